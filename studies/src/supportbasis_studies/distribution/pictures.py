"""The pictures of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, GREY, INK, legend_below, new_figure, plain_axes, save
from .rows import Layer, SideRow
from .tables import shown, texts_of

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
    figure = new_figure(12.4, 6.8)
    grid = figure.subplots(2, 2).flatten()
    wanted: list[tuple[str, Callable[[SideRow], float]]] = [
        ("standard deviation of the entries", lambda row: row.std),
        ("proxy σ² over that of a Gaussian", lambda row: row.gaussian_ratio),
        ("entries above √ln n, %", lambda row: 100 * row.large_share),
        ("rows with such an entry, %", lambda row: 100 * row.row_share),
    ]
    for axes, (title, value) in zip(grid, wanted, strict=True):
        plain_axes(axes)
        for text, style in zip(texts_of(layers), ("-o", ":s"), strict=False):
            for name in ("query", "key"):
                rows = [layer.sides[name] for layer in shown(layers, text)]
                numbers = [row.layer for row in rows]
                label = f"{name}, {text}"
                axes.plot(numbers, [value(r) for r in rows], style, color=SIDES[name], ms=4,
                          lw=1.4, label=label)  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
    grid[1].axhline(1.0, color=INK, lw=1, ls="--", label="a Gaussian")
    for text, style in zip(texts_of(layers), ("-D", ":D"), strict=False):
        rows = [layer.sides["query"] for layer in shown(layers, text)]
        shares = [100 * row.pair_share for row in rows]
        grid[3].plot([row.layer for row in rows], shares, style, color=COLOURS[1], ms=4, lw=1.4,
                     label=f"pairs in A⁽ᴸ⁾, {text}")  # fmt: skip
    for axes in grid[:3]:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    grid[3].set_title("rows with such an entry, and pairs in A⁽ᴸ⁾, %", loc="left", fontsize=10)
    grid[3].set_ylim(-3, 103)
    legend_below(figure, grid, 4)
    save(figure, path)


def draw_bounds(layers: Sequence[Layer], path: Path) -> None:
    """Large entries of a matrix against their sub-Gaussian bound, a dot for each layer and side."""
    from matplotlib.ticker import NullFormatter

    figure = new_figure(6.6, 5.0)
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    rows = [layer.sides[name] for layer in layers for name in ("query", "key")]
    counts = [value for row in rows for value in (row.bound, row.large_entries / row.matrices)]
    least = max(1e-2, min((value for value in counts if value > 0), default=1.0) / 3)
    for text, marker in zip(texts_of(layers), ("o", "s"), strict=False):
        for name in ("query", "key"):
            rows = [layer.sides[name] for layer in shown(layers, text)]
            x = [max(row.bound, least) for row in rows]
            y = [max(row.large_entries / row.matrices, least) for row in rows]
            axes.plot(x, y, marker, color=SIDES[name], ms=6, alpha=0.8, label=f"{name}, {text}")
    ends = [
        10.0 ** math.floor(math.log10(least)),
        10.0 ** math.ceil(math.log10(max(*counts, least))),
    ]
    axes.plot(ends, ends, "--", color=GREY, lw=1, label="as many as the bound")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bound 2nd·exp(−ln n/σ²) on large entries of a matrix")
    axes.set_ylabel("large entries of a matrix (none: at the bottom)")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, path)
