"""Gradients of attention over lists, by the formulas of `lists.list_gradients`, with h = -slope.

Rows are gathered by tile first: then kernels read whole tiles. No function synchronises with the
host. As in other kernels, products of 16-bit tokens take 16-bit weights: float16 gradients want a
scaled loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...lists.tables import deviations
from ..exact.rectangle import Shapes
from ..runtime.language import cdiv, power_of_two
from . import list_backward_kernels as kernels
from .list_attention import Lists, Tables, Tilts, pick, tiles_of

# As those of `rectangle`.
TILES: dict[str, Shapes] = {  # rows or cells; tilted keys, or keys of one leaf; warps; stages
    "query": ((64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    "tilt": ((64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    "exact": ((64, 64, 4, 3), (64, 64, 8, 2), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    "leaf": ((64, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    "mean": ((64, 64, 4, 3), (64, 64, 8, 2), (32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 8, 1)),
}  # fmt: skip
PROGRAMS = 1024  # of the means' gradients, at least, where leaves can be split
LEAST_SPLIT = 16  # leaves
CHUNK = 32  # tiles and leaves that are transposed at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """Cotangents of rows, and their lse over all keys that they attend to."""

    grad: Tensor  # [Hq, n, dv], of the output
    slope: Tensor  # [Hq, n] float32: <grad, output> - gradient of lse
    lse: Tensor  # [Hq, n] float32, -inf: the row has no weights


class Totals(NamedTuple):
    """Float32 sums that gradients are added to; keys at their sorted slots, per query head."""

    query: Tensor  # [Hq, n, d]
    key: Tensor  # [Hq, M, d]
    value: Tensor  # [Hq, M, dv]
    spread: Tensor  # [Hq, leaves], of the variances of leaves
    weight: Tensor  # [Hq, M], of log-weights


class Gathered(NamedTuple):
    """Rows by tile, of the tiles of a range of cells; a slot without a row has lse = inf."""

    query: Tensor  # [Hq, tiles, T, d]
    grad: Tensor  # [Hq, tiles, T, dv]
    slope: Tensor  # [Hq, tiles, T] float32
    lse: Tensor  # [Hq, tiles, T] float32, to base 2
    cell: Tensor  # [Hq, tiles] int32, counted from the first of the range; -1: no rows


class Changes(NamedTuple):
    """Gradients of tilted keys and values, the cells' means, and statistics of the tilts."""

    mean: Tensor  # [Hq, cells, d]
    kt: Tensor  # [Hq, cells, leaves, d]
    vt: Tensor  # [Hq, cells, leaves, dv]
    lam: Tensor  # [Hq, cells, leaves] float32: logsumexp t to base 2, inf at open leaves
    shift: Tensor  # dlt - level
    level: Tensor  # <dkt, kt> + <dvt, vt>


def gradients(tables: Tables, tilts: Tilts, lists: Lists, rows: Rows, totals: Totals) -> None:
    """Add the gradients of the rows of the tilts' cells, except those of the own window; those of
    keys through the variances of their leaves wait for `add_spreads`.

    ``tilts`` and ``lists`` are those of the forward pass. The tilts' kt and vt are overwritten;
    beside them a pair of a cell and a leaf takes 13 bytes, and 4 for every tile of the cell.
    """
    gathered = gather(tables, tilts, rows)
    query_gradients(tables, tilts, lists, gathered, totals)
    exact_gradients(tables, transposed(lists, gathered), gathered, totals)
    changes = tilt_gradients(tables, tilts, gathered)
    leaf_gradients(tables, tilts, changes, totals)
    mean_gradients(tables, tilts, changes, totals)


def gather(tables: Tables, tilts: Tilts, rows: Rows) -> Gathered:
    """Rows of the tiles of the tilts' cells."""
    d, dv, wide, _ = tables.widths
    first, count = tiles_of(tables, tilts)
    tiles, size = tables.rows.shape[1:]
    new, shape = tables.query.new_empty, (tables.heads, count, size)
    slope, lse = new((2, *shape), dtype=torch.float32)
    cell = new(shape[:2], dtype=torch.int32)
    gathered = Gathered(new(*shape, d), new(*shape, dv), slope, lse, cell)
    kernels.gather_rows[(count, tables.heads)](
        tables.query, rows.grad, rows.slope, rows.lse, tables.rows, tables.cell,
        *gathered, tables.query.shape[1], tilts.first, first, tiles,
        *tables.widths, size, num_warps=8 if size * wide > 8192 else 4,
    )  # fmt: skip
    return gathered


