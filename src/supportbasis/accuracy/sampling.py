"""Samples of query rows: exact results, and estimates for all rows with confidence limits.

Most of a head's error can lie in a few outlier queries: long ones, ones in rare directions, ones
that attend to a single key. A uniform sample misses them. So each row is drawn with a probability
of its own, and counts for the inverse of it. The probability mixes shares of the sample in
proportion to

    1                                                every row has its chance,
    |q|^8                                            errors of polynomials grow so with the length,
    (q - mean)^T Cov^-1 (q - mean)                   rare directions,
    sum_j w_j^2 |v_j - mean|^2                       weight on few keys: the output's own part,

and of what the caller adds. The weights w are estimated over sampled keys and all outlier keys:
long ones, ones in rare directions, ones with large values, and the ones that a few pilot rows
attend to most among all keys. All of it takes O(n d (d + 200)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..polynomials.powers import PowerKernel
from ..problem.caching import WeakCache
from ..problem.problem import Head

SAMPLED_KEYS, OUTLIER_KEYS, FOUND_KEYS = 64, 24, 48
PILOT_ROWS = 64
PILOT_ENTRIES = 2**23
PIECE = (1024, 2**16)  # rows at a time on a CPU, where their scores stay in the caches, on a GPU
LENGTH_POWER = 8
EVEN = 0.4  # of the sample: the share that is drawn from all rows with equal probability
TILE = 2**22  # scores at a time
QUANTILE = 1.645  # one-sided 95 % of a normal ratio
FLOOR = 1e-6  # of the largest eigenvalue: directions with less count as that


class Sketch(NamedTuple):
    """Measures of every row, made before any row is compared with its exact output."""

    measures: tuple[Tensor, ...]  # float64 [n] each, >= 0
    lse: Tensor  # float64 [n]: estimated

    @staticmethod
    def of(head: Head, seed: int) -> Sketch:
        """The measures of a head, cached for a seed."""
        return _sketches.get(head, seed, lambda: _sketch(head, seed))


_sketches: WeakCache[Head, int, Sketch] = WeakCache()


def probabilities(even: Tensor, measures: tuple[Tensor, ...], count: int) -> Tensor:
    """Inclusion probabilities of rows, which add up to ``count``: one share of the sample in
    proportion to ``even``, the rest in equal parts in proportion to each of the measures."""
    chance = _proportional(even, EVEN * count)
    for measure in measures:
        chance = chance + _proportional(measure, (1 - EVEN) * count / len(measures))
    return _proportional(chance, count)


def _proportional(measure: Tensor, count: float) -> Tensor:
    """min(1, c x) with c such that they add up to ``count``."""
    largest = torch.finfo(torch.float64).max ** 0.5
    x = measure.double().nan_to_num(largest, largest, 0.0).clamp(max=largest)
    certain = torch.zeros_like(x, dtype=torch.bool)
    while True:
        rest = x.masked_fill(certain, 0.0)
        total = float(rest.sum())
        factor = max(0.0, count - int(certain.sum())) / total if total > 0 else 0.0
        over = rest * factor >= 1
        if not bool(over.any()):
            return (rest * factor).masked_fill_(certain, 1.0)
        certain |= over


def spread_out(tokens: Tensor) -> Tensor:
    """(x - mean)^T Cov^-1 (x - mean) of each token [n, d], in float64."""
    x = tokens if tokens.dtype == torch.float64 else tokens.float()
    top = float(x.abs().max()) if x.numel() else 1.0
    if not 1e-12 < top < 1e12:  # so that squares neither overflow nor vanish
        x = x.double() / max(top, 1e-300)
    away = x - x.mean(0)
    values, axes = torch.linalg.eigh((away.T @ away).double() / max(1, len(away)))
    floor = max(float(values[-1]) * FLOOR, 1e-300) if len(values) else 1.0
    axes = axes * values.clamp(min=floor).rsqrt()
    return (away @ axes.to(away)).double().square().sum(1)


def _sketch(head: Head, seed: int) -> Sketch:
    query, key = head.query.detach(), head.key.detach()
    lengths = (head.query_norms / head.query_norms.max().clamp(min=1e-300)).pow(LENGTH_POWER)
    rare = spread_out(query)
    live = torch.arange(head.m, device=key.device) if head.live_keys is None else head.live_keys
    if head.is_causal:
        live = live[live < head.n]
    if not len(live):
        return Sketch((lengths, rare), torch.full_like(lengths, -math.inf))
    value = head.value.detach()[live].to(head.dtype)
    value_size = (value - value.mean(0)).double().square().sum(1)
    pilots = min(head.n, max(16, min(PILOT_ROWS, PILOT_ENTRIES // max(1, head.m))))
    chance = probabilities(torch.ones_like(lengths), (lengths, rare), pilots)
    found = [_found_keys(head, live, value_size, draw_rows(chance, pilots, seed + 4))]
    for size in (head.key_norms[live], spread_out(key[live]), value_size):
        found.append(size.topk(min(OUTLIER_KEYS, len(live))).indices)
    special = torch.cat(found).unique()
    concentration, lse = _estimate(head, live, value_size, special, seed + 4)
    return Sketch((lengths, rare, concentration), lse)


def draw_rows(chance: Tensor, count: int, seed: int) -> Tensor:
    """``count`` rows drawn with these probabilities, which add up to it: systematically along a
    random permutation. Sorted."""
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(chance), generator=generator).to(chance.device)
    start = float(torch.rand((), generator=generator, dtype=torch.float64))
    steps = chance[permutation].cumsum(0)
    steps = (steps * (count / max(float(steps[-1]), 1e-300)) + start).floor().clamp(max=count)
    return permutation[steps.diff(prepend=steps.new_zeros(1)) > 0].sort().values


def _found_keys(head: Head, live: Tensor, value_size: Tensor, rows: Tensor) -> Tensor:
    """Keys with the largest share in the output of some pilot row."""
    best = value_size.new_zeros(len(live))
    for some in rows.split(32):
        weight = _log_weights(head, some, live, head.dtype).softmax(1).nan_to_num_(0.0)
        part = weight.mul_(value_size.sqrt().to(weight)).square_()
        largest, at = part.topk(min(2, len(live)), 1)
        share = largest.double() / part.sum(1, keepdim=True).double().clamp(min=1e-300)
        best.scatter_reduce_(0, at.flatten(), share.flatten(), "amax")
    return best.topk(min(FOUND_KEYS, len(live))).indices


def _estimate(
    head: Head, live: Tensor, value_size: Tensor, special: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """sum_j w_j^2 |v_j - mean|^2 and the lse of each row, estimated over special keys and a sample
    of the others."""
    others = torch.ones(len(live), dtype=torch.bool, device=live.device)
    others[special] = False
    index = others.nonzero().squeeze(1)
    drawn = min(SAMPLED_KEYS, len(index))  # one of each part of the sequence
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(drawn) + torch.rand(drawn, generator=generator)
    positions = (positions * (len(index) / max(1, drawn))).long().clamp(max=len(index) - 1)
    at = torch.cat([special, index[positions.to(index.device)]])
    keys, size = live[at], value_size[at].to(head.dtype)
    count = torch.ones_like(size)
    count[len(special) :] = max(1.0, len(index) / max(1, drawn))
    parts, sums = [], []
    for rows in torch.arange(head.n, device=live.device).split(PIECE[live.is_cuda]):
        score = _log_weights(head, rows, keys, head.dtype)
        top = score.amax(1)
        weight = score.sub_(top.unsqueeze(1)).exp_()
        total = weight @ count
        part = weight.square_() @ (count * size) / total.square()
        parts.append(torch.where(top > -math.inf, part, size.mean()).double())
        sums.append((top + total.log()).nan_to_num(-math.inf).double())
    lse = torch.cat(sums)
    if head.normalise:
        return torch.cat(parts), lse
    if head.query_log_weight is not None:
        lse = lse + head.query_log_weight
    return (2 * (lse - lse.max())).exp().nan_to_num(0.0), lse


class RowSample(NamedTuple):
    """Rows drawn with unequal probabilities, each of which counts for the inverse of its own: sums
    over all rows are estimated without bias, whatever they are (Horvitz and Thompson)."""

    rows: Tensor  # sorted
    weight: Tensor  # float64: 1 / probability of each of the rows

    @staticmethod
    def draw(head: Head, count: int, seed: int, measures: tuple[Tensor, ...] = ()) -> RowSample:
        """``count`` rows, or all if there are no more, from a private generator. ``measures`` [n]
        estimate the squared errors of rows and raise their probabilities."""
        even = torch.ones(head.n, dtype=torch.float64, device=head.query.device)
        if head.n <= count:
            return RowSample(torch.arange(head.n, device=even.device), even)
        chance = probabilities(even, Sketch.of(head, seed).measures + measures, count)
        rows = draw_rows(chance, count, seed)
        return RowSample(rows, 1 / chance[rows])

    def total(self, x: Tensor) -> float:
        """Estimated sum over all rows of ``x`` [rows], measured on these."""
        return float((self.weight * x).sum())

    def frobenius_limit(self, squared: Tensor, size: Tensor) -> tuple[float, float]:
        """sqrt(sum e_i^2 / sum s_i^2) over all rows, and its upper confidence limit.

        The limit takes the standard error of the linearised ratio, as if rows were drawn
        independently, on the logarithm of the ratio, which suits the long right tail that squared
        errors have. One row is added, with the largest error and the largest weight among the
        sampled rows that could have been missed, for rows of which the sample has no example."""
        error, total = self.total(squared), self.total(size)
        if error == 0.0 and math.isfinite(total):
            return 0.0, 0.0
        if total == 0.0 or not (math.isfinite(error) and math.isfinite(total)):
            return math.inf, math.inf  # squares overflow: no estimate
        ratio, further = error / total, self.weight - 1
        residual = squared.double() - ratio * size.double()
        standard = math.sqrt(self.total(further * residual.square())) / total
        worst = float(squared[further > 1e-9].max()) if bool((further > 1e-9).any()) else 0.0
        missed = float(further.max()) * worst / total
        limit = ratio * math.exp(min(QUANTILE * standard / ratio, 700.0)) + missed
        return math.sqrt(ratio), math.sqrt(limit)


def exact_rows(
    head: Head, rows: Tensor, log_scale: float = 0.0, kernel: PowerKernel | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The exact result of some rows, in any order (``kernel``: of a power instead of exp).

    Softmax over tiles of plain products. It shares nothing with components and kernels, which it
    is there to check: neither code nor, through PyTorch's attention, their faults."""
    shown = min(head.m, int(rows.max()) + 1) if head.is_causal and len(rows) else head.m
    top = head.query.new_full((len(rows), 1), -math.inf, dtype=dtype)
    den, num = torch.zeros_like(top), top.new_zeros(len(rows), head.value_dim)
    step = max(1, TILE // max(1, len(rows)))
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, shown, step):
            keys = torch.arange(start, min(shown, start + step), device=rows.device)
            log_weight = _log_weights(head, rows, keys, dtype, kernel)
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
    head: Head, rows: Tensor, keys: Tensor, dtype: torch.dtype, kernel: PowerKernel | None = None
) -> Tensor:
    """Log-weights of some pairs; -inf for those that do not count."""
    score = (head.query[rows].to(dtype) * head.scale) @ head.key[keys].to(dtype).T
    score = score if kernel is None else kernel.log(score)
    if head.key_log_weight is not None:
        score += head.key_log_weight[keys].to(dtype)
    if head.mask is not None:
        mask = head.mask[rows.unsqueeze(1), keys]
        hidden = mask.dtype == torch.bool
        score = score.masked_fill(~mask, -math.inf) if hidden else score + mask
    if head.is_causal:
        score.masked_fill_(keys > rows.unsqueeze(1), -math.inf)
    return score
