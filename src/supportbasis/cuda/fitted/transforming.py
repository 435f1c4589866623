"""Affine maps of the tokens of several heads, in one launch a side."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.language import cdiv, interpreted, power_of_two
from . import transforming_kernels as kernels

ROWS, COLUMNS = 128, 64  # of the result, that one program makes


def transformed(
    tokens: Tensor,
    heads: int,
    matrix: Tensor,
    offset: Tensor,
    line: Tensor,
    level: Tensor,
) -> tuple[Tensor, Tensor]:
    """For ``tokens`` x [heads or fewer, tokens, d], which several of the ``heads`` may share, x A
    + a and x b + c in float32.

    Products are as good as those of float32, whatever the dtype of the tokens.
    """
    count, d = tokens.shape[1:]
    new = matrix.new_empty
    out, extra = new(heads, count, d), new(heads, count)
    rows = 32 if tokens.dtype == torch.float32 else ROWS
    width = min(COLUMNS, power_of_two(d))
    kernels.transform[(cdiv(count, rows), heads, cdiv(d, width))](
        tokens.contiguous(), matrix, offset, line, level, out, extra,
        count, d, heads // len(tokens), rows, width,
        _precision(tokens.dtype),
    )  # fmt: skip
    return out, extra


def _precision(dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16 and not interpreted():  # NumPy has no such numbers
        return "bf16x3"
    return "ieee" if dtype == torch.float32 else "tf32x3"
