"""Medians over heads, the best baseline, and keys for a given error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import BASELINE, NAME, OURS, VARIANT, Row

TARGET = 0.02  # the error for which keys are counted
WORSE = 1.2  # an error this many times the best baseline's counts as a loss


def quantile(values: Iterable[float], share: float) -> float:
    """By linear interpolation between the sorted values, some of which may be infinite.

    >>> quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.0)
    (3.0, 1.0)
    """
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = math.floor(place)
    rest = place - low
    if not rest:
        return ranked[low]
    if ranked[low + 1] == math.inf:
        return math.inf
    return ranked[low] + rest * (ranked[low + 1] - ranked[low])


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one model at one length."""

    model: str
    n: int
    rows: Sequence[Row]

    @property
    def label(self) -> str:
        return f"{self.model}, n={self.n}"

    @cached_property
    def heads(self) -> list[str]:
        return list(dict.fromkeys(row.name for row in self.rows))

    @cached_property
    def budgets(self) -> list[float]:
        """Those at which all methods were run."""
        return sorted({row.budget for row in self.rows if row.kind in (BASELINE, VARIANT)})

    @cached_property
    def methods(self) -> list[str]:
        """Ours first."""
        named = dict.fromkeys(row.method for row in self.rows if row.kind != OURS)
        return [NAME, *named]

    @cached_property
    def baselines(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows if row.kind == BASELINE))

    @cached_property
    def _table(self) -> dict[tuple[str, float, str], float]:
        return {
            (row.method, row.budget, row.name): row.error if row.is_within else math.inf
            for row in self.rows
        }

    def error(self, method: str, budget: float, head: str) -> float:
        """Infinite where a method has no answer within the budget."""
        return self._table.get((method, budget, head), math.inf)

    def errors(self, method: str, budget: float) -> list[float]:
        return [self.error(method, budget, head) for head in self.heads]

    def median(self, method: str, budget: float) -> float:
        return quantile(self.errors(method, budget), 0.5)

    def best_median(self, budget: float) -> tuple[str, float]:
        """The baseline whose median error is least."""
        name = min(self.baselines, key=lambda method: self.median(method, budget))
        return name, self.median(name, budget)

    def best_on(self, budget: float, head: str) -> tuple[str, float]:
        """The baseline with the least error on one head."""
        name = min(self.baselines, key=lambda method: self.error(method, budget, head))
        return name, self.error(name, budget, head)

    def lacks(self, budget: float, head: str) -> bool:
        """Whether ours has no plan within the budget."""
        return not math.isfinite(self.error(NAME, budget, head))

    def losses(self, budget: float) -> list[str]:
        """Heads on which our error is more than 20 % above the best baseline's, or which we
        have no plan for."""
        return [
            head
            for head in self.heads
            if self.error(NAME, budget, head) > WORSE * self.best_on(budget, head)[1]
        ]


def groups(rows: Sequence[Row]) -> list[Group]:
    """By model and length, in order of appearance."""
    keys = dict.fromkeys((row.model, row.n) for row in rows)
    return [Group(*key, [row for row in rows if (row.model, row.n) == key]) for key in keys]


@dataclass(frozen=True)
class KeysNeeded:
    """Keys a query for an error of 2 %, on one head or on the median of all."""

    model: str
    head: str
    n: int
    keys: float | None  # in the lists; None: not reached
    paid: float | None  # cost · m: all work, in keys
    at_most: bool  # the cheapest plan was already more accurate


def keys_needed(group: Group, target: float = TARGET) -> list[KeysNeeded]:
    """For each head, and for the median over heads ("median")."""
    mine = [row for row in group.rows if row.kind == OURS and row.is_within]
    by_head = [[row for row in mine if row.name == head] for head in group.heads]
    curves = [[(row.error, row.keys, row.cost * row.n) for row in rows] for rows in by_head]
    found = [
        _needed(group, head, curve, target) for head, curve in zip(group.heads, curves, strict=True)
    ]
    return [*found, _needed(group, "median", _median_curve(mine, len(group.heads)), target)]


Curve = list[tuple[float, float, float]]  # error, keys, paid


def _median_curve(rows: Sequence[Row], heads: int) -> Curve:
    """Medians over the heads at each budget that every head could keep."""
    curve = []
    for budget in sorted({row.budget for row in rows}):
        at = [row for row in rows if row.budget == budget]
        if len(at) == heads:
            columns = ([r.error for r in at], [r.keys for r in at], [r.cost * r.n for r in at])
            error, keys, paid = (quantile(column, 0.5) for column in columns)
            curve.append((error, keys, paid))
    return curve


def _needed(group: Group, head: str, curve: Curve, target: float) -> KeysNeeded:
    """Between the two neighbours on a log-log scale."""
    curve = sorted(curve, key=lambda point: point[1])
    for index, (error, keys, paid) in enumerate(curve):
        if error > target:
            continue
        if index == 0:
            return KeysNeeded(group.model, head, group.n, keys, paid, True)
        before = curve[index - 1]
        share = math.log(before[0] / target) / math.log(before[0] / error)
        between = [a * (b / a) ** share for a, b in zip(before[1:], (keys, paid), strict=True)]
        return KeysNeeded(group.model, head, group.n, between[0], between[1], False)
    return KeysNeeded(group.model, head, group.n, None, None, False)
