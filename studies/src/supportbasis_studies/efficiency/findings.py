"""What the rows say, beside what the paper says."""

from __future__ import annotations

from collections.abc import Sequence

from supportbasis.cli.report import percent, seconds, small, times

from ..study import Check
from . import methods as made
from .inputs import EXPERIMENTS
from .measure import MAP
from .rows import EfficiencyRow
from .tables import ACCURATE, FINE, at, best, input_label, inputs_of, line, panels, swept, verdict

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
