"""The single-threshold support basis (the paper's Algorithms 1 and 3)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..accuracy.estimates import SAMPLED_SCORES, best_polynomial
from ..errors import InputError
from ..paper import sub_gaussian
from ..plans import ExactHead, HeadPlan, ThresholdHead
from ..plans.cost import pair_work, polynomial_work, work_of
from ..plans.supports import Side, is_empty, score_reach, split_at, take
from ..polynomials.certified import largest_bound
from ..polynomials.features import check_rank, largest_degree
from ..problem.checks import check_number
from ..problem.problem import Head
from .base import Method, derived_degree, exact_plan, live_count, polynomial_settings, strictest

EPSILON = 0.05  # certified relative error that threshold=None asks of the polynomial
RULES = ("sqrt-log", "sub-gaussian")


@dataclass(frozen=True, repr=False)
class SingleThreshold(Method):
    """Rows with an entry beyond T exactly, the rest by a certified polynomial.

    ``threshold`` is T, which raw entries of query and key are compared with, before the scale; or

    - None: the cheapest T for which some polynomial of this degree is certified to 5 %; where
      none is cheaper than exact attention, everything is exact;
    - "sqrt-log": sqrt(c ln n), the paper's choice, with ``c`` 1 unless given (Theorem 1.3: c < 1);
    - "sub-gaussian": `sb.analysis.sub_gaussian_threshold`, at which about sqrt(n) of the entries
      are large.

    ``degree`` is 2 unless it is given, or derived from ``epsilon``: the smallest one certified to
    |p(z) - exp(z)| <= epsilon exp(z) on all scores of small rows, as in Algorithm 1. With
    ``threshold=None`` T and degree are those of least cost. ``polynomial`` is the kind: "taylor",
    "chebyshev" (the paper's), "minimax" (of least relative error), or "auto", the one of least
    expected error on a sample of the scores.

    >>> import supportbasis as sb
    >>> sb.SingleThreshold("sqrt-log", epsilon=0.01, c=0.5)
    SingleThreshold(threshold='sqrt-log', epsilon=0.01, c=0.5)
    """

    threshold: float | str | None = None
    degree: int | None = None
    epsilon: float | None = None
    polynomial: str = "auto"
    c: float | None = None

    def __post_init__(self) -> None:
        self._set(**polynomial_settings(self.degree, self.epsilon, self.polynomial))
        if self.c is not None:
            if self.threshold != "sqrt-log":
                raise InputError(
                    f"c is {self.c!r}, but only threshold='sqrt-log' has a constant; got "
                    f"threshold={self.threshold!r}"
                )
            self._set(c=check_number("c", self.c))
        if self.threshold not in (None, *RULES):
            wanted = f"> 0, None or one of {RULES}"
            self._set(threshold=check_number("threshold", self.threshold, wanted))

    def plan_head(self, head: Head) -> HeadPlan:
        if self.degree is not None:
            check_rank(head.dim, self.degree)
        if not head.pairs or not live_count(head):
            return exact_plan(head, "there are no pairs")
        threshold = self.threshold
        if threshold is None:
            return self._cheapest(head)
        if threshold == "sqrt-log":
            threshold = sub_gaussian.log_threshold(max(2, head.n, head.m), self.c or 1.0)
        elif isinstance(threshold, str):
            keys = take(head.key, head.live_keys)
            threshold = sub_gaussian.sub_gaussian_threshold(head.query, keys)
        return self._at(head, threshold, self.degree)

    def shared(self, heads: Sequence[Head], plans: Sequence[HeadPlan]) -> Sequence[HeadPlan]:
        """With the smallest threshold of all batch elements, beyond which more is exact."""
        found = [plan for plan in plans if isinstance(plan, ThresholdHead)]
        least = min(plan.threshold for plan in found)
        if all(plan.threshold == least for plan in found):
            return plans
        highest = max(plan.degree for plan in found)
        degree = highest if self.threshold is None else self.degree
        return [self._at(head, least, degree) for head in heads]

    @property
    def _epsilon(self) -> float:
        """Certified error that is asked of the polynomial."""
        return self.epsilon or (EPSILON if self.threshold is None else math.inf)

    def _at(self, head: Head, threshold: float, degree: int | None) -> ExactHead | ThresholdHead:
        return threshold_plan(head, threshold, degree, self._epsilon, self.polynomial)

    def _cheapest(self, head: Head) -> HeadPlan:
        """The cheapest threshold whose polynomial is certified, of all degrees if none is given."""
        kind, keys, given = strictest(self.polynomial), live_count(head), self.degree
        plans: list[ExactHead | ThresholdHead] = []
        last = -1.0
        for degree in range(largest_degree(head.dim) + 1) if given is None else (given,):
            least = min((plan.cost for plan in plans), default=1.0)
            if given is None and polynomial_work(head, head.n, keys, degree).cost(head) > least:
                break  # of a split the cost is more still, or that of exact attention
            reach = largest_bound(degree, self._epsilon, kind)
            if reach <= last:
                break  # rounding, not the degree, limits the range
            last = reach
            if (threshold := largest_threshold(head, reach)) is not None:
                plans.append(self._at(head, threshold, degree))
        if not plans:
            which = "polynomial" if given is None else f"degree-{given} polynomial"
            return exact_plan(head, f"no threshold has a {which} within {self._epsilon:.3g}")
        best = min(plans, key=lambda plan: plan.cost)
        if isinstance(best, ThresholdHead) and best.cost >= 1:
            reason = f"T={best.threshold:.4g} would cost {best.cost:.3g} times exact attention"
            return exact_plan(head, reason)
        return best


def threshold_plan(
    head: Head, threshold: float, degree: int | None, epsilon: float = math.inf, kind: str = "auto"
) -> ExactHead | ThresholdHead:
    """Split at a threshold and pick the polynomial for what is small, certified to epsilon; without
    a degree, of the smallest one that can be."""
    rows, keys = split_at(head, threshold)
    if is_empty(rows.small) or is_empty(keys.small):
        return exact_plan(head, f"at T={threshold:.4g} every row or every key is large")
    reach = small_reach(head, threshold, rows, keys)
    degree = derived_degree(epsilon, reach, head.dim, kind) if degree is None else degree
    if degree is None:
        reason = (
            f"at T={threshold:.4g} scores reach {reach:.4g}, where no polynomial of degree <= "
            f"{largest_degree(head.dim)}, the highest for head dim {head.dim}, is certified to "
            f"epsilon={epsilon:.3g}"
        )
        return exact_plan(head, reason)
    poly = best_polynomial(head, rows.small, keys.small, degree, reach, epsilon, kind=kind)
    (large_rows, small_rows), (large_keys, small_keys) = rows.sizes(head.n), keys.sizes(head.m)
    work = polynomial_work(head, small_rows, small_keys, degree)
    work += pair_work(head, large_rows * head.m + small_rows * large_keys)
    work += work_of(head, scanned=(head.n + head.m + SAMPLED_SCORES) * head.dim)
    large = (large_rows, large_keys)
    return ThresholdHead(polynomial=poly, threshold=threshold, large=large, **work.settings(head))


def largest_threshold(head: Head, reach: float) -> float | None:
    """Largest T such that no score of small rows and keys can leave [-reach, reach]: their range
    grows with T, and the split changes only at entries of the data."""
    keys = take(head.key_maxima, head.live_keys)
    candidates = torch.cat([head.query_maxima, keys]).unique().tolist()
    count = bisect_right(candidates, reach, key=lambda t: small_reach(head, t, *split_at(head, t)))
    return max(candidates[count - 1], torch.finfo(torch.float64).tiny) if count else None


def small_reach(head: Head, threshold: float, rows: Side, keys: Side) -> float:
    """Largest possible |score| of small rows and keys: by the threshold alone it is |scale| d T^2
    (Lemma B.8 has scale = 1/d)."""
    by_entry = abs(head.scale) * head.dim * threshold**2
    return min(by_entry, score_reach(head, rows.small, keys.small))
