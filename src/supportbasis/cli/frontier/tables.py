"""The tables of the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..report import Grid, seconds, times
from .errors import MEAN, NAME, OURS
from .summary import TARGET, Group, KeysNeeded, quantile
from .timing import AutoRow, Growth

FEW = 8  # names in a list


def brief(value: float | None) -> str:
    """An error in two digits; a dash where there is none within the budget."""
    if value is None or not math.isfinite(value):
        return "—"
    return f"{value:.1e}" if value < 1e-3 else f"{value:.2g}"


def share(value: float) -> str:
    return f"{100 * value:g} %"


def short(method: str) -> str:
    """The name in brackets, or the whole one."""
    return method.split("(")[-1].rstrip(")") if "(" in method and method != MEAN else method


def named(heads: Iterable[str]) -> str:
    """A few heads by name, many by their number."""
    listed = list(heads)
    return ", ".join(listed) if len(listed) <= FEW else f"{len(listed)} heads"


def frontier_table(group: Group) -> Grid:
    """Ours and the best baseline at each budget: median and 90th percentile over heads."""
    lines = []
    for budget in group.budgets:
        best, median = group.best_median(budget)
        ours = group.errors(NAME, budget)
        theirs = quantile(group.errors(best, budget), 0.9)
        reached = sum(math.isfinite(error) for error in ours)
        lines.append(
            [
                share(budget),
                brief(quantile(ours, 0.5)),
                brief(quantile(ours, 0.9)),
                f"{reached} of {len(ours)}",
                short(best) if math.isfinite(median) else "—",
                brief(median),
                brief(theirs),
                named(head for head in group.losses(budget) if not group.lacks(budget, head)),
            ]
        )
    title = f"{group.label}, {len(group.heads)} heads: error at equal cost"
    headings = ["cost", "ours: median", "90th perc.", "heads", "best baseline", "median"]
    return Grid(title, [*headings, "90th perc.", "worse by > 20 % on"], lines)


def method_table(group: Group) -> Grid:
    """The median error of every method at each budget."""
    lines = []
    for method in group.methods:
        if method == MEAN:
            mean = quantile([row.error for row in group.rows if row.method == MEAN], 0.5)
            lines.append([MEAN, *([brief(mean)] * len(group.budgets))])
        else:
            medians = [brief(group.median(method, budget)) for budget in group.budgets]
            lines.append([method, *medians])
    headings = ["median error", *(share(budget) for budget in group.budgets)]
    return Grid(f"{group.label}: every method", headings, lines)


def synthetic_table(group: Group, names: bool = True) -> Grid:
    """Each generated head at each budget: ours, and the best baseline with or without its name."""
    lines = []
    for head in group.heads:
        ours = [brief(group.error(NAME, budget, head)) for budget in group.budgets]
        best = [group.best_on(budget, head) for budget in group.budgets]
        theirs = [f"{brief(error)} {short(name) if names else ''}".strip() for name, error in best]
        lines += [[head, *ours], ["  best baseline", *theirs]]
    title = f"{group.label}, d={group.rows[0].d}: error at equal cost"
    return Grid(title, ["head", *(share(budget) for budget in group.budgets)], lines)


def head_table(group: Group, budget: float) -> Grid:
    """Every head at one budget."""
    lines, lost = [], group.losses(budget)
    for head in group.heads:
        sigma = next(row.sigma for row in group.rows if row.name == head)
        name, best = group.best_on(budget, head)
        ours = group.error(NAME, budget, head)
        ratio = f"{ours / best:.2g}" if math.isfinite(ours) and best > 0 else "—"
        lines.append([head, f"{sigma:.2f}", brief(ours), brief(best), short(name), ratio])
    red = frozenset(index for index, head in enumerate(group.heads) if head in lost)
    headings = ["head", "score σ", "ours", "best baseline", "which", "ours / best"]
    return Grid(f"{group.label}, cost {share(budget)}: every head", headings, lines, red)


def causal_table(group: Group) -> Grid:
    """Our method alone, on causal heads."""
    lines = []
    for budget in sorted({row.budget for row in group.rows if row.kind == OURS}):
        found = [e for e in group.errors(NAME, budget) if math.isfinite(e)]
        medians = [brief(quantile(found, s)) if found else "—" for s in (0.5, 0.9)]
        lines.append([share(budget), *medians, f"{len(found)} of {len(group.heads)}"])
    headings = ["cost", "median error", "90th perc.", "heads within the budget"]
    return Grid(f"{group.label}, causal: ours", headings, lines)


# ---- keys, plans and times -------------------------------------------------------------------


def keys_text(needed: KeysNeeded) -> str:
    if needed.keys is None:
        return "not reached"
    return f"{'≤ ' if needed.at_most else ''}{needed.keys:.0f}"


def keys_table(needed: Sequence[KeysNeeded], autos: Sequence[AutoRow]) -> Grid:
    """Keys a query for 2 % at each length: for the median error, and head by head."""
    lines = []
    for n in sorted({item.n for item in needed}):
        whole = next(item for item in needed if item.n == n and item.head == "median")
        heads = [item for item in needed if item.n == n and item.head != "median"]
        keys = [math.inf if item.keys is None else item.keys for item in heads]
        auto = [row.keys for row in autos if row.n == n and row.keys is not None]
        lines.append(
            [
                f"n={n}",
                keys_text(whole),
                "—" if whole.paid is None else f"{whole.paid:.0f}",
                _count(quantile(keys, 0.5)),
                _count(quantile(keys, 0.9)),
                _count(quantile(auto, 0.5)) if auto else "—",
            ]
        )
    title = f"{needed[0].model}: keys a query for an error of {100 * TARGET:g} %"
    headings = ["length", "median error", "all work, in keys", "median head", "90th perc."]
    return Grid(title, [*headings, "Auto, median"], lines)


def _count(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "—"


def plan_table(rows: Sequence[AutoRow]) -> Grid:
    """How many heads `Auto` leaves exact at each length, and the worst error of the others."""
    lines = []
    for model, n in dict.fromkeys((row.model, row.n) for row in rows):
        mine = [row for row in rows if (row.model, row.n) == (model, n)]
        exact = [row.name for row in mine if row.kind == "exact"]
        others = [row for row in mine if row.kind != "exact"]
        errors = [row.error for row in others]
        lines.append(
            [
                f"{model}, n={n}, tolerance {mine[0].tolerance:g}",
                f"{len(others)} of {len(mine)}",
                named(exact) if exact else "none",
                brief(quantile(errors, 0.5)) if errors else "—",
                brief(max(errors)) if errors else "—",
            ]
        )
    headings = ["input", "not exact", "exact heads", "median error", "largest error"]
    return Grid("What Auto does", headings, lines)


def time_table(rows: Sequence[AutoRow]) -> Grid:
    """Time against SDPA at each length, over the heads whose plan is not exact."""
    lines = []
    for model, n in dict.fromkeys((row.model, row.n) for row in rows):
        mine = [row for row in rows if (row.model, row.n) == (model, n)]
        timed = [row for row in mine if row.seconds is not None]
        gains = [row.speedup for row in timed if row.speedup is not None]
        cells = [times(quantile(gains, s)) for s in (0.0, 0.5, 1.0)] if gains else ["—"] * 3
        ours = [row.seconds for row in timed if row.seconds is not None]
        exact = [row.sdpa_seconds for row in timed if row.sdpa_seconds is not None]
        lines.append(
            [
                f"{model}, n={n}, tolerance {mine[0].tolerance:g}",
                f"{len(timed)} of {len(mine)}",
                seconds(quantile(ours, 0.5) if ours else None),
                seconds(quantile(exact, 0.5) if exact else None),
                *cells,
            ]
        )
    headings = ["input", "timed", "ours, median", "SDPA", "least gain", "median", "largest"]
    return Grid("Auto with a saved plan against SDPA", headings, lines)


def growth_table(made: Sequence[Growth]) -> Grid:
    """Seconds against length, head by head."""
    lengths = sorted({n for item in made for n in item.lengths})
    lines = []
    for item in made:
        by_length = dict(zip(item.lengths, item.seconds, strict=True))
        cells = [seconds(by_length.get(n)) for n in lengths]
        lines.append([item.head, *cells, f"{item.exponent:.2f}"])
    return Grid("Growth of time", ["head", *(f"n={n}" for n in lengths), "exponent"], lines)
