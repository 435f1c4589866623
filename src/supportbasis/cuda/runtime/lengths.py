"""Sizes of the tokens of every head: how long they are, and which have a large entry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import lengths_kernels as kernels
from .language import cdiv, power_of_two

ROWS, PARTS = 64, 64
LISTED = 2048  # tokens of a head at a time


def lengths(query: Tensor, key: Tensor, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """Norms of queries [batch, heads, n, d] and keys [batch, key heads, m, d], in parts of the
    tokens of each head: the largest squared norm, the sum of norms and their number, [2, batch *
    heads, parts, 3]. A token counts if its entries are within ``limit`` [batch * heads], and a key
    if its log-weight [batch, heads, m] is finite."""
    (batch, heads, n, d), m = query.shape, key.shape[2]
    longest = max(n, m)
    span = cdiv(cdiv(longest, PARTS), ROWS) * ROWS
    parts = cdiv(longest, span)
    out = torch.empty(2, batch * heads, parts, 3, dtype=torch.float32, device=query.device)
    weight = out if log_weight is None else log_weight.contiguous()
    kernels.lengths[(parts, batch * heads, 2)](
        query, key, weight, limit, out, heads, heads // key.shape[1], n, m, span, d,
        *query.stride()[:3], *key.stride()[:3], ROWS, power_of_two(d), log_weight is not None,
    )  # fmt: skip
    return out


def large(tokens: Tensor, heads: int, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """Which tokens [batch, heads or fewer, n, d] have an entry beyond the ``limit`` [batch * heads]
    of a head, and a finite log-weight [batch, heads, n]: [batch * heads, n] bool."""
    batch, key_heads, count, d = tokens.shape
    out = torch.empty(batch * heads, count, dtype=torch.uint8, device=tokens.device)
    weight = out if log_weight is None else log_weight.contiguous()
    kernels.large[(cdiv(count, ROWS), batch * heads)](
        tokens, weight, limit, out, heads, heads // key_heads, count, d,
        *tokens.stride()[:3], ROWS, power_of_two(d), log_weight is not None,
    )  # fmt: skip
    return out.view(torch.bool)


def listed(flags: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The first ``most`` flagged tokens of each head [heads, tokens], [heads, most] int32, and the
    number of all of them, [heads] int32."""
    heads, n = flags.shape
    index = torch.zeros(heads, most, dtype=torch.int32, device=flags.device)
    count = torch.empty(heads, dtype=torch.int32, device=flags.device)
    kernels.listed[(heads,)](flags.view(torch.uint8), index, count, n, most, LISTED)
    return index, count


def rounded_down(limits: Sequence[float]) -> Tensor:
    """The largest float32 numbers not above these limits: an entry of at most 32 bits exceeds one
    exactly if it exceeds the other."""
    exact = torch.tensor(limits, dtype=torch.float64)
    near = exact.float()
    below = torch.nextafter(near, torch.tensor(-torch.inf))
    return torch.where(near.double() > exact, below, near)
