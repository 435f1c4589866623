"""Fitted polynomials on the device: features of all tokens of a head at once, by PyTorch.

What `components.fitted` does block by block for the sake of a cache is done here for as many tokens
as fit into memory, without looking at any number on the way. Units are the radii of the plan
instead of the largest norms. Keys that are far, and rows that are far or lost, are exact, as many
as there is room for (`room`): so all this is replayed, and the host waits for nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..backward import backward
from ..cotangent import Gradients
from ..execute import LOST
from ..features import FeatureMap
from ..fitted import FittedKernel
from ..kernels.rectangle import Rectangle, Tokens, exact_rows
from ..plans import HeadPlan, Plan
from ..problem import Problem
from .dispatch import Forward
from .exact import precision
from .framed import Inside
from .room import Sizes, enough, exact_unless
from .run import Run, parted

ENTRIES = 2**28  # of features in memory at a time
PRODUCTS = 128  # at most, that one sum over tokens is made of


def refusal(head: HeadPlan) -> str | None:
    return "causal fitted polynomials run chunk by chunk" if head.exact_rows else None


def family(head: HeadPlan) -> object:
    return "fitted"


def gradients(
    problem: Problem,
    plan: Plan,
    output: Tensor,
    lse: Tensor,
    rescued: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    return backward(problem, plan, output, lse, rescued, grad, grad_lse, for_weights=for_weights)


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output, lse, and which rows were lost and computed exactly instead."""
    kernels = tuple(_kernel(head) for head in plan.heads)
    run = Run.of(problem, plan, kernels, (0, 0))
    output, lse, lost = run.there("fitted", partial(_all_heads, kernels, problem.scale))
    return output, lse, lost


