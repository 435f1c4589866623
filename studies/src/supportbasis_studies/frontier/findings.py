"""What the rows say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from supportbasis.cli.report import times

from .measure import AUTO, LISTS, OURS, Row
from .summary import Group, Point
from .tables import brief, setting_label, share

GOOD = 0.05  # median error at which times are compared
EXCESS = 1.25  # times a tolerance: beyond, it is said to be exceeded


def findings(group: Group) -> str:
    """A paragraph on one model at one length."""
    said = [_fastest(group), _equal_cost(group), *_promises(group)]
    return " ".join(sentence for sentence in said if sentence)


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
    """How far lists are ahead of the best baseline, over the budgets where both have a median."""
    ratios = []
    for budget in group.budgets if group.baselines else ():
        ours, (best, theirs) = group.median(LISTS, budget), group.best_median(budget)
        if math.isfinite(ours) and math.isfinite(theirs):
            ratios.append((theirs / ours, f"{best}, {share(budget)}"))
    if not ratios:
        return ""
    ends = [min(ratios), max(ratios)] if len(ratios) > 1 else ratios
    parts = " to ".join(f"{times(ratio)} ({at})" for ratio, at in ends)
    return f"At equal cost the best baseline's median error is {parts} that of lists."


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
