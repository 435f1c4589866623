"""Plans with polynomials fitted to the scores: how many features, and whether they are enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from ..basis import split_of
from ..cost import Work, fitted_work
from ..fitted import FittedKernel, PairSample, choose_spans, count_features
from ..frame import Frame, framed, own_frame, prefix_of
from ..plans import HeadPlan
from ..problem import Head
from ..rows import RowCheck

FEWEST, MOST = 8, 2**15  # features
HALVES = 2  # how often the step between too few features and enough is halved
HOPEFUL = 1.5  # times the tolerance: what is expected to err more is not measured


@dataclass(frozen=True, eq=False)
class FittedSearch:
    """Plans of one head with any number of features."""

    NAME: ClassVar = "polynomial"
    head: Head
    frame: Frame
    sample: PairSample
    far_rows: int
    far_keys: int
    seed: int

    @staticmethod
    def of(head: Head, seed: int) -> FittedSearch | str:
        """The search, or why there can be none."""
        if not head.normalise or head.n < FEWEST or head.m < FEWEST or head.dim == 0:
            return "there is too little to fit a polynomial to"
        frame = own_frame(head)
        if not bool(frame.spectrum.isfinite().all()):
            return "scores are too large for a polynomial"
        sample = PairSample.draw(framed(head, frame), seed)
        if not len(sample.query) or not len(sample.key):
            return "there is too little to fit a polynomial to"
        kernel = FittedKernel((1.0,), (), sample.query_radius, sample.key_radius)
        rows, keys = split_of(_plan(head, frame, kernel), head)
        far = rows.count(head.n)[0], keys.count(head.m)[0]
        return FittedSearch(head, frame, sample, *far, seed)

    def plan(self, features: int) -> HeadPlan | None:
        """The plan with at most that many features, with its cost."""
        spans = choose_spans(self.frame.spectrum, features)
        kernel = self.sample.fit(spans)
        if kernel is None:
            return None
        work = self._work(spans)
        return replace(
            _plan(self.head, self.frame, kernel),
            keys=float(kernel.features + self.far_keys),
            cost=work.cost(self.head),
            speedup=work.speedup(self.head),
        )

    def _work(self, spans: tuple[int, ...]) -> Work:
        return fitted_work(self.head, count_features(spans), self.far_rows, self.far_keys)

    def affordable(self, budget: float) -> HeadPlan | None:
        """Of the largest plans within the budget, the one that is expected to err least: a degree
        that is barely begun may err more than one that is complete."""
        low, high = 0, MOST
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            work = self._work(choose_spans(self.frame.spectrum, middle))
            low, high = (middle, high) if work.cost(self.head) <= budget else (low, middle)
        tried = (self.plan(low * part // 8) for part in (4, 6, 8) if low * part // 8 >= FEWEST)
        plans = [plan for plan in tried if plan is not None and plan.cost <= budget]
        return min(plans, key=self._expected, default=None)

    def within(self, tolerance: float, check: RowCheck, speedup: float) -> HeadPlan | None:
        """The plan of fewest features whose measured error, at its upper limit, is within
        tolerance, if it is predicted to be faster than ``speedup``."""
        most = self._most(speedup)
        last = None if most < FEWEST else self.plan(most)
        if last is None or self._expected(last) > HOPEFUL * tolerance:
            return None
        features, found, short = FEWEST, None, 0
        while found is None and features <= most:
            plan = last if features == most else self.plan(features)
            if plan is None or plan.speedup <= speedup:
                return None
            found = self._measured(plan, tolerance, check)
            short, features = (features, 2 * features) if found is None else (short, features)
        for _ in range(HALVES if found is not None and short else 0):
            middle = round(math.sqrt(short * features))
            plan = self.plan(middle)
            plan = None if plan is None else self._measured(plan, tolerance, check)
            if plan is None:
                short = middle
            else:
                found, features = plan, middle
        return found

    def _most(self, speedup: float) -> int:
        """The most features that are predicted to be faster than ``speedup``; 0: none are."""
        features = FEWEST
        while features <= MOST:
            work = self._work(choose_spans(self.frame.spectrum, features))
            if work.speedup(self.head) <= speedup:
                break
            features *= 2
        return features // 2 if features > FEWEST else 0

    def _measured(self, plan: HeadPlan, tolerance: float, check: RowCheck) -> HeadPlan | None:
        """The plan with its measured error, if that is within tolerance."""
        if self._expected(plan) > HOPEFUL * tolerance:
            return None
        measured, limit = check.error(plan)
        return replace(plan, measured=measured) if limit <= tolerance else None

    def measured(self, plan: HeadPlan) -> HeadPlan:
        """The plan with its measured error."""
        return replace(plan, measured=RowCheck(self.head, 1.0, self.seed).error(plan)[0])

    def _expected(self, plan: HeadPlan) -> float:
        assert plan.fitted is not None
        return self.sample.expected_error(plan.fitted)


def _plan(head: Head, frame: Frame, kernel: FittedKernel) -> HeadPlan:
    exact_rows = prefix_of(head) or 0
    return HeadPlan(
        "fitted", "", head.n, head.m, 1.0, 1.0, fitted=kernel, frame=frame, exact_rows=exact_rows
    )
