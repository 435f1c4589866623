"""The single-threshold support basis (the paper's Algorithms 1 and 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accuracy.scores import ScoreSample, best_polynomial
from ..errors import InputError
from ..paper import sub_gaussian
from ..plans import ExactHead, HeadPlan, ThresholdHead
from ..plans.cost import Work, polynomial_work
from ..plans.supports import Side, entry_reach, large_tokens, score_reach, sides
from ..polynomials.certified import largest_bound
from ..polynomials.features import check_rank
from ..problem.problem import Head
from .base import Method, check_degree, exact_plan, is_positive

EPSILON = 0.05  # certified relative error that threshold=None asks of the polynomial
RULES = ("sqrt-log", "sub-gaussian")


@dataclass(frozen=True)
class SingleThreshold(Method):
    """Rows with an entry beyond T exactly, the rest by a certified polynomial.

    ``threshold`` compares raw entries of query and key, before the scale:

    - a number: that T for every head;
    - None: the cheapest T for which some polynomial of this degree is certified to 5 %; where
      none is cheaper than exact attention, everything is exact and the plan says so;
    - "sqrt-log": sqrt(ln n), the paper's choice; "sub-gaussian": from a sub-Gaussian fit of the
      entries, so that about sqrt(n) of them are large. For other constants pass the number that
      `sb.analysis.log_threshold` or `sb.analysis.sub_gaussian_threshold` returns.
    """

    threshold: float | str | None = None
    degree: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", check_degree(self.degree))
        if is_positive(self.threshold):
            object.__setattr__(self, "threshold", float(self.threshold))
            return
        if self.threshold is None or self.threshold in RULES:
            return
        raise InputError(
            f"threshold must be a finite number > 0, None or one of {RULES}, got {self.threshold!r}"
        )

    def plan_head(self, head: Head) -> HeadPlan:
        check_rank(head.dim, self.degree)
        if not head.pairs:
            return exact_plan(head, "there are no pairs")
        threshold = self._threshold(head)
        if threshold is None:
            return exact_plan(
                head, f"no threshold has a degree-{self.degree} polynomial within {EPSILON:.0%}"
            )
        epsilon = EPSILON if self.threshold is None else math.inf
        plan = threshold_plan(head, threshold, self.degree, epsilon)
        if self.threshold is None and plan.cost >= 1:
            return exact_plan(
                head, f"T={threshold:.4g} would cost {plan.cost:.3g} times exact attention"
            )
        return plan

    def plan_batch(self, heads: Sequence[Head]) -> list[HeadPlan]:
        """With the smallest threshold of all batch elements, beyond which more is exact."""
        plans = super().plan_batch(heads)
        found = [plan.threshold for plan in plans if isinstance(plan, ThresholdHead)]
        if len(set(found)) <= 1 or len(found) < len(plans):
            return plans
        epsilon = EPSILON if self.threshold is None else math.inf
        return [threshold_plan(head, min(found), self.degree, epsilon) for head in heads]

    def _threshold(self, head: Head) -> float | None:
        if isinstance(self.threshold, (int, float)):
            return float(self.threshold)
        if self.threshold == "sqrt-log":
            return sub_gaussian.log_threshold(max(2, head.n, head.m))
        if self.threshold == "sub-gaussian":
            live = head.live_keys
            key = head.key if live is None else head.key[live]
            return sub_gaussian.sub_gaussian_threshold(head.query, key) if len(key) else None
        return largest_threshold(head, largest_bound(self.degree, EPSILON))


def threshold_plan(
    head: Head,
    threshold: float,
    degree: int,
    epsilon: float = math.inf,
    sample: ScoreSample | None = None,
) -> ExactHead | ThresholdHead:
    """Split at a threshold and pick the polynomial for what is small, certified to epsilon."""
    tokens = large_tokens(head, threshold)
    rows, keys = sides(head, *tokens)
    if _none(rows.small) or _none(keys.small):
        return exact_plan(head, f"at T={threshold:.4g} every row or every key is large")
    reach = min(entry_reach(head, threshold), score_reach(head, rows.small, keys.small))
    sample = sample or ScoreSample.draw(head, rows.small, keys.small)
    work = split_work(head, rows, keys, degree)
    return ThresholdHead(
        n=head.n,
        m=head.m,
        cost=work.cost(head),
        speedup=work.speedup(head),
        polynomial=best_polynomial(sample, degree, reach, epsilon),
        threshold=threshold,
        large=(len(tokens[0]), len(tokens[1])),
    )


def split_work(head: Head, rows: Side, keys: Side, degree: int) -> Work:
    """Exact rectangles, features of the rest, and what the planner reads."""
    large_rows, small_rows = rows.count(head.n)
    large_keys, small_keys = keys.count(head.m)
    share = head.pairs / max(1, head.n * head.m)
    pairs = (large_rows * head.m + small_rows * large_keys) * share
    work = polynomial_work(head, small_rows, small_keys, degree)
    return Work(
        exact_pairs=int(pairs),
        feature_rows=work.feature_rows,
        degree=degree,
        dense_pairs=work.dense_pairs,
        scanned=work.scanned + (head.n + head.m) * head.dim + ScoreSample.MULTIPLY_ADDS * head.dim,
    )


def largest_threshold(head: Head, reach: float) -> float | None:
    """Largest T such that no score of small rows and keys can leave [-reach, reach].

    Rows and keys sorted by their largest entry, with the running maximum of their norms, give
    the range B(T) = min(|scale| d T^2, |scale| max|q| max|k|) at every T that changes the split.
    """
    if score_reach(head, None, head.live_keys) <= reach:  # the common case: nothing to sort
        top = max(float(head.query_maxima.max()), float(head.key_maxima.max()))
        return max(top, torch.finfo(torch.float64).tiny)
    query, query_norms = _sorted_side(head.query_maxima, head.query_norms, None)
    key, key_norms = _sorted_side(head.key_maxima, head.key_norms, head.live_keys)
    candidates = torch.cat([query, key]).unique()
    scale = abs(head.scale)
    by_norm = (
        scale * _running(query, query_norms, candidates) * _running(key, key_norms, candidates)
    )
    by_entry = scale * head.dim * candidates.square()
    feasible = torch.minimum(by_norm, by_entry) <= reach
    count = int(feasible.sum())  # the range grows with T, so the feasible ones come first
    if count == 0 or float(candidates[count - 1]) <= 0:
        return None if count == 0 else torch.finfo(torch.float64).tiny
    return float(candidates[count - 1])


def _sorted_side(maxima: Tensor, norms: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    if live is not None:
        maxima, norms = maxima[live], norms[live]
    ordered, order = maxima.double().sort()
    return ordered, norms[order].cummax(0).values if len(norms) else norms


def _running(ordered: Tensor, norms: Tensor, thresholds: Tensor) -> Tensor:
    """Largest norm among the tokens whose largest entry is at most each threshold."""
    count = torch.searchsorted(ordered, thresholds, right=True)
    return torch.where(count > 0, norms[(count - 1).clamp(min=0)], 0.0)


def _none(index: Tensor | None) -> bool:
    return index is not None and not len(index)
