"""What the rows say, beside what the paper says: tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ..numbers import percent, seconds, small, times
from ..study import Check, Grid
from . import methods as made
from .inputs import EXPERIMENTS
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


CLOSE = 2.0  # a factor within which errors count as the same
SAME_T = 0.4  # near this threshold errors of different lengths are compared


def checks(rows: Sequence[EfficiencyRow]) -> list[Check]:
    """The paper's statements on its efficiency figure, with scale 1/√d as in its experiments."""
    lengths = [n for n, scale in panels(rows) if scale == EXPERIMENTS]
    found = {n: at(rows, n, EXPERIMENTS) for n in lengths}
    return [
        _faster(
            found, made.NAIVE, "Faster than the exact computation (the paper's own) by tuning T"
        ),
        _faster(found, made.SDPA, "Not in the paper: faster than SDPA by tuning T"),
        _growing(found, made.NAIVE, "The gain over the exact computation grows with n"),
        _as23(found, made.AS23_ENTRY, "Significantly lower error than AS23, B from the entries"),
        _as23(found, made.AS23_NORM, "The same, B from the norms, as AS23 may just as well do"),
        _fair(found),
        _same_error(found),
        _rising(found),
        _mean(found),
    ]


def _gain(rows: Sequence[EfficiencyRow], method: str) -> float:
    """Time of another method over that of the best threshold."""
    other, mine = line(rows, method).seconds, best(rows).seconds
    return (other or 0.0) / (mine or 1.0)


def _gains(found: dict[int, list[EfficiencyRow]], method: str) -> str:
    return ", ".join(f"{times(_gain(rows, method))} at n={n}" for n, rows in found.items())


def _faster(found: dict[int, list[EfficiencyRow]], method: str, text: str) -> Check:
    gains = [_gain(rows, method) for rows in found.values()]
    return Check(text, _gains(found, method), min(gains) > 1)


def _growing(found: dict[int, list[EfficiencyRow]], method: str, text: str) -> Check:
    gains = [_gain(rows, method) for rows in found.values()]
    return Check(text, _gains(found, method), gains == sorted(gains) and len(gains) > 1)


def _as23(found: dict[int, list[EfficiencyRow]], method: str, text: str) -> Check:
    pairs = [
        (line(r, method).output_error or 0.0, best(r).output_error or 1.0) for r in found.values()
    ]
    theirs, ours = (max(side) for side in zip(*pairs, strict=True))
    factor = min(a / b for a, b in pairs)
    said = f"{small(theirs)} against {small(ours)}: {times(factor)} or more"
    return Check(text, said, factor > 10)


def _fair(found: dict[int, list[EfficiencyRow]]) -> Check:
    """What the threshold alone does: the same polynomial, with and without it."""
    parts, factors = [], []
    for name, alone, label in (
        ("Chebyshev", made.AS23_NORM, made.SINGLE_CHEBYSHEV), ("best", made.ONE_BEST, made.SINGLE),
    ):  # fmt: skip
        ratios = []
        for rows in found.values():
            mine = [row for row in rows if row.method == label]
            near = min(mine, key=lambda row: abs((row.threshold or 0.0) - SAME_T))
            ratios.append((line(rows, alone).output_error or 0.0) / (near.output_error or 1.0))
        factors.append(min(ratios))
        parts.append(f"{name} {times(min(ratios))} or more")
    text = f"The threshold alone (T near {SAME_T:g}), with the same polynomial, lowers the error"
    return Check(text, ", ".join(parts), min(factors) > 1)


def _near(rows: Sequence[EfficiencyRow], threshold: float) -> EfficiencyRow:
    return min(swept(rows), key=lambda row: abs((row.threshold or 0.0) - threshold))


def _same_error(found: dict[int, list[EfficiencyRow]]) -> Check:
    errors = [_near(rows, SAME_T).output_error or 0.0 for rows in found.values()]
    listed = ", ".join(small(error) for error in errors)
    text = f"The error does not depend on n (relative, T near {SAME_T:g})"
    return Check(text, listed, max(errors) <= CLOSE * min(errors))


def _rising(found: dict[int, list[EfficiencyRow]]) -> Check:
    rows = found[max(found)]
    kept = [row for row in swept(rows) if (row.exact_share or 0.0) < 1]
    low, high = (row.output_error or 0.0 for row in (kept[0], kept[-1]))
    said = f"{small(low)} at T={kept[0].threshold:.3g}, {small(high)} at T={kept[-1].threshold:.3g}"
    return Check(f"The error grows with T (n={max(found)})", said, high > low)


def _mean(found: dict[int, list[EfficiencyRow]]) -> Check:
    rows = [line(each, made.MEAN) for each in found.values()]
    worst = max(row.output_error or 0.0 for row in rows)
    largest = max(row.max_error or 0.0 for row in rows)
    said = f"relative {small(worst)}, largest over max|V| {small(largest)}"
    text = "Not in the paper: the setting is hard enough that mean(V) errs by more than 5 %"
    return Check(text, said, worst > 0.05)


def panel_findings(rows: Sequence[EfficiencyRow]) -> list[str]:
    """One sentence for each length and scale."""
    return [_panel_finding(at(rows, n, scale), n, scale) for n, scale in panels(rows)]


def _panel_finding(rows: Sequence[EfficiencyRow], n: int, scale: str) -> str:
    top = best(rows)
    auto = line(rows, made.AUTO_FINE)
    return (
        f"n={n}, scale {scale}: within {FINE:g}, the best T is {top.threshold:.3g} "
        f"({percent(100 * (top.exact_share or 0.0))} of the pairs exact): {seconds(top.seconds)}, "
        f"{times(_gain(rows, made.NAIVE))} as fast as the paper's exact computation and "
        f"{times(top.ratio)} as fast as SDPA, error {small(top.output_error)}. {made.AUTO_FINE} "
        f"takes {seconds(auto.seconds)} ({times(auto.ratio)}), error {small(auto.output_error)}; "
        f"mean(V) errs by {small(line(rows, made.MEAN).output_error)}."
    )


def map_findings(rows: Sequence[EfficiencyRow]) -> list[str]:
    """Who wins where: one sentence for each kind of input."""
    mine = [row for row in rows if row.part == MAP and row.method != made.SDPA]
    return [_map_finding(mine, *item) for item in inputs_of(mine)]


def _map_finding(rows: Sequence[EfficiencyRow], sigma: float, outliers: bool) -> str:
    mine = [row for row in rows if (row.sigma, row.outliers) == (sigma, outliers)]
    lengths = sorted({row.n for row in mine})
    parts = []
    for n in lengths:
        wins = [row for row in mine if row.n == n and verdict(row) == "wins"]
        if wins:
            top = max(wins, key=lambda row: row.ratio or 0.0)
            parts.append(f"{top.method} {times(top.ratio)} at n={n}")
    free = max(row.output_error or 0.0 for row in mine if row.method == made.MEAN)
    label = f"{input_label(sigma, outliers)} (mean(V) errs by {percent(100 * free)})"
    if not parts:
        return f"{label}: nothing beats SDPA within an error of {ACCURATE:g} up to n={lengths[-1]}."
    return f"{label}: fastest within {ACCURATE:g}: {'; '.join(parts)}."
