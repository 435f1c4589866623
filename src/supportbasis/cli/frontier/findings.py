"""What the rows say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..intervals import log_slope
from ..report import times
from .measure import AUTO, LISTS, OURS, Row
from .summary import Group, Point, groups, quantile
from .tables import brief, setting_label, share

GOOD = 0.05  # median error at which times are compared
EXCESS = 1.25  # times a tolerance: beyond, it is said to be exceeded


def findings(group: Group) -> list[str]:
    """On one model at one length."""
    said = [_fastest(group), _equal_cost(group)]
    return [sentence for sentence in said if sentence] + _promises(group)


def _fastest(group: Group) -> str:
    """The fastest setting of ours whose median error is small, and whether it gains."""
    ours = [name for name in group.methods if group.of(name)[0].kind == OURS]
    found: list[tuple[Point, str]] = [
        (point, name)
        for name in ours
        for point in group.curve(name, lambda row: row.time)
        if point.error <= GOOD and not _mostly_exact(group.of(name, point.setting))
    ]
    if not found:
        return (
            f"{group.label}: no setting of ours has a median error of at most {GOOD:g} unless at "
            "least half of the heads are exact."
        )
    point, name = min(found, key=lambda item: item[0].x)
    rows = group.of(name, point.setting)
    worst = max(rows, key=lambda row: row.error)
    what = setting_label(name, point.setting)
    gain = f"{times(1 / point.x)} SDPA's speed in the median"
    if point.x >= 1:
        gain = f"no faster than SDPA ({times(1 / point.x)})"
    return (
        f"{group.label}: of settings with a median error of at most {GOOD:g} and most heads not "
        f"exact, {what} is fastest: {gain}, error {brief(point.error)}, 90th percentile "
        f"{brief(point.high)}, worst {brief(worst.error)} on head {worst.name}."
    )


def _mostly_exact(rows: Sequence[Row]) -> bool:
    """Whether the median head is exact: then its time says nothing about a method."""
    return 2 * sum(row.is_exact for row in rows) >= len(rows)


def _equal_cost(group: Group) -> str:
    """Lists beside the best baseline at each budget where both have a median."""
    if not group.baselines:
        return ""
    parts = []
    for budget in group.budgets:
        ours = group.median(LISTS, budget)
        best, theirs = group.best_median(budget)
        if math.isfinite(ours) and math.isfinite(theirs):
            parts.append(f"{brief(ours)} against {brief(theirs)} ({best}) at {share(budget)}")
        elif math.isfinite(theirs):
            parts.append(f"no plan for the median head against {brief(theirs)} at {share(budget)}")
    return f"At equal cost lists and the best baseline err by {'; '.join(parts)}." if parts else ""


def _promises(group: Group) -> list[str]:
    """What Auto does, and whether it keeps its tolerance on rows it did not choose."""
    said = []
    for tolerance in group.settings(AUTO):
        rows = group.of(AUTO, tolerance)
        tried = [row for row in rows if not row.is_exact]
        text = f"Auto({tolerance:g}) leaves {len(rows) - len(tried)} of {len(rows)} heads exact"
        broken = [row for row in tried if row.error > EXCESS * tolerance]
        if broken:
            worst = max(broken, key=lambda row: row.error)
            text += (
                f"; {len(broken)} exceed {EXCESS:g} times the tolerance, most {brief(worst.error)} "
                f"on head {worst.name}"
            )
        elif tried:
            text += f"; the others err by at most {brief(max(row.error for row in tried))}"
        said.append(f"{text}.")
    return said


def growth(rows: Sequence[Row]) -> list[str]:
    """How the time of each method grows with the length, where there are several."""
    said = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = groups([row for row in rows if row.model == model and row.seconds is not None])
        parts = []
        for method in mine[0].methods if len(mine) > 1 else ():
            for setting in mine[0].settings(method):
                found = {group.n: group.of(method, setting) for group in mine}
                if all(found.values()):
                    seconds = [quantile([r.seconds or 0.0 for r in x], 0.5) for x in found.values()]
                    slope = log_slope(list(found), seconds)
                    parts.append(f"{setting_label(method, setting)} {slope:.2f}")
        if parts:
            ends = f"n={mine[0].n} to {mine[-1].n}"
            said.append(
                f"{model}: median time grows from {ends} with exponents {', '.join(parts)}."
            )
    return said
