"""The tables of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from supportbasis.cli.report import percent

from ..study import Grid, table
from .rows import Layer, SideRow

MOMENTS: dict[str, Callable[[SideRow], str]] = {
    "std": lambda row: f"{row.std:.3g}",
    "max|x|": lambda row: f"{row.largest:.3g}",
    "proxy σ²": lambda row: f"{row.proxy:.3g}",
    "÷ Gaussian's": lambda row: f"{row.gaussian_ratio:.2g}",
}


def texts_of(layers: Sequence[Layer]) -> list[str]:
    return list(dict.fromkeys(layer.text for layer in layers))


def shown(layers: Sequence[Layer], text: str) -> list[Layer]:
    return [layer for layer in layers if layer.text == text]


def count(value: float) -> str:
    """A number of entries, however large or small."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def exponent(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "none"


def layer_table(layers: Sequence[Layer], text: str) -> Grid:
    """Queries and keys of every layer; red where more than half of the pairs are in A^(L)."""
    rows = [layer.sides[name] for layer in shown(layers, text) for name in ("query", "key")]
    title = f"{text}: n={rows[0].n}, √ln n = {rows[0].threshold:.3g}"
    columns: dict[str, Callable[[SideRow], str]] = {
        "entries of": lambda row: f"layer {row.layer}, {row.side}",
        **MOMENTS,
        "large entries": lambda row: f"{row.large_entries:,}",
        "share": lambda row: percent(100 * row.large_share),
        "a matrix": lambda row: count(row.large_entries / row.matrices),
        "bound": lambda row: count(row.bound),
        "α": lambda row: exponent(row.alpha),
        "large rows": lambda row: percent(100 * row.row_share),
        "pairs in A⁽ᴸ⁾": lambda row: percent(100 * row.pair_share),
    }
    return table(title, rows, columns, lost=lambda row: row.pair_share > 0.5)


def value_table(layers: Sequence[Layer], text: str) -> Grid:
    """Values, of which the method asks nothing but the paper draws them."""
    columns: dict[str, Callable[[SideRow], str]] = {
        "values": lambda row: f"layer {row.layer}",
        **MOMENTS,
        "share above √ln n": lambda row: percent(100 * row.large_share),
    }
    rows = [layer.sides["value"] for layer in shown(layers, text)]
    return table(f"{text}: values", rows, columns)


def summary_table(layers: Sequence[Layer], text: str) -> Grid:
    """A few columns of each layer, for the terminal."""

    def both(cell: Callable[[SideRow], str]) -> Callable[[Layer], str]:
        return lambda layer: " / ".join(cell(layer.sides[name]) for name in ("query", "key"))

    columns: dict[str, Callable[[Layer], str]] = {
        "Q / K": lambda layer: f"layer {layer.number}",
        "std": both(lambda row: f"{row.std:.2g}"),
        "proxy σ²": both(lambda row: f"{row.proxy:.2g}"),
        "large entries": both(lambda row: percent(100 * row.large_share)),
        "α": both(lambda row: exponent(row.alpha)),
        "large rows": both(lambda row: percent(100 * row.row_share)),
        "pairs": lambda layer: percent(100 * layer.sides["query"].pair_share),
    }
    return table(text, shown(layers, text), columns)
