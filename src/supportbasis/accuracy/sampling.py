"""Samples of query rows: exact results, and estimates for all rows with confidence limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from .inclusion import Sketch, draw_rows, probabilities

TILE = 2**22  # scores at a time
QUANTILE = 1.645  # one-sided 95 % of a normal ratio


@dataclass(frozen=True, eq=False)
class RowSample:
    """Rows drawn with unequal probabilities, each of which counts for the inverse of its own.

    One row in thousands can carry most of a head's error, so outlier queries are drawn almost
    surely (`inclusion.py`). Sums over all rows are estimated without bias, whatever
    the probabilities (Horvitz and Thompson); good ones make the estimates certain.
    """

    rows: Tensor  # sorted
    weight: Tensor  # float64: 1 / probability of each of the rows
    n: int  # rows in all

    @staticmethod
    def draw(head: Head, count: int, seed: int, measures: tuple[Tensor, ...] = ()) -> RowSample:
        """``count`` rows, or all if there are no more, from a private generator. ``measures`` [n]
        estimate the squared errors of rows and raise their probabilities."""
        everyone = RowSample.census(head.n, head.query.device)
        if head.n <= count:
            return everyone
        return everyone.thinned(Sketch.of(head, seed).measures + measures, count, seed)

    @staticmethod
    def census(n: int, device: torch.device) -> RowSample:
        """All rows."""
        weight = torch.ones(n, dtype=torch.float64, device=device)
        return RowSample(torch.arange(n, device=device), weight, n)

    def thinned(self, measures: tuple[Tensor, ...], count: int, seed: int) -> RowSample:
        """``count`` of these rows; measures are of these."""
        weighted = tuple(measure.double() * self.weight for measure in measures)
        chance = probabilities(self.weight, weighted, count)
        at = draw_rows(chance, count, seed)
        return RowSample(self.rows[at], self.weight[at] / chance[at], self.n)

    def total(self, x: Tensor) -> float:
        """Estimated sum over all rows of ``x`` [rows], measured on these."""
        return float((self.weight * x).sum())

    def frobenius_limit(self, squared: Tensor, size: Tensor) -> tuple[float, float]:
        """sqrt(sum e_i^2 / sum s_i^2) over all rows, and its upper confidence limit.

        The limit takes the standard error of the linearised ratio, as if rows were drawn
        independently, on the logarithm of the ratio, which suits the long right tail that squared
        errors have. One row is added, with the largest error and the largest weight among the
        sampled rows that could have been missed, for rows of which the sample has no example.
        """
        error, total = self.total(squared), self.total(size)
        if error == 0.0 and math.isfinite(total):
            return 0.0, 0.0
        if total == 0.0 or not (math.isfinite(error) and math.isfinite(total)):
            return math.inf, math.inf  # squares overflow: no estimate
        ratio = error / total
        residual = squared.double() - ratio * size.double()
        further = self.weight - 1
        standard = math.sqrt(self.total(further * residual.square())) / total
        drawn = further > 1e-9
        worst = float(squared[drawn].max()) if bool(drawn.any()) else 0.0
        missed = float(further.max()) * worst / total
        limit = ratio * math.exp(min(QUANTILE * standard / ratio, 700.0)) + missed
        return math.sqrt(ratio), math.sqrt(limit)


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
