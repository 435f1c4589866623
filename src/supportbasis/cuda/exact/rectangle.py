"""Exact attention of some rows over some keys, with gradients: the exact components on the device.

Rows and keys are sets of tokens, one for each head, or all tokens. Sums may begin with those of
other components; the one division then covers both. Few rows are spread over the device by cutting
the keys into splits, which are joined in a fixed order: results are the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.problem import Problem, in_rows
from ..runtime.language import cdiv, interpreted, power_of_two
from . import rectangle_kernels as kernels

LOG2E = math.log2(math.e)
PROGRAMS = 512  # of a kernel, at least, where splits can make them
LEAST_SPLIT = 1024  # tokens

# Tiles of a kernel (rows, keys, warps, stages), for float16 and bfloat16 up to width 64, 128, 256
# and for float32 up to 128, 256.
Shapes = tuple[tuple[int, int, int, int], ...]
FORWARD = ((128, 64, 4, 3), (128, 128, 8, 3), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1))
BACKWARD = ((64, 64, 4, 2), (64, 64, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1))


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


class Tile(NamedTuple):
    """Rows and keys at a time, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int

    @staticmethod
    def of(shapes: Shapes, width: int, full_precision: bool) -> Tile:
        """The tile for tokens and values of at most ``width`` entries."""
        if full_precision:
            return Tile(*shapes[3 if width <= 128 else 4])
        return Tile(*shapes[0 if width <= 64 else 1 if width <= 128 else 2])

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def splits_of(blocks: int, length: int, tile: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Number of splits, and tokens of each, that occupy the device."""
    wanted = min(cdiv(programs, blocks), cdiv(length, LEAST_SPLIT))
    span = cdiv(cdiv(length, wanted), tile) * tile
    return cdiv(length, span), span


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Some rows and keys of a problem."""

    problem: Problem
    rows: Tokens
    keys: Tokens
    precision: str  # of float32 products

    @property
    def heads(self) -> int:
        """Of the queries, of all batches."""
        return self.problem.batch * self.problem.heads

    @property
    def full(self) -> bool:
        return self.problem.query.dtype == torch.float32 or interpreted()

    def tile(self, shapes: Shapes) -> Tile:
        width = max(self.problem.query.shape[-1], self.problem.value.shape[-1])
        return Tile.of(shapes, width, self.full)

    def launch(
        self, kernel: Any, tile: Tile, grid: tuple[int, int, int],
        given: tuple[Tensor | None, ...], span: int, scale: float, strides: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch a kernel with the arguments that all of them share, and those that are given."""
        problem, rows, keys = self.problem, self.rows, self.keys
        query, key, value = problem.query, problem.key, problem.value
        weight = problem.key_log_weight
        (heads, n, d), (m, dv) = query.shape[1:], value.shape[2:]
        kernel[grid](
            query, key, value, weight, rows.index, rows.count, keys.index, keys.count, *given,
            heads, problem.group, n, m, d, dv, rows.most, keys.most, span, scale,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *((0, 0) if weight is None else weight.stride()[:2]),
            *strides, power_of_two(d), power_of_two(dv), tile.rows, tile.keys,
            problem.is_causal, self.precision if self.full else None, **tile.launch,
        )  # fmt: skip


def exact_rows(
    rectangle: Rectangle, output: Tensor, lse: Tensor, start: Start | None = None
) -> None:
    """Write output and lse of the rows of a rectangle."""
    rows, keys, heads, dv = rectangle.rows, rectangle.keys, rectangle.heads, output.shape[-1]
    if not rows.most:
        return
    tile = rectangle.tile(FORWARD)
    blocks, splits, span = cdiv(rows.most, tile.rows), 1, keys.most
    if start is None:
        splits, span = splits_of(blocks * heads, keys.most, tile.keys)
    parts, tops, masses = output, lse, None
    if splits > 1:
        parts = lse.new_empty(splits, heads, rows.most, dv)
        tops, masses = lse.new_empty(2, splits, heads, rows.most).unbind(0)
    rectangle.launch(
        kernels.attend, tile, (blocks, splits, heads),
        (*(start or (None, None, None)), parts, tops, masses), span,
        rectangle.problem.scale * LOG2E,
    )  # fmt: skip
    if splits > 1:
        kernels.join_splits[(cdiv(rows.most, 16), heads)](
            parts, tops, masses, rows.index, rows.count, output, lse,
            lse.shape[-1], dv, rows.most, splits, power_of_two(dv), 16,
        )  # fmt: skip


def slopes(
    grad: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor | None = None,
    unit: Tensor | None = None, scaled: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """grad_lse - <grad, output> of every row, [batch, heads, n]: the part of its score gradients
    that does not depend on the key. With ``scaled`` it is over the row's denominator in units of
    exp(unit), as is ``grad``, which is written there."""
    batch, heads, n, dv = output.shape
    grad, slope = in_rows(grad), output.new_empty((batch, heads, n), dtype=torch.float32)
    kernels.row_slopes[(cdiv(n, 64), batch * heads)](
        grad, output.contiguous(), None if grad_lse is None else grad_lse.contiguous(), slope,
        lse, unit, scaled, heads, n, dv, *grad.stride()[:3], power_of_two(dv), 64,
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
    tile, problem = rectangle.tile(BACKWARD), rectangle.problem
    grad = in_rows(grad.to(problem.query.dtype))
    of_keys = (total.key, total.value, total.weight.unsqueeze(-1))
    for kernel, own, other, size, step, wholes in (
        (kernels.query_gradient, rows, keys, tile.rows, tile.keys, (total.query,)),
        (kernels.key_gradient, keys, rows, tile.keys, tile.rows, of_keys),
    ):
        blocks = cdiv(own.most, size)
        splits, span = splits_of(blocks * heads, other.most, step)
        parts = [lse.new_empty(splits, heads, own.most, whole.shape[-1]) for whole in wholes]
        rectangle.launch(
            kernel, tile, (blocks, splits, heads), (grad, lse, slope, *parts), span,
            problem.scale, grad.stride()[:3],
        )  # fmt: skip
        for part, whole in zip(parts, wholes, strict=True):
            n, width = whole.shape[2:]
            at_once = 64 if width <= 64 else 16
            kernels.add_parts[(cdiv(own.most, at_once), heads)](
                part, own.index, own.count, whole, n, width, own.most, splits,
                power_of_two(width, 1), at_once,
            )  # fmt: skip
