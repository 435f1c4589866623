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
    """A head in float32 and the query rows at which outputs are compared; n = m where causal."""

    head: Capture
    rows: Tensor

    @cached_property
    def query(self) -> Tensor:
        return self.head.query[self.rows]

    @cached_property
    def scores(self) -> Tensor:
        """Of the rows with all keys, [rows, m], -inf for later ones. What a list leaves out is
        masked, which gives the same numbers as a gather; costs are counted, not timed."""
        score = self.query @ self.head.key.T * self.head.scale
        if self.head.is_causal:
            score.masked_fill_(self.at > self.rows.unsqueeze(1), -math.inf)
        return score

    @cached_property
    def at(self) -> Tensor:
        """The positions of the keys."""
        return torch.arange(self.head.m, device=self.rows.device)

    @property
    def pairs(self) -> float:
        """Queries and keys that see each other."""
        n, m = self.head.n, self.head.m
        return n * (n + 1) / 2 if self.head.is_causal else float(n * m)

    @property
    def exact_work(self) -> float:
        """Multiply-adds of exact attention."""
        return self.pairs * (self.head.d + self.head.dv)

    def keys(self, budget: float) -> float:
        """The keys of every query that sees so many: `share` is the inverse.

        Causal: Σᵢ min(i, c) = c (2n + 1 - c) / 2 pairs, for whole c.
        """
        if not self.head.is_causal:
            return budget * self.head.m
        middle = self.head.n + 0.5
        return middle - math.sqrt(max(0.0, middle**2 - 2 * budget * self.pairs))

    def share(self, keys: float) -> float:
        """The cost of attention to so many keys of every query that sees them."""
        keys = min(keys, self.head.m)
        if not self.head.is_causal:
            return keys / self.head.m
        return keys * (2 * self.head.n + 1 - keys) / 2 / self.pairs


@dataclass(frozen=True, eq=False)
class Answer:
    """The output at the rows of a case, and what the whole output would cost."""

    output: Tensor  # [rows, dv]
    cost: float  # multiply-adds relative to exact attention, everything counted
    sizes: str  # what the budget was spent on


Baseline = Callable[[Case, float, int], Answer | None]
"""(case, budget, seed) → an answer with cost ≤ budget, or None: nothing is that cheap, or the
method has no causal form."""


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
    device: torch.device

    @staticmethod
    def of_size(tokens: int, size: int, device: torch.device) -> Segments:
        size = min(size, tokens)
        return Segments(math.ceil(tokens / size), size, tokens, device)

    def index(self) -> Tensor:
        """The segment of each token."""
        return torch.arange(self.tokens, device=self.device) // self.size

    def lengths(self) -> Tensor:
        return self.index().bincount(minlength=self.count).float()

    def mean(self, x: Tensor) -> Tensor:
        """Means of the rows of x [tokens, d] over each segment."""
        total = x.new_zeros(self.count, x.shape[1]).index_add_(0, self.index(), x)
        return total / self.lengths().unsqueeze(1)

    def spread(self, kept: Tensor) -> Tensor:
        """[rows, segments] → [rows, tokens]"""
        return kept.repeat_interleave(self.size, 1)[:, : self.tokens]


@dataclass(frozen=True, eq=False)
class Grid:
    """The score matrix in blocks of ``size`` neighbouring queries and keys."""

    case: Case
    rows: Segments
    keys: Segments

    @staticmethod
    def of(case: Case, size: int) -> Grid:
        head, device = case.head, case.rows.device
        return Grid(case, *(Segments.of_size(x, size, device) for x in (head.n, head.m)))

    @cached_property
    def pairs(self) -> Tensor:
        """Queries and keys of each block that see each other, [row blocks, key blocks]."""
        lengths = self.rows.lengths()
        pairs = lengths.unsqueeze(1) * self.keys.lengths()
        if self.case.head.is_causal:
            pairs = pairs.tril(-1) + (lengths * (lengths + 1) / 2).diag()
        return pairs

    def visible(self, score: Tensor) -> Tensor:
        """The scores of blocks that are seen, -inf for later ones."""
        return score.masked_fill(self.pairs == 0, -math.inf)

    def pooled(self) -> Tensor:
        """Scores of mean queries with mean keys."""
        head = self.case.head
        score = self.rows.mean(head.query) @ self.keys.mean(head.key).T * head.scale
        return self.visible(score)

    def pooling(self) -> float:
        """The work of `pooled` and of ranking its rows."""
        head = self.case.head
        products = head.d * (head.n + head.m + int((self.pairs > 0).sum()))
        return products + sort_work(self.keys.count, self.rows.count)

    def top(self, score: Tensor, pairs: Tensor, left: float) -> tuple[Tensor, int]:
        """A mask of the blocks of each row that score highest, the same number in each, and that
        number: the largest that needs at most ``left`` pairs, with ``pairs`` in each block."""
        order = score.argsort(1, descending=True)
        paid = pairs.double().gather(1, order).sum(0).cumsum(0)
        kept = int((paid <= left).sum())
        mask = torch.zeros_like(score, dtype=torch.bool)
        return mask.scatter_(1, order[:, :kept], True), kept

    def share(self, mask: Tensor) -> float:
        """The cost of exact attention in the blocks of a mask."""
        return float((mask * self.pairs).double().sum()) / self.case.pairs

    def of_rows(self, mask: Tensor) -> Tensor:
        """A mask of blocks for the sampled rows, [rows, m]."""
        return self.keys.spread(mask[self.case.rows // self.rows.size])
