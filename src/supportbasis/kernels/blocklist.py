"""Attention of blocks of queries over lists of granules of keys.

Block i of head h attends to the granules ``indices[offsets[r] : offsets[r + 1]]`` with r = h *
blocks + i; granule g is keys 16 g to 16 g + 15. A key's log-weight is added to its scores: an exact
key has 0, a coarse key its log mass, a missing one -inf. Cost is the length of the lists.

The gradient of keys walks the inverse lists (which blocks list a granule), so every sum has one
order and the result is the same in every run. No call waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from . import blocklist_kernels as kernels
from .language import cdiv, interpreted, power_of_two
from .polynomial import check_inputs, rows_of

GRANULE = 16
LOG2E = math.log2(math.e)
HALVES = {torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class ListTiles:
    """Keys at a time, warps and pipeline stages of `forward`."""

    keys: int = 64
    warps: int = 4
    stages: int = 3
    columns: bool = False  # log-weights as entries of the keys


@dataclass(frozen=True)
class Call:
    """What forward and backward share."""

    block: int  # queries of a list
    scale: float
    precision: str | None
    tiles: ListTiles


def choose_list_tiles(width: int, full_precision: bool, weighted: bool) -> ListTiles:
    """Tiles for keys or values of at most ``width`` entries."""
    if full_precision:
        return ListTiles(16 if width > 128 else 32, 4, 1)
    if width <= 64:
        return ListTiles(128, 4, 3)
    return ListTiles(64, 4, 2, columns=weighted)


def inverse_lists(
    offsets: Tensor, indices: Tensor, rows_per_key_head: int, granules: int, key_heads: int
) -> tuple[Tensor, Tensor]:
    """For each granule of each key head the rows (head * blocks + block) that list it."""
    entry = torch.arange(indices.numel(), device=indices.device)
    row = torch.searchsorted(offsets, entry.to(offsets.dtype), right=True) - 1
    place = row // rows_per_key_head * granules + indices
    place = torch.where(row < offsets.numel() - 1, place, key_heads * granules)  # spare entries
    if key_heads * granules < 2**31:
        place = place.int()  # half the passes
    place, order = place.sort(stable=True)
    bounds = torch.arange(key_heads * granules + 1, dtype=place.dtype, device=indices.device)
    return torch.searchsorted(place, bounds), row[order]


def weight_columns(
    log_weight: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float]:
    """Log-weights [batch, key heads, m] as entries of keys [batch, key heads, m + 16, 16]: less
    the largest, over the scale, in three parts that add up to them; the largest [batch, key heads,
    1]; and a score, to base 2, that only keys without weight stay below."""
    hidden = -6e4 if dtype == torch.float16 else -1e30
    top = log_weight.amax(2, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    rest = torch.nn.functional.pad(log_weight - top, (0, GRANULE), value=-math.inf)
    rest = (rest / scale).clamp(min=hidden)
    columns = torch.zeros(*rest.shape, 16, dtype=dtype, device=rest.device)
    for part in range(3):
        columns[..., part] = rest
        rest = rest - columns[..., part]
    return columns, top, hidden * scale * LOG2E / 2


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None,
        offsets: Tensor, indices: Tensor, call: Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        batch, heads, n, d = query.shape
        (key_heads, m), dv = key.shape[1:3], value.shape[-1]
        blocks = cdiv(n, call.block)
        out = torch.empty(batch, heads, n, dv, dtype=value.dtype, device=query.device)
        lse = torch.empty(batch, heads, n, dtype=torch.float32, device=query.device)
        as_columns = log_weight is not None and call.tiles.columns
        rows, columns, top, least = lse, lse, None, -math.inf
        if as_columns:
            assert log_weight is not None
            columns, top, least = weight_columns(log_weight, call.scale, query.dtype)
        elif log_weight is not None:
            rows = log_weight * LOG2E
        kernels.forward[(blocks, batch * heads)](
            query, key, value, rows, columns,
            offsets, indices, out, lse,
            heads, key_heads, n, m, d, dv, blocks, call.scale * LOG2E, least,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            power_of_two(d), power_of_two(dv), call.block, call.tiles.keys,
            GRANULE, log_weight is not None, as_columns,
            m % GRANULE == 0 and d == power_of_two(d) and dv == power_of_two(dv),
            m * max(key.stride(2), value.stride(2), 16) >= 2**31, call.precision,
            num_warps=call.tiles.warps, num_stages=call.tiles.stages,
        )  # fmt: skip
        if top is not None:
            lse += top.repeat_interleave(heads // key_heads, 1)
        ctx.call = call
        ctx.save_for_backward(query, key, value, log_weight, offsets, indices, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_weight, offsets, indices, out, lse = ctx.saved_tensors
        grad = rows_of(grads[0])
        (batch, heads, n), dv = lse.shape, value.shape[-1]
        delta = torch.empty_like(lse)
        kernels.row_terms[(cdiv(n, 64), batch * heads)](
            grad, out, grads[1].contiguous(), delta, heads, n, dv, *grad.stride()[:3],
            power_of_two(dv), 64, True,
        )  # fmt: skip
        given = (query, key, value, log_weight, offsets, indices, grad, lse, delta, ctx.call)
        *made, to_weight = _gradients(*given, (query.dtype, key.dtype, value.dtype))
        return (*made, None if log_weight is None else to_weight, None, None, None)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, offsets: Tensor,
    indices: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, call: Call,
    dtypes: Sequence[torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of queries, keys and values, in these dtypes, and of log-weights."""
    batch, heads, n, d = query.shape
    (key_heads, m), dv = key.shape[1:3], value.shape[-1]
    blocks, granules = cdiv(n, call.block), cdiv(m, GRANULE)
    grad_query, grad_key, grad_value = (
        torch.empty(x.shape, dtype=dtype, device=x.device)
        for x, dtype in zip((query, key, value), dtypes, strict=True)
    )
    weight = lse if log_weight is None else log_weight
    grad_weight = lse if log_weight is None else torch.empty_like(log_weight)
    shared = (
        heads, key_heads, n, m, d, dv, blocks, call.scale * LOG2E, call.scale,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
        power_of_two(d), power_of_two(dv), call.block,
    )  # fmt: skip
    kernels.query_gradient[(blocks, batch * heads)](
        query, key, value, weight, offsets, indices, grad, lse, delta, grad_query, *shared,
        min(call.tiles.keys, 64), GRANULE, log_weight is not None, call.precision,
        num_warps=call.tiles.warps, num_stages=min(call.tiles.stages, 2),
    )  # fmt: skip
    bounds, rows = inverse_lists(
        offsets, indices, blocks * heads // key_heads, granules, batch * key_heads
    )
    kernels.key_gradient[(granules, batch * key_heads)](
        query, key, value, weight, bounds, rows, grad, lse, delta,
        grad_key, grad_value, grad_weight, *shared,
        GRANULE, log_weight is not None, call.precision,
        num_warps=4, num_stages=min(call.tiles.stages, 2),
    )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_weight


