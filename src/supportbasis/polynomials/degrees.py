"""The smallest degree of a certified error, and what any certificate of epsilon < 1 takes.

The bounds hold whatever the polynomial, and cost nothing, so that searches build none that cannot
do. For epsilon >= 1 nothing is known: p = 0 has an error of 1.
"""

import math
from collections.abc import Callable

from .proofs import UNIT, margin_operations

_GROWTH = math.acosh(3.0)  # T_g(3) <= e^{g acosh 3}


def first_degree(
    error: Callable[[int], float], epsilon: float, bound: float, limit: int
) -> int | None:
    """The smallest degree <= limit with error(degree) <= epsilon on [-bound, bound], or None."""
    log_bound = math.log(bound) if bound > 0.0 else -math.inf
    log_goal = math.log(epsilon) - 5 - 2 * bound
    for degree in range(least_degree(epsilon, bound), limit + 1):
        if rounding_error(epsilon, degree, bound) > epsilon:
            return None
        if error(degree) <= epsilon:
            return degree
        # truncation is at most 2 e^{2B} B^{g+1} / (g+1)! for all kinds: where that is below
        # epsilon / 70, a higher degree has little to gain but rounding
        if (degree + 1) * log_bound - math.lgamma(degree + 2) <= log_goal:
            return None
    return None


def least_degree(epsilon: float, bound: float) -> int:
    """A degree that no polynomial within epsilon of exp on [-bound, bound] is below.

    On [-B, 0] such a p is at most 1 + epsilon, so at z = B it is at most (1 + epsilon) T_g(3), but
    it is at least (1 - epsilon) e^B there."""
    if epsilon >= 1.0:
        return 0
    return max(0, math.ceil((bound - 2 * math.atanh(epsilon)) / _GROWTH - 1e-9))


def rounding_error(epsilon: float, degree: int, bound: float) -> float:
    """What rounding alone adds to an error certified to epsilon.

    At z = -B the certificate allows for the rounding of sum_k c_k t^k, relative to sum_k |c_k|;
    that sum is at least p(B) e^{-B} >= 1 - epsilon, and there e^{2B} multiplies it."""
    if epsilon >= 1.0:
        return 0.0
    log_size = math.log((1.0 - epsilon) * margin_operations(degree) * UNIT)
    return math.exp(min(700.0, 2 * bound + log_size)) * (1 - 1e-9)


def widest_bound(epsilon: float, degree: int) -> float:
    """A bound beyond which no polynomial of this degree is certified to epsilon."""
    if epsilon >= 1.0:
        return math.inf
    by_degree = degree * _GROWTH + 2 * math.atanh(epsilon)
    by_rounding = 0.5 * math.log(epsilon / rounding_error(epsilon, degree, 0.0))
    return (1 + 1e-9) * max(0.0, min(by_degree, by_rounding))
