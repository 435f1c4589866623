"""The tables of the frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence

from supportbasis.cli.report import Grid, seconds, times

from ..statistics import log_slope, quantile
from .measure import LISTS, MEAN, OURS
from .summary import Group


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