def block_list_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    indices: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    log_weight: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in float32 of query, key, value and log-weights of `block_list_attention`, given
    those of its output; ``lse`` is that of whole rows (inf: a row counts for nothing), ``delta``
    what every score of a row subtracts (see `row_terms`)."""
    call = _call(query, value, scale, block, "tf32x3", None, True)
    given = (query, key, value, log_weight, offsets, indices, grad, lse, delta, call)
    return _gradients(*given, (torch.float32,) * 3)


def _check_value(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Values may have another 16-bit dtype than tokens."""
    if value.dim() != 4 or value.shape[:3] != key.shape[:3] or not 0 < value.shape[3] <= 256:
        raise InputError(f"value: got {tuple(value.shape)} with key {tuple(key.shape)}")
    alike = value.dtype == query.dtype or {value.dtype, query.dtype} == HALVES
    if not alike or value.device != query.device:
        raise InputError(
            f"value: got {value.dtype} on {value.device}, expected {query.dtype} on {query.device}"
        )


def _call(
    query: Tensor, value: Tensor, scale: float, block: int, precision: str,
    tiles: ListTiles | None, weighted: bool,
) -> Call:  # fmt: skip
    width = power_of_two(max(query.shape[-1], value.shape[-1]))
    full = query.dtype == torch.float32 or interpreted()
    if full and block * width > 64 * 128:
        raise InputError(
            f"block: got {block}, expected at most {64 * 128 // width} for float32 of this width"
        )
    tiles = tiles or choose_list_tiles(width, full, weighted)
    return Call(block, scale, precision if full else None, tiles)


def block_list_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    indices: Tensor,
    *,
    log_weight: Tensor | None = None,
    scale: float | None = None,
    block: int = 128,
    precision: str = "tf32x3",
    tiles: ListTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse, with gradients to query, key, value and log-weights.

    query [batch, heads, n, d], key and value [batch, key heads, m, ...], log_weight
    [batch, key heads, m] in float32, offsets [batch * heads * ceil(n / block) + 1], indices [total]
    (entries past the last offset are never read). Offsets and indices are not looked at here:
    checking them would wait for the device.
    """
    check_inputs(query, key, key)
    _check_value(query, key, value)
    rows = query.shape[0] * query.shape[1] * cdiv(query.shape[2], block)
    if offsets.numel() != rows + 1:
        raise InputError(f"offsets: got {offsets.numel()} entries, expected {rows + 1}")
    if block not in (16, 32, 64, 128):
        raise InputError(f"block: got {block}, expected 16, 32, 64 or 128")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = _call(query, value, scale, block, precision, tiles, log_weight is not None)
    if log_weight is not None:
        log_weight = log_weight.float().expand(key.shape[:3]).contiguous()
    return _Attention.apply(query, key, value, log_weight, offsets, indices, call)  # type: ignore[no-untyped-call]
