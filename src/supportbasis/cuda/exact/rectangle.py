"""Exact attention of some rows over some keys, with gradients: the exact components on the device.

Rows and keys are sets of tokens, one for each head, or all tokens. Sums may begin with those of
other components; the one division then covers both. Few rows are spread over the device by cutting
the keys into splits, which are joined in a fixed order: results are the same in every run. No call
synchronises with the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.language import cdiv, interpreted, power_of_two
from . import rectangle_kernels as kernels

LOG2E = math.log2(math.e)
PROGRAMS = 512  # of a kernel, at least, where splits can make them
LEAST_SPLIT = 1024  # tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of each head, ascending; without an index all ``most`` of them."""

    most: int  # of one head
    index: Tensor | None = None  # [batch * heads, most] int32
    count: Tensor | None = None  # [batch * heads] int32


class Start(NamedTuple):
    """Sums of other components, in units of exp(unit)."""

    num: Tensor  # [batch, heads, n, dv] float32
    den: Tensor  # [batch, heads, n]
    unit: Tensor  # [batch * heads]


class Totals(NamedTuple):
    """Gradients in float32, to which every rectangle adds; one for each head of the queries."""

    query: Tensor  # [batch, heads, n, d]
    key: Tensor  # [batch, heads, m, d]
    value: Tensor  # [batch, heads, m, dv]
    weight: Tensor  # [batch, heads, m]


