"""Tile shapes of the polynomial's kernels: which were the fastest, by width and dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..runtime.language import power_of_two


@dataclass(frozen=True)
class StateTiles:
    """Of `square_state`: [rows, columns] of a program, rows of the packing, tokens at a time."""

    rows: int
    columns: int
    pairs: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class RowTiles:
    """Of `read_out` and `contract`: rows of a program, columns it writes, tokens of a chunk."""

    rows: int
    columns: int
    tokens: int
    warps: int
    stages: int
    unroll: int = 1  # rows of the packing between two waits


@dataclass(frozen=True)
class Tiles:
    """Tile shapes of one call."""

    state: StateTiles
    read: RowTiles
    contract: RowTiles
    small: int  # rows, columns of the small moments


def choose_tiles(dim: int, value_dim: int, full_precision: bool, causal: bool = False) -> Tiles:
    """Tiles for keys of ``dim`` and values of ``value_dim`` entries."""
    d, e = power_of_two(dim), power_of_two(value_dim)
    narrow, wide = max(d, e) <= 64, max(d, e) > 128
    if full_precision:
        columns, tokens, stages = (32, 16, 1) if wide else (64, 32, 2)
        return Tiles(
            StateTiles(min(d, 64), min(e, columns), 1, 32, 4, stages),
            RowTiles(32 if wide else 64, min(e, columns), tokens, 4, stages),
            RowTiles(32 if wide else 64, min(d, columns), tokens, 4, stages),
            min(d, e, 32),
        )
    if wide:
        rows = RowTiles(64, 64, 32, 4, 1 if causal else 2)  # what shared memory holds
        return Tiles(
            StateTiles(min(d, 64), min(e, 128), 4 if e <= 64 else 2, 64, 4, 3),
            replace(rows, columns=min(e, 64)), replace(rows, columns=min(d, 64)), min(d, e, 64),
        )  # fmt: skip
    return Tiles(
        StateTiles(min(d, 64), e, 4 if e <= 64 else 2, 64, 4, 3),
        RowTiles(128 if narrow else 64, e, 64, 4, 3 if narrow else 2),
        RowTiles(128, min(d, 64), 64, 4 if narrow else 8, 3 if narrow else 2),
        min(d, e, 64),
    )
