"""Exact attention of some rows over some keys, with gradients: the exact components on the device.

Rows and keys are sets of tokens, one for each head, or all tokens. Sums may begin with those of
other components; the one division then covers both. Few rows are spread over the device by cutting
the keys into splits, which are joined in a fixed order: results are the same in every run. No call
synchronises with the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..polynomial.setting import check_inputs
from ..polynomial.sums import rows_of
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

    @property
    def listed(self) -> bool:
        return self.index is not None


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Rows, keys, and how their scores become weights: scale, causal mask, log-weights."""

    rows: Tokens
    keys: Tokens
    scale: float
    causal: bool = False
    log_weight: Tensor | None = None  # [batch, heads of the queries, m] float32
    excluded: Tensor | None = None  # [batch, heads, n] uint8: rows that are not to be written
    precision: str = "tf32x3"  # of float32 products


@dataclass(frozen=True, eq=False)
class Start:
    """Sums of other components, in units of exp(unit)."""

    num: Tensor  # [batch, heads, n, dv] float32
    den: Tensor  # [batch, heads, n]
    unit: Tensor  # [batch * heads]


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


def splits_of(blocks: int, length: int, tile: int) -> tuple[int, int]:
    """Number of splits, and tokens of each, that occupy the device."""
    wanted = min(cdiv(PROGRAMS, max(1, blocks)), cdiv(length, LEAST_SPLIT))
    span = cdiv(cdiv(length, max(1, wanted)), tile) * tile
    return max(1, cdiv(length, span)), span


def exact_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangle: Rectangle,
    output: Tensor,
    lse: Tensor,
    start: Start | None = None,
) -> None:
    """Write output and lse of the rows of a rectangle."""
    check_inputs(query, key, value)
    shape = _Shape.of(query, key, value, rectangle)
    rows, keys = rectangle.rows, rectangle.keys
    if not rows.most:
        return
    tile = forward_tile(shape.width, shape.full)
    blocks = cdiv(rows.most, tile.rows)
    splits, span = splits_of(blocks * shape.heads, keys.most, tile.keys)
    excluded = rectangle.excluded
    if start is not None or excluded is not None:
        splits, span = 1, max(1, keys.most)
    new, parts, tops, masses = shape.new, output, lse, lse
    if splits > 1:
        parts = new(splits, shape.heads, rows.most, shape.dv)
        tops, masses = new(2, splits, shape.heads, rows.most).unbind(0)
    given = (lse, lse, lse) if start is None else (start.num, start.den, start.unit)
    kernels.attend[(blocks, splits, shape.heads)](
        *shape.tensors, *given, lse if excluded is None else excluded, parts, tops, masses,
        *shape.sizes, span, rectangle.scale * LOG2E, *shape.strides,
        shape.d_width, shape.dv_width, tile.rows, tile.keys,
        rows.listed, keys.listed, rectangle.causal, rectangle.log_weight is not None,
        start is not None, excluded is not None, splits > 1, shape.precision, **tile.launch,
    )  # fmt: skip
    if splits > 1:
        kernels.join_splits[(cdiv(rows.most, 16), shape.heads)](
            parts, tops, masses, *shape.rows, output, lse,
            shape.n, shape.dv, rows.most, splits, shape.dv_width, 16, rows.listed,
        )  # fmt: skip


def slopes(grad: Tensor, grad_lse: Tensor | None, output: Tensor) -> Tensor:
    """grad_lse - <grad, output> of every row, [batch, heads, n]: the part of its score gradients
    that does not depend on the key."""
    batch, heads, n, dv = output.shape
    grad, slope = rows_of(grad), output.new_empty((batch, heads, n), dtype=torch.float32)
    kernels.row_slopes[(cdiv(n, 64), batch * heads)](
        grad, output.contiguous(), slope if grad_lse is None else grad_lse.contiguous(), slope,
        heads, n, dv, *grad.stride()[:3], power_of_two(dv), 64, grad_lse is not None,
    )  # fmt: skip
    return slope


