"""A call of an evaluator that waits for nothing: what it is given, recorded, in the room it has."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...plans import Plan
from ...problem.problem import Problem
from ..exact.exact_heads import precision
from ..fitted.framed import Stack, frames_of
from .replay import replayed
from .room import Room, Sizes


class Run(NamedTuple):
    """What a call is made with, there and back."""

    given: tuple[Tensor, ...]  # tokens, what is told, frames, log-weights of the keys if any
    call: Hashable  # what a recording depends on beside the shapes of these
    room: Room

    @staticmethod
    def of(
        problem: Problem,
        plan: Plan,
        kind: Hashable,
        usual: Sizes,
        told: Callable[[Plan, torch.device], Tensor] | None = None,
    ) -> Run:
        """``kind`` is all that the work depends on beside tensors, ``usual`` the room that the
        first call begins with, and ``told`` what else a plan says."""
        room = Room.of(plan, problem, usual)  # nothing is copied to the device before
        said = () if told is None else (told(plan, problem.query.device),)
        weight = () if problem.key_log_weight is None else (problem.key_log_weight.float(),)
        tokens = (problem.query, problem.key, problem.value)
        given = (*tokens, *said, *frames_of(problem, plan), *weight)
        return Run(given, (kind, problem.group, problem.scale, precision()), room)

    def there(self, name: str, function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``function(sizes, sure, *given)`` returns before the sizes that it needed."""
        return self.room.run(partial(self._work, name, function, ()))

    def back(
        self, name: str, function: Callable[..., tuple[Tensor, ...]], *first: Tensor
    ) -> tuple[Tensor, ...]:
        """The same for the way back, which is given some tensors more, before all others."""
        return self.room.again(partial(self._work, name, function, first))

    def _work(
        self,
        name: str,
        function: Callable[..., tuple[Tensor, ...]],
        first: tuple[Tensor, ...],
        sizes: Sizes,
        sure: bool,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        made, given = partial(function, sizes, sure), (*first, *self.given)
        key = (name, self.call, sizes, len(first))
        *parts, needed = replayed(key, made, *given) if sure else made(*given)
        return tuple(parts), needed


def parted(frames: tuple[Tensor, ...]) -> tuple[Stack, Tensor | None]:
    """The last tensors that are given: frames, and log-weights if there are any."""
    count = len(Stack._fields)
    return Stack(*frames[:count]), frames[count] if len(frames) > count else None
