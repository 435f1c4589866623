"""Attention over lists of leaves: tilt, select, attend, for all heads at once.

The formulas and names are those of `lists.tables`. Output is one softmax over the own window
(causal attention), the tilted keys of closed leaves and the keys of open ones. Tilts belong to a
range of cells, in causal attention of whole windows, so that a caller can bound their memory. No
function synchronises with the host; shapes depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...lists.tables import SCORED_MEMBERS
from ..exact.rectangle import Shapes, Tile
from ..runtime.language import cdiv, interpreted, power_of_two
from . import list_kernels as kernels

# As those of `rectangle`.
TILES: dict[str, Shapes] = {  # cells and leaves of a program; rows, leaves or keys at a time
    "tilt": ((64, 32, 4, 3), (64, 16, 4, 2), (64, 8, 8, 1), (32, 4, 8, 1), (16, 4, 8, 1)),
    "select": ((32, 128, 4, 3), (32, 128, 4, 3), (32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    "attend": ((128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tables:
    """Sorted keys, cells of queries, tiles of rows; Hk key heads serve Hq heads.

    The members of a cell are its one tile, or rows are routed to cells: a cell's tiles lie one
    after the other, those of a range of whole windows too, as many for each cell in the mean.
    """

    query: Tensor  # [Hq, n, d]
    ks: Tensor  # [Hk, M, d], sorted; M in whole leaves
    vs: Tensor  # [Hk, M, dv]
    bs: Tensor | None  # [Hq, M] float32 log-weights, -inf at padding
    slots: Tensor  # [Hk, M] int32: the key of a sorted slot, -1: none
    members: Tensor  # [Hq, cells, B] int32, -1: none
    visible: Tensor  # [cells] int32: leaves that a cell attends to, ascending
    mean: Tensor  # [Hq, cells, d] float32, of the members
    variance: Tensor  # [Hq, cells] float32: mean |q - m|^2 / d
    spread: Tensor  # [Hk, leaves] float32: mean |k - mean|^2 over the real keys of a leaf
    leaf: int
    scale: float
    precision: str  # of float32 products
    rows: Tensor  # [Hq, tiles, T] int32: of a tile, -1: none
    cell: Tensor | None = None  # [Hq, tiles] int32, of a tile; any for one without rows
    first_tile: Tensor | None = None  # [Hq, cells] int32
    tile_count: Tensor | None = None  # [Hq, cells] int32

    @property
    def heads(self) -> int:
        return self.query.shape[0]

    @property
    def group(self) -> int:
        """Heads that share keys."""
        return self.heads // self.ks.shape[0]

    @property
    def cells(self) -> int:
        return self.members.shape[1]

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """d, dv, and both as powers of two."""
        d, dv = self.ks.shape[2], self.vs.shape[2]
        return d, dv, power_of_two(d), power_of_two(dv)

    @property
    def dot(self) -> str | None:
        """Precision of products, as the kernels take it."""
        full = self.ks.dtype == torch.float32 or interpreted()
        return self.precision if full else None


@dataclass(frozen=True, eq=False)
class Tilts:
    """Tilted keys of cells [first, first + cells) over the first ``leaves`` leaves.

    Where a cell does not attend to a leaf lt is -inf; kt and vt may hold anything there.
    """

    first: int
    kt: Tensor  # [Hq, cells, leaves, d]
    vt: Tensor  # [Hq, cells, leaves, dv]
    lt: Tensor  # [Hq, cells, leaves] float32

    @property
    def cells(self) -> int:
        return self.kt.shape[1]

    @property
    def leaves(self) -> int:
        return self.kt.shape[2]


@dataclass(frozen=True, eq=False)
class Lists:
    """Open leaves of every cell of a range, ascending; beyond ``count`` the index is undefined."""

    index: Tensor  # [Hq, cells, leaves] int32
    count: Tensor  # [Hq, cells] int32


def pick(shapes: Shapes, tables: Tables) -> Tile:
    """The tile for the width and dtype of a call."""
    return Tile.of(shapes, max(tables.widths), tables.dot is not None)


def cell_means(query: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each cell's members, [Hq, cells, d], and mean |q - m|^2 / d; zeros if it has none."""
    heads, n, d = query.shape
    cells, block = members.shape[1:]
    mean = query.new_empty((heads, cells, d), dtype=torch.float32)
    variance = query.new_empty((heads, cells), dtype=torch.float32)
    wide = power_of_two(d)
    kernels.cell_means[(cells, heads)](
        query, members, mean, variance, n, d, wide, block,
        num_warps=8 if block * wide > 8192 else 4,
    )  # fmt: skip
    return mean, variance


