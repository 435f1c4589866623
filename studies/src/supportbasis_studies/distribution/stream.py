"""Distributions of entries that come in parts, in a memory that does not grow with them.

An entry is counted by its sign, its binade and the first ten bits of its mantissa, so every order
statistic is known to one part in a thousand, however many entries there are. What the threshold
sqrt(ln n) makes of them is counted exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from supportbasis.analysis import EntryProfile, LargeEntries, SideProfile, log_threshold
from supportbasis.problem.problem import largest_entries

LOWEST, BINADES, STEPS = -32, 64, 1024  # magnitudes from 2^-32 to 2^32, in steps of 2^-10
BINS = BINADES * STEPS
HALF = 100  # bins of a drawn histogram on either side of zero
MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of float32
LABEL = "sqrt(ln n)"


class EntrySketch:
    """Counts of entries by magnitude and sign, their moments and the largest magnitude.

    >>> sketch = EntrySketch()
    >>> sketch.add(torch.tensor([-3.0, 1.0, 0.0]))
    >>> sketch.total, sketch.largest, sketch.quantile(1.0)
    (3, 3.0, 3.0)
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, BINS, dtype=torch.int64)  # positive, negative
        self.total, self.sum, self.square, self.largest = 0, 0.0, 0.0, 0.0

    def add(self, x: Tensor) -> None:
        """Count the entries of a tensor of any shape."""
        x = x.detach().flatten().float()
        bits = x.abs().view(torch.int32) >> (MANTISSA_BITS - 10)
        place = (bits - ((EXPONENT_BIAS + LOWEST) << 10)).clamp_(0, BINS - 1)
        place += BINS * (x < 0)
        self.counts += torch.bincount(place, minlength=2 * BINS).view(2, BINS)
        self.total += x.numel()
        self.sum += float(x.sum(dtype=torch.float64))
        self.square += float(x.double().square().sum())
        self.largest = max(self.largest, float(x.abs().max()))

    @staticmethod
    def edges() -> Tensor:
        """Lower edges of the bins of magnitudes; the first reaches down to zero."""
        step = torch.arange(BINS, dtype=torch.float64)
        return (1 + step.remainder(STEPS) / STEPS) * 2.0 ** (LOWEST + step.div(STEPS).floor())

    def _upper_edges(self) -> Tensor:
        upper = torch.full((BINS,), math.inf, dtype=torch.float64)  # the last has no end
        upper[:-1] = self.edges()[1:]
        return upper.clamp(max=self.largest)

    @property
    def mean(self) -> float:
        return self.sum / self.total

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.square / self.total - self.mean**2))

    @property
    def rms(self) -> float:
        return math.sqrt(self.square / self.total)

    def quantile(self, share: float) -> float:
        """The magnitude that this share of the entries does not exceed, at most 0.1 % too large."""
        below = self.counts.sum(0).cumsum(0)
        place = int(torch.searchsorted(below, math.ceil(share * self.total)))
        return float(self._upper_edges()[min(place, BINS - 1)])

    def variance_proxy(self) -> float:
        """`analysis.variance_proxy` of all entries, at most 0.3 % too large and never too small."""
        counts = self.counts.sum(0)
        at_least = counts.flip(0).cumsum(0).flip(0)
        kept = counts > 0
        log = (2 * self.total / at_least[kept].double()).log()
        return float((self._upper_edges()[kept].square() / log).max())

    def histogram(self) -> tuple[int, ...]:
        """Counts in equal bins over [-largest, largest]; a magnitude counts at its bin's middle."""
        edges = self.edges()
        edges[0] = 0.0
        middle = (edges + self._upper_edges()) / 2
        place = (middle / (self.largest or 1.0) * HALF).long().clamp_(0, HALF - 1)
        positive, negative = (
            torch.zeros(HALF, dtype=torch.int64).index_add_(0, place, side) for side in self.counts
        )
        return (*negative.flip(0).tolist(), *positive.tolist())


class SideStream:
    """One of query, key and value: its entries, and those above the threshold."""

    def __init__(self, name: str, threshold: float):
        self.name, self.threshold, self.sketch = name, threshold, EntrySketch()
        self.entries = self.rows = self.matrices = self.n = self.dim = 0

    def add(self, x: Tensor) -> Tensor:
        """Count [matrices, n, d]; returns the share of large rows of each matrix."""
        x = x.detach().float()
        self.sketch.add(x)
        is_large = largest_entries(x).double() > self.threshold
        self.entries += int((x[is_large].abs().double() > self.threshold).sum())
        self.rows += int(is_large.sum())
        self.matrices += len(x)
        self.n, self.dim = x.shape[-2:]
        return is_large.double().mean(-1)

    def profile(self, alpha: float) -> SideProfile:
        sketch, proxy = self.sketch, self.sketch.variance_proxy()
        shape = (self.matrices, self.n, self.dim)
        large = LargeEntries.of_counts(
            self.threshold, self.entries, self.rows,
            shape=shape, proxy=proxy, rms=sketch.rms, alpha=alpha,
        )  # fmt: skip
        moments = (sketch.mean, sketch.std, sketch.largest, proxy)
        return SideProfile(self.name, *shape, *moments, (large,), sketch.histogram())


class LayerStream:
    """Query, key and value of one layer, window by window of n tokens."""

    def __init__(self, n: int):
        self.threshold = log_threshold(n)
        self.query, self.key, self.value = (
            SideStream(name, self.threshold) for name in ("query", "key", "value")
        )
        self.pair_share, self.heads = 0.0, 0

    @property
    def sides(self) -> tuple[SideStream, SideStream, SideStream]:
        return self.query, self.key, self.value

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add a window, [batch, heads, n, d] each; keys may have fewer heads."""
        rows, keys, _ = (
            side.add(x.flatten(0, 1)).view(x.shape[:2])
            for side, x in zip(self.sides, (query, key, value), strict=True)
        )
        keys = keys.repeat_interleave(rows.shape[1] // keys.shape[1], 1)
        self.pair_share += float((rows + keys - rows * keys).sum())
        self.heads += rows.numel()

    @property
    def pairs(self) -> float:
        """Share of pairs in A^(L): with a large query row or a large key row, mean over heads."""
        return self.pair_share / self.heads

    def profile(self, alpha: float) -> EntryProfile:
        sides = (self.query.profile(alpha), self.key.profile(alpha))
        return EntryProfile(alpha, (LABEL,), (self.threshold,), *sides, (self.pairs,))
