"""What a fitted polynomial is held to: the rows that a glance finds suspicious, and some others.

Nothing bounds the error of a fit. Where the sum of its weights comes close to zero, a row's output
is wrong by any factor, and one such row in a thousand can make most of a head's error: a sample of
forty rows says nothing about it. So thousands of rows are glanced at over a sample of the keys,
those that err most there are all compared over all keys, and others are sampled for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fitted import FittedKernel
from ..frame import Frame, framed
from ..plans import HeadPlan
from ..problem import Head
from ..rows import ENTRIES, RowCheck
from ..sampling import RowSample
from ..scores import pick

GLANCED_ROWS, GLANCED_KEYS = 4096, 512
SUSPECTS = 32  # at most, and as many others
PIECE = 512  # rows at a time: their scores stay in the caches


@dataclass(frozen=True, eq=False)
class FitCheck:
    """Sampled rows of a head, and sampled keys to glance at them over."""

    head: Head
    inside: Head  # in the frame of its fits
    rows: Tensor  # sorted
    keys: Tensor
    seed: int

    @staticmethod
    def draw(head: Head, frame: Frame, seed: int) -> FitCheck:
        generator = torch.Generator().manual_seed(seed + 2)
        rows = torch.randperm(head.n, generator=generator)[:GLANCED_ROWS].sort().values
        live, seen = head.live_keys, head.m
        if head.is_causal:  # keys behind the last row are seen by none
            seen = min(head.n, head.m)
            live = None if live is None else live[live < seen]
        keys = pick(live, seen, GLANCED_KEYS, seed + 3, head.key.device)
        return FitCheck(head, framed(head, frame), rows.to(head.query.device), keys, seed)

    def error(self, plan: HeadPlan, tolerance: float) -> tuple[float, float]:
        """Measured error of a plan, and its upper limit."""
        sample = self._suspected(plan)
        return RowCheck(self.head, tolerance, self.seed, sample).error(plan)

    def _suspected(self, plan: HeadPlan) -> RowSample:
        """All rows that seem to err most, and some of the others; of those that were drawn."""
        assert plan.fitted is not None
        n, half = len(self.rows), max(8, min(SUSPECTS, ENTRIES // max(1, self.head.m)))
        if n <= 2 * half:
            everyone = torch.ones_like(self.rows, dtype=torch.bool)
            return RowSample(self.rows, everyone, n, self.head.n)
        seeming = self._glance(plan.fitted)
        near = self.inside.query[self.rows].norm(dim=1) <= plan.fitted.query_radius
        seeming = torch.where(near & (self.rows >= plan.exact_rows), seeming, 0.0)
        order = seeming.argsort(descending=True)
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(n - half, generator=generator)[:half].to(order.device)
        at = torch.cat([order[:half], order[half:][chosen]])
        rows, place = self.rows[at].sort()
        return RowSample(rows, place < half, n, self.head.n)

    def _glance(self, kernel: FittedKernel) -> Tensor:
        """The squared error of each row over the sampled keys."""
        inside, head = self.inside, self.head
        assert inside.key_log_weight is not None
        key, value = inside.key[self.keys], head.value[self.keys].to(inside.key)
        log_weight, found = inside.key_log_weight[self.keys], []
        far = key.norm(dim=1) > kernel.key_radius
        for rows in self.rows.split(PIECE):
            query = inside.query[rows]
            score = query @ key.T + log_weight
            if head.is_causal:
                score.masked_fill_(self.keys > rows.unsqueeze(1), -math.inf)
            unit = score.logsumexp(1, keepdim=True)
            hidden = score == -math.inf
            exact = (score - unit).exp()
            weight = kernel(query, key) * (log_weight - unit).exp()
            weight = torch.where(hidden | far, exact, weight)
            weight = weight / weight.sum(1, keepdim=True) - exact
            found.append((weight @ value).square().sum(1))
        return torch.cat(found).nan_to_num(math.inf, math.inf)