def _all_heads(
    kernels: tuple[FittedKernel, ...],
    scale: float,
    sizes: Sizes,
    sure: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *frames: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, which rows were lost, and how many keys of a head are far and rows far or lost,
    for which ``sizes`` is the room. Nothing here waits."""
    stack, weight = parted(frames)
    inside = Inside.made(query, key, value, *stack).weighted(weight)
    key_radius, query_radius = _radii(kernels, query.device)
    live = inside.log_weight > -math.inf
    far_keys = (torch.linalg.vector_norm(inside.key, dim=2) > key_radius) & live
    far_rows = torch.linalg.vector_norm(inside.query, dim=2) > query_radius
    near = inside.log_weight.masked_fill(far_keys, -math.inf)
    sums = [_sums(inside.one(i), near[i], kernel) for i, kernel in enumerate(kernels)]
    num, lse = (torch.stack(x) for x in zip(*sums, strict=True))
    lse = lse + inside.shift
    tokens, like = (query, key, value), Rectangle(
        Tokens(query.shape[2]), Tokens(key.shape[2]), scale, log_weight=weight,
        precision=precision(),
    )  # fmt: skip
    if sizes[0]:
        keys = replace(like, keys=_marked(far_keys, sizes[0]))
        num, lse = _with_keys(num, lse, tokens, keys)
    lost = ~(lse >= _least(inside) + inside.shift + math.log(LOST))
    bad = lost | far_rows
    needed = torch.stack([far_keys.sum(1).amax(), bad.sum(1).amax()])
    output = num.to(value.dtype).view(*query.shape[:3], -1)
    lse = lse.view(query.shape[:3]).contiguous()
    if sizes[1]:
        exact_rows(*tokens, replace(like, rows=_marked(bad, sizes[1])), output, lse)
    if sure:
        exact_unless(enough(needed, sizes), *tokens, scale, weight, precision(), output, lse)
    return output, lse, (lost & ~far_rows).view(lse.shape), needed


def _marked(flags: Tensor, most: int) -> Tokens:
    """The first tokens that are flagged in each head [heads, tokens]."""
    heads, tokens = flags.shape
    at = flags.cumsum(1) - 1
    at = torch.where(flags & (at < most), at, most)
    place = torch.arange(tokens, dtype=torch.int32, device=flags.device).expand(heads, -1)
    index = place.new_zeros(heads, most + 1).scatter_(1, at, place)[:, :most].contiguous()
    return Tokens(most, index, flags.sum(1).clamp(max=most).int())


def _with_keys(
    num: Tensor, lse: Tensor, tokens: tuple[Tensor, Tensor, Tensor], rectangle: Rectangle
) -> tuple[Tensor, Tensor]:
    """Mean values and log-sums of all rows with those over some more keys, exactly."""
    more, size = torch.empty_like(num), torch.empty_like(lse)
    exact_rows(*tokens, rectangle, more, size)
    known = torch.where(lse > -math.inf, lse, -math.inf)  # what is no number has no weight
    total = torch.logaddexp(known, size)
    unit = torch.where(total > -math.inf, total, 0.0)
    num = torch.where((known > -math.inf).unsqueeze(2), num, 0.0)
    mine, theirs = ((x - unit).exp().unsqueeze(2) for x in (known, size))
    return num * mine + more * theirs, total


@lru_cache(maxsize=64)
def _radii(kernels: tuple[FittedKernel, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Beyond which keys and queries are far, [heads, 1]."""
    key = torch.tensor([[kernel.key_radius] for kernel in kernels])
    return key.to(device), torch.tensor([[kernel.query_radius] for kernel in kernels]).to(device)


def _kernel(head: HeadPlan) -> FittedKernel:
    assert head.fitted is not None
    return head.fitted


def _least(inside: Inside) -> Tensor:
    """Lower bound of the log-sums of all rows, by Jensen's inequality: that of the mean key."""
    log_mass = inside.log_weight.logsumexp(1, keepdim=True)
    share = (inside.log_weight - log_mass).exp().nan_to_num(0.0).unsqueeze(1)
    return (inside.query @ (share @ inside.key).transpose(1, 2)).squeeze(2) + log_mass


def _sums(inside: Inside, log_weight: Tensor, kernel: FittedKernel) -> tuple[Tensor, Tensor]:
    """Mean value [n, dv] and log-sum [n] of every row by the kernel; NaN where that is not > 0."""
    query, key, value = inside.query[0], inside.key[0], inside.value[0]
    features, weights, units = _prepared(kernel, query.device)
    top = log_weight.max()
    top = torch.where(top > -math.inf, top, 0.0)
    weight = (log_weight - top).exp().unsqueeze(1)
    columns = torch.cat([value * weight, weight], 1)
    step = max(PRODUCTS, ENTRIES // features.count // PRODUCTS * PRODUCTS)
    state = columns.new_zeros(features.count, columns.shape[1])
    for start in range(0, len(key), step):
        part = columns[start : start + step]
        state[0] += part.sum(0)
        state[1:] += _summed(_written(features, key[start : start + step], units[1])[0], part)
    state *= weights
    sums = [
        _written(features, query[start : start + step], units[0])[0].T @ state[1:] + state[0]
        for start in range(0, len(query), step)
    ]
    total = torch.cat(sums)
    return total[:, :-1] / total[:, -1:], total[:, -1].log() + top


def _summed(features: Tensor, columns: Tensor) -> Tensor:
    """Features [count, tokens] times columns [tokens, width], as many products of a part of the
    tokens: one product so long and thin would keep few of the device's units busy."""
    parts = math.gcd(len(columns), PRODUCTS)
    split = features.unflatten(1, (parts, -1)).transpose(0, 1)
    return (split @ columns.unflatten(0, (parts, -1))).sum(0)


@lru_cache(maxsize=64)
def _prepared(
    kernel: FittedKernel, device: torch.device
) -> tuple[FeatureMap, Tensor, tuple[float, float]]:
    """The map, the weight of each feature, and the units of queries and keys."""
    query_unit, key_unit = (
        radius if radius < math.inf else 1.0 for radius in (kernel.query_radius, kernel.key_radius)
    )
    features = FeatureMap(kernel.spans[0], kernel.degree, kernel.spans)
    scaled = [a * (query_unit * key_unit) ** k for k, a in enumerate(kernel.coefficients)]
    weights = features.multiplicity * torch.tensor(scaled, dtype=torch.float64)[features.order]
    return features, weights.float().to(device).unsqueeze(1), (query_unit, key_unit)


def _written(features: FeatureMap, tokens: Tensor, unit: float) -> Tensor:
    """Features of the leading coordinates, which are the last of the map's variables."""
    x = (tokens[:, : features.dim] / unit).flip(1).unsqueeze(0)
    return features.write(x, features.buffer(1, len(tokens), x))
