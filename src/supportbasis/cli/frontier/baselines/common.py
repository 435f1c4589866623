"""What all baselines share: the case they are run on, their answer, and attention over lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..heads import Capture


@dataclass(frozen=True, eq=False)
class Case:
    """A head and the query rows at which outputs are compared."""

    head: Capture
    rows: Tensor

    @cached_property
    def query(self) -> Tensor:
        return self.head.query[self.rows]

    @cached_property
    def scores(self) -> Tensor:
        """Of the rows with all keys, [rows, m]. What a list leaves out is masked, which gives the
        same numbers as a gather; costs are counted, not timed."""
        return self.query @ self.head.key.T * self.head.scale

    @property
    def exact_work(self) -> float:
        """Multiply-adds of exact attention."""
        return self.head.n * self.head.m * (self.head.d + self.head.dv)


@dataclass(frozen=True, eq=False)
class Answer:
    """The output at the rows of a case, and what the whole output would cost."""

    output: Tensor  # [rows, dv]
    cost: float  # multiply-adds relative to exact attention, everything counted
    keys: float  # a query, exact or not; features and landmarks count as keys
    sizes: str  # what the budget was spent on


Baseline = Callable[[Case, float, int], Answer | None]
"""(case, budget, seed) → an answer with cost ≤ budget, or None: nothing is that cheap."""


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """Softmax of scores [rows, m], -inf for what is left out; rows without a key give zeros."""
    top = scores.amax(1, keepdim=True)
    weight = (scores - torch.where(top > -math.inf, top, 0.0)).exp_()
    return weight @ value / weight.sum(1, keepdim=True).clamp(min=torch.finfo(value.dtype).tiny)


def only(scores: Tensor, kept: Tensor) -> Tensor:
    """The scores of what is kept, a mask of the same shape."""
    return scores.masked_fill(~kept, -math.inf)


def sort_work(count: float, groups: float = 1) -> float:
    """Sorting ``groups`` lists of ``count`` numbers, a comparison as one multiply-add."""
    return groups * count * math.log2(max(2.0, count))


@dataclass(frozen=True, eq=False)
class Segments:
    """Tokens in consecutive segments of equal length; the last one may be shorter."""

    count: int  # of segments
    size: int
    tokens: int

    @staticmethod
    def of_size(tokens: int, size: int) -> Segments:
        size = min(size, tokens)
        return Segments(math.ceil(tokens / size), size, tokens)

    def index(self) -> Tensor:
        """The segment of each token."""
        return torch.arange(self.tokens) // self.size

    def lengths(self) -> Tensor:
        return self.index().bincount(minlength=self.count).float()

    def mean(self, x: Tensor) -> Tensor:
        """Means of the rows of x [tokens, d] over each segment."""
        total = x.new_zeros(self.count, x.shape[1]).index_add_(0, self.index(), x)
        return total / self.lengths().unsqueeze(1)

    def spread(self, kept: Tensor) -> Tensor:
        """[rows, segments] → [rows, tokens]"""
        return kept.repeat_interleave(self.size, 1)[:, : self.tokens]
