"""Several heads in their frames at once: one launch a side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...plans import FittedHead, Plan
from ...polynomials.balancing import Frame
from ...problem.problem import Problem
from . import framing


class Inside(NamedTuple):
    """Heads in their frames, [heads, tokens, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor  # in the input dtype
    log_weight: Tensor
    shift: Tensor  # what the log-sums of the rows lack in the frame

    @staticmethod
    def made(query: Tensor, key: Tensor, value: Tensor, *frames: Tensor) -> Inside:
        """Heads without key weights; some may share their keys."""
        stack, group = Stack(*frames), query.shape[1] // key.shape[1]
        heads = len(stack.nothing)
        if group > 1:
            value = value.repeat_interleave(group, 1)
        query, shift = framing.framed(
            query.flatten(0, 1), heads, stack.query_map, stack.query_offset,
            stack.shift_map, stack.nothing,
        )  # fmt: skip
        key, weight = framing.framed(
            key.flatten(0, 1), heads, stack.key_map, stack.key_offset,
            stack.weight_map, stack.weight_offset,
        )  # fmt: skip
        return Inside(query, key, value.flatten(0, 1), weight, shift)

    def weighted(self, log_weight: Tensor | None) -> Inside:
        """With log-weights of the keys [batch, heads, m]."""
        if log_weight is None:
            return self
        return self._replace(log_weight=self.log_weight + log_weight.flatten(0, 1).float())

    def one(self, head: int) -> Inside:
        return Inside(*(x[head : head + 1] for x in self))


class Stack(NamedTuple):
    """Frames of several heads on the device: x = q A + a, log-weights = k b + c."""

    query_map: Tensor
    query_offset: Tensor
    key_map: Tensor
    key_offset: Tensor
    weight_map: Tensor
    weight_offset: Tensor
    shift_map: Tensor
    nothing: Tensor  # a zero for each head


def frames_of(problem: Problem, plan: Plan) -> Stack:
    """The frames of all heads of a plan."""
    frames = tuple(head.frame for head in plan.heads if isinstance(head, FittedHead))
    return _stack(frames * problem.batch, problem.scale, problem.query.device)


@lru_cache(maxsize=64)
def _stack(frames: Sequence[Frame], scale: float, device: torch.device) -> Stack:
    root = math.sqrt(scale)

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.cpu() for part in parts]).float().to(device)

    return Stack(
        stacked([frame.query_map * root for frame in frames]),
        stacked([-(frame.query_centre @ frame.query_map).unsqueeze(0) * root for frame in frames]),
        stacked([frame.key_map * root for frame in frames]),
        stacked([-(frame.key_centre @ frame.key_map).unsqueeze(0) * root for frame in frames]),
        stacked([frame.query_centre.unsqueeze(1) * scale for frame in frames]),
        stacked([-(frame.key_centre @ frame.query_centre).view(1, 1) * scale for frame in frames]),
        stacked([frame.key_centre.unsqueeze(1) * scale for frame in frames]),
        torch.zeros(len(frames), device=device),
    )


def out_of(
    stack: Stack, inside: tuple[Tensor, Tensor, Tensor, Tensor], factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights [heads, tokens, ...] from those in the
    frames of the heads; ``factor`` are those of the rows' shifts."""
    query, key, value, weight = inside
    query = query @ stack.query_map.transpose(1, 2)
    if factor is not None:
        query += factor.unsqueeze(2) * stack.shift_map.transpose(1, 2)
    key = key @ stack.key_map.transpose(1, 2)
    key += weight.unsqueeze(2) * stack.weight_map.transpose(1, 2)
    return query, key, value, weight


def shift_factor(own: tuple[Tensor, Tensor], grad: Tensor, lse: Tensor, slope: Tensor) -> Tensor:
    """What some keys, exact outside of the frame, leave out of the gradients of the rows' shifts,
    [heads * n]; ``own`` are the mean values and log-sums of all rows over them."""
    output, size = own
    share = (size.flatten() - lse.flatten()).exp().nan_to_num(0.0)  # a row without keys has none
    along = (grad.float().flatten(0, 2) * output.view(-1, output.shape[-1])).sum(1)
    return -share * (along + slope.flatten())
