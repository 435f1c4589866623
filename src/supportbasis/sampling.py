"""Sampled query rows: which ones, their exact result, and what they say about all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .components import Component, ExactSum, evaluate
from .problem import Head

QUANTILE = 1.96  # one-sided 97.5 % of a normal ratio: 95 % is left for one with a long tail


@dataclass(frozen=True, eq=False)
class RowSample:
    """Rows that stand for all rows: a census of those that may err most and a sample of the rest.

    The error of a polynomial grows with the norm of the query, so a few long queries can carry
    most of it and would escape a plain sample.
    """

    rows: Tensor  # sorted
    in_census: Tensor  # bool, for each of the rows
    n: int  # rows that they stand for
    of: int = 0  # more rows, which those n are a random sample of themselves

    @staticmethod
    def draw(head: Head, count: int, seed: int, suspicion: Tensor | None = None) -> RowSample:
        """At most ``count`` rows, one in eight of them the most suspicious, or if nothing else is
        known the longest; from a private generator."""
        if head.n <= count:
            rows = torch.arange(head.n, device=head.query.device)
            return RowSample(rows, torch.ones_like(rows, dtype=torch.bool), head.n)
        suspicion = head.query_norms if suspicion is None else suspicion
        census = suspicion.topk(count // 8).indices
        rest = torch.ones(head.n, dtype=torch.bool, device=head.query.device)
        rest[census] = False
        others = rest.nonzero().squeeze(1)
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
        chosen = others[order[: count - len(census)].to(others.device)]
        rows, at = torch.cat([census, chosen]).sort()
        return RowSample(rows, at < len(census), head.n)

    def _weight(self, like: Tensor) -> Tensor:
        """How many rows each of the rows stands for."""
        count = int((~self.in_census).sum())
        others = self.n - int(self.in_census.sum())
        return torch.where(self.in_census, 1.0, others / max(1, count)).to(like.dtype)

    def total(self, x: Tensor) -> float:
        """The sum over all rows of what was measured on the sampled ones."""
        return float((self._weight(x) * x).sum())

    def frobenius_limit(self, squared: Tensor, size: Tensor) -> tuple[float, float]:
        """sqrt(sum e_i^2 / sum s_i^2) over all rows, and its upper confidence limit.

        The sampled rows stand for all rows outside the census. The limit takes the standard error
        of the linearised ratio, with the finite-population factor, on the logarithm of the ratio,
        which suits the long right tail that squared errors have. Where the rows that are stood for
        are a sample themselves, their own standard error is added.
        """
        sampled = ~self.in_census
        others, count = self.n - int(self.in_census.sum()), int(sampled.sum())
        error, total = self.total(squared), self.total(size)
        if total == 0.0:
            return (0.0, 0.0) if error == 0.0 else (math.inf, math.inf)
        ratio = error / total
        if ratio == 0.0 or not math.isfinite(ratio):
            return math.sqrt(ratio), math.sqrt(ratio)
        residual, variance = squared - ratio * size, 0.0
        if count not in (0, others):
            variance += others**2 * float(residual[sampled].var()) / count * (1 - count / others)
        if self.of > self.n:
            variance += self.total(residual.square()) * (1 - self.n / self.of)
        standard = math.sqrt(variance) / total
        return math.sqrt(ratio), math.sqrt(ratio) * math.exp(QUANTILE * standard / ratio / 2)


def exact_rows(
    head: Head,
    rows: Tensor,
    log_scale: float = 0.0,
    component: Component | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The exact result of some rows, in any order (``component``: of another kernel than exp)."""
    wide = replace(head, precision=dtype)
    ordered, at = rows.sort()  # causal sums skip what lies ahead of the last row of a tile
    total = evaluate([component or ExactSum(head.live_keys)], wide, ordered)[at.argsort()]
    if head.normalise:
        return total.divide_(total.seen & (total.den > 0))[0]
    if head.query_log_weight is not None:
        total.log_scale = total.log_scale + head.query_log_weight[rows]
    return total.num * (total.log_scale - log_scale).exp().unsqueeze(1)
