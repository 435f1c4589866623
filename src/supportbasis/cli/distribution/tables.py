"""The tables of the study."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..report import Grid, percent
from .rows import Layer, SideRow


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
    mine = shown(layers, text)
    first = mine[0].sides["query"]
    lines: list[list[str]] = []
    lost = set()
    for layer in mine:
        for name in ("query", "key"):
            if layer.sides[name].pair_share > 0.5:
                lost.add(len(lines))
            lines.append([f"layer {layer.number}, {name}", *_cells(layer.sides[name])])
    title = f"{text}: n={first.n}, √ln n = {first.threshold:.3g}"
    headings = ["entries of", "std", "max|x|", "proxy σ²", "÷ Gaussian's", "large entries", "share"]
    headings += ["a matrix", "bound", "α", "large rows", "pairs in A⁽ᴸ⁾"]
    return Grid(title, headings, lines, frozenset(lost))


def _cells(row: SideRow) -> list[str]:
    return [
        f"{row.std:.3g}",
        f"{row.largest:.3g}",
        f"{row.proxy:.3g}",
        f"{row.gaussian_ratio:.2g}",
        f"{row.large_entries:,}",
        percent(100 * row.large_share),
        count(row.large_entries / row.matrices),
        count(row.bound),
        exponent(row.alpha),
        percent(100 * row.row_share),
        percent(100 * row.pair_share),
    ]


def value_table(layers: Sequence[Layer], text: str) -> Grid:
    """Values, of which the method asks nothing but the paper draws them."""
    lines = []
    for layer in shown(layers, text):
        row = layer.sides["value"]
        cells = [f"{row.std:.3g}", f"{row.largest:.3g}", f"{row.proxy:.3g}"]
        cells += [f"{row.gaussian_ratio:.2g}", percent(100 * row.large_share)]
        lines.append([f"layer {layer.number}", *cells])
    headings = ["values", "std", "max|x|", "proxy σ²", "÷ Gaussian's", "share above √ln n"]
    return Grid(f"{text}: values", headings, lines)


def summary_table(layers: Sequence[Layer], text: str) -> Grid:
    """A few columns of each layer, for the terminal."""
    lines = []
    for layer in shown(layers, text):
        query, key = layer.sides["query"], layer.sides["key"]
        cells = [f"{query.std:.2g} / {key.std:.2g}", f"{query.proxy:.2g} / {key.proxy:.2g}"]
        cells.append(f"{percent(100 * query.large_share)} / {percent(100 * key.large_share)}")
        cells.append(f"{exponent(query.alpha)} / {exponent(key.alpha)}")
        cells.append(f"{percent(100 * query.row_share)} / {percent(100 * key.row_share)}")
        lines.append([f"layer {layer.number}", *cells, percent(100 * query.pair_share)])
    headings = ["Q / K", "std", "proxy σ²", "large entries", "α", "large rows", "pairs"]
    return Grid(text, headings, lines)
