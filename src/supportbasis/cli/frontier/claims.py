"""What the numbers say: statements with what was measured, and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..report import Grid, times
from .encoder import MODEL
from .errors import MEAN, NAME, VARIANT, Row
from .heads import SYNTHETIC
from .summary import TARGET, Group, KeysNeeded, groups, quantile
from .tables import brief, keys_text, named, share, short
from .timing import AutoRow, Growth

# length → cost, median error, 90th percentile
TRAINED = {4096: (0.15, 0.02, 0.08), 16384: (0.1, 0.01, 0.04), 65536: (0.02, 0.005, 0.08)}
GENERATED = {"diffuse": (0.15, 0.03), "clusters": (0.1, 0.03), "own cluster": (0.1, 0.03)}
GENERATED_LENGTH = 16384
KEYS_FROM, KEYS_TO, KEYS_FACTOR = 4096, 65536, 2.0
GAINS = {16384: 1.0, 65536: 5.0, 131072: 10.0}
GENERATED_GAINS = {65536: 5.0}
EXPONENT = 1.3
EXCESS, BROKEN_SHARE = 1.25, 0.02
CHEAP_AT, CHEAP = (16384, 0.03), 0.3


class Claim(NamedTuple):
    """A statement, what was measured, and whether it holds."""

    text: str
    measured: str
    holds: bool


def claims_table(made: Sequence[Claim]) -> Grid:
    lines = [[claim.text, claim.measured, "yes" if claim.holds else "no"] for claim in made]
    red = frozenset(index for index, claim in enumerate(made) if not claim.holds)
    title = "Statements and what was measured"
    return Grid(title, ["statement", "measured", "holds"], lines, red)


def error_claims(rows: Sequence[Row]) -> list[Claim]:
    """Those about errors at equal cost, for the lengths that were measured."""
    made = []
    for group in groups(rows):
        if group.model == MODEL and group.n in TRAINED:
            budget, median, high = TRAINED[group.n]
            if budget in group.budgets:
                made += _trained_claims(group, budget, median, high)
        if group.model == SYNTHETIC and group.n == GENERATED_LENGTH:
            made += _generated_claims(group)
    return made


def _trained_claims(group: Group, budget: float, median: float, high: float) -> list[Claim]:
    at = f"{group.label}, {len(group.heads)} heads, cost {share(budget)}"
    errors = group.errors(NAME, budget)
    mid, top = quantile(errors, 0.5), quantile(errors, 0.9)
    best, theirs = group.best_median(budget)
    lost = group.losses(budget)
    found = f"ours {brief(mid)}, {short(best)} {brief(theirs)}"
    return [
        Claim(f"{at}: median error ≤ {median:g}", brief(mid), mid <= median),
        Claim(f"{at}: 90th percentile ≤ {high:g}", brief(top), top <= high),
        Claim(f"{at}: median below every baseline's", found, mid < theirs),
        Claim(
            f"{at}: no head > 20 % above its best baseline",
            f"worse on {named(lost)}" if lost else "none is",
            not lost,
        ),
    ]


def _generated_claims(group: Group) -> list[Claim]:
    made = []
    for head, (budget, limit) in GENERATED.items():
        if head in group.heads and budget in group.budgets:
            error = group.error(NAME, budget, head)
            text = f"{head}, n={group.n}, cost {share(budget)}: error ≤ {limit:g}"
            made.append(Claim(text, brief(error), error <= limit))
    return made


def keys_claim(needed: Iterable[KeysNeeded]) -> list[Claim]:
    """That keys for a median error of 2 % hardly grow with the length."""
    medians = {item.n: item for item in needed if item.head == "median" and item.model == MODEL}
    if KEYS_FROM not in medians or KEYS_TO not in medians:
        return []
    first, last = medians[KEYS_FROM], medians[KEYS_TO]
    text = f"{MODEL}: keys for a median error of 2 % grow ≤ 2× from n={KEYS_FROM} to {KEYS_TO}"
    measured = f"{keys_text(first)} → {keys_text(last)}"
    holds = (
        first.keys is not None and last.keys is not None and last.keys <= KEYS_FACTOR * first.keys
    )
    return [Claim(text, measured, holds)]


def time_claims(rows: Sequence[AutoRow], growing: Sequence[Growth]) -> list[Claim]:
    """Those about time, over the heads whose plan is not exact."""
    made = []
    for model, wanted in ((MODEL, GAINS), (SYNTHETIC, GENERATED_GAINS)):
        for n, limit in wanted.items():
            mine = [row for row in rows if (row.model, row.n) == (model, n)]
            gains = {row.name: row.speedup for row in mine if row.speedup is not None}
            if gains:
                made.append(_gain_claim(f"{model}, n={n}", gains, limit, len(mine)))
    if growing:
        worst = max(growing, key=lambda item: item.exponent)
        ends = f"n={worst.lengths[0]} to {worst.lengths[-1]}"
        text = f"time grows with an exponent ≤ {EXPONENT:g} from {ends}"
        measured = f"at most {worst.exponent:.2f}, on head {worst.head}"
        made.append(Claim(text, measured, worst.exponent <= EXPONENT))
    return made


def promise_claims(rows: Sequence[AutoRow]) -> list[Claim]:
    """That Auto keeps its tolerance, and does not do so by being exact."""
    made = []
    for tolerance in dict.fromkeys(row.tolerance for row in rows):
        mine = [row for row in rows if row.tolerance == tolerance]
        broken = [row for row in mine if row.error > EXCESS * tolerance]
        text = f"Auto({tolerance:g}): error beyond {EXCESS:g}× that on at most 2 % of heads"
        measured = f"{len(broken)} of {len(mine)}"
        if broken:
            worst = max(broken, key=lambda row: row.error)
            measured += f", most {brief(worst.error)} on {worst.model} {worst.name}, n={worst.n}"
        made.append(Claim(text, measured, len(broken) <= BROKEN_SHARE * len(mine)))
    cheap = [row for row in rows if (row.model, row.n, row.tolerance) == (MODEL, *CHEAP_AT)]
    if cheap:
        below = sum(row.cost < CHEAP for row in cheap)
        text = f"{MODEL}, n={CHEAP_AT[0]}, Auto({CHEAP_AT[1]:g}): cost < {CHEAP:g} on ⅔ of heads"
        made.append(Claim(text, f"{below} of {len(cheap)}", 3 * below >= 2 * len(cheap)))
    return made


def _gain_claim(at: str, gains: dict[str, float], limit: float, heads: int) -> Claim:
    slowest = min(gains, key=lambda head: gains[head])
    below = [head for head, gain in gains.items() if gain < limit]
    measured = f"least {times(gains[slowest])} on {slowest}, {len(gains)} of {heads} heads"
    if len(below) > 1:
        measured += f", below on {len(below)}"
    return Claim(f"{at}: ≥ {limit:g}× SDPA where not exact", measured, not below)


# ---- sentences -------------------------------------------------------------------------------


def error_findings(group: Group) -> str:
    """How far ours is ahead of the best baseline, over the budgets, and of the sorted variant."""
    ratios, parts = [], []
    for budget in group.budgets:
        best, theirs = group.best_median(budget)
        mine = group.median(NAME, budget)
        if math.isfinite(mine) and math.isfinite(theirs):
            ratios.append((theirs / mine, budget, best, mine, theirs))
    if not ratios:
        return f"{group.label}: no budget at which both ours and a baseline have a median."
    least, most = min(ratios), max(ratios)
    parts.append(
        f"{group.label}: the best baseline's median error is {times(least[0])} to "
        f"{times(most[0])} ours at equal cost (at {share(most[1])}: ours {brief(most[3])}, "
        f"{short(most[2])} {brief(most[4])})"
    )
    absent = [share(b) for b in group.budgets if not math.isfinite(group.median(NAME, b))]
    if absent:
        parts.append(f"the median head has no plan of ours within {', '.join(absent)}")
    variant = _variant_words(group)
    return "; ".join([*parts, variant] if variant else parts) + "."


def _variant_words(group: Group) -> str:
    names = dict.fromkeys(row.method for row in group.rows if row.kind == VARIANT)
    words = []
    for name in names:
        ratios = [
            group.median(name, budget) / group.median(NAME, budget)
            for budget in group.budgets
            if math.isfinite(group.median(NAME, budget))
        ]
        if ratios:
            words.append(
                f"{name}, which is no published method, has {times(min(ratios))} to "
                f"{times(max(ratios))} our median"
            )
    return "; ".join(words)


def head_findings(group: Group) -> str:
    """Where a baseline is better, at the budgets within which ours has plans."""
    parts = []
    for budget in group.budgets:
        if all(group.lacks(budget, head) for head in group.heads):
            continue
        lost = [head for head in group.losses(budget) if not group.lacks(budget, head)]
        if lost:
            parts.append(f"{named(lost)} at {share(budget)}")
    if parts:
        return f"{group.label}: a baseline is more than 20 % better on {'; '.join(parts)}."
    return f"{group.label}: wherever ours has a plan, no baseline is more than 20 % better."


def synthetic_findings(group: Group) -> str:
    """A clause for each generated head: what its cheapest useful budget is."""
    parts = []
    for head in group.heads:
        mean = next(row.error for row in group.rows if row.name == head and row.method == MEAN)
        at = group.budgets[-1]
        error = group.error(NAME, at, head)
        good = [b for b in group.budgets if group.error(NAME, b, head) <= TARGET]
        if good:
            parts.append(f"{head} is within {100 * TARGET:g} % at a cost of {share(good[0])}")
        else:
            reached = "has no plan within" if math.isinf(error) else f"is off by {brief(error)} at"
            parts.append(f"{head} {reached} {share(at)} (mean(V): {brief(mean)})")
    return f"{group.label}: {'; '.join(parts)}."


def exact_findings(rows: Sequence[AutoRow]) -> list[str]:
    """Which heads stay exact and why, for each input."""
    said = []
    for model, n in dict.fromkeys((row.model, row.n) for row in rows):
        mine = [row for row in rows if (row.model, row.n) == (model, n)]
        exact = [row for row in mine if row.kind == "exact"]
        at = f"{model}, n={n}, Auto({mine[0].tolerance:g})"
        if not exact:
            said.append(f"{at}: no head stays exact.")
            continue
        reasons = dict.fromkeys(row.reason for row in exact)
        parts = []
        for reason in reasons:
            heads = [row.name for row in exact if row.reason == reason]
            which = f"all {len(mine)} heads" if len(heads) == len(mine) else ", ".join(heads)
            parts.append(f"{which} ({reason})")
        said.append(f"{at}: exact are {'; '.join(parts)}.")
    return said


def promise_findings(rows: Sequence[AutoRow]) -> list[str]:
    """Whether `Auto` kept its tolerance on rows it did not choose."""
    tried = [row for row in rows if row.kind != "exact"]
    if not tried:
        return []
    broken = [row for row in tried if row.error > row.tolerance]
    if not broken:
        return [f"Every plan of Auto that is not exact ({len(tried)}) keeps its tolerance."]
    names = ", ".join(
        f"{row.model} {row.name} at n={row.n} ({brief(row.error)} for {row.tolerance:g})"
        for row in broken
    )
    return [f"{len(broken)} of {len(tried)} plans of Auto exceed their tolerance: {names}."]
