"""Means over seeds with their intervals, and slopes on log-log scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5 % points of Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
SMALLEST = 1e-16  # errors below, that is none at all, count as this: a logarithm needs a number


@dataclass(frozen=True)
class Interval:
    """A geometric mean with the 95 % interval of Student's t for the mean logarithm.

    One value has no spread to be known: its interval is the value itself.
    """

    mean: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Errors and their ratios are positive and spread over decades: logarithms it is.

        >>> round(Interval.of([0.1, 10.0]).mean, 12)
        1.0
        """
        logs = [math.log(max(value, SMALLEST)) for value in values]
        count, centre = len(logs), sum(logs) / len(logs)
        if not math.isfinite(centre):
            return Interval(math.exp(centre), 0.0, math.inf, count)
        half = 0.0
        if count > 1:
            variance = sum((value - centre) ** 2 for value in logs) / (count - 1)
            half = student(count - 1) * math.sqrt(variance / count)
        low, high = (math.exp(min(centre + side * half, 700)) for side in (-1, 1))
        return Interval(math.exp(centre), low, high, count)


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t; beyond the table, its first-order expansion."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through (log x, log y).

    >>> round(log_slope([1, 4, 16], [8, 4, 2]), 12)
    -0.5
    """
    u, v = ([math.log(value) for value in side] for side in (x, y))
    centre, level = sum(u) / len(u), sum(v) / len(v)
    square = sum((a - centre) ** 2 for a in u)
    return sum((a - centre) * (b - level) for a, b in zip(u, v, strict=True)) / square
