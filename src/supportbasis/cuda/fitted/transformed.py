"""Several heads in their balancing transforms at once: one launch a side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...plans import FittedHead
from ..runtime.language import cdiv, interpreted, power_of_two
from . import transforming_kernels as kernels

ROWS, COLUMNS = 128, 64  # of the result, that one program makes


@dataclass(frozen=True, eq=False)
class Side:
    """Transforms of the queries, or of the keys, of several heads on the device: tokens x become
    x A + a, with log-weights x b + c."""

    matrix: Tensor  # A [heads, d, d]
    offset: Tensor  # a [heads, 1, d]
    line: Tensor  # b [heads, d, 1]
    level: Tensor  # c [heads, 1, 1]
    radius: Tensor  # [heads, 1]: longer tokens, transformed, are far

    @staticmethod
    def of(heads: Sequence[FittedHead], name: str, scale: float, device: torch.device) -> Side:
        """The side of these heads with this ``name``, query or key: x = (q - a) A sqrt(scale) with
        log-weight scale <q, c>, and y = (k - c) B sqrt(scale) with scale <k - c, a>."""
        other = "key" if name == "query" else "query"
        matrix, own, theirs = (
            torch.stack([getattr(head.transform, part).cpu() for head in heads])
            for part in (f"{name}_map", f"{name}_centre", f"{other}_centre")
        )
        root, own, theirs = math.sqrt(scale), own.unsqueeze(1), theirs.unsqueeze(2)
        level = -(own @ theirs) * scale if name == "key" else own.new_zeros(len(heads), 1, 1)
        radius = torch.tensor([[getattr(head.fitted, f"{name}_radius")] for head in heads])
        parts = (matrix * root, -(own @ matrix) * root, theirs * scale, level, radius)
        return Side(*(x.float().contiguous().to(device) for x in parts))

    def apply(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [batch, heads or fewer, tokens, d], which several heads may share, transformed
        [heads, tokens, d], and log-weights [heads, tokens]: in float32, and products are as good
        for any dtype of tokens."""
        tokens, matrix = tokens.flatten(0, 1).contiguous(), self.matrix
        heads, (count, d) = len(matrix), tokens.shape[1:]
        out, extra = matrix.new_empty(heads, count, d), matrix.new_empty(heads, count)
        rows = 32 if tokens.dtype == torch.float32 else ROWS
        width = min(COLUMNS, power_of_two(d))
        precision = "ieee" if tokens.dtype == torch.float32 else "tf32x3"
        if tokens.dtype == torch.bfloat16 and not interpreted():  # NumPy has no such numbers
            precision = "bf16x3"
        kernels.transform[(cdiv(count, rows), heads, cdiv(d, width))](
            tokens, matrix, self.offset, self.line, self.level, out, extra,
            count, d, heads // len(tokens), rows, width, precision,
        )  # fmt: skip
        return out, extra

    def pull_back(self, grad: Tensor, of_weights: Tensor) -> Tensor:
        """Gradients of tokens, from those of transformed ones and of their log-weights."""
        grad = grad @ self.matrix.mT
        grad += of_weights.unsqueeze(2) * self.line.mT
        return grad