@dataclass(frozen=True, eq=False)
class Totals:
    """Gradients in float32, to which every rectangle adds; one for each head of the queries."""

    query: Tensor  # [batch, heads, n, d]
    key: Tensor  # [batch, heads, m, d]
    value: Tensor  # [batch, heads, m, dv]
    weight: Tensor  # [batch, heads, m]


def add_gradients(
    total: Totals,
    grad: Tensor,
    slope: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangle: Rectangle,
) -> None:
    """Add the gradients of a rectangle; ``lse`` is that of the whole row."""
    check_inputs(query, key, value)
    shape = _Shape.of(query, key, value, rectangle)
    rows, keys, heads = rectangle.rows, rectangle.keys, shape.heads
    if not rows.most or not keys.most:
        return
    tile = backward_tile(shape.width, shape.full)
    grad = rows_of(grad.to(query.dtype))
    excluded = rectangle.excluded
    given = (grad, lse, slope, lse if excluded is None else excluded)
    strides = (*shape.strides, *grad.stride()[:3])
    switches = (
        shape.d_width, shape.dv_width, tile.rows, tile.keys,
        rows.listed, keys.listed, rectangle.causal, rectangle.log_weight is not None,
        excluded is not None, shape.precision,
    )  # fmt: skip
    blocks = cdiv(rows.most, tile.rows)
    splits, span = splits_of(blocks * heads, keys.most, tile.keys)
    part = shape.new(splits, heads, rows.most, shape.d)
    kernels.query_gradient[(blocks, splits, heads)](
        *shape.tensors, *given, part, *shape.sizes, span, rectangle.scale, *strides, *switches,
        **tile.launch,
    )  # fmt: skip
    _add(part, rows, total.query)
    blocks = cdiv(keys.most, tile.keys)
    splits, span = splits_of(blocks * heads, rows.most, tile.rows)
    to_key = shape.new(splits, heads, keys.most, shape.d)
    to_value = shape.new(splits, heads, keys.most, shape.dv)
    to_weight = shape.new(splits, heads, keys.most, 1)
    kernels.key_gradient[(blocks, splits, heads)](
        *shape.tensors, *given, to_key, to_value, to_weight,
        *shape.sizes, span, rectangle.scale, *strides, *switches, **tile.launch,
    )  # fmt: skip
    _add(to_key, keys, total.key)
    _add(to_value, keys, total.value)
    _add(to_weight, keys, total.weight.unsqueeze(-1))


def _add(parts: Tensor, tokens: Tokens, total: Tensor) -> None:
    splits, heads, most, width = parts.shape
    at_once = 64 if width <= 64 else 16
    kernels.add_parts[(cdiv(most, at_once), heads)](
        parts, parts if tokens.index is None else tokens.index,
        parts if tokens.count is None else tokens.count, total,
        total.shape[2], width, most, splits, power_of_two(width, 1), at_once, tokens.listed,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Shape:
    """Arguments that the kernels of a rectangle share."""

    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    heads: int  # of the queries, of all batches
    n: int
    d: int
    dv: int
    full: bool
    precision: str | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, rectangle: Rectangle) -> _Shape:
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        batch, heads, n, d = query.shape
        m, dv = value.shape[2:]
        log_weight = rows_of(query if rectangle.log_weight is None else rectangle.log_weight)
        sides = [
            query if x is None else x
            for side in (rectangle.rows, rectangle.keys)
            for x in (side.index, side.count)
        ]
        full = query.dtype == torch.float32 or interpreted()
        return _Shape(
            (query, key, value, log_weight, *sides),
            (heads, key.shape[1], n, m, d, dv, rectangle.rows.most, rectangle.keys.most),
            tuple(stride for x in (query, key, value) for stride in x.stride()[:3])
            + log_weight.stride()[:2],
            batch * heads, n, d, dv, full, rectangle.precision if full else None,
        )  # fmt: skip

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        return self.tensors[4], self.tensors[5]

    @property
    def d_width(self) -> int:
        return power_of_two(self.d)

    @property
    def dv_width(self) -> int:
        return power_of_two(self.dv)

    @property
    def width(self) -> int:
        return max(self.d_width, self.dv_width)

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.tensors[0].device)
