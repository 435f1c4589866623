"""Figures: error against speed, and time against length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .measure import Measurement

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = {
    "SDPA": ("#1f2933", "D"),
    "Polynomial": ("#c05621", "v"),
    "SingleThreshold": ("#2f6fab", "o"),
    "Auto": ("#2f855a", "^"),
}
INK, GREY = "#1f2933", "#7b8794"
COLOURS = ("#2f6fab", "#2f855a", "#b7791f", "#805ad5", "#c05621", "#d53f8c", "#319795")
PANELS = {
    "SDPA": "Attention",
    "SDPA causal": "Causal attention",
    "chunked exact sum": "Gaussian kernel density",
}
LABEL_GAP = 13.0  # points between the base lines of two labels
LETTER = 5.4  # width of a letter of a label, in points


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that makes room for its labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """As PNG, and as SVG beside it in the same layout."""
    figure.savefig(path, dpi=150)
    figure.set_layout_engine("none")  # to make it once more takes as long as the drawing
    figure.savefig(path.with_suffix(".svg"))


def length_label(n: float, _: object = None) -> str:
    """16k for 16384, on an axis of lengths."""
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def log_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Both axes logarithmic, with a mark for each length."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(length_label)


def legend_below(
    figure: Figure, panels: Iterable[Axes], columns: int, order: Iterable[str] = ()
) -> None:
    """Every label of the panels once, below them, those of ``order`` first and in that order."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = list(dict.fromkeys([*(name for name in order if name in found), *found]))
    handles = [found[name] for name in names]
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def plain_axes(axes: Axes) -> None:
    """A light grid and no box around the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


# ---- error against speed ---------------------------------------------------------------------


class Point(NamedTuple):
    """A method in the picture of error against speed."""

    speed: float
    error: float
    label: str


def plot_errors(rows: Sequence[Measurement], title: str, path: Path) -> None:
    """Relative error against speed relative to SDPA, a labelled point for each method.

    The mean of V costs next to nothing, so it is a line: the error that comes for free.
    """
    points = [
        Point(row.ratio, row.relative_error, row.method)
        for row in rows
        if row.ratio and row.relative_error and math.isfinite(row.relative_error)
    ]
    free = [point for point in points if point.label == "mean(V)"]
    points = [point for point in points if point.label != "mean(V)"]
    figure = new_figure(8.6, 5.0)
    axes = figure.add_subplot()
    plain_axes(axes)
    _error_axes(axes, points, free)
    for point in points:
        colour, marker = _family(point.label)
        axes.plot(point.speed, point.error, marker, color=colour, markersize=8, zorder=3)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    figure.draw_without_rendering()  # settles the layout, which the labels depend on
    _label_points(axes, points, [_free_line(axes, point) for point in free])
    figure.savefig(path, dpi=150)


def _error_axes(axes: Axes, points: Sequence[Point], free: Sequence[Point]) -> None:
    """Logarithmic axes with room around the points for their labels."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(1.0, color="#9aa5b1", linewidth=1, linestyle="--")
    x = [point.speed for point in points] + [1.0]
    y = [point.error for point in (*points, *free)] or [1.0]
    axes.set_xlim(min(x) / 2, max(x) * 4)
    axes.set_ylim(min(y) / 5, max(y) * 5)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel("speed relative to SDPA (right is faster)")
    axes.set_ylabel("relative error (down is better)")


def _family(label: str) -> tuple[str, str]:
    return FAMILIES.get(label.split("(")[0].split(" ")[0], ("#2f6fab", "o"))


