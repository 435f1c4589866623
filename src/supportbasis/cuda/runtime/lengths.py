"""Sizes of the tokens of every head: how long they are, and which have a large entry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...plans import Plan, ThresholdHead
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from . import lengths_kernels as kernels
from .language import cdiv, power_of_two

ROWS = 64
LISTED = 2048  # tokens of a head at a time


def lengths(tokens: Tensor, heads: int, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """The largest norm, the sum of norms and their number, [batch * heads, 3], of the tokens
    [batch, heads or fewer, n, d] of each head that have no entry beyond its ``limit`` and, if it is
    given, a finite log-weight [batch, heads, n]."""
    norm = torch.linalg.vector_norm(tokens, dim=3, dtype=torch.float32)
    norm = norm.repeat_interleave(heads // tokens.shape[1], 1).flatten(0, 1)
    counted = ~large(tokens, heads, limit, None)
    if log_weight is not None:
        counted &= log_weight.flatten(0, 1) > -torch.inf
    norm = torch.where(counted, norm, 0.0)
    return torch.stack([norm.amax(1), norm.sum(1), counted.sum(1)], 1)


def large(tokens: Tensor, heads: int, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """Which tokens [batch, heads or fewer, n, d] have an entry beyond the ``limit`` [batch * heads]
    of a head, and a finite log-weight [batch, heads, n]: [batch * heads, n] bool."""
    batch, key_heads, count, d = tokens.shape
    out = torch.empty(batch * heads, count, dtype=torch.uint8, device=tokens.device)
    weight = None if log_weight is None else log_weight.contiguous()
    kernels.large[(cdiv(count, ROWS), batch * heads)](
        tokens, weight, limit, out, heads, heads // key_heads, count, d,
        *tokens.stride()[:3], ROWS, power_of_two(d),
    )  # fmt: skip
    return out.view(torch.bool)


def listed(flags: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The first ``most`` flagged tokens of each head [heads, tokens], [heads, most] int32, and the
    number of all of them, [heads] int32."""
    heads, n = flags.shape
    index = torch.zeros(heads, most, dtype=torch.int32, device=flags.device)
    count = torch.empty(heads, dtype=torch.int32, device=flags.device)
    kernels.listed[(heads,)](flags.view(torch.uint8), index, count, n, most, LISTED)
    return index, count


def thresholds(plan: Plan) -> list[float]:
    """Of all heads; infinite where there is none."""
    return [head.threshold if isinstance(head, ThresholdHead) else math.inf for head in plan.heads]


_limits: WeakCache[Plan, tuple[torch.device, int], Tensor] = WeakCache()


def limits(plan: Plan, problem: Problem) -> Tensor:
    """The thresholds of all heads [batch * heads] on the device. They are copied once: a call that
    a CUDA graph captures could not do it."""
    device, batch = problem.query.device, problem.batch
    exact = thresholds(plan) * batch
    return _limits.get(plan, (device, batch), lambda: rounded_down(exact).to(device))


def rounded_down(limits: Sequence[float]) -> Tensor:
    """The largest float32 numbers not above these limits: an entry of at most 32 bits exceeds one
    exactly if it exceeds the other."""
    exact = torch.tensor(limits, dtype=torch.float64)
    near = exact.float()
    below = torch.nextafter(near, torch.tensor(-torch.inf))
    return torch.where(near.double() > exact, below, near)
