"""Ranges of scores on a device, without synchronising with the host.

A call with a plan reduces the norms of its tokens on the device and copies them to the host, which
compares them at the next call with that plan: heads that left the range of their plan are reported
then, in a warning, and are exact from that call on. Of calls within 0.1 s only one is checked,
because a check reads every token.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from ...engine import ranges
from ...plans import Plan, ScoreRange
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact.split import large, rounded_down, thresholds
from .reporting import Report, capturing

SECONDS = 0.1  # between two calls that are checked


class RangeCheck:
    """What the calls of one plan on one device report."""

    def __init__(self) -> None:
        self.report, self.scale, self.last = Report(), 1.0, -math.inf
        self.limit: Tensor | None = None  # of entries of tokens that count, for each head
        self.instead: Plan | None = None  # with the heads exact that have left their range

    @staticmethod
    def of(problem: Problem, plan: Plan) -> RangeCheck:
        return _kept.get(plan, (problem.query.device, problem.batch), RangeCheck)


_kept: WeakCache[Plan, tuple[torch.device, int], RangeCheck] = WeakCache()


def checked(problem: Problem, plan: Plan) -> Plan:
    """The plan to use, given the last report; warns if a head left its range. Starts the reduction
    of this call on the device, unless one of an earlier call is pending, or a CUDA graph is
    captured."""
    if plan.is_exact:
        return plan
    check, now = RangeCheck.of(problem, plan), time.monotonic()
    found = check.report.read()
    left = {} if found is None else _left(plan, found, check.scale)
    if left:
        check.instead = ranges.exact_where(plan, left)
    if check.instead is not None:
        return checked(problem, check.instead)
    if not (check.report.pending or now - check.last < SECONDS or capturing()):
        sides = ((problem.query, None), (problem.key, problem.key_log_weight))
        if check.limit is None:  # copied once: it synchronises
            check.limit = rounded_down(thresholds(plan) * problem.batch).to(problem.query.device)
        with torch.no_grad(), torch.cuda.device_of(problem.query):
            sizes = [lengths(tokens, problem.heads, check.limit, each) for tokens, each in sides]
            check.report.send(torch.stack(sizes))
        check.scale, check.last = abs(problem.scale), now
    return plan


def _left(plan: Plan, found: Tensor, scale: float) -> dict[int, str]:
    """The numbers of heads that left their range, and the reasons, by `lengths` of both sides."""
    left = {}
    for number, sides in enumerate(found.transpose(0, 1).tolist()):
        largest = math.prod(side[0] for side in sides)
        mean = math.prod(total / max(1.0, count) for _, total, count in sides)
        head = plan.heads[number % plan.num_heads]
        reason = ranges.leaves(head, ScoreRange(scale * largest, scale * mean))
        if reason is not None:
            left[number % plan.num_heads] = f"in an earlier call {reason}"
    return left


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
