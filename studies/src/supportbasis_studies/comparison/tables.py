"""Tables of measurements, and what counts as an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..numbers import seconds, small, times
from ..study import Grid
from .measure import Measurement

HEADINGS = ("method", "time", "speed-up", "rel. error", "max error", "bound", "cost")
LOST = 0.1  # a relative error beyond which the answer is useless

EXPLAINED = """Time is the best of several whole calls, planning included, taking turns with the
baseline in one loop; “speed-up” is the baseline's time over it. Errors are against float64
attention of sampled query rows (up to 512) over all keys: the relative Frobenius error, and the
largest error over max|V|. “Bound” is the certified upper bound on the largest error over max|V|
for all rows. “Cost” counts multiply-adds relative to exact attention."""


def is_lost(row: Measurement) -> bool:
    """Whether the answer is useless: failed, not a number, or wrong by more than 10 %."""
    return row.relative_error is None or not row.relative_error <= LOST


def is_approximate(row: Measurement) -> bool:
    """Whether an approximation ran and gave numbers. Exact work has cost 1."""
    return row.ratio is not None and row.relative_error is not None and row.cost != 1.0


def measurement_table(title: str, rows: Sequence[Measurement], *, named: bool = False) -> Grid:
    """A line for each measurement; what ran stands below the method."""
    lost = frozenset(index for index, row in enumerate(rows) if is_lost(row))
    return Grid(title, HEADINGS, [_cells(row, named) for row in rows], lost)


def _cells(row: Measurement, named: bool) -> list[str]:
    label = f"{row.name}: {row.method}" if named else row.method
    name = "\n".join([label, row.ran, *([f"! {row.note}"] if row.note else [])])
    cost = "—" if row.cost is None else f"{row.cost:.3g}"
    errors = (small(row.relative_error), small(row.max_error), small(row.bound))
    return [name, seconds(row.seconds), times(row.ratio), *errors, cost]
