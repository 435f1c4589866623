"""Fitted polynomials on the device: features of all tokens of a head at once, by PyTorch.

What `components.fitted` does block by block for the sake of a cache is done here for as many tokens
as fit into memory, without looking at any number on the way. Units are the radii of the plan
instead of the largest norms. At the end the host waits once, for the rows that are far or lost:
these are computed exactly.
"""

from __future__ import annotations

import math
from functools import lru_cache

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
from .framed import Inside

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


def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and which rows were lost and computed exactly instead."""
    inside = Inside.of(problem, plan)
    kernels = [_kernel(head) for head in plan.heads]
    far_keys = _beyond(inside.key, [kernel.key_radius for kernel in kernels])
    far_rows = _beyond(inside.query, [kernel.query_radius for kernel in kernels])
    far = (far_keys & (inside.log_weight > -math.inf)).sum(1).tolist()
    near = inside.log_weight.masked_fill(far_keys, -math.inf)
    least = _least(inside) + math.log(LOST)
    shape = (problem.batch, problem.heads, problem.n)
    output = problem.query.new_empty(len(kernels), problem.n, problem.value.shape[-1])
    lse, lost = torch.empty_like(inside.shift), torch.zeros_like(far_rows)
    for i, kernel in enumerate(kernels):
        num, log_den = _sums(inside.one(i), near[i], kernel)
        if far[i]:
            keys = (far_keys[i] & (inside.log_weight[i] > -math.inf)).nonzero().squeeze(1)
            part = evaluate([ExactSum(keys)], inside.one(i).flat(), None)
            total = torch.logaddexp(log_den, part.den.log() + part.log_scale)
            num = num * (log_den - total).exp().unsqueeze(1)
            num += part.num * (part.log_scale - total).exp().unsqueeze(1)
            log_den = total
        lost[i] = ~(log_den >= least[i])
        output[i], lse[i] = num, log_den
    if bool((lost | far_rows).any()):
        _make_exact(inside, lost | far_rows, output, lse)
    lost &= ~far_rows
    return output.view(*shape, -1), (lse + inside.shift).view(shape), lost.view(shape)


def _kernel(head: HeadPlan) -> FittedKernel:
    assert head.fitted is not None
    return head.fitted


def _beyond(tokens: Tensor, radii: list[float]) -> Tensor:
    """Tokens [heads, tokens, d] that are longer than the radius of their head."""
    radius = torch.tensor(radii).to(tokens.device, non_blocking=True)
    return torch.linalg.vector_norm(tokens, dim=2) > radius.unsqueeze(1)


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
            lse[i, where] = log_sum
