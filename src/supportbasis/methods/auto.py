"""Auto: the cheapest of polynomial and single threshold that meets a tolerance, else exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..basis import split_of
from ..cost import exact_seconds, polynomial_work
from ..density import density_error, density_scale
from ..errors import InputError
from ..features import largest_degree
from ..plans import HeadPlan
from ..problem import Head
from ..rows import RowCheck
from ..scores import ScoreSample
from .base import Method, is_positive
from .exact import exact_plan
from .single_threshold import threshold_plan

PLANNING_SECONDS = 0.02  # what a search costs; exact attention below that is left alone
SHARES = (0.0, 0.001, 0.004, 0.015, 0.05)  # of tokens that a candidate threshold makes large
MARGIN = 0.8  # of the tolerance that an estimate may use up before it is verified
ATTEMPTS = 4


@dataclass(frozen=True)
class Auto(Method):
    """For each head, searches degree and threshold for the cheapest plan within ``tolerance``.

    The tolerance is the relative Frobenius error of a head's output (for `gaussian_kde` the
    largest error over the largest density). Candidates are screened on a sample of scores; the
    cheapest in predicted time is verified on sampled query rows against all keys, where the upper
    limit of its error (95 % confidence) must be within the tolerance. Else the head is exact.
    """

    tolerance: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_positive(self.tolerance):
            raise InputError(f"tolerance must be a finite number > 0, got {self.tolerance!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed must be an integer, got {self.seed!r}")

    def plan_head(self, head: Head) -> HeadPlan:
        limit = exact_seconds(head)
        cheapest = polynomial_work(head, head.n, head.m, 0).seconds(head)
        if limit < PLANNING_SECONDS + cheapest:
            return exact_plan(head, "below the length where an approximation pays")
        search = _Search(head, self.tolerance, self.seed)
        plans = [search.smallest_degree(share) for share in SHARES]
        useful = [plan for plan in plans if plan is not None and plan.speedup > 1]
        for plan in search.verified(sorted(useful, key=lambda p: -p.speedup)):
            return plan
        return exact_plan(head, f"no cheaper plan within {self.tolerance:g}")


class _Search:
    """One head's search: an estimate of the error of a plan, and its verification."""

    def __init__(self, head: Head, tolerance: float, seed: int):
        self.head, self.tolerance, self.seed = head, tolerance, seed
        self.is_density = head.query_log_weight is not None
        self.maxima = torch.cat([head.query_maxima, head.key_maxima]).double().sort().values
        self.top_degree = self._top_degree()
        self.estimate = self._density_error if self.is_density else self._sampled_error
        self._peak = density_scale(head, seed) if self.is_density else 0.0

    def _top_degree(self) -> int:
        """Highest degree whose features alone are faster than exact attention."""
        head, degree = self.head, 0
        limit, top = exact_seconds(head), largest_degree(head.dim)
        while degree < top:
            if polynomial_work(head, head.n, head.m, degree + 1).seconds(head) >= limit:
                break
            degree += 1
        return degree

    def threshold(self, share: float) -> float:
        """T that makes about this share of the tokens large."""
        position = math.ceil((1 - share) * (len(self.maxima) - 1))
        return max(float(self.maxima[position]), torch.finfo(torch.float64).tiny)

    def smallest_degree(self, share: float) -> HeadPlan | None:
        """The plan of least degree whose estimated error is within the margin."""
        threshold = self.threshold(share)
        low, high, found = 0, self.top_degree, None
        while low <= high:  # the error falls with the degree
            degree = (low + high) // 2
            plan = self._candidate(threshold, degree)
            if plan is None:
                return None
            if self.estimate(plan) <= MARGIN * self.tolerance:
                found, high = plan, degree - 1
            else:
                low = degree + 1
        return found

    def _candidate(self, threshold: float, degree: int) -> HeadPlan | None:
        plan = threshold_plan(self.head, threshold, degree)
        if plan.polynomial is None:
            return None
        assert plan.large_rows is not None
        assert plan.large_keys is not None
        if len(plan.large_rows) == 0 and len(plan.large_keys) == 0:
            return replace(
                plan, kind="polynomial", threshold=None, large_rows=None, large_keys=None
            )
        return plan

    def _sampled_error(self, plan: HeadPlan) -> float:
        assert plan.polynomial is not None
        rows, keys = None, self.head.live_keys
        if plan.kind == "single-threshold":
            rows, keys = (side.small for side in split_of(plan, self.head))
        return ScoreSample.draw(self.head, rows, keys).expected_error(plan.polynomial)

    def _density_error(self, plan: HeadPlan) -> float:
        return density_error(self.head, plan, self._peak)

    def verified(self, plans: list[HeadPlan]) -> Iterator[HeadPlan]:
        """Plans whose error on sampled rows against all keys is within the tolerance."""
        check: Callable[[HeadPlan], tuple[float, float]]
        if self.is_density:
            check = lambda plan: (self.estimate(plan),) * 2  # noqa: E731
        else:
            check = RowCheck(self.head, self.tolerance, self.seed).error
        for plan in plans[:ATTEMPTS]:
            for attempt in _escalations(self, plan):
                measured, limit = check(attempt)
                if limit <= self.tolerance:
                    yield replace(attempt, measured=measured)
                    break


def _escalations(search: _Search, plan: HeadPlan) -> Iterator[HeadPlan]:
    """The plan, then the same threshold one degree higher, while that still pays."""
    yield plan
    assert plan.polynomial is not None
    degree = plan.polynomial.degree + 1
    threshold = plan.threshold or search.threshold(0.0)
    if degree <= search.top_degree:
        higher = search._candidate(threshold, degree)
        if higher is not None and higher.speedup > 1:
            yield higher
