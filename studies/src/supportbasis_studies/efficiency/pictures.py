"""The pictures of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import GREY, INK, Line, Panel, draw, length_label, new_figure, save
from . import methods as made
from .findings import at, input_label, inputs_of, map_cell, map_methods_of, panels, swept, verdict
from .inputs import SCALES
from .measure import MAP
from .rows import EfficiencyRow

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


def _panel(title: str, rows: Sequence[EfficiencyRow], value: Value, label: str = "") -> Panel:
    """A line for each method: against T where it has one, else level."""
    points = swept(rows)
    thresholds = [row.threshold or 0.0 for row in points]
    ends, lines = [thresholds[0], thresholds[-1]], []
    for method, (colour, style) in LINES.items():
        if method == made.SINGLE:
            values = [value(row) or math.nan for row in points]
            lines.append(Line(method, thresholds, values, style, colour))
            continue
        level = next((value(row) for row in rows if row.method == method), None)
        if level is not None and level > 0:
            lines.append(Line(method, ends, [level] * 2, style, colour))
    return Panel(title, lines, "threshold T", label, log="y")


def draw_thresholds(rows: Sequence[EfficiencyRow], scale: str, path: Path) -> None:
    """Time, error and share of exact pairs against T: a row of panels for each length. The mean of
    V takes next to no time; its line would press all others together."""
    grid = []
    for n in [n for n, its in panels(rows) if its == scale]:
        mine = at(rows, n, scale)
        timed = [row for row in mine if row.method != made.MEAN]
        points = swept(mine)
        shares = [100 * (row.exact_share or 0.0) for row in points]
        x, colour = [row.threshold or 0.0 for row in points], LINES[made.SINGLE][0]
        exact = [Line(made.SINGLE, x, shares, "-o", colour)]
        grid.append(
            [
                _panel(f"n={n}: time", timed, lambda row: row.seconds, "seconds per call"),
                _panel(f"n={n}: relative error of the output", mine, lambda row: row.output_error),
                Panel(f"n={n}: pairs exact, %", exact, "threshold T", log="", limits=(-3, 103)),
            ]
        )
    draw(path, grid, (12.6, 1.3 + 2.7 * len(grid)), order=LINES, sharey="col")


def draw_errors(rows: Sequence[EfficiencyRow], path: Path) -> None:
    """Three errors against T at the largest length: a row of panels for each scale."""
    n = max(length for length, _ in panels(rows))
    measures: dict[str, Value] = {
        "output, relative Frobenius": lambda row: row.output_error,
        "D⁻¹A, relative Frobenius": lambda row: row.matrix_error,
        "output, largest over max|V|": lambda row: row.max_error,
    }
    grid = [
        [
            replace(_panel(f"scale {scale}: {name}", at(rows, n, scale), value, "error"),
                    limits=(LEAST, None))
            for name, value in measures.items()
        ]
        for scale in SCALES
    ]  # fmt: skip
    draw(path, grid, (12.6, 7.6), order=LINES, sharey=True)


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
