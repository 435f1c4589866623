"""The pictures of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import GREY, INK, legend_below, length_label, new_figure, plain_axes, save
from . import contenders as made
from .inputs import SCALES
from .measure import MAP
from .rows import EfficiencyRow
from .tables import at, input_label, inputs_of, map_cell, map_methods_of, panels, swept, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# method, colour and style; the paper draws AS23 blue, its own method orange, exact dotted green
LINES = {
    made.NAIVE: ("#2f855a", ":"),
    made.SDPA: (INK, "--"),
    made.AS23_ENTRY: ("#2f6fab", "-"),
    made.AS23_NORM: ("#63a4d8", "-"),
    made.SINGLE: ("#dd6b20", "-o"),
    made.MULTI: ("#805ad5", "-."),
    made.MULTI_PLAIN: ("#805ad5", ":"),
    made.AUTO_FINE: ("#d53f8c", "-."),
    made.AUTO: ("#d53f8c", ":"),
    made.MEAN: (GREY, "--"),
}
COLOURS = {
    "wins": "#2f855a",
    "loses": "#d69e2e",
    "wrong": "#c53030",
    "exact": "#a0aec0",
    "not run": "#cbd5e0",
}
WORDS = {
    "wins": "faster than SDPA within 1e-2\n(the darker, the faster)",
    "loses": "slower than SDPA, within 1e-2",
    "wrong": "error above 1e-2: how large",
    "exact": "runs exactly instead",
    "not run": "not run: more work\nthan exact attention",
}
MOST = 100.0  # times as fast: the darkest green
LEAST = 1e-10  # errors below are not drawn

Value = Callable[[EfficiencyRow], float | None]


def _draw_lines(axes: Axes, rows: Sequence[EfficiencyRow], value: Value) -> None:
    """A line for each method: against T where it has one, else level."""
    plain_axes(axes)
    axes.set_yscale("log")
    points = swept(rows)
    ends = [points[0].threshold or 0.0, points[-1].threshold or 1.0]
    for method, (colour, style) in LINES.items():
        mine = [row for row in rows if row.method == method]
        if method == made.SINGLE:
            x, y = [row.threshold or 0.0 for row in points], [value(row) or 0.0 for row in points]
            axes.plot(x, y, style, color=colour, ms=3.5, lw=1.6, label=method, zorder=3)
            continue
        level = value(mine[0]) if mine else None
        if level is not None and level > 0:
            axes.plot(ends, [level] * 2, style, color=colour, lw=1.6, label=method)


def draw_thresholds(rows: Sequence[EfficiencyRow], scale: str, path: Path) -> None:
    """Time, error and share of exact pairs against T: a row of panels for each length."""
    lengths = [n for n, its in panels(rows) if its == scale]
    figure = new_figure(12.6, 1.3 + 2.5 * len(lengths))
    grid = figure.subplots(len(lengths), 3, sharex=True, sharey="col", squeeze=False)
    for (left, middle, right), n in zip(grid, lengths, strict=True):
        mine = at(rows, n, scale)
        _draw_lines(left, mine, _seconds)
        _draw_lines(middle, mine, lambda row: row.output_error)
        _draw_shares(right, swept(mine))
        left.set_ylabel("seconds per call")
        middle.set_ylabel("relative error of the output")
        right.set_ylabel("pairs exact")
        for axes, what in ((left, "time"), (middle, "error"), (right, "share of pairs exact")):
            axes.set_title(f"n={n}: {what}", loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("threshold T")
    legend_below(figure, grid[0], 4, LINES)
    save(figure, path)


def _seconds(row: EfficiencyRow) -> float | None:
    """The mean of V takes next to no time; its line would press all others together."""
    return None if row.method == made.MEAN else row.seconds


def _draw_shares(axes: Axes, rows: Sequence[EfficiencyRow]) -> None:
    plain_axes(axes)
    shares = [100 * (row.exact_share or 0.0) for row in rows]
    axes.plot(
        [row.threshold or 0.0 for row in rows], shares, "-o", color=LINES[made.SINGLE][0], ms=3.5
    )
    axes.set_ylim(-3, 103)
    axes.yaxis.set_major_formatter("{x:g} %")


def draw_errors(rows: Sequence[EfficiencyRow], path: Path) -> None:
    """Three errors against T at the largest length: a row of panels for each scale."""
    n = max(length for length, _ in panels(rows))
    measures: dict[str, Value] = {
        "output, relative Frobenius": lambda row: row.output_error,
        "D⁻¹A, relative Frobenius": lambda row: row.matrix_error,
        "output, largest over max|V|": lambda row: row.max_error,
    }
    figure = new_figure(12.6, 7.6)
    grid = figure.subplots(len(SCALES), len(measures), sharex=True, sharey=True, squeeze=False)
    for line, scale in zip(grid, SCALES, strict=True):
        for axes, (name, value) in zip(line, measures.items(), strict=True):
            _draw_lines(axes, at(rows, n, scale), value)
            axes.set_title(f"scale {scale}: {name}", loc="left", fontsize=10)
    grid[0][0].set_ylim(bottom=LEAST)
    for axes in grid[-1]:
        axes.set_xlabel("threshold T")
    for line in grid:
        line[0].set_ylabel("error")
    legend_below(figure, grid[0], 4, LINES)
    save(figure, path)


# ---- the map ---------------------------------------------------------------------------------


def draw_map(rows: Sequence[EfficiencyRow], path: Path) -> None:
    """A panel for each method: lengths to the right, inputs downwards, speed in the cells."""
    from matplotlib.patches import Patch

    mine = [row for row in rows if row.part == MAP]
    lengths, inputs = sorted({row.n for row in mine}), inputs_of(mine)
    methods = map_methods_of(mine)
    columns = 3
    lines = math.ceil(len(methods) / columns)
    figure = new_figure(
        3.4 + 0.62 * len(lengths) * columns, 1.6 + lines * (0.9 + 0.34 * len(inputs))
    )
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes, method in zip(grid.flatten(), methods, strict=False):
        for row in (row for row in mine if row.method == method):
            place = lengths.index(row.n), inputs.index((row.sigma, row.outliers))
            _draw_cell(axes, row, place)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(inputs) - 0.5, -0.5)
        axes.set_xticks(range(len(lengths)), [length_label(n) for n in lengths])
        axes.set_yticks(range(len(inputs)), [input_label(*item) for item in inputs])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(method, loc="left", fontsize=10)
    handles = [Patch(color=COLOURS[word], label=text) for word, text in WORDS.items()]
    spare = grid.flatten()[len(methods) :]
    for axes in spare:
        axes.set_axis_off()
    if len(spare):
        spare[0].legend(handles=handles, loc="center left", frameon=False, fontsize=9)
    else:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def _draw_cell(axes: Axes, row: EfficiencyRow, place: tuple[int, int]) -> None:
    from matplotlib.patches import Rectangle

    x, y = place
    word = verdict(row)
    strength = 1.0
    if word == "wins":
        strength = 0.25 + 0.75 * min(1.0, math.log(row.ratio or 1.0) / math.log(MOST))
    face = (COLOURS[word], strength)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=face, linewidth=0))
    dark = word in ("exact", "not run") or (word == "wins" and strength < 0.6) or word == "loses"
    text = map_cell(row).replace("off ", "")
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK if dark else "white")
