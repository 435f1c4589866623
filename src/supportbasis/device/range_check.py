"""Ranges of scores on a device, without synchronising with the host.

A call with a plan has the lengths of its tokens reduced on the device and copied to the host, which
compares them when the next call with that plan comes: heads that left the range of their plan are
reported then, in a warning, and are exact from that call on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ranges
from ..kernels.lengths import lengths
from ..plans import Plan, ScoreRange
from ..problem import Problem
from .room import capturing


class _Asked(NamedTuple):
    """Lengths of a call that are on their way to the host."""

    query: Tensor
    key: Tensor
    scale: float
    event: torch.cuda.Event | None


class RangeCheck:
    """What is known about the calls of one plan on one device."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        limits = [math.inf if head.threshold is None else head.threshold for head in plan.heads]
        self.limit = torch.tensor(limits, dtype=torch.float32).to(device)
        self.asked: _Asked | None = None
        self.instead: Plan | None = None  # with the heads exact that have left their range

    @staticmethod
    def of(plan: Plan, device: torch.device) -> RangeCheck:
        """The one that is kept with the plan."""
        key = ("range", device)
        if key not in plan.memory:
            plan.memory[key] = RangeCheck(plan, device)
        found = plan.memory[key]
        assert isinstance(found, RangeCheck)
        return found

    def ask(self, problem: Problem) -> None:
        """Have the device reduce the lengths of a call, unless the answer to an earlier call is
        still on its way; inside a CUDA graph nobody would read it."""
        if self.asked is not None or capturing() or not problem.n or not problem.m:
            return
        weight = problem.key_log_weight
        found = [
            lengths(problem.query.detach(), problem.heads, self.limit, None),
            lengths(
                problem.key.detach(), problem.heads, self.limit,
                None if weight is None else weight.detach().float(),
            ),
        ]  # fmt: skip
        event = None
        if problem.query.is_cuda:
            copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in found]
            for copy, x in zip(copies, found, strict=True):
                copy.copy_(x, non_blocking=True)
            found, event = copies, torch.cuda.Event()
            event.record()
        self.asked = _Asked(found[0], found[1], problem.scale, event)

    def reported(self, plan: Plan) -> Plan:
        """The plan to use as far as the host knows; a warning says what is new."""
        asked = self.asked
        if asked is not None and (asked.event is None or asked.event.query()):
            self.asked, left = None, _left(plan, asked)
            if left:
                self.instead = ranges.exact_where(plan, left)
        if self.instead is None:
            return plan
        return RangeCheck.of(self.instead, self.limit.device).reported(self.instead)


def _left(plan: Plan, asked: _Asked) -> dict[int, str]:
    """The heads that have left their range, and how."""
    sides, scale, left = [_reduced(x) for x in (asked.query, asked.key)], abs(asked.scale), {}
    products = [
        [scale * q * k for q, k in zip(*pair, strict=True)] for pair in zip(*sides, strict=True)
    ]
    for number, (head, *found) in enumerate(zip(plan.heads, *products, strict=True)):
        reason = ranges.leaves(head.scores, ScoreRange(*found))
        if reason is not None:
            left[number] = f"in an earlier call {reason}"
    return left


def _reduced(parts: Tensor) -> tuple[list[float], list[float]]:
    """Largest and mean length of each head."""
    largest, total, number = parts.double().unbind(2)
    mean = total.sum(1) / number.sum(1).clamp(min=1.0)
    return largest.amax(1).sqrt().tolist(), mean.tolist()
