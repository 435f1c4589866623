"""Several heads in their balancing transforms at once: one launch a side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...plans import FittedHead, Plan
from ...polynomials.balancing import Transform
from ...problem.problem import Problem
from . import transforming


class Balanced(NamedTuple):
    """Heads in their balancing transforms, [heads, tokens, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor  # in the input dtype
    log_weight: Tensor
    shift: Tensor  # scale <q, c>, which log-sums of transformed rows lack

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, transforms: Transforms) -> Balanced:
        """Heads without key log-weights of their own; several heads may share keys."""
        group, heads = query.shape[1] // key.shape[1], len(transforms.zero)
        if group > 1:
            value = value.repeat_interleave(group, 1)
        query, shift = transforming.transformed(
            query.flatten(0, 1), heads, transforms.query_map, transforms.query_offset,
            transforms.shift_map, transforms.zero,
        )  # fmt: skip
        key, weight = transforming.transformed(
            key.flatten(0, 1), heads, transforms.key_map, transforms.key_offset,
            transforms.weight_map, transforms.weight_offset,
        )  # fmt: skip
        return Balanced(query, key, value.flatten(0, 1), weight, shift)

    def weighted(self, log_weight: Tensor | None) -> Balanced:
        """The same with log-weights [batch, heads, m] added to those of the keys."""
        if log_weight is None:
            return self
        return self._replace(log_weight=self.log_weight + log_weight.flatten(0, 1).float())

    def one(self, head: int) -> Balanced:
        return Balanced(*(x[head : head + 1] for x in self))


class Transforms(NamedTuple):
    """Balancing transforms of several heads on the device: x = q A + a, log-weights = k b + c."""

    query_map: Tensor
    query_offset: Tensor
    key_map: Tensor
    key_offset: Tensor
    weight_map: Tensor
    weight_offset: Tensor
    shift_map: Tensor
    zero: Tensor  # [heads]


def transforms_of(problem: Problem, plan: Plan) -> Transforms:
    """The balancing transforms of all heads of a plan, for every batch element."""
    transforms = tuple(head.transform for head in plan.heads if isinstance(head, FittedHead))
    return _stack(transforms * problem.batch, problem.scale, problem.query.device)


@lru_cache(maxsize=64)
def _stack(transforms: Sequence[Transform], scale: float, device: torch.device) -> Transforms:
    root = math.sqrt(scale)

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.cpu() for part in parts]).float().to(device)

    return Transforms(
        stacked([each.query_map * root for each in transforms]),
        stacked([-(each.query_centre @ each.query_map).unsqueeze(0) * root for each in transforms]),
        stacked([each.key_map * root for each in transforms]),
        stacked([-(each.key_centre @ each.key_map).unsqueeze(0) * root for each in transforms]),
        stacked([each.query_centre.unsqueeze(1) * scale for each in transforms]),
        stacked([-(each.key_centre @ each.query_centre).view(1, 1) * scale for each in transforms]),
        stacked([each.key_centre.unsqueeze(1) * scale for each in transforms]),
        torch.zeros(len(transforms), device=device),
    )


def token_gradients(
    transforms: Transforms, balanced: tuple[Tensor, Tensor, Tensor, Tensor], factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights [heads, tokens, ...] from those of the
    transformed heads; ``factor`` [heads, n] are those of the rows' shifts."""
    query, key, value, weight = balanced
    query = query @ transforms.query_map.transpose(1, 2)
    if factor is not None:
        query += factor.unsqueeze(2) * transforms.shift_map.transpose(1, 2)
    key = key @ transforms.key_map.transpose(1, 2)
    key += weight.unsqueeze(2) * transforms.weight_map.transpose(1, 2)
    return query, key, value, weight


def shift_factor(own: tuple[Tensor, Tensor], grad: Tensor, lse: Tensor, slope: Tensor) -> Tensor:
    """The part of exact keys, whose scores contain no shift, in the gradients of the rows' shifts,
    [heads * n]; ``own`` are mean values and log-sums of all rows over these keys."""
    output, size = own
    share = (size.flatten() - lse.flatten()).exp().nan_to_num(0.0)  # a row without keys has none
    along = (grad.float().flatten(0, 2) * output.view(-1, output.shape[-1])).sum(1)
    return -share * (along + slope.flatten())
