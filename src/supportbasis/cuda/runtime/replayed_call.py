"""A call captured as a CUDA graph: its tensors, its key, and its preallocated capacity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...plans import Plan
from ...problem.problem import Problem
from ..exact.exact_heads import precision
from ..fitted.transformed import Transforms, transforms_of
from .capacity import Capacity, Sizes
from .replay import replayed

Work = Callable[..., tuple[Tensor, ...]]


class ReplayedCall(NamedTuple):
    """One call of an evaluator, forward and backward."""

    given: tuple[Tensor, ...]  # tokens, transforms, log-weights of the keys if any
    key: Hashable  # what a captured graph depends on beside the shapes of these
    capacity: Capacity

    @staticmethod
    def of(problem: Problem, plan: Plan, constants: Hashable, initial: Sizes) -> ReplayedCall:
        """``constants`` is all that the work depends on beside tensors; ``initial`` the capacity
        with which the first call begins."""
        capacity = Capacity.of(plan, problem, initial)  # may raise: before anything is copied
        weight = () if problem.key_log_weight is None else (problem.key_log_weight.float(),)
        tokens = (problem.query, problem.key, problem.value)
        given = (*tokens, *transforms_of(problem, plan), *weight)
        key = (constants, problem.group, problem.scale, precision())
        return ReplayedCall(given, key, capacity)

    def forward(self, name: str, function: Work) -> tuple[Tensor, ...]:
        """The results of ``function(sizes, guarded, *given)``, which returns them and then the
        counts that it needed (`Capacity.run`)."""
        return self.capacity.run(partial(self._work, name, function, ()))

    def backward(self, name: str, function: Work, *saved: Tensor) -> tuple[Tensor, ...]:
        """The results of ``function(sizes, guarded, *saved, *given)`` in the backward pass."""
        return self.capacity.run_backward(partial(self._work, name, function, saved))

    def _work(
        self,
        name: str,
        function: Work,
        saved: tuple[Tensor, ...],
        sizes: Sizes,
        guarded: bool,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        work, given = partial(function, sizes, guarded), (*saved, *self.given)
        key = (name, self.key, sizes, len(saved))
        *results, needed = replayed(key, work, *given) if guarded else work(*given)
        return tuple(results), needed


def split_given(given: tuple[Tensor, ...]) -> tuple[Transforms, Tensor | None]:
    """What follows the tokens in ``given``: transforms, and log-weights or None."""
    count = len(Transforms._fields)
    return Transforms(*given[:count]), given[count] if len(given) > count else None
