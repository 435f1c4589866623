"""What the rows say: tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..numbers import seconds, times
from ..statistics import log_slope, quantile
from ..study import Grid
from .measure import AUTO, LISTS, MEAN, OURS, Row
from .summary import Group, Point


def brief(value: float) -> str:
    """An error in two digits; a dash where there is none within the budget."""
    if not math.isfinite(value):
        return "—"
    return f"{value:.1e}" if value < 1e-3 else f"{value:.2g}"


def share(value: float) -> str:
    return f"{100 * value:g} %"


def setting_label(method: str, setting: float) -> str:
    """A method as it is written in a program.

    >>> setting_label("Auto(tolerance)", 0.03), setting_label("BlockSupport(budget)", 0.1)
    ('Auto(0.03)', 'BlockSupport(budget=0.1)')
    """
    name, argument = method.rstrip(")").split("(")
    return f"Auto({setting:g})" if name == "Auto" else f"{name}({argument}={setting:g})"


def our_table(group: Group) -> Grid:
    """Every setting of ours: errors and times over heads."""
    lines = []
    for method in group.methods:
        for setting in group.settings(method):
            rows = [row for row in group.of(method, setting) if row.kind == OURS]
            if not rows:
                continue
            errors = [row.error for row in rows]
            gains = [row.ratio for row in rows if row.ratio is not None]
            plans = [row.plan_seconds for row in rows if row.plan_seconds is not None]
            lines.append(
                [
                    setting_label(method, setting),
                    *(brief(quantile(errors, at)) for at in (0.5, 0.9, 1.0)),
                    f"{quantile([row.cost for row in rows], 0.5):.2g}",
                    f"{sum(row.is_exact for row in rows)} of {len(rows)}",
                    *(times(quantile(gains, at)) for at in (0.5, 0.0, 1.0)),
                    seconds(quantile(plans, 0.5)),
                ]
            )
    timed = next(row for row in group.rows if row.sdpa_seconds is not None)
    heads = f"{timed.together} heads in a call" if timed.together > 1 else "one head in a call"
    title = (
        f"{group.label}, {'causal, ' if timed.causal else ''}{len(group.heads)} heads, {heads}, "
        f"SDPA {seconds(timed.sdpa_seconds)}"
    )
    headings = ["medians over heads", "error", "90th perc.", "worst", "cost", "exact", "speed-up"]
    return Grid(title, [*headings, "least", "most", "planning"], lines)


def equal_cost_table(group: Group) -> Grid:
    """The median error of lists and of every baseline at each budget."""
    others = [name for name in group.methods if group.of(name)[0].kind != OURS]
    lines = [
        [name, *(brief(group.median(name, budget)) for budget in group.budgets)]
        for name in [LISTS, *others]
    ]
    lines.append([MEAN, *([brief(group.mean)] * len(group.budgets))])
    headings = ["median error at a cost of", *(share(budget) for budget in group.budgets)]
    return Grid(f"{group.label}, {len(group.heads)} heads: equal cost", headings, lines)


def growth_table(made: Sequence[Group]) -> Grid:
    """The median time of every setting of ours at each length, and the exponent it grows with."""
    lines = []
    for method, setting in dict.fromkeys(
        (row.method, row.setting) for group in made for row in group.rows if row.kind == OURS
    ):
        took = {
            group.n: quantile([row.seconds or 0.0 for row in rows], 0.5)
            for group in made
            if (rows := group.of(method, setting))
        }
        slope = f"{log_slope(list(took), list(took.values())):.2f}" if len(took) > 1 else "—"
        cells = [seconds(took.get(group.n)) for group in made]
        lines.append([setting_label(method, setting), *cells, slope])
    headings = ["median time", *(f"n={group.n}" for group in made), "exponent"]
    return Grid(f"{made[0].model}: growth of time", headings, lines)


GOOD = 0.05  # median error at which times are compared
EXCESS = 1.25  # times a tolerance: beyond, it is said to be exceeded


def paragraph(group: Group) -> str:
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
