"""The pictures of the frontier: error against cost, and against time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..figures import Line, Panel, draw
from .measure import AUTO, FITTED, LISTS, LISTS_WITHIN, MEAN, OURS, Row
from .summary import Group

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


def draw_groups(groups: Sequence[Group], x: Axis, path: Path) -> None:
    """Median error against cost or time: a panel for each group, a line for each method, a band
    from the 10th to the 90th percentile of the errors of ours."""
    made = [_panel(group, x) for group in groups]
    columns = math.ceil(len(made) / math.ceil(len(made) / COLUMNS))
    blank = [Panel("", [])] * (-len(made) % columns)
    cells = [*made, *blank]
    grid = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    size = (0.8 + 3.5 * max(2, columns), 2.0 + 3.4 * len(grid))
    draw(path, grid, size, legend=4 if columns > 2 else 3, order=[*STYLES, MEAN], sharey=True)


def _panel(group: Group, x: Axis) -> Panel:
    count = f", {len(group.heads)} heads" if len(group.heads) > 1 else ""
    lines = [_line(group, method, x) for method in reversed(group.methods)]
    return Panel(
        f"{group.label}{count}", lines, LABELS[x], "relative error", levels={MEAN: group.mean},
        limits=(FLOOR * 0.8, CEILING),
    )  # fmt: skip


def _line(group: Group, method: str, x: Axis) -> Line:
    points = group.curve(method, x)
    colour, marker = STYLES[method]
    low, middle, high = (
        [max(FLOOR, getattr(point, name)) for point in points] for name in ("low", "error", "high")
    )
    is_ours = group.of(method)[0].kind == OURS
    spans = list(zip(low, high, strict=True)) if is_ours and len(group.heads) > 1 else []
    options = {"marker": marker, "ms": 5, "lw": 2.0 if is_ours else 1.0}
    options["mfc"] = colour if is_ours else "none"
    style = "-" if is_ours else ":"
    return Line(method, [point.x for point in points], middle, style, colour, spans, True, options)
