"""Differences of two methods on the same items, with intervals from a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A number of percent or points, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def flags(text: str) -> Tensor:
    """Of a row of ones and zeros, as numbers."""
    return torch.tensor([float(letter) for letter in text], dtype=torch.float64)


def mean(sets: Sequence[Tensor], seed: int = 0) -> Estimate:
    """The mean over sets of the mean over their items, times 100; items are drawn set by set.

    >>> mean([torch.ones(5), torch.zeros(5)]).value
    50.0
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(RESAMPLES, dtype=torch.float64)
    for items in sets:
        drawn = torch.randint(len(items), (RESAMPLES, len(items)), generator=generator)
        total += items.double()[drawn].mean(1)
    total = 100 * total / len(sets)
    low, high = torch.quantile(total, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    value = 100 * sum(float(items.double().mean()) for items in sets) / len(sets)
    return Estimate(value, low, high)


def difference(mine: Sequence[Tensor], other: Sequence[Tensor], seed: int = 0) -> Estimate:
    """Mine less the other, item by item: what both share does not widen the interval."""
    return mean([a - b for a, b in zip(mine, other, strict=True)], seed)
