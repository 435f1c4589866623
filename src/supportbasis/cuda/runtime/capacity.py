"""Preallocated capacity for counts that depend on the entries: list lengths, exact rows.

A call does not synchronise with the host to learn such a count. It allocates what earlier calls of
the plan needed and a quarter more. Where that is not enough, the device computes every row exactly;
the counts are reported to the host, and the capacity grows, at the next call. Only the first call
of a plan synchronises, until its capacity suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import InputError
from ...plans import Plan
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from .language import cdiv, power_of_two
from .reporting import Report, capturing

Result = TypeVar("Result")
Sizes = tuple[int, ...]


class Capacity:
    """Sizes that the calls of one plan preallocate."""

    def __init__(self, initial: Sizes) -> None:
        self.sizes, self.known = initial, False
        self.reported: list[int] = []  # further counts of the last call that was reported
        self._report = Report()

    @staticmethod
    def of(plan: Plan, problem: Problem) -> Capacity:
        """The capacity that calls of a plan with tensors of this shape share."""
        query = problem.query
        key = (query.device, query.shape, problem.m, problem.key_log_weight is None)
        capacity = _capacities.get(plan, key, lambda: Capacity((0, 0)))
        if not capacity.known and capturing():
            raise InputError(
                "plan: it has not run on such tensors yet, and the capacity it needs is not known; "
                "call once before a CUDA graph is captured"
            )
        return capacity

    def run(
        self, work: Callable[[Sizes, bool], tuple[Result, Tensor]], backward: bool = False
    ) -> Result:
        """The result of ``work(sizes, guarded)``, which returns it with the counts it needed: one
        for each size, then any others. ``guarded`` work computes every row exactly on the device
        where a count exceeds its size; otherwise the host checks the counts before it returns.
        The backward pass has the sizes of the forward pass: what overflowed there overflows here.
        (If the plan was called again in between, the sizes may be larger.)"""
        while not self.known:  # which it is while a CUDA graph is captured
            result, needed = work(self.sizes, False)
            if not self._grow(needed.tolist()):
                self.known = True
                return result
        needed_before = None if backward else self._report.read()
        if needed_before is not None:
            self._grow(needed_before.tolist())
        result, needed = work(self.sizes, True)
        if not (backward or self._report.pending or capturing()):
            self._report.send(needed)
        return result

    def _grow(self, needed: list[int]) -> bool:
        """Raise each size to what was needed; True if any size changed."""
        before, self.reported = self.sizes, needed[len(self.sizes) :]
        pairs = zip(before, needed, strict=False)
        self.sizes = tuple(size if need <= size else with_spare(need) for size, need in pairs)
        return self.sizes != before


_capacities: WeakCache[Plan, tuple[torch.device, torch.Size, int, bool], Capacity] = WeakCache()


def with_spare(need: int) -> int:
    """``need`` and a quarter more, rounded up to coarse steps: similar needs get the same size."""
    step = max(16, power_of_two(need) // 8)
    return cdiv(need + need // 4, step) * step
