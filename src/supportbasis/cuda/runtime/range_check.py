"""Ranges of scores on a device, without synchronising with the host.

A call with a plan reduces the norms of its tokens on the device and copies them to the host, which
compares them at the next call with that plan: heads that left the range of their plan are reported
then, in a warning, and are exact from that call on. Of calls within 0.1 s only one is checked,
because a check reads every token.
"""

from __future__ import annotations

import math
import time
from functools import cached_property

import torch
from torch import Tensor

from ...engine import ranges
from ...plans import Plan, ScoreRange
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from .lengths import lengths, rounded_down, thresholds
from .reporting import Report, capturing

SECONDS = 0.1  # between two calls that are checked


class RangeCheck:
    """The range check of the calls of one plan on one device."""

    def __init__(self, plan: Plan, device: torch.device, batch: int) -> None:
        self.limits, self.device, self.batch = thresholds(plan) * batch, device, batch
        self.report, self.scale, self.last = Report(), 1.0, -math.inf
        self.instead: Plan | None = None  # with the heads exact that have left their range

    @cached_property
    def limit(self) -> Tensor:
        """The thresholds on the device, copied by the first call that is checked: one that a CUDA
        graph captures could not copy them."""
        return rounded_down(self.limits).to(self.device)

    @staticmethod
    def of(plan: Plan, device: torch.device, batch: int) -> RangeCheck:
        """The check that calls of a plan share."""
        return _kept.get(plan, (device, batch), lambda: RangeCheck(plan, device, batch))

    def start(self, problem: Problem) -> None:
        """Start the reduction of a call on the device, unless one of an earlier call is pending, or
        a CUDA graph is captured."""
        now = time.monotonic()
        if self.report.pending or now - self.last < SECONDS or capturing():
            return
        weight = problem.key_log_weight
        sides = ((problem.query, None), (problem.key, None if weight is None else weight.float()))
        found = [lengths(tokens, problem.heads, self.limit, each) for tokens, each in sides]
        self.report.send(torch.stack(found))
        self.scale, self.last = abs(problem.scale), now

    def reported(self, plan: Plan) -> Plan:
        """The plan to use, given the last report; warns if a head left its range."""
        found = self.report.read()
        left = {} if found is None else _left(plan, found, self.scale)
        if left:
            self.instead = ranges.exact_where(plan, left)
        if self.instead is None:
            return plan
        return RangeCheck.of(self.instead, self.device, self.batch).reported(self.instead)


_kept: WeakCache[Plan, tuple[torch.device, int], RangeCheck] = WeakCache()


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
