"""Kinds of certified polynomials, and their true errors."""

from functools import cache

import mpmath
from hypothesis import settings
from hypothesis import strategies as st

from supportbasis.polynomials.certified import CertifiedPolynomial, chebyshev, minimax, taylor

BUILDERS = {"taylor": taylor, "chebyshev": chebyshev, "minimax": minimax}
UNIT = 2.0**-53

mpmath.mp.dps = 50

any_kind = st.sampled_from(sorted(BUILDERS))
any_degree = st.integers(0, 12)
checked = settings(deadline=None, derandomize=True, max_examples=25)


def ratio(p: CertifiedPolynomial, t):
    """p(z) e^{-z} at z = bound * t, the float coefficients taken as exact."""
    s = mpmath.polyval([mpmath.mpf(c) for c in reversed(p.coefficients)], t)
    return mpmath.exp(mpmath.mpf(p.bound) * (1 - t)) * s


def refine(p, left, right, sign):
    """Golden-section search for the maximum of sign * ratio in [left, right]."""
    golden = (mpmath.sqrt(5) - 1) / 2
    for _ in range(20):
        a, b = right - golden * (right - left), left + golden * (right - left)
        if sign * ratio(p, a) < sign * ratio(p, b):
            left = a
        else:
            right = b
    return ratio(p, (left + right) / 2)


@cache
def true_range(p: CertifiedPolynomial):
    """(min, max) of p(z) e^{-z}: Chebyshev-spaced points, then a search around the best."""
    count = 8 * (p.degree + 2)
    points = [-mpmath.cos(mpmath.pi * i / count) for i in range(count + 1)]
    values = [ratio(p, t) for t in points]
    ends = []
    for sign in (-1, 1):
        i = max(range(count + 1), key=lambda i: sign * values[i])
        found = refine(p, points[max(i - 1, 0)], points[min(i + 1, count)], sign)
        ends.append(sign * max(sign * found, sign * values[i]))
    return tuple(ends)


def true_error(p):
    low, high = true_range(p)
    return max(abs(low - 1), abs(high - 1))
