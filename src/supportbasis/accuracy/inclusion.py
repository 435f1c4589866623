"""Inclusion probabilities of query rows in a sample; outlier queries are drawn almost surely.

Most of a head's error can lie in a few outlier queries: long ones, ones in rare directions, ones
that attend to a single key. A uniform sample misses them. So each row is drawn with a probability
of its own, and counts for the inverse of it (`sampling.py`). The probability mixes shares of the
sample in proportion to

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
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..problem.caching import WeakCache
from ..problem.problem import Head

SAMPLED_KEYS, OUTLIER_KEYS, FOUND_KEYS = 64, 24, 48
PILOT_ROWS = 64
PILOT_ENTRIES = 2**23
PIECE = {"cpu": 1024, "cuda": 2**16}  # rows at a time: on a CPU their scores stay in the caches
LENGTH_POWER = 8
EVEN = 0.4  # of the sample: the share that is drawn from all rows with equal probability
FLOOR = 1e-6  # of the largest eigenvalue: directions with less count as that


@dataclass(frozen=True, eq=False)
class Sketch:
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
        rest = torch.where(certain, 0.0, x)
        total = float(rest.sum())
        factor = max(0.0, count - int(certain.sum())) / total if total > 0 else 0.0
        over = rest * factor >= 1
        if not bool(over.any()):
            return torch.where(certain, 1.0, rest * factor)
        certain |= over


def spread_out(tokens: Tensor) -> Tensor:
    """(x - mean)^T Cov^-1 (x - mean) of each token [n, d], in float64."""
    x = tokens.double() if tokens.dtype == torch.float64 else tokens.float()
    away = x - x.mean(0)
    values, axes = torch.linalg.eigh((away.T @ away).double() / max(1, len(away)))
    floor = max(float(values[-1]) * FLOOR, 1e-300) if len(values) else 1.0
    axes = axes * values.clamp(min=floor).rsqrt()
    return (away @ axes.to(away)).double().square().sum(1)


def _sketch(head: Head, seed: int) -> Sketch:
    query, key = head.query.detach(), head.key.detach()
    norms = head.query_norms
    top = float(norms.max()) if head.n else 1.0
    lengths = (norms / max(top, 1e-300)).pow(LENGTH_POWER)
    rare = spread_out(_unit(query))
    live = head.live_keys
    live = torch.arange(head.m, device=key.device) if live is None else live
    if head.is_causal:
        live = live[live < head.n]
    if not len(live):
        return Sketch((lengths, rare), torch.full_like(lengths, -math.inf))
    value = head.value.detach()[live].to(head.dtype)
    value_size = (value - value.mean(0)).double().square().sum(1)
    pilots = min(head.n, max(16, min(PILOT_ROWS, PILOT_ENTRIES // max(1, head.m))))
    chance = probabilities(torch.ones_like(lengths), (lengths, rare), pilots)
    rows = draw_rows(chance, pilots, seed + 4)
    sizes = (head.key_norms[live], spread_out(_unit(key[live])), value_size)
    outliers = {i for size in sizes for i in _top(size, OUTLIER_KEYS)}
    outliers.update(_found_keys(head, live, value_size, rows))
    special = torch.tensor(sorted(outliers), device=live.device)
    concentration, lse = _estimate(head, live, value_size, special, seed + 4)
    return Sketch((lengths, rare, concentration), lse)


def _unit(x: Tensor) -> Tensor:
    """Scaled so that squares neither overflow nor vanish."""
    top = float(x.abs().max()) if x.numel() else 1.0
    return x if 1e-12 < top < 1e12 else x.double() / max(top, 1e-300)


def _top(x: Tensor, count: int) -> list[int]:
    return x.topk(min(count, len(x))).indices.tolist()


def draw_rows(chance: Tensor, count: int, seed: int) -> Tensor:
    """``count`` rows drawn with these probabilities, which add up to it: systematically along a
    random permutation. Sorted."""
    permutation, start = _permutation(len(chance), seed, chance.device)
    steps = chance[permutation].cumsum(0)
    steps = (steps * (count / max(float(steps[-1]), 1e-300)) + start).floor().clamp(max=count)
    before = torch.cat([steps.new_zeros(1), steps[:-1]])
    return permutation[steps > before].sort().values


@lru_cache(maxsize=4)  # a search draws several samples of a head, and heads are equally long
def _permutation(count: int, seed: int, device: torch.device) -> tuple[Tensor, float]:
    """A random permutation, and a number between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(count, generator=generator).to(device)
    return permutation, float(torch.rand((), generator=generator, dtype=torch.float64))


def _scores(head: Head, rows: Tensor, keys: Tensor) -> Tensor:
    """Log-weights of some pairs in the compute dtype."""
    dtype = head.dtype
    score = (head.query[rows].to(dtype) * head.scale) @ head.key[keys].to(dtype).T
    if head.key_log_weight is not None:
        score += head.key_log_weight[keys].to(dtype)
    if head.is_causal:
        score.masked_fill_(keys > rows.unsqueeze(1), -math.inf)
    return score


def _found_keys(head: Head, live: Tensor, value_size: Tensor, rows: Tensor) -> list[int]:
    """Keys with the largest share in the output of some pilot row."""
    best = value_size.new_zeros(len(live))
    for some in rows.split(32):
        weight = _scores(head, some, live).softmax(1).nan_to_num_(0.0)
        part = weight.mul_(value_size.sqrt().to(weight)).square_()
        largest, at = part.topk(min(2, len(live)), 1)
        share = largest.double() / part.sum(1, keepdim=True).double().clamp(min=1e-300)
        best.scatter_reduce_(0, at.flatten(), share.flatten(), "amax")
    return _top(best, FOUND_KEYS)


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
    sampled = torch.arange(len(at), device=at.device) >= len(special)
    keys, size = live[at], value_size[at].to(head.dtype)
    many = max(1.0, len(index) / max(1, int(sampled.sum())))
    count = torch.where(sampled, many, 1.0).to(head.dtype)
    parts, sums = [], []
    piece = PIECE.get(live.device.type, PIECE["cpu"])
    for rows in torch.arange(head.n, device=live.device).split(piece):
        score = _scores(head, rows, keys)
        top = score.amax(1)
        weight = score.sub_(top.unsqueeze(1)).exp_()
        total = weight @ count
        part = weight.square_() @ (count * size) / total.square()
        parts.append(torch.where(top > -math.inf, part, size.mean()).double())
        sums.append((top + total.log()).nan_to_num(-math.inf).double())
    concentration, lse = torch.cat(parts), torch.cat(sums)
    if head.normalise:
        return concentration, lse
    if head.query_log_weight is not None:
        lse = lse + head.query_log_weight
    return (2 * (lse - lse.max())).exp().nan_to_num(0.0), lse
