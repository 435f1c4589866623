"""Means over seeds and items with their intervals, quantiles, slopes on log-log scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

SMALLEST = 1e-16  # errors below, that is none at all, count as this: a logarithm needs a number
RESAMPLES = 4000


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
        logs = np.log(np.maximum(values, SMALLEST))
        count, centre = len(logs), float(logs.mean())
        if not math.isfinite(centre):
            return Interval(math.exp(centre), 0.0, math.inf, count)
        half = 0.0
        if count > 1:
            half = float(stats.t.ppf(0.975, count - 1) * stats.sem(logs))
        low, high = (math.exp(min(centre + side * half, 700)) for side in (-1, 1))
        return Interval(math.exp(centre), low, high, count)


@dataclass(frozen=True)
class Estimate:
    """A number of percent or points, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def mean_of_sets(sets: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """The mean over sets of the mean over their items, times 100, with the percentile interval of
    a bootstrap that draws items set by set. For two methods on the same items the sets hold
    differences: what both share does not widen the interval.

    >>> mean_of_sets([[1.0] * 5, [0.0] * 5])
    Estimate(value=50.0, low=50.0, high=50.0)
    """
    items = [np.asarray(each) for each in sets]
    value = float(_mean_percent(*items))
    if all(np.ptp(each) == 0 for each in items):
        return Estimate(value, value, value)
    found = stats.bootstrap(
        items, _mean_percent, n_resamples=RESAMPLES, vectorized=True, method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Estimate(value, float(found.low), float(found.high))


def _mean_percent(*sets: Any, axis: int = -1) -> Any:
    return 100 * sum(items.mean(axis=axis) for items in sets) / len(sets)


def quantile(values: Iterable[float], share: float) -> float:
    """By linear interpolation between the sorted values. Some may be infinite, which NumPy's
    quantile turns into NaN.

    >>> quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.0)
    (3.0, 1.0)
    """
    ranked = sorted(values)
    low, rest = divmod(share * (len(ranked) - 1), 1)
    below, above = ranked[int(low)], ranked[math.ceil(low + rest)]
    return below + rest * (above - below) if rest and below != above else below


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through (log x, log y).

    >>> round(log_slope([1, 4, 16], [8, 4, 2]), 12)
    -0.5
    """
    return float(stats.linregress(np.log(x), np.log(y)).slope)
