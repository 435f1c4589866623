"""One polynomial for the whole score matrix (AS23; the paper's Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..accuracy.estimates import best_polynomial
from ..errors import InputError
from ..plans import HeadPlan, PolynomialHead
from ..plans.cost import polynomial_work
from ..plans.supports import score_reach
from ..polynomials.features import check_rank, largest_degree
from ..problem.checks import check_number
from ..problem.problem import Head
from .base import Method, derived_degree, live_count, polynomial_settings, strictest


@dataclass(frozen=True, repr=False)
class Polynomial(Method):
    """exp(z) is replaced by a polynomial on [-B, B]: its Chebyshev interpolant (AS23).

    ``bound`` is B; None takes |scale| max|q| max|k| for each head. ``degree`` is 2 unless it is
    given, or derived from ``epsilon``: the smallest one certified to |p(z) - exp(z)| <=
    epsilon exp(z) on [-B, B], as in Algorithm 2. ``polynomial`` is the kind, as in
    `SingleThreshold`. No row falls back to exact sums: one whose denominator is unusable (the
    polynomial went negative or cancelled) returns zeros and lse -inf, is counted in
    ``certificate.invalid_rows`` and warned about.

    >>> import supportbasis as sb
    >>> sb.Polynomial(), sb.Polynomial(epsilon=0.01, polynomial="minimax")
    (Polynomial(degree=2, bound=None), Polynomial(bound=None, epsilon=0.01, polynomial='minimax'))
    """

    degree: int | None = None
    bound: float | None = None
    epsilon: float | None = None
    polynomial: str = "chebyshev"

    def __post_init__(self) -> None:
        self._set(**polynomial_settings(self.degree, self.epsilon, self.polynomial))
        if self.bound is not None:
            self._set(bound=check_number("bound", self.bound))

    def plan_head(self, head: Head) -> HeadPlan:
        reach = score_reach(head, None, head.live_keys) if self.bound is None else self.bound
        epsilon, degree = self.epsilon or math.inf, self.degree
        if degree is None:
            degree = derived_degree(epsilon, reach, head.dim, self.polynomial)
        if degree is None:
            raise InputError(
                f"epsilon={epsilon:g}: no {strictest(self.polynomial)} polynomial of degree <= "
                f"{largest_degree(head.dim)}, the highest for head dim {head.dim}, is certified to "
                f"it on [-{reach:.4g}, {reach:.4g}]; use a larger epsilon, a degree, or "
                "sb.SingleThreshold(epsilon=...), which computes large rows exactly"
            )
        check_rank(head.dim, degree)
        kind, keys = self.polynomial, head.live_keys
        poly = best_polynomial(head, None, keys, degree, reach, epsilon, kind=kind)
        work = polynomial_work(head, head.n, live_count(head), degree)
        return PolynomialHead(polynomial=poly, **work.settings(head))
