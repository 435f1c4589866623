"""The pictures of the frontier: error against cost, and against time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import GREY, legend_below, new_figure, plain_axes
from .measure import AUTO, FITTED, LISTS, LISTS_WITHIN, MEAN, OURS, Row
from .summary import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    LISTS: ("#2f855a", "o"),
    LISTS_WITHIN: ("#68a357", "P"),
    AUTO: ("#1f2933", "D"),
    FITTED: ("#d53f8c", "*"),
    "top blocks (MInference)": ("#2f6fab", "s"),
    "top blocks (XAttention)": ("#63a4d8", "d"),
    "top blocks + centroids (PISA)": ("#805ad5", "^"),
    "LSH + sampling (HyperAttention)": ("#b7791f", "v"),
    "random features (Performer)": ("#c05621", "x"),
    "landmarks (Nyström)": ("#e06666", "+"),
    "window + sinks (Longformer)": ("#319795", "<"),
    "window + random (BigBird)": ("#0b4f4a", ">"),
    "top blocks, oracle": ("#7b8794", "."),
}
FLOOR = 1e-4  # errors below, those of exact heads, are drawn here
CEILING = 3.0  # errors beyond are not shown: all is lost
COLUMNS = 4
NOT_TIMED = "solid: measured; dotted: baselines, not timed: where their cost is at SDPA's rate"

Axis = Callable[[Row], float]


def cost(row: Row) -> float:
    """Multiply-adds relative to exact attention."""
    return row.cost


def time(row: Row) -> float:
    """Seconds relative to SDPA's; of baselines, which are not timed, the cost."""
    return row.time


LABELS: dict[Axis, str] = {
    cost: "cost, everything counted (exact = 1)",
    time: "time relative to SDPA (left of 1 is faster)",
}


def draw(panels: Sequence[Group], x: Axis, path: Path) -> None:
    """Median error against cost or time: a panel for each group, a line for each method, a band
    from the 10th to the 90th percentile of the errors of ours."""
    lines = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / lines)
    figure = new_figure(0.8 + 3.5 * max(2, columns), 2.0 + 3.4 * lines)
    drawn = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for axes, group in zip(drawn, panels, strict=False):
        _axes(axes)
        for method in reversed(group.methods):
            _line(axes, group, method, x)
        axes.axhline(group.mean, color=GREY, lw=1, ls="--", label=MEAN)
        count = f", {len(group.heads)} heads" if len(group.heads) > 1 else ""
        axes.set_title(f"{group.label}{count}", loc="left", fontsize=10)
        axes.set_xlabel(LABELS[x])
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    for axes in drawn[::columns]:
        axes.set_ylabel("relative error")
    if x is time:
        figure.suptitle(NOT_TIMED, x=0.01, ha="left", fontsize=9, color=GREY)
    legend_below(figure, drawn, 4 if columns > 2 else 3, [*STYLES, MEAN])
    figure.savefig(path, dpi=150)


def _axes(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    plain_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(FLOOR * 0.8, CEILING)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1.0, color=GREY, lw=1)


def _line(axes: Axes, group: Group, method: str, x: Axis) -> None:
    points = group.curve(method, x)
    colour, marker = STYLES[method]
    places = [point.x for point in points]
    low, middle, high = (
        [max(FLOOR, getattr(point, name)) for point in points] for name in ("low", "error", "high")
    )
    is_ours = group.of(method)[0].kind == OURS
    dash, width = ("-", 2.0) if is_ours else (":", 1.0)
    axes.plot(
        places, middle, dash, marker=marker, color=colour, lw=width, ms=5,
        mfc=colour if is_ours else "none", label=method,
    )  # fmt: skip
    if is_ours and len(group.heads) > 1:
        axes.fill_between(places, low, high, color=colour, alpha=0.13, lw=0)
