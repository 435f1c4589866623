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
from ..runtime.language import cdiv, interpreted, power_of_two
from . import transforming_kernels as kernels

ROWS, COLUMNS = 128, 64  # of the result, that one program makes


class Transforms(NamedTuple):
    """Balancing transforms of several heads on the device: x = q A + a, log-weights = k b + c."""

    query_map: Tensor
    query_offset: Tensor
    shift_map: Tensor
    zero: Tensor  # [heads]
    key_map: Tensor
    key_offset: Tensor
    weight_map: Tensor
    weight_offset: Tensor

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Transforms:
        """The balancing transforms of all heads of a plan, for every batch element."""
        transforms = tuple(head.transform for head in plan.heads if isinstance(head, FittedHead))
        return _stack(transforms * problem.batch, problem.scale, problem.query.device)


@lru_cache(maxsize=64)
def _stack(transforms: Sequence[Transform], scale: float, device: torch.device) -> Transforms:
    root, zero = math.sqrt(scale), torch.zeros(len(transforms))
    query_map, key_map, query_centre, key_centre = (
        torch.stack([getattr(each, name).cpu() for each in transforms])
        for name in ("query_map", "key_map", "query_centre", "key_centre")
    )
    a, c = query_centre.unsqueeze(1), key_centre.unsqueeze(1)
    of_query = (query_map * root, -(a @ query_map) * root, c.mT * scale, zero)
    of_key = (key_map * root, -(c @ key_map) * root, a.mT * scale, -(c @ a.mT) * scale)
    return Transforms(*(x.float().contiguous().to(device) for x in (*of_query, *of_key)))


class Balanced(NamedTuple):
    """Heads in their balancing transforms, [heads, tokens, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor  # in the input dtype
    log_weight: Tensor
    shift: Tensor  # scale <q, c>, which log-sums of transformed rows lack

    @staticmethod
    def of(problem: Problem, transforms: Transforms) -> Balanced:
        value, group = problem.value, problem.group
        value = value.repeat_interleave(group, 1) if group > 1 else value
        query, shift = _transformed(problem.query.flatten(0, 1), *transforms[:4])
        key, weight = _transformed(problem.key.flatten(0, 1), *transforms[4:])
        if problem.key_log_weight is not None:
            weight = weight + problem.key_log_weight.flatten(0, 1)
        return Balanced(query, key, value.flatten(0, 1), weight, shift)


def _transformed(tokens: Tensor, matrix: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """For ``tokens`` x [heads or fewer, tokens, d], which several heads may share, x A + a and x b
    + c in float32; products are as good as those of float32 for any dtype of tokens."""
    heads, (count, d) = len(matrix), tokens.shape[1:]
    out, extra = matrix.new_empty(heads, count, d), matrix.new_empty(heads, count)
    rows = 32 if tokens.dtype == torch.float32 else ROWS
    width = min(COLUMNS, power_of_two(d))
    precision = "ieee" if tokens.dtype == torch.float32 else "tf32x3"
    if tokens.dtype == torch.bfloat16 and not interpreted():  # NumPy has no such numbers
        precision = "bf16x3"
    kernels.transform[(cdiv(count, rows), heads, cdiv(d, width))](
        tokens.contiguous(), matrix, *rest, out, extra,
        count, d, heads // len(tokens), rows, width, precision,
    )  # fmt: skip
    return out, extra
