"""Lengths of the tokens of every head, largest and mean, in one launch a side."""

from __future__ import annotations

import torch
from torch import Tensor

from . import lengths_kernels as kernels
from .language import cdiv, power_of_two

ROWS, PARTS = 64, 64


def lengths(tokens: Tensor, heads: int, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """Per part of the tokens [batch, heads or fewer, n, d] of each of ``heads`` heads their largest
    squared length, the sum and the number of lengths, [batch * heads, parts, 3]. A token counts if
    its entries are within ``limit`` [batch * heads] and its log-weight [batch, heads, n] is finite.
    """
    batch, key_heads, count, d = tokens.shape
    parts = min(PARTS, cdiv(count, ROWS))
    span = cdiv(cdiv(count, parts), ROWS) * ROWS
    parts = cdiv(count, span)
    out = torch.empty(batch * heads, parts, 3, dtype=torch.float32, device=tokens.device)
    weight = out if log_weight is None else log_weight.contiguous()
    kernels.lengths[(parts, batch * heads)](
        tokens, weight, limit, out, heads, heads // key_heads, count, span, d,
        *tokens.stride()[:3], ROWS, power_of_two(d), log_weight is not None,
    )  # fmt: skip
    return out