@dataclass(frozen=True)
class Tile:
    """Rows and keys at a time, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def forward_tile(width: int, full_precision: bool) -> Tile:
    """Tile for keys and values of at most ``width`` entries."""
    if full_precision:
        return Tile(64, 32, 4, 1) if width > 128 else Tile(64, 32, 4, 2)
    if width <= 64:
        return Tile(128, 64, 4, 3)
    return Tile(128, 128, 8, 3) if width <= 128 else Tile(64, 32, 4, 2)


def backward_tile(width: int, full_precision: bool) -> Tile:
    if full_precision:
        return Tile(16, 16, 4, 1) if width > 128 else Tile(32, 32, 4, 1)
    if width <= 64:
        return Tile(64, 64, 4, 2)
    return Tile(64, 64, 8, 1) if width <= 128 else Tile(32, 32, 4, 1)


def rows_of(x: Tensor) -> Tensor:
    """A [batch, heads, n, width] tensor whose rows lie together in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def splits_of(blocks: int, length: int, tile: int) -> tuple[int, int]:
    """Number of splits, and tokens of each, that occupy the device."""
    wanted = min(cdiv(PROGRAMS, max(1, blocks)), cdiv(length, LEAST_SPLIT))
    span = cdiv(cdiv(length, max(1, wanted)), tile) * tile
    return max(1, cdiv(length, span)), span


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Tokens, rows and keys among them, and how scores become weights: scale, causal mask,
    log-weights."""

    query: Tensor  # [batch, heads, n, d]
    key: Tensor  # [batch, key heads, m, d]
    value: Tensor  # [batch, key heads, m, dv]
    rows: Tokens
    keys: Tokens
    scale: float
    causal: bool = False
    log_weight: Tensor | None = None  # [batch, heads of the queries, m] float32
    precision: str = "tf32x3"  # of float32 products

    @property
    def heads(self) -> int:
        """Of the queries, of all batches."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def full(self) -> bool:
        return self.query.dtype == torch.float32 or interpreted()

    @property
    def width(self) -> int:
        return power_of_two(max(self.query.shape[-1], self.value.shape[-1]))

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, int], given: tuple[Tensor | None, ...],
        span: int, scale: float, strides: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch a kernel with the arguments that all of them share, and those that are given."""
        query, key, value = tokens = [rows_of(x) for x in (self.query, self.key, self.value)]
        (_, heads, n, d), (_, key_heads, m, dv) = query.shape, value.shape
        rows, keys = self.rows, self.keys
        weight = None if self.log_weight is None else rows_of(self.log_weight)
        grid = (*programs, self.heads)
        kernel[grid](
            *tokens, weight, rows.index, rows.count, keys.index, keys.count, *given,
            heads, key_heads, n, m, d, dv, rows.most, keys.most, span, scale,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *((0, 0) if weight is None else weight.stride()[:2]),
            *strides, power_of_two(d), power_of_two(dv), tile.rows, tile.keys,
            self.causal, self.precision if self.full else None, **tile.launch,
        )  # fmt: skip


def exact_rows(
    rectangle: Rectangle, output: Tensor, lse: Tensor, start: Start | None = None
) -> None:
    """Write output and lse of the rows of a rectangle."""
    rows, keys, heads = rectangle.rows, rectangle.keys, rectangle.heads
    dv, new = output.shape[-1], rectangle.new
    if not rows.most:
        return
    tile = forward_tile(rectangle.width, rectangle.full)
    blocks = cdiv(rows.most, tile.rows)
    splits, span = 1, max(1, keys.most)
    if start is None:
        splits, span = splits_of(blocks * heads, keys.most, tile.keys)
    parts, tops, masses = output, lse, None
    if splits > 1:
        parts = new(splits, heads, rows.most, dv)
        tops, masses = new(2, splits, heads, rows.most).unbind(0)
    rectangle.launch(
        kernels.attend, tile, (blocks, splits),
        (*(start or (None, None, None)), parts, tops, masses), span, rectangle.scale * LOG2E,
    )  # fmt: skip
    if splits > 1:
        kernels.join_splits[(cdiv(rows.most, 16), heads)](
            parts, tops, masses, rows.index, rows.count, output, lse,
            lse.shape[-1], dv, rows.most, splits, power_of_two(dv), 16,
        )  # fmt: skip


def slopes(grad: Tensor, grad_lse: Tensor | None, output: Tensor) -> Tensor:
    """grad_lse - <grad, output> of every row, [batch, heads, n]: the part of its score gradients
    that does not depend on the key."""
    batch, heads, n, dv = output.shape
    grad, slope = rows_of(grad), output.new_empty((batch, heads, n), dtype=torch.float32)
    kernels.row_slopes[(cdiv(n, 64), batch * heads)](
        grad, output.contiguous(), None if grad_lse is None else grad_lse.contiguous(), slope,
        None, None, None, heads, n, dv, *grad.stride()[:3], power_of_two(dv), 64,
    )  # fmt: skip
    return slope


def add_gradients(
    total: Totals, grad: Tensor, slope: Tensor, lse: Tensor, rectangle: Rectangle
) -> None:
    """Add the gradients of a rectangle; ``lse`` is that of the whole row, or +inf for a row that
    had no part in it."""
    rows, keys, heads = rectangle.rows, rectangle.keys, rectangle.heads
    if not rows.most or not keys.most:
        return
    tile = backward_tile(rectangle.width, rectangle.full)
    grad = rows_of(grad.to(rectangle.query.dtype))

    def launch(kernel: Any, blocks: int, splits: int, span: int, *parts: Tensor) -> None:
        given = (grad, lse, slope, *parts)
        rectangle.launch(
            kernel, tile, (blocks, splits), given, span, rectangle.scale, grad.stride()[:3]
        )

    blocks = cdiv(rows.most, tile.rows)
    splits, span = splits_of(blocks * heads, keys.most, tile.keys)
    part = rectangle.new(splits, heads, rows.most, total.query.shape[-1])
    launch(kernels.query_gradient, blocks, splits, span, part)
    _add(part, rows, total.query)
    blocks = cdiv(keys.most, tile.keys)
    splits, span = splits_of(blocks * heads, rows.most, tile.rows)
    wholes = (total.key, total.value, total.weight.unsqueeze(-1))
    parts = [rectangle.new(splits, heads, keys.most, whole.shape[-1]) for whole in wholes]
    launch(kernels.key_gradient, blocks, splits, span, *parts)
    for part, whole in zip(parts, wholes, strict=True):
        _add(part, keys, whole)


def _add(parts: Tensor, tokens: Tokens, total: Tensor) -> None:
    splits, heads, most, width = parts.shape
    at_once = 64 if width <= 64 else 16
    kernels.add_parts[(cdiv(most, at_once), heads)](
        parts, tokens.index, tokens.count, total, total.shape[2], width, most, splits,
        power_of_two(width, 1), at_once,
    )  # fmt: skip
