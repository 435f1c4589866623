"""PyTorch's flash attention for CPUs, with the log-sum-exp, which SDPA does not return."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..problem.problem import in_rows

OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"  # private: another version may lack it
AVAILABLE = hasattr(torch.ops.aten, OPERATOR)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, n, dv] and lse [batch, heads, n], with a boolean mask or log-weights
    [batch, heads, 1 or n, m]; a row without keys has zeros and lse -inf.

    The operator reads tokens as if their last stride were 1, and as many heads and entries of the
    key and value as the query has, beyond their memory too; nothing else in the library calls it.
    """
    assert key.shape[:3] == value.shape[:3] and query.shape[:2] == key.shape[:2], key.shape
    assert query.shape[3] == key.shape[3], (query.shape, key.shape)
    n, dim = query.shape[2], max(query.shape[3], value.shape[3])
    # zero columns change no score and no kept output
    q, k, v = (
        in_rows(x if x.shape[3] == dim else pad(x, (0, dim - x.shape[3])))
        for x in (query, key, value)
    )
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    bias = None if bias is None else bias.expand(-1, -1, n, -1)
    operator = getattr(torch.ops.aten, OPERATOR)
    output, lse = operator(q, k, v, is_causal=is_causal, attn_mask=bias, scale=scale)
    output = output[..., : value.shape[3]]
    if mask is not None:
        dead = dead_rows(mask, n, is_causal)
        output, lse = output.masked_fill(dead.unsqueeze(3), 0.0), lse.masked_fill(dead, -math.inf)
    return output, lse


def dead_rows(mask: Tensor, n: int, is_causal: bool) -> Tensor:
    """Rows [batch, heads, n] that attend to no key by such a mask, causal: [batch, heads, 1, m]."""
    live = mask if mask.dtype == torch.bool else mask > -math.inf
    if not is_causal:
        return ~live.any(3).expand(-1, -1, n)
    none_yet = live.squeeze(2).cumsum(2) == 0  # up to and including key j
    return none_yet[..., torch.arange(n, device=live.device).clamp(max=live.shape[3] - 1)]
