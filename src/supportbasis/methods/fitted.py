"""Far tokens exactly, the rest by a polynomial fitted to the scores: for diffuse heads."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from ..accuracy.estimates import RowCheck
from ..errors import InputError
from ..plans import FittedHead, HeadPlan
from ..plans.cost import Work, fitted_work
from ..polynomials.balancing import balancing_transform, prefix_of, transformed
from ..polynomials.fitting import FittedKernel, PairSample, choose_spans, count_features
from ..problem.checks import check_integer, check_number, check_seed
from ..problem.problem import Head
from .base import Method, exact_plan

FEWEST, USUAL, MOST = 8, 1024, 2**15  # features
BISECTIONS = 2  # of the interval between too few features and enough
UNFIT = "scores are too large, or all equal, to fit a polynomial to"
MEASURED_BELOW = 1.5  # times the tolerance: plans of a larger expected error are not measured


@dataclass(frozen=True)
class FittedPolynomial(Method):
    """Queries and keys far from the others exactly, the rest by a polynomial of the scores,

        p(x, y) = a_0 + a_1 <x, y>_1 + ... + a_g <x, y>_g ^ g,

    where <x, y>_k is the inner product in the r_k directions in which scores vary most, and the
    coefficients are fitted to sampled pairs. It suits diffuse heads, whose scores vary little, and
    costs about (n + m) / (n m) of exact attention for each feature (monomial).

    ``features`` is the most that it may have, 1024 unless given and 32768 at most; a measured error
    above 5 % is warned about. With a ``tolerance`` for the relative Frobenius error of a head's
    output instead, there are the fewest features found whose measured error, at its upper limit
    (95 % confidence), is within it. A head for which that is not cheaper than exact attention is
    exact. No bound is proved: the certificate measures.

    >>> import torch, supportbasis as sb
    >>> generator = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 1, 2000, 8, generator=generator) / 2
    >>> result = sb.attention(
    ...     q, k, v, method=sb.FittedPolynomial(tolerance=0.02), return_result=True
    ... )
    >>> result.plan.heads[0].kind, result.certificate.holds(0.02)
    ('fitted', True)
    """

    features: int | None = None  # 1024 where there is no tolerance either
    tolerance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.features is not None and self.tolerance is not None:
            raise InputError("features and tolerance are both given; expected one of them")
        if self.tolerance is None:
            features = USUAL if self.features is None else self.features
            self._set(features=check_integer("features", features, FEWEST))
        else:
            self._set(tolerance=check_number("tolerance", self.tolerance))
        self._set(seed=check_seed(self.seed))

    def plan_head(self, head: Head) -> HeadPlan:
        search = FittedSearch.of(head, self.seed)
        if isinstance(search, str):
            return exact_plan(head, search)
        most = search.most(limit=self.features or MOST)
        if not most:
            return exact_plan(head, f"{FEWEST} features cost as much as exact attention")
        if self.tolerance is not None:
            check = RowCheck(head, self.tolerance, self.seed)
            reason = f"no fitted polynomial within {self.tolerance:g} is cheaper than exact"
            return search.within(check, 0.0) or exact_plan(head, reason)
        plan = search.plan(most)
        if plan is None:
            return exact_plan(head, UNFIT)
        error, _ = RowCheck(head, 1.0, self.seed).error(plan)
        if error < 1:  # that of zeros
            return replace(plan, measured=error)
        fault = f"errs by {error:.2g}" if error < math.inf else "fails on more than 1 % of the rows"
        return exact_plan(head, f"a fitted polynomial of {plan.fitted.features} features {fault}")


@dataclass(frozen=True, eq=False)
class FittedSearch:
    """Plans of one head with any number of features."""

    head: Head
    start: FittedHead  # the transform, the radii and rows that are exact; a constant as polynomial
    sample: PairSample
    far_rows: int
    far_keys: int

    @staticmethod
    def of(head: Head, seed: int) -> FittedSearch | str:
        """The search, or why there can be none."""
        if not head.normalise:
            return "polynomials are fitted to softmax attention, not to kernel sums"
        if head.is_causal and head.query.is_cuda:
            return "causal fitted polynomials are slower than exact attention on a GPU"
        if head.n < FEWEST or head.m < FEWEST or head.dim == 0:
            return "there is too little to fit a polynomial to"
        transform = balancing_transform(head)
        if not transform.fits(head.dtype):
            return UNFIT
        sample = PairSample.draw(transformed(head, transform), seed)
        if not len(sample.query) or not len(sample.key):
            return "there is too little to fit a polynomial to"
        kernel = FittedKernel((1.0,), (), sample.query_radius, sample.key_radius)
        start = FittedHead(
            n=head.n, m=head.m, fitted=kernel, transform=transform, exact_rows=prefix_of(head) or 0
        )
        rows, keys = start.split(head)
        return FittedSearch(head, start, sample, rows.sizes(head.n)[0], keys.sizes(head.m)[0])

    def plan(self, features: int) -> FittedHead | None:
        """The plan with at most that many features, with its cost."""
        spans = self._spans(features)
        kernel = self.sample.fit(spans)
        if kernel is None:
            return None
        keys, work = float(kernel.features + self.far_keys), self._work(spans)
        return replace(self.start, fitted=kernel, keys=keys, **work.settings(self.head))

    def _spans(self, features: int) -> tuple[int, ...]:
        return choose_spans(self.start.transform.eigenvalues, features)

    def _work(self, spans: tuple[int, ...]) -> Work:
        return fitted_work(self.head, count_features(spans), self.far_rows, self.far_keys)

    def most(self, speedup: float = 0.0, limit: int = MOST) -> int:
        """The most features up to the limit that cost less than exact attention and are predicted
        to be faster than ``speedup``; 0: there are none."""

        def costs_too_much(features: int) -> bool:
            work = self._work(self._spans(features))
            return work.cost(self.head) >= 1 or work.speedup(self.head) <= speedup

        most = bisect_left(range(min(limit, MOST) + 1), True, key=costs_too_much) - 1
        return most if most >= FEWEST else 0

    def within(self, check: RowCheck, speedup: float) -> FittedHead | None:
        """The plan of fewest features found whose measured error, at its upper limit, is within
        tolerance; None where there is none that is cheaper than exact attention and predicted to
        be faster than ``speedup``."""
        most = self.most(speedup)
        last = self.plan(most) if most else None
        if last is None or not self._is_likely(last, check):
            return None
        short, features, found = 0, FEWEST // 2, None
        while found is None and features < most:
            short, features = features, min(2 * features, most)
            found = self._measured(self.plan(features), check)
        for _ in range(BISECTIONS if found is not None and short >= FEWEST else 0):
            middle = round(math.sqrt(short * features))
            if plan := self._measured(self.plan(middle), check):
                found, features = plan, middle
            else:
                short = middle
        return found

    def _measured(self, plan: FittedHead | None, check: RowCheck) -> FittedHead | None:
        """The plan with its measured error, if there is one and that is within tolerance."""
        if plan is None or not self._is_likely(plan, check):
            return None
        measured, limit = check.error(plan)
        return replace(plan, measured=measured) if limit <= check.tolerance else None

    def _is_likely(self, plan: FittedHead, check: RowCheck) -> bool:
        return self.sample.expected_error(plan.fitted) <= MEASURED_BELOW * check.tolerance