def query_gradients(
    tables: Tables, tilts: Tilts, lists: Lists, gathered: Gathered, totals: Totals
) -> None:
    """Add the gradients of rows, as queries of tilted keys and of the keys of open leaves."""
    tile, (tiles, size) = pick(TILES["query"], tables), tables.rows.shape[1:]
    rows, (first_tile, count) = min(tile.rows, size), tiles_of(tables, tilts)
    kernels.query_gradients[(count * (size // rows), tables.heads)](
        *gathered, tilts.kt, tilts.vt, tilts.lt, tables.ks, tables.vs, tables.bs,
        lists.index, lists.count, tables.visible, tables.rows, totals.query,
        tables.query.shape[1], tilts.first, tilts.cells, tables.ks.shape[1], tilts.leaves,
        first_tile, tiles, tables.group, tables.scale,
        *tables.widths, size, tables.leaf, rows, tile.keys, tables.dot, **tile.launch,
    )  # fmt: skip


def tilt_gradients(tables: Tables, tilts: Tilts, gathered: Gathered) -> Changes:
    """Gradients of tilted keys and values, written over kt and vt of the tilts."""
    first, last = tilts.first, tilts.first + tilts.cells
    mean = tables.mean[:, first:last].to(tables.ks.dtype).contiguous()
    changes = Changes(mean, tilts.kt, tilts.vt, *tilts.lt.new_empty((3, *tilts.lt.shape)))
    tile = pick(TILES["tilt"], tables)
    rows = min(tile.rows, tables.members.shape[2])
    kernels.tilt_gradients[(cdiv(tilts.leaves, tile.keys), tilts.cells, tables.heads)](
        *gathered[:4], mean, tilts.kt, tilts.vt, tilts.lt,
        tables.variance, tables.spread, tables.visible, tables.first_tile, tables.tile_count,
        *changes[1:],
        gathered.lse.numel() // tables.heads, tables.cells, first, tilts.cells, tilts.leaves,
        tables.spread.shape[1], tables.group, tiles_of(tables, tilts)[0], tables.scale,
        *tables.widths, tables.rows.shape[2], rows, tile.keys, tables.dot, **tile.launch,
    )  # fmt: skip
    return changes


def transposed(lists: Lists, gathered: Gathered) -> Lists:
    """Tiles of the cells that have a leaf open: index [Hq, leaves, tiles], count [Hq, leaves]."""
    (heads, cells, leaves), tiles = lists.index.shape, gathered.cell.shape[1]
    mask = torch.zeros(lists.index.shape, dtype=torch.bool, device=lists.index.device)
    kernels.mark[(cells, heads)](lists.index, lists.count, mask, cells, leaves, CHUNK)
    new = lists.index.new_empty
    openers = Lists(new(heads, leaves, tiles), new(heads, leaves))
    kernels.transpose[(cdiv(leaves, CHUNK), heads)](
        mask, gathered.cell, openers.index, openers.count, cells, leaves, tiles, CHUNK, CHUNK,
    )  # fmt: skip
    return openers


def exact_gradients(tables: Tables, openers: Lists, gathered: Gathered, totals: Totals) -> None:
    """Add the gradients of the keys of open leaves; ``openers``: the tiles that attend to them."""
    heads, leaves, tiles = openers.index.shape
    tile, size = pick(TILES["exact"], tables), tables.rows.shape[2]
    part = min(tile.keys, tables.leaf)
    kernels.exact_gradients[(leaves * (tables.leaf // part), heads)](
        *gathered[:4], tables.ks, tables.vs, tables.bs, openers.index, openers.count,
        totals.key, totals.value, totals.weight,
        tiles * size, tables.ks.shape[1], leaves, tiles, tables.group, tables.scale,
        *tables.widths, size, tables.leaf, tile.rows, part, tables.dot, **tile.launch,
    )  # fmt: skip


def leaf_gradients(tables: Tables, tilts: Tilts, changes: Changes, totals: Totals) -> None:
    """Add the gradients of all keys through the tilts of their leaves."""
    tile = pick(TILES["leaf"], tables)
    part = min(tile.keys, tables.leaf)
    leaf = torch.arange(tilts.leaves, dtype=torch.int32, device=tables.ks.device)
    visible = tables.visible[tilts.first : tilts.first + tilts.cells]
    since = torch.searchsorted(visible, leaf, right=True, out_int32=True)
    kernels.leaf_gradients[(tilts.leaves * (tables.leaf // part), tables.heads)](
        *changes[:5], tables.ks, tables.vs, tables.bs, since,
        totals.key, totals.value, totals.weight,
        tilts.cells, tables.ks.shape[1], tilts.leaves, tables.group, tables.scale, *tables.widths,
        tables.leaf, min(tile.rows, power_of_two(tilts.cells)), part, tables.dot, **tile.launch,
    )  # fmt: skip


def mean_gradients(tables: Tables, tilts: Tilts, changes: Changes, totals: Totals) -> None:
    """Add to members their share in the gradients of their cell's mean and variance."""
    (d, _, wide, _), (heads, n, _) = tables.widths, tables.query.shape
    block = tables.members.shape[2]
    tile = pick(TILES["mean"], tables)
    together = min(tile.rows, power_of_two(tilts.cells))
    blocks = cdiv(tilts.cells, together)
    splits = min(cdiv(PROGRAMS, blocks * heads), cdiv(tilts.leaves, LEAST_SPLIT))
    parts = totals.query.new_empty((splits, heads, tilts.cells, d))
    kernels.mean_gradients[(blocks, splits, heads)](
        *changes[:4], changes.level,
        tables.ks, tables.vs, tables.bs, tables.visible, parts,
        tilts.first, tilts.cells, tables.ks.shape[1], tilts.leaves, tables.group, tables.scale,
        *tables.widths, tables.leaf, together, min(tile.keys, tables.leaf), tables.dot,
        **tile.launch,
    )  # fmt: skip
    kernels.add_means[(tilts.cells, heads)](
        parts, _variance_gradients(tables, tilts, changes, totals), tables.query,
        tables.mean, tables.members, totals.query, n, tables.cells, tilts.first, splits,
        d, wide, block, num_warps=8 if block * wide > 8192 else 4,
    )  # fmt: skip


def _variance_gradients(tables: Tables, tilts: Tilts, changes: Changes, totals: Totals) -> Tensor:
    """Gradients of the variances of cells [Hq, cells]; those of leaves are added to the totals."""
    last, half = tilts.first + tilts.cells, tables.scale**2 / 2
    variance = tables.variance[:, tilts.first : last].unsqueeze(2)  # [Hq, cells, 1]
    spread = tables.spread[:, : tilts.leaves].repeat_interleave(tables.group, 0).unsqueeze(1)
    leaf = torch.arange(tilts.leaves, device=spread.device)
    hidden = leaf >= tables.visible[tilts.first : last].unsqueeze(1)
    grad = (changes.shift + changes.level).masked_fill_(hidden, 0.0)  # of lt
    grad = grad * half / (1 + half * variance * spread)
    totals.spread[:, : tilts.leaves] += (grad * variance).sum(1)
    return (grad * spread).sum(2)


def add_spreads(tables: Tables, totals: Totals) -> None:
    """Add to keys their share in the gradients of the variances of their leaves."""
    key, slots = (x.unflatten(1, (-1, tables.leaf)) for x in (tables.ks, tables.slots))
    away, count = deviations(key.float(), slots)  # [Hk, leaves, L, d]
    grad = totals.spread.unflatten(0, (-1, tables.group))[..., None, None]
    total = totals.key.view(-1, tables.group, *away.shape[1:])
    total.addcmul_((away * (2 / count)).unsqueeze(1), grad)
