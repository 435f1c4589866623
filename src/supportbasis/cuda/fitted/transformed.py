"""Several heads in their balancing transforms at once: one launch a side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...plans import FittedHead
from ..runtime.language import cdiv, interpreted, power_of_two
from . import transforming_kernels as kernels

ROWS, COLUMNS = 128, 64  # of the result, that one program makes


class Transforms(NamedTuple):
    """Balancing transforms of several heads on the device: x = q A + a, log-weights = k b + c; and
    the norms [heads, 1] beyond which x is far."""

    query_map: Tensor
    query_offset: Tensor
    shift_map: Tensor
    zero: Tensor  # [heads]
    query_radius: Tensor
    key_map: Tensor
    key_offset: Tensor
    weight_map: Tensor
    weight_offset: Tensor
    key_radius: Tensor

    @staticmethod
    def of(heads: Sequence[FittedHead], scale: float, device: torch.device) -> Transforms:
        root, zero = math.sqrt(scale), torch.zeros(len(heads))
        query_map, key_map, query_centre, key_centre = (
            torch.stack([getattr(head.transform, name).cpu() for head in heads])
            for name in ("query_map", "key_map", "query_centre", "key_centre")
        )
        a, c = query_centre.unsqueeze(1), key_centre.unsqueeze(1)
        of_query = (query_map * root, -(a @ query_map) * root, c.mT * scale, zero)
        of_key = (key_map * root, -(c @ key_map) * root, a.mT * scale, -(c @ a.mT) * scale)
        radii = torch.tensor([[[x.fitted.query_radius], [x.fitted.key_radius]] for x in heads])
        made = (*of_query, radii[:, 0], *of_key, radii[:, 1])
        return Transforms(*(x.float().contiguous().to(device) for x in made))


def transformed(tokens: Tensor, matrix: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
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
