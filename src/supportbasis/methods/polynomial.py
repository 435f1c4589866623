"""One polynomial for the whole score matrix (AS23; the paper's Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from ..plans import HeadPlan, PolynomialHead
from ..plans.cost import polynomial_work
from ..plans.supports import score_reach
from ..polynomials.certified import chebyshev
from ..polynomials.features import check_rank
from ..problem.problem import Head
from .base import Method, check_degree, is_positive


@dataclass(frozen=True)
class Polynomial(Method):
    """exp(z) is replaced by its Chebyshev interpolant of the given degree on [-B, B].

    ``bound`` is B; None takes |scale| max|q| max|k| for each head. The method never switches to
    exact work: a row whose denominator is unusable (the polynomial went negative or cancelled)
    returns zeros and lse -inf, is counted in ``certificate.invalid_rows`` and warned about once.
    """

    degree: int = 2
    bound: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", check_degree(self.degree))
        if self.bound is None:
            return
        if not is_positive(self.bound):
            raise InputError(f"bound must be a finite number > 0 or None, got {self.bound!r}")
        object.__setattr__(self, "bound", float(self.bound))

    def plan_head(self, head: Head) -> HeadPlan:
        check_rank(head.dim, self.degree)
        live = head.live_keys
        reach = score_reach(head, None, live) if self.bound is None else float(self.bound)
        keys = head.m if live is None else len(live)
        work = polynomial_work(head, head.n, keys, self.degree)
        return PolynomialHead(
            n=head.n,
            m=head.m,
            cost=work.cost(head),
            speedup=work.speedup(head),
            polynomial=chebyshev(self.degree, reach),
        )
