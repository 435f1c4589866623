"""Sampled query rows: which ones, their exact result, and what they say about all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .powers import PowerKernel
from .problem import Head

TILE = 2**22  # scores at a time
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
    kernel: PowerKernel | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The exact result of some rows, in any order (``kernel``: of a power instead of exp).

    Softmax over tiles of plain products. It shares nothing with components and kernels, which it
    is there to check: neither code nor, through PyTorch's attention, their faults.
    """
    query, shown = head.query[rows].to(dtype) * head.scale, head.m
    if head.is_causal and len(rows):
        shown = min(head.m, int(rows.max()) + 1)
    top = query.new_full((len(rows), 1), -math.inf)
    den, num = torch.zeros_like(top), query.new_zeros(len(rows), head.value_dim)
    step = max(1, TILE // max(1, len(rows)))
    for start in range(0, shown, step):
        keys = slice(start, min(shown, start + step))
        log_weight = _log_weights(head, query, rows, keys, kernel)
        peak = torch.maximum(top, log_weight.amax(1, keepdim=True))
        unit = torch.where(peak > -math.inf, peak, 0.0)
        weight, shrink = (log_weight - unit).exp(), (top - unit).exp()
        num = num * shrink + weight @ head.value[keys].to(dtype)
        den, top = den * shrink + weight.sum(1, keepdim=True), peak
    if head.normalise:
        return torch.where(den > 0, num / den, 0.0)
    if head.query_log_weight is not None:
        top = top + head.query_log_weight[rows].unsqueeze(1)
    return num * (top - log_scale).exp()


def _log_weights(
    head: Head, query: Tensor, rows: Tensor, keys: slice, kernel: PowerKernel | None
) -> Tensor:
    """Log-weights of scaled queries with some keys; -inf for pairs that do not count."""
    score = query @ head.key[keys].to(query.dtype).T
    score = score if kernel is None else kernel.log(score)
    if head.key_log_weight is not None:
        score = score + head.key_log_weight[keys].to(query.dtype)
    if head.mask is not None:
        mask = head.mask[rows, keys]
        hidden = mask.dtype == torch.bool
        score = score.masked_fill(~mask, -math.inf) if hidden else score + mask
    if head.is_causal:
        later = torch.arange(keys.start, keys.stop, device=rows.device) > rows.unsqueeze(1)
        score = score.masked_fill(later, -math.inf)
    return score