class Box(NamedTuple):
    """A rectangle that a label or a marker takes, in points."""

    left: float
    right: float
    low: float
    high: float

    def meets(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.low < other.high and other.low < self.high

    def within(self, other: Box) -> bool:
        across = other.left <= self.left and self.right <= other.right
        return across and other.low <= self.low and self.high <= other.high


def _place(axes: Axes, point: Point) -> tuple[float, float]:
    """Where a point lies in the figure, in points."""
    x, y = axes.transData.transform((point.speed, point.error)) * 72 / axes.figure.dpi
    return float(x), float(y)


def _free_line(axes: Axes, point: Point) -> Box:
    """The error of the mean of V as a line with a label; returns where they are."""
    axes.axhline(point.error, color="#7b8794", linewidth=1, linestyle="--")
    axes.annotate(
        f"mean(V): error {point.error:.1e}",
        (1, point.error),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color="#52606d",
    )
    height = _place(axes, point)[1]
    return Box(-math.inf, math.inf, height - 1, height + LABEL_GAP)


def _label_points(axes: Axes, points: Sequence[Point], taken: list[Box]) -> None:
    """Each label beside its point, where it hides neither a point nor another label."""
    at = {point: _place(axes, point) for point in points}
    taken = [*taken, *(Box(x - 5, x + 5, y - 5, y + 5) for x, y in at.values())]
    inside, unit = axes.bbox, 72 / axes.figure.dpi
    frame = Box(inside.x0 * unit, inside.x1 * unit, inside.y0 * unit, inside.y1 * unit)
    for point in points:
        to_left, lift = _free_place(at[point], LETTER * len(point.label), taken, frame)
        line = {"arrowstyle": "-", "color": "#9aa5b1", "shrinkA": 0, "shrinkB": 5}
        axes.annotate(
            point.label,
            (point.speed, point.error),
            xytext=(-10 if to_left else 10, lift),
            textcoords="offset points",
            ha="right" if to_left else "left",
            va="center",
            fontsize=9,
            color=_family(point.label)[0],
            arrowprops=line | {"relpos": (float(to_left), 0.5)} if abs(lift) > 6 else None,
        )


def _free_place(
    at: tuple[float, float], width: float, taken: list[Box], frame: Box
) -> tuple[bool, float]:
    """The nearest free place for a label: to the left or not, and how far up. Takes it."""
    half = LABEL_GAP / 2
    for step in range(40):
        for lift in (half * step, -half * step):
            for to_left in (False, True):
                left, middle = at[0] - 10 - width if to_left else at[0] + 10, at[1] + lift
                box = Box(left, left + width, middle - half, middle + half)
                if box.within(frame) and not any(box.meets(other) for other in taken):
                    taken.append(box)
                    return to_left, lift
    return False, 0.0


# ---- time against length ---------------------------------------------------------------------


def plot_times(rows: Sequence[Measurement], path: Path) -> None:
    """Time against length, log-log: one panel for each baseline, its time in black."""
    timed = sorted((row for row in rows if row.seconds), key=lambda row: (row.baseline, row.n))
    panels = [(name, list(group)) for name, group in groupby(timed, lambda row: row.baseline)]
    panels.sort(key=lambda panel: list(PANELS).index(panel[0]))
    figure = new_figure(0.6 + 3.9 * max(1, len(panels)), 5.2)
    for axes, (baseline, panel) in zip(
        figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False
    ):
        _time_panel(axes, baseline, panel)
    figure.savefig(path, dpi=150)


def _time_panel(axes: Axes, baseline: str, rows: Sequence[Measurement]) -> None:
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    best: dict[int, float] = {}
    for row in rows:
        best[row.n] = min(best.get(row.n, math.inf), row.baseline_seconds)
    axes.plot(*_points(best), "-D", color="#1f2933", markersize=4, label=baseline)
    lines = list(dict.fromkeys(_line_name(row) for row in rows))
    for index, name in enumerate(lines):
        points = {row.n: row.seconds or math.nan for row in rows if _line_name(row) == name}
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(*_points(points), "-o", color=colour, markersize=4, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds per call")
    axes.set_title(PANELS[baseline], loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(length_label)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.05, -0.13))


def _line_name(row: Measurement) -> str:
    return f"{row.method}, outliers" if "outliers" in row.name else row.method


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(values)
    return lengths, [values[n] for n in lengths]
