"""PyTorch's flash attention for CPUs, with the log-sum-exp, which SDPA does not return."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.problem import in_rows

OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"  # private: another version may lack it
AVAILABLE = hasattr(torch.ops.aten, OPERATOR)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, n, d] and lse [batch, heads, n] of tensors with one head dim.

    The operator reads tokens as if their last stride were 1, and as many heads and entries of the
    key and value as the query has, beyond their memory too; nothing else in the library calls it.
    """
    assert key.shape == value.shape and query.shape[:2] == key.shape[:2], (query.shape, key.shape)
    assert query.shape[3] == key.shape[3], (query.shape, key.shape)
    operator = getattr(torch.ops.aten, OPERATOR)
    query, key, value = (in_rows(x) for x in (query, key, value))
    output, lse = operator(query, key, value, is_causal=is_causal, attn_mask=bias, scale=scale)
    return output, lse
