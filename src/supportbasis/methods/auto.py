"""Auto: the fastest of polynomial, threshold, fitted polynomial and lists within a tolerance."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch

from ..accuracy.estimates import RowCheck, density_scale, expected_error, largest_error
from ..plans import HeadPlan, ListHead, PolynomialHead, ThresholdHead
from ..plans.cost import exact_seconds, polynomial_work
from ..plans.supports import take
from ..polynomials.features import largest_degree
from ..problem.checks import check_number, check_seed
from ..problem.problem import Head
from .base import Method, exact_plan
from .fitted import FittedSearch
from .list_search import WIDE_BLOCK, ListSearch, fastest_lists
from .single_threshold import threshold_plan

# calls faster than this are computed exactly: planning would cost more than it saves, in one call
# or in many calls with the same plan; on a GPU only the latter limit is used
PLANNING_SECONDS, REUSED_SECONDS = {"cpu": 0.02, "cuda": 1e-3}, {"cpu": 5e-3, "cuda": 2e-4}
SHARES = (0.0, 0.001, 0.004, 0.015, 0.05)  # of tokens that a candidate threshold makes large
FEW_KEYS = 0.01  # of all, in open leaves, where wider blocks may do
WORTHWHILE = 1.3  # predicted speedup over exact attention, with a margin for wrong predictions
MARGIN = 0.8  # of the tolerance that an estimate may use up before it is verified


@dataclass(frozen=True)
class Auto(Method):
    """For each head, the fastest plan found within ``tolerance``: a polynomial, a threshold with a
    polynomial, a polynomial fitted to the scores, or lists of exact and tilted keys.

    The tolerance is the relative Frobenius error of a head's output (for `gaussian_kde` the
    largest error over the largest density). Plans are verified on sampled query rows against all
    keys, where the upper limit of the error (95 % confidence) must be within the tolerance. Else
    the head is exact, as it is where exact attention takes less than a search; `sb.plan`, whose
    plan may serve many calls, searches where a call would not."""

    tolerance: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        tolerance = check_number("tolerance", self.tolerance)
        self._set(tolerance=tolerance, seed=check_seed(self.seed))

    def plan_head(self, head: Head) -> HeadPlan:
        limit = exact_seconds(head)
        cheapest = polynomial_work(head, head.n, head.m, 0).seconds(head)
        cheapest = min(cheapest, limit / fastest_lists(head))
        seconds = REUSED_SECONDS if head.is_reused else PLANNING_SECONDS
        least = seconds.get(head.query.device.type, seconds["cpu"])
        if limit < least + cheapest:
            return exact_plan(head, "below the length where an approximation pays")
        search = _Search(head, self.tolerance, self.seed)
        best: HeadPlan | None = None
        for find in (search.certified, search.fitted, search.lists):
            best = find(WORTHWHILE if best is None else best.speedup) or best
        reason = f"no plan within {self.tolerance:g} is predicted to be faster"
        return best or exact_plan(head, reason)


class _Search:
    """One head's search: `certified`, `fitted` and `lists` find the plan of their kind within the
    tolerance, if there is one that is predicted to be faster than ``speedup``."""

    def __init__(self, head: Head, tolerance: float, seed: int):
        self.head, self.tolerance, self.seed = head, tolerance, seed
        self.limit = exact_seconds(head)
        keys = take(head.key_maxima, head.live_keys)
        self.maxima = torch.cat([head.query_maxima, keys]).sort().values
        self.top_degree, highest = 0, largest_degree(head.dim)
        while self.top_degree < highest and self.feature_seconds(self.top_degree + 1) < self.limit:
            self.top_degree += 1  # to the last whose features alone are faster than exact attention

    def certified(self, speedup: float) -> HeadPlan | None:
        """Polynomials, with a threshold or without: at a few thresholds of the least degree whose
        estimated error is within the margin, or of one more, in case the estimate was too low."""
        last = self.plan(self.threshold(SHARES[-1]), self.top_degree)
        if last is not None and not self.is_within(last):
            return None  # nor is any plan of a lower degree or of a higher threshold
        best, features = None, self.feature_seconds(0)
        for share in SHARES:
            if 1.5 * speedup * (features + 2 * share * self.limit) > self.limit:
                break  # the exact part alone leaves too little to gain
            threshold = self.threshold(share)
            degree = self.smallest_degree(threshold)
            for plan in (self.plan(threshold, degree), self.plan(threshold, degree + 1)):
                if plan is not None and plan.speedup > speedup and (found := self.verified(plan)):
                    best, speedup = found, found.speedup
                    break
        return best

    def fitted(self, speedup: float) -> HeadPlan | None:
        search = FittedSearch.of(self.head, self.seed)
        return None if isinstance(search, str) else search.within(self.check, speedup)

    def lists(self, speedup: float) -> ListHead | None:
        """Where few leaves have to be open, wider blocks are tried first: they cost less."""
        head, tolerance, wide = self.head, self.tolerance, fastest_lists(self.head, WIDE_BLOCK)
        if max(fastest_lists(head), wide) <= speedup:
            return None
        search = ListSearch.of(head, None, None, self.seed, tolerance)
        if isinstance(search, str) or (likely := search.likely(tolerance)) is None:
            return None
        least = max(speedup, likely.speedup)
        if likely.keys <= FEW_KEYS * head.m and wide > least:
            wider = ListSearch.of(head, WIDE_BLOCK, None, self.seed, tolerance)
            if not isinstance(wider, str) and (plan := wider.within(tolerance, least)):
                return plan
        return search.within(tolerance, speedup)

    @cached_property
    def check(self) -> RowCheck:
        return RowCheck(self.head, self.tolerance, self.seed)

    @cached_property
    def log_peak(self) -> float:
        return density_scale(self.head, self.seed)

    def feature_seconds(self, degree: int) -> float:
        return polynomial_work(self.head, self.head.n, self.head.m, degree).seconds(self.head)

    def threshold(self, share: float) -> float:
        """T that makes about this share of the tokens large."""
        position = math.ceil((1 - share) * (len(self.maxima) - 1))
        return max(float(self.maxima[position]), torch.finfo(torch.float64).tiny)

    def smallest_degree(self, threshold: float) -> int:
        """The least degree whose estimated error, which falls with the degree, is within the
        margin; beyond the highest where there is none."""
        degrees = range(self.top_degree + 1)
        return bisect_left(
            degrees, True, key=lambda degree: self.is_within(self.plan(threshold, degree))
        )

    def plan(self, threshold: float, degree: int) -> ThresholdHead | None:
        plan = threshold_plan(self.head, threshold, degree) if degree <= self.top_degree else None
        return plan if isinstance(plan, ThresholdHead) else None

    def is_within(self, plan: ThresholdHead | None) -> bool:
        return plan is not None and self.estimate(plan) <= MARGIN * self.tolerance

    def estimate(self, plan: ThresholdHead) -> float:
        """Expected error from sampled scores; for a density, an upper bound."""
        head = self.head
        if head.is_density:
            return largest_error(head, plan, self.log_peak)
        share = self.check.small_share(plan) if head.normalise and plan.large[1] else 1.0
        return share * expected_error(head, *plan.smooth(head), plan.polynomial)

    def verified(self, plan: ThresholdHead) -> PolynomialHead | None:
        """The plan with its error on sampled rows against all keys, if that is within tolerance at
        its upper limit; a plain polynomial where nothing is large."""
        if self.head.is_density:
            measured = limit = self.estimate(plan)
        else:
            measured, limit = self.check.error(plan)
        if not limit <= self.tolerance:
            return None
        if plan.large != (0, 0):
            return replace(plan, measured=measured)
        shared = {field.name: getattr(plan, field.name) for field in fields(PolynomialHead)}
        return PolynomialHead(**shared | {"measured": measured})
