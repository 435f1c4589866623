"""One call of attention inside a model, and exact answers to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.sdpa import SDPA

MASK_ENTRIES = 2**26  # of a mask that depends on the query, at a time


@dataclass(frozen=True, eq=False)
class Call:
    """Tokens [batch, heads, tokens, dim] of one call; several heads may share keys.

    Of causal calls row i attends to the first ``offset + i + 1`` keys.
    """

    site: int  # number of the attention module, or of the call, within a forward pass
    name: str  # of the site
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None  # bool [batch, keys]: False is hidden
    is_causal: bool = False
    offset: int = 0  # keys before the first query of a causal call
    scale: float | None = None
    dropout: float = 0.0
    own: Callable[[], Tensor] | None = None  # the model's own attention, if only that will do
    reason: str = ""  # why only that will do
    row_mask: Tensor | None = None  # [batch, heads, tokens, keys] of such a call, bool or additive

    @property
    def n(self) -> int:
        return self.query.shape[-2]

    @property
    def m(self) -> int:
        return self.key.shape[-2]

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def attn_mask(self) -> Tensor | None:
        """The key mask as PyTorch's attention takes it, [batch, 1, 1, keys]."""
        return None if self.key_mask is None else self.key_mask[:, None, None]

    def exact(self) -> Tensor:
        """Output [batch, heads, tokens, dim] by the model's own attention or PyTorch's."""
        if self.own is not None:
            return self.own()
        if not self.is_causal:
            return self._sdpa(self.query, self.m, self.attn_mask, False)
        if self.key_mask is None and self.offset == 0:
            return self._sdpa(self.query, min(self.n, self.m), None, True)
        rows = max(1, MASK_ENTRIES // max(1, len(self.query) * self.m))
        if self.key_mask is None:
            rows = max(1, MASK_ENTRIES // max(1, self.m))
        parts = [self._causal_rows(at, min(at + rows, self.n)) for at in range(0, self.n, rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def mask(self, first: int, last: int) -> Tensor | None:
        """Which keys the rows [first, last) attend to, bool; None: all."""
        if not self.is_causal:
            return self.attn_mask
        row = torch.arange(first, last, device=self.query.device) + self.offset
        causal = row.unsqueeze(1) >= torch.arange(self.m, device=self.query.device)
        return causal if self.attn_mask is None else causal & self.attn_mask

    def _causal_rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last), with a mask over the keys that any of them attends to."""
        keys, mask = min(self.m, self.offset + last), self.mask(first, last)
        mask = None if mask is None else mask[..., :keys]
        if mask is not None and self.key_mask is not None:
            mask = mask | ~mask.any(-1, keepdim=True)  # rows of padding: any finite answer
        return self._sdpa(self.query[:, :, first:last], keys, mask, False)

    def _sdpa(self, query: Tensor, keys: int, mask: Tensor | None, causal: bool) -> Tensor:
        key, value = self.key[:, :, :keys], self.value[:, :, :keys]
        if self.group > 1 and mask is not None:  # PyTorch's fast kernels take masks or groups
            key, value = (x.repeat_interleave(self.group, 1) for x in (key, value))
        return SDPA(
            query, key, value, mask, self.dropout, causal, scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip


Handler = Callable[[Call], Tensor]
"""Answers a call with an output [batch, heads, tokens, dim]."""


def explicit(
    call: Call,
    mask: Tensor | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Exact attention with soft-capped scores, a bias of positions, or a learned score of each
    head that takes part in the softmax without a value. ``mask`` is boolean or additive, of all
    queries; without one the call's own causality and key mask hold."""
    key, value = (x.repeat_interleave(call.group, 1) for x in (call.key, call.value))
    scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    rows = max(1, MASK_ENTRIES // max(1, math.prod(call.query.shape[:2]) * call.m))
    parts = []
    for first in range(0, call.n, rows):
        last = min(first + rows, call.n)
        score = (call.query[:, :, first:last] @ key.mT).float() * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if position_bias is not None:
            score = score + _rows(position_bias, first, last, call.m)
        part = call.mask(first, last) if mask is None else _rows(mask, first, last, call.m)
        if part is not None:
            boolean = part.dtype == torch.bool
            score = score.masked_fill(~part, -math.inf) if boolean else score + part
        if s_aux is not None:
            sink = s_aux.float().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], 3)
        weight = torch.nan_to_num(torch.softmax(score, -1))[..., : call.m]
        weight = F.dropout(weight, call.dropout) if call.dropout else weight
        parts.append(weight.to(value.dtype) @ value)
    return torch.cat(parts, 2)


def _rows(bias: Tensor, first: int, last: int, keys: int) -> Tensor:
    """Rows [first, last) of a mask or bias, which may be the same for all queries."""
    return (bias[..., first:last, :] if bias.shape[-2] > 1 else bias)[..., :keys]
