"""The pictures of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, GREY, Line, Panel, draw, new_figure, plain_axes, save
from .findings import shown, texts_of
from .rows import Layer, SideRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 6
SIDES = {"value": "#a0aec0", "query": "#2f6fab", "key": "#dd6b20"}  # as they are drawn
RED = "#c1121f"


def draw_overview(layers: Sequence[Layer], text: str, path: Path) -> None:
    """Histograms of all layers in one picture, with lines at ±sqrt(ln n)."""
    mine = shown(layers, text)
    columns = min(COLUMNS, len(mine))
    lines = math.ceil(len(mine) / columns)
    figure = new_figure(1.0 + 2.3 * max(3, columns), 1.2 + 1.9 * lines)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for axes, layer in zip(panels, mine, strict=False):
        _draw_layer(axes, layer)
    for axes in panels[len(mine) :]:
        axes.set_axis_off()
    row = mine[0].sides["query"]
    figure.supxlabel(f"entry; {text}, n={row.n}, √ln n = {row.threshold:.3g}", fontsize=10)
    figure.supylabel("share of the entries, per unit", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    save(figure, path)


def _draw_layer(axes: Axes, layer: Layer) -> None:
    plain_axes(axes)
    for name, colour in SIDES.items():
        bins = layer.bins[name]
        edges = [item.low for item in bins] + [bins[-1].high]
        width, total = edges[1] - edges[0] or 1.0, sum(item.count for item in bins)
        heights = [item.count / total / width for item in bins]
        axes.stairs(heights, edges, color=colour, lw=1.0, label=name)
    threshold = layer.sides["query"].threshold
    axes.axvline(-threshold, color=RED, ls="--", lw=1)
    axes.axvline(threshold, color=RED, ls="--", lw=1, label="±√ln n")
    axes.set_yscale("log")
    axes.tick_params(labelsize=8)
    axes.set_title(f"layer {layer.number}", loc="left", fontsize=9)


def draw_layers(layers: Sequence[Layer], path: Path) -> None:
    """Spread, share of large entries, of large rows and of pairs against the layer."""

    def lines(
        value: Callable[[SideRow], float], sides: Sequence[str], colour: str = ""
    ) -> list[Line]:
        return [
            Line(f"{'pairs in A⁽ᴸ⁾' if colour else name}, {text}", [row.layer for row in rows],
                 [value(row) for row in rows], style, colour or SIDES[name])
            for text, style in zip(texts_of(layers), ("-o", ":s"), strict=False)
            for name in sides
            for rows in [[layer.sides[name] for layer in shown(layers, text)]]
        ]  # fmt: skip

    both = ("query", "key")
    pairs = lines(lambda row: 100 * row.pair_share, ("query",), COLOURS[1])
    rows = lines(lambda row: 100 * row.row_share, both)
    panels = [
        ("standard deviation of the entries", lines(lambda row: row.std, both)),
        ("proxy σ² over that of a Gaussian, which has 1", lines(lambda r: r.gaussian_ratio, both)),
        ("entries above √ln n, %", lines(lambda row: 100 * row.large_share, both)),
        ("rows with such an entry, and pairs in A⁽ᴸ⁾, %", [*rows, *pairs]),
    ]
    made = [
        Panel(title, some, "layer", log="", limits=(0, None), ticks=some[0].x)
        for title, some in panels
    ]
    draw(path, [made[:2], made[2:]], (12.4, 6.8))


def draw_bounds(layers: Sequence[Layer], path: Path) -> None:
    """Large entries of a matrix against their sub-Gaussian bound, a dot for each layer and side;
    none are drawn at the least of the others over three."""
    rows = [layer.sides[name] for layer in layers for name in ("query", "key")]
    counts = [value for row in rows for value in (row.bound, row.large_entries / row.matrices)]
    least = max(1e-2, min((value for value in counts if value > 0), default=1.0) / 3)
    lines = []
    for text, marker in zip(texts_of(layers), ("o", "s"), strict=False):
        for name in ("query", "key"):
            mine = [layer.sides[name] for layer in shown(layers, text)]
            x = [max(row.bound, least) for row in mine]
            y = [max(row.large_entries / row.matrices, least) for row in mine]
            lines.append(Line(f"{name}, {text}", x, y, marker, SIDES[name]))
    ends = [least, max(*counts, least)]
    lines.append(Line("as many as the bound", ends, ends, "--", GREY))
    x_label = "bound 2nd·exp(−ln n/σ²) on large entries of a matrix"
    panel = Panel("", lines, x_label, "large entries of a matrix (none: at the bottom)")
    draw(path, [[panel]], (6.6, 5.4), legend=2)
