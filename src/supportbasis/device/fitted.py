"""Fitted polynomials on the device: features of all tokens of a head at once, by PyTorch.

What `components.fitted` does block by block for the sake of a cache is done here for as many tokens
as fit into memory, without looking at any number on the way. Units are the radii of the plan
instead of the largest norms. All this is replayed; then the host waits once, for whether keys are
far, or rows far or lost: these are computed exactly.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..backward import backward
from ..components import ExactSum, evaluate
from ..cotangent import Gradients
from ..execute import LOST
from ..features import FeatureMap
from ..fitted import FittedKernel
from ..plans import HeadPlan, Plan
from ..problem import Head, Problem
from .dispatch import Finish, Forward
from .framed import Inside, Stack, frames_of
from .replay import replayed

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


def begin(problem: Problem, plan: Plan) -> Finish:
    """Output, lse, and which rows were lost and computed exactly instead."""
    kernels = tuple(_kernel(head) for head in plan.heads)
    weight = problem.key_log_weight
    given = [problem.query, problem.key, problem.value, *frames_of(problem, plan)]
    if weight is not None:
        given.append(weight.flatten(0, 1).float())
    key = ("fitted", kernels, problem.group)
    made = replayed(key, partial(_prepare, kernels, problem.group), *given)
    return partial(_finish, problem, made)


def _finish(problem: Problem, made: Prepared) -> Forward:
    far, bad = made.flags.tolist()
    num, log_den, lost = made.num, made.log_den, made.lost
    if far:
        log_den, lost = log_den.clone(), lost.clone()
        _add_far_keys(made, num, log_den, lost)
        bad = bool((lost | made.far_rows).any())
    # copies: what was replayed is written over by the next call
    output, lse = num.to(problem.query.dtype, copy=True), log_den + made.inside.shift
    if bad:
        _make_exact(made.inside, lost | made.far_rows, output, lse)
    lost = lost & ~made.far_rows
    shape = (problem.batch, problem.heads, problem.n)
    return output.view(*shape, -1), lse.view(shape), lost.view(shape)


class Prepared(NamedTuple):
    """Heads and the sums of their rows by the kernels, over keys that are not far."""

    inside: Inside
    far_keys: Tensor  # [heads, m]
    far_rows: Tensor  # [heads, n]
    least: Tensor  # [heads, n]: log-sums below are lost
    num: Tensor  # [heads, n, dv]: mean values
    log_den: Tensor  # [heads, n]
    lost: Tensor  # [heads, n]
    flags: Tensor  # whether any key is far; whether any row is far or lost


def _prepare(
    kernels: tuple[FittedKernel, ...],
    group: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *frames: Tensor,
) -> Prepared:
    count = len(Stack._fields)
    inside = Inside.made(group, query, key, value, *frames[:count])
    if len(frames) > count:
        inside = inside._replace(log_weight=inside.log_weight + frames[count], masked=True)
    key_radius, query_radius = _radii(kernels, query.device)
    live = inside.log_weight > -math.inf
    far_keys = (torch.linalg.vector_norm(inside.key, dim=2) > key_radius) & live
    far_rows = torch.linalg.vector_norm(inside.query, dim=2) > query_radius
    near = inside.log_weight.masked_fill(far_keys, -math.inf)
    least = _least(inside) + math.log(LOST)
    sums = [_sums(inside.one(i), near[i], kernel) for i, kernel in enumerate(kernels)]
    num, log_den = (torch.stack(x) for x in zip(*sums, strict=True))
    lost = ~(log_den >= least)
    flags = torch.stack([far_keys.any(), (lost | far_rows).any()])
    return Prepared(inside, far_keys, far_rows, least, num, log_den, lost, flags)


@lru_cache(maxsize=64)
def _radii(kernels: tuple[FittedKernel, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Beyond which keys and queries are far, [heads, 1]."""
    key = torch.tensor([[kernel.key_radius] for kernel in kernels])
    return key.to(device), torch.tensor([[kernel.query_radius] for kernel in kernels]).to(device)


def _add_far_keys(made: Prepared, num: Tensor, log_den: Tensor, lost: Tensor) -> None:
    """Far keys exactly, added to the sums of all rows."""
    for i in made.far_keys.any(1).nonzero().squeeze(1).tolist():
        keys = made.far_keys[i].nonzero().squeeze(1)
        part = evaluate([ExactSum(keys)], made.inside.one(i).flat(), None)
        total = torch.logaddexp(log_den[i], part.den.log() + part.log_scale)
        num[i] *= (log_den[i] - total).exp().unsqueeze(1)
        num[i] += part.num * (part.log_scale - total).exp().unsqueeze(1)
        log_den[i] = total
        lost[i] = ~(total >= made.least[i])


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


def _make_exact(inside: Inside, bad: Tensor, output: Tensor, lse: Tensor) -> None:
    """Rows that are far or lost, exactly."""
    for i, rows in enumerate(bad):
        where = rows.nonzero().squeeze(1)
        if len(where):
            head: Head = inside.one(i).flat()
            total = evaluate([ExactSum(head.live_keys)], head, where)
            exact, log_sum = total.divide_(total.seen)
            output[i, where] = exact.to(output.dtype)
            lse[i, where] = log_sum + inside.shift[i, where]
