"""One polynomial for the whole score matrix (AS23; the paper's Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..accuracy.scores import BUILDERS, ScoreSample, best_polynomial
from ..errors import InputError
from ..plans import HeadPlan, PolynomialHead
from ..plans.cost import polynomial_work
from ..plans.supports import score_reach
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import check_rank
from ..problem.problem import Head
from .base import Method, is_positive
from .choice import (
    check_polynomial,
    degree_or_error,
    derived_degree,
    highest_degree,
    short_repr,
    strictest,
)


@dataclass(frozen=True, repr=False)
class Polynomial(Method):
    """exp(z) is replaced by a polynomial on [-B, B]: its Chebyshev interpolant (AS23).

    ``bound`` is B; None takes |scale| max|q| max|k| for each head. ``degree`` is 2 unless it is
    given, or derived from ``epsilon``: the smallest one at which the polynomial is certified to
    |p(z) - exp(z)| <= epsilon exp(z) on [-B, B], as in Algorithm 2. ``polynomial`` is the kind:
    "chebyshev", "taylor", "minimax" (of least relative error), or "auto", the one of least expected
    error on a sample of the scores.

    The method never switches to exact work: a row whose denominator is unusable (the polynomial
    went negative or cancelled) returns zeros and lse -inf, is counted in
    ``certificate.invalid_rows`` and warned about once.

    >>> import supportbasis as sb
    >>> sb.Polynomial(), sb.Polynomial(epsilon=0.01, polynomial="minimax")
    (Polynomial(degree=2, bound=None), Polynomial(bound=None, epsilon=0.01, polynomial='minimax'))
    """

    degree: int | None = None
    bound: float | None = None
    epsilon: float | None = None
    polynomial: str = "chebyshev"

    def __post_init__(self) -> None:
        degree, epsilon = degree_or_error(self.degree, self.epsilon)
        object.__setattr__(self, "degree", degree)
        object.__setattr__(self, "epsilon", epsilon)
        check_polynomial(self.polynomial)
        if self.bound is None:
            return
        if not is_positive(self.bound):
            raise InputError(f"bound must be a finite number > 0 or None, got {self.bound!r}")
        object.__setattr__(self, "bound", float(self.bound))

    __repr__ = short_repr

    def plan_head(self, head: Head) -> HeadPlan:
        live = head.live_keys
        reach = score_reach(head, None, live) if self.bound is None else float(self.bound)
        degree = self._degree(head, reach)
        check_rank(head.dim, degree)
        keys = head.m if live is None else len(live)
        work = polynomial_work(head, head.n, keys, degree)
        return PolynomialHead(
            n=head.n,
            m=head.m,
            cost=work.cost(head),
            speedup=work.speedup(head),
            polynomial=self._chosen(head, degree, reach),
        )

    def _degree(self, head: Head, reach: float) -> int:
        if self.epsilon is None:
            assert self.degree is not None
            return self.degree
        degree = derived_degree(self.epsilon, reach, head.dim, self.polynomial)
        if degree is None:
            raise InputError(
                f"epsilon={self.epsilon:g}: no {strictest(self.polynomial)} polynomial of degree "
                f"<= {highest_degree(head.dim)}, the highest for head dim {head.dim}, is certified "
                f"to it on [-{reach:.4g}, {reach:.4g}]; use a larger epsilon, a degree, or "
                "sb.SingleThreshold(epsilon=...), which computes large rows exactly"
            )
        return degree

    def _chosen(self, head: Head, degree: int, reach: float) -> CertifiedPolynomial:
        if self.polynomial != "auto":
            return BUILDERS[self.polynomial](degree, reach)
        sample = ScoreSample.draw(head, None, head.live_keys)
        epsilon = math.inf if self.epsilon is None else self.epsilon
        return best_polynomial(sample, degree, reach, epsilon)
