"""The tables of the study."""

from __future__ import annotations

from collections.abc import Sequence

from supportbasis.cli.report import Grid, percent, seconds, small, times

from .measure import MAP, THRESHOLDS
from .methods import MEAN, NAIVE, SDPA, SINGLE
from .rows import EfficiencyRow

ACCURATE = 1e-2  # an error within which an answer counts on the map
FINE = 1e-3  # and in the paper's setting, where the mean of V is within 1e-2 already
HEADINGS = (
    "time", "against SDPA", "against naive", "output", "D⁻¹A", "max", "bound", "pairs exact"
)  # fmt: skip


def at(rows: Sequence[EfficiencyRow], n: int, scale: str) -> list[EfficiencyRow]:
    """The rows of one panel of the paper's figure."""
    return [row for row in rows if (row.part, row.n, row.scale) == (THRESHOLDS, n, scale)]


def panels(rows: Sequence[EfficiencyRow]) -> list[tuple[int, str]]:
    """Length and scale of every panel."""
    return list(dict.fromkeys((row.n, row.scale) for row in rows if row.part == THRESHOLDS))


def line(rows: Sequence[EfficiencyRow], method: str) -> EfficiencyRow:
    return next(row for row in rows if row.method == method)


def swept(rows: Sequence[EfficiencyRow]) -> list[EfficiencyRow]:
    """Single thresholds, smallest first."""
    return sorted((row for row in rows if row.method == SINGLE), key=lambda row: row.threshold or 0)


def best(rows: Sequence[EfficiencyRow]) -> EfficiencyRow:
    """The fastest threshold of a panel that approximates something with a small error."""
    tried = [row for row in swept(rows) if row.exact_share != 1] or swept(rows)
    good = [row for row in tried if (row.output_error or 0.0) <= FINE] or tried
    return max(good, key=lambda row: row.ratio or 0.0)


def share(value: float | None) -> str:
    return "—" if value is None else "0" if value == 0 else percent(100 * value)


def _cells(row: EfficiencyRow, naive: float | None) -> list[str]:
    against = None if naive is None or row.seconds is None else naive / row.seconds
    errors = (row.output_error, row.matrix_error, row.max_error, row.bound)
    return [
        seconds(row.seconds),
        times(row.ratio),
        times(against),
        *map(small, errors),
        share(row.exact_share),
    ]


def _label(row: EfficiencyRow) -> str:
    return row.method if row.threshold is None else f"{row.method}, T={row.threshold:.3g}"


def panel_table(rows: Sequence[EfficiencyRow], n: int, scale: str) -> Grid:
    """Every line of a panel, and the best and the largest threshold; red: worse than mean(V)."""
    mine = at(rows, n, scale)
    lines = [row for row in mine if row.threshold is None]
    lines += list(dict.fromkeys([best(mine), swept(mine)[-1]]))
    naive, free = line(mine, NAIVE).seconds, line(mine, MEAN).output_error or 0.0
    lost = [
        index
        for index, row in enumerate(lines)
        if row.method != MEAN and not (row.output_error or 0.0) < free
    ]
    title = f"n={n}, scale {scale}"
    cells = [[_label(row), *_cells(row, naive)] for row in lines]
    return Grid(title, ["method", *HEADINGS], cells, frozenset(lost))


def threshold_table(rows: Sequence[EfficiencyRow], n: int, scale: str) -> Grid:
    """Every threshold of one panel."""
    mine = at(rows, n, scale)
    naive = line(mine, NAIVE).seconds
    cells = [[f"T={row.threshold:.3g}", *_cells(row, naive)] for row in swept(mine)]
    return Grid(f"Every threshold, n={n}, scale {scale}", ["threshold", *HEADINGS], cells)


# ---- the map ---------------------------------------------------------------------------------


def inputs_of(rows: Sequence[EfficiencyRow]) -> list[tuple[float, bool]]:
    """The kinds of input on the map: those without outliers first, scores growing."""
    found = {(row.outliers, row.sigma) for row in rows if row.part == MAP}
    return [(sigma, outliers) for outliers, sigma in sorted(found)]


def input_label(sigma: float, outliers: bool) -> str:
    return f"σ={sigma:g}" + (", outliers" if outliers else "")


def verdict(row: EfficiencyRow) -> str:
    """What a cell of the map says: exact, not run, wrong, wins or loses."""
    if row.seconds is None or row.output_error is None:
        return "not run"
    if row.exact_share == 1 and row.method != SDPA and row.cost == 1:
        return "exact"
    if not row.output_error <= ACCURATE:
        return "wrong"
    return "wins" if (row.ratio or 0.0) > 1 else "loses"


def map_methods_of(rows: Sequence[EfficiencyRow]) -> list[str]:
    named = dict.fromkeys(row.method for row in rows if row.part == MAP)
    return [name for name in named if name != SDPA]


def map_cell(row: EfficiencyRow) -> str:
    """The speed where the answer counts, else why it does not."""
    word = verdict(row)
    if word == "not run":
        return f"cost {row.cost:.2g}"
    if word == "exact":
        return "exact"
    if word == "wrong":
        return f"off {percent(100 * (row.output_error or 0.0))}"
    return times(row.ratio)


def map_table(rows: Sequence[EfficiencyRow], n: int) -> Grid:
    """All methods at one length: speed where the error is within 1e-2."""
    mine = [row for row in rows if row.part == MAP and row.n == n]
    methods = map_methods_of(rows)
    lines = []
    for sigma, outliers in inputs_of(rows):
        found = {r.method: r for r in mine if (r.sigma, r.outliers) == (sigma, outliers)}
        base = seconds(found[SDPA].seconds)
        cells = [map_cell(found[name]) for name in methods]
        lines.append([input_label(sigma, outliers), base, *cells])
    title = f"n={n}: speed against SDPA where the error is within {ACCURATE:g}"
    return Grid(title, ["scores", "SDPA", *methods], lines)
