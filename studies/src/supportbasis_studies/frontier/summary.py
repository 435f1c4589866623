"""Medians over heads, and the best baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..statistics import quantile
from .measure import BASELINE, FREE, LISTS, OURS, Row


class Point(NamedTuple):
    """A method at one setting, over the heads that have it: medians, and a band of the errors."""

    setting: float
    x: float  # cost, or time relative to SDPA
    error: float
    low: float  # 10th percentile of the errors
    high: float  # 90th


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
        return self.settings(LISTS)

    @cached_property
    def methods(self) -> list[str]:
        """Ours first; not the mean of V."""
        named = dict.fromkeys(row.method for row in self.rows if row.kind != FREE)
        return sorted(named, key=lambda name: self.of(name)[0].kind != OURS)

    @cached_property
    def baselines(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows if row.kind == BASELINE))

    @cached_property
    def mean(self) -> float:
        """The median error of the mean of V."""
        return quantile([row.error for row in self.rows if row.kind == FREE], 0.5)

    def of(self, method: str, setting: float | None = None) -> list[Row]:
        return [
            row for row in self.rows
            if row.method == method and (setting is None or row.setting == setting)
        ]  # fmt: skip

    def settings(self, method: str) -> list[float]:
        return sorted({row.setting for row in self.of(method)})

    def only(self, head: str) -> Group:
        """The rows of one head."""
        rows = [row for row in self.rows if row.name == head]
        return Group(f"{self.model}, {head}", self.n, rows)

    def errors(self, method: str, budget: float) -> list[float]:
        """Of each head; infinite where a method has no answer within the budget."""
        found = {row.name: row.error for row in self.of(method, budget) if row.is_within}
        return [found.get(head, math.inf) for head in self.heads]

    def median(self, method: str, budget: float) -> float:
        return quantile(self.errors(method, budget), 0.5)

    def best_median(self, budget: float) -> tuple[str, float]:
        """The baseline whose median error is least."""
        name = min(self.baselines, key=lambda method: self.median(method, budget))
        return name, self.median(name, budget)

    def curve(self, method: str, x: Callable[[Row], float]) -> list[Point]:
        """A point for each setting that every head has."""
        points = []
        for setting in self.settings(method):
            rows = self.of(method, setting)
            if len(rows) == len(self.heads):
                low, middle, high = (quantile([r.error for r in rows], s) for s in (0.1, 0.5, 0.9))
                points.append(Point(setting, quantile(map(x, rows), 0.5), middle, low, high))
        return points


def groups(rows: Sequence[Row]) -> list[Group]:
    """By model and length, in order of appearance."""
    keys = dict.fromkeys((row.model, row.n) for row in rows)
    return [Group(*key, [row for row in rows if (row.model, row.n) == key]) for key in keys]