def gather_leaves(key: Tensor, value: Tensor, slots: Tensor, leaf: int) -> tuple[Tensor, ...]:
    """Keys and values [Hk, M, ...] in the sequence of ``slots`` [Hk, M] int32 (-1: none, zeros),
    and the variance of the keys of each leaf, [Hk, leaves] float32, the sum over coordinates."""
    heads, tokens, d = key.shape
    dv, keys = value.shape[2], slots.shape[1]
    ks, vs = key.new_empty(heads, keys, d), value.new_empty(heads, keys, dv)
    spread = key.new_empty((heads, keys // leaf), dtype=torch.float32)
    kernels.gather_leaves[(keys // leaf, heads)](
        key, value, slots, ks, vs, spread, tokens, d, dv, power_of_two(d), power_of_two(dv), leaf,
    )  # fmt: skip
    return ks, vs, spread


def tilt(tables: Tables, first: int, last: int, leaves: int) -> Tilts:
    """Tilted keys of the first ``leaves`` leaves for the cells [first, last), which attend to no
    others."""
    ks, cells = tables.ks, last - first
    shape = (tables.heads, cells, leaves)
    kt, vt = (ks.new_empty(*shape, width) for width in tables.widths[:2])
    tilts = Tilts(first, kt, vt, ks.new_empty(shape, dtype=torch.float32))
    tile = pick(TILES["tilt"], tables)
    together, per = min(tile.rows, power_of_two(cells)), min(tile.keys, power_of_two(leaves, 1))
    kernels.tilt[(cdiv(cells, together), cdiv(leaves, per), tables.heads)](
        tables.mean, ks, tables.vs, tables.bs,
        tables.variance, tables.spread, tables.visible, kt, vt, tilts.lt,
        tables.cells, first, cells, ks.shape[1], leaves, tables.group, tables.scale,
        *tables.widths, together, per, tables.leaf, tables.dot, **tile.launch,
    )  # fmt: skip
    return tilts


def select(tables: Tables, tilts: Tilts, price: Tensor) -> Lists:
    """Open leaves: those whose importance exceeds the price of their head, [Hq] float32.

    Open leaves are attended by their keys: their lt becomes -inf, in place.
    """
    index = torch.empty_like(tilts.lt, dtype=torch.int32)
    lists = Lists(index, index.new_empty(index.shape[:2]))
    d, _, wide, _ = tables.widths
    block, tile = tables.members.shape[2], pick(TILES["select"], tables)
    stride = max(1, block // SCORED_MEMBERS)
    kernels.select[(tilts.cells, tables.heads)](
        tables.query, tables.members, tilts.kt, tilts.lt, tables.spread, tables.variance,
        tables.visible, price, lists.index, lists.count,
        tables.query.shape[1], tables.cells, tilts.first, tilts.cells, tilts.leaves, tables.scale,
        tables.spread.shape[1], tables.group,
        d, wide, block, stride, power_of_two(block // stride), tile.keys, tables.dot, **tile.launch,
    )  # fmt: skip
    return lists


def attend(
    tables: Tables, tilts: Tilts, lists: Lists, own: tuple[Tensor, Tensor] | None, output: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Write output [Hq, n, dv] and lse [Hq, n] at the rows of the tiles of the tilts' cells.

    ``own``: output and log-sum-exp of the rows' own window, with which their softmax begins.
    """
    heads, n = tables.query.shape[:2]
    first_tile, tile_count = tiles_of(tables, tilts)
    tiles, size = tables.rows.shape[1:]
    tile = pick(TILES["attend"], tables)
    rows = min(tile.rows, size)
    kernels.attend[(tile_count * (size // rows), heads)](
        tables.query, tilts.kt, tilts.vt, tilts.lt, tables.ks, tables.vs, tables.bs,
        lists.index, lists.count, tables.visible, tables.rows, tables.cell,
        *(own or (None, None)), output, lse,
        n, tilts.first, tilts.cells, tables.ks.shape[1], tilts.leaves, first_tile, tiles,
        tables.group, tables.scale, *tables.widths, size, tables.leaf, rows, tile.keys, tables.dot,
        **tile.launch,
    )  # fmt: skip


def tiles_of(tables: Tables, tilts: Tilts) -> tuple[int, int]:
    """First tile of the tilts' cells, and how many they have."""
    ratio = tables.rows.shape[1] // tables.cells
    return tilts.first * ratio, tilts.cells * ratio
