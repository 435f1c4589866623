"""Polynomials that approximate exp on [-B, B], each with a certified relative error.

A polynomial is kept in t = z / B and divided by e^B, so that nothing overflows:

    p(z) = e^B * s(t),    s(t) = sum_k c_k t^k,    t = z / B in [-1, 1].

`certify` proves bounds on the ratio r = p(z) e^{-z} = e^{B (1 - t)} s(t) for the float64
coefficients that are returned, however they were found. This is Lemma A.3 of the paper
("Corollary 2.2 in AS23") with numbers instead of Theta(.).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_integer, check_number
from .coefficients import COEFFICIENTS, WIDEST, remez
from .proofs import TINY, UNIT, certify, exp, widest_bound

LARGEST_DEGREE = 256  # certification takes (degree + 1)^3 numbers, 185 MiB at twice this degree
KINDS = (*COEFFICIENTS, "minimax")


def horner(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """sum_k c_k t^k entrywise, one pass over memory a degree."""
    *lower, last = coefficients
    if not lower:
        return torch.full_like(t, last)
    value = (t * last).add_(lower.pop())
    for c in reversed(lower):
        out = None if t.requires_grad else value
        value = torch.addcmul(t.new_tensor(c), value, t, out=out)
    return value


def derivative(coefficients: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of the derivative; of a constant, those of zero."""
    return tuple(k * c for k, c in enumerate(coefficients) if k) or (0.0,)


@dataclass(frozen=True)
class CertifiedPolynomial:
    """p(z) = exp(bound) * sum_k coefficients[k] * (z / bound)^k, with proven bounds on p(z) e^{-z}.

    `bound == 0` means the single point z = 0: then t := 0 and only coefficients[0] matters.

    >>> p = minimax(2, 1.0)
    >>> round(p.error, 3), p.positive
    (0.04, True)
    >>> z = torch.tensor([0.5], dtype=torch.float64)
    >>> abs(p(z).item() * math.exp(p.bound) / math.exp(0.5) - 1) <= p.error
    True
    """

    kind: str  # "taylor", "chebyshev" or "minimax"
    degree: int
    bound: float  # B >= 0; what is stated holds for all real z in [-B, B]
    coefficients: tuple[float, ...]  # c_k, in t = z / B and divided by e^B
    error: float  # upper bound of |p(z) - e^z| / e^z; inf when it leaves float64
    log_ratio: tuple[float, float]  # bounds of log(p(z) e^{-z}); -inf: not certified positive

    @property
    def positive(self) -> bool:
        """Whether p > 0 is certified on all of [-bound, bound]."""
        return self.log_ratio[0] > -math.inf

    def __call__(self, z: Tensor) -> Tensor:
        """The SCALED value p(z) * exp(-bound): Horner in t = z / bound, in the dtype of z."""
        return horner(self.coefficients, self._t(z))

    def slope(self, z: Tensor) -> Tensor:
        """The SCALED derivative p'(z) * exp(-bound)."""
        if self.bound == 0.0:
            return torch.zeros_like(z)
        return horner([c / self.bound for c in derivative(self.coefficients)], self._t(z))

    def _t(self, z: Tensor) -> Tensor:
        if self.bound == 0.0:
            return torch.zeros_like(z)
        if self.bound < 1e-30:  # would be flushed to zero in float32
            return (z.double() / self.bound).to(z.dtype)
        return z / self.bound

    def on(self, bound: float) -> "CertifiedPolynomial":
        """The same function p, certified on [-bound, bound] instead: c_k -> c_k (b/B)^k e^{B-b}.

        The certificate allows for the rounding of that step, so it holds for p as it stood before
        and as it stands after. Where float64 cannot hold the coefficients, error is inf. From
        `bound == 0` p is continued as c_0.

        >>> p = taylor(2, 1.0)
        >>> p.on(2.0).error > p.error > p.on(0.5).error
        True
        """
        new, old = _checked_bound(bound), self.bound
        is_point = new == 0 or old == 0  # where only c_0 matters
        log_new, log_old = (0.0, 0.0) if is_point else (math.log(new), math.log(old))
        coefficients = [0.0] * (self.degree + 1)
        for k, c in enumerate(self.coefficients[:1] if is_point else self.coefficients):
            if c != 0.0:  # in two steps, for e^{B-b} may leave float64 where the product does not
                half = exp((k * (log_new - log_old) + (old - new)) / 2)
                coefficients[k] = c * half * half
        log_size = abs(log_new) + abs(log_old)
        rounding = 8 * UNIT * (1 + self.degree * (1 + log_size) + old + new)
        return certified(self.kind, coefficients, new, 0.0 if new == old else rounding)

    def weight_log_spread(self, with_exact: bool) -> float:
        """The spread ln(max r / min r) of the ratio r = p(z) e^{-z}: weights made with p err by
        factors at most this far apart. `with_exact` adds r = 1, because exact weights enter the
        same sum. inf if p is not positive."""
        lower, upper = self.log_ratio
        if not self.positive:
            return math.inf
        return max(upper, 0.0) - min(lower, 0.0) if with_exact else upper - lower


def taylor(degree: int, bound: float) -> CertifiedPolynomial:
    """The Taylor polynomial of exp at 0: p(z) = sum_{k<=g} z^k / k!, so c_k = e^{-B} B^k / k!.

    >>> round(taylor(0, 1.0).error, 3)  # |1 - e^z| / e^z is largest at z = -1: e - 1
    1.718
    """
    return built("taylor", degree, bound)


def chebyshev(degree: int, bound: float) -> CertifiedPolynomial:
    """The interpolant of exp at the g + 1 Chebyshev nodes of [-B, B] (AS23; paper Algorithm 2),
    z_i = B cos(pi (2i + 1) / (2g + 2)).

    >>> chebyshev(2, 1.0).error < taylor(2, 1.0).error
    True
    """
    return built("chebyshev", degree, bound)


def minimax(degree: int, bound: float) -> CertifiedPolynomial:
    """The p of degree g with the least max |p(z) e^{-z} - 1| on [-B, B] (weighted Remez exchange);
    where the exchange ends in rounding noise or B > 300, the best of `chebyshev`, `taylor` and
    1 / cosh(B), which is the one of degree 0.

    >>> abs(minimax(0, 1.0).error - math.tanh(1.0)) < 1e-6
    True
    """
    return built("minimax", degree, bound)


@lru_cache(maxsize=4096, typed=True)
def built(kind: str, degree: int, bound: float) -> CertifiedPolynomial:
    """The polynomial of a kind, one of KINDS."""
    kind, degree, bound = _checked_kind(kind), _built_degree(degree), _checked_bound(bound)
    if bound == 0.0:
        return certified(kind, (1.0,) + (0.0,) * degree, 0.0)
    if kind != "minimax":
        return certified(kind, COEFFICIENTS[kind](degree, bound), bound)
    candidates = [built(other, degree, bound) for other in COEFFICIENTS]
    if (coefficients := remez(degree, bound)) is not None:
        candidates.append(certified(kind, coefficients, bound))
    best = min(candidates, key=lambda p: p.error)
    constant = 2 * math.exp(-2 * bound) / (1 + math.exp(-2 * bound))
    if best.error >= 1.0 and constant > TINY:  # rounding spoiled it: 1 / cosh(B) is better
        flat = certified(kind, (constant,) + (0.0,) * degree, bound)
        best = min(best, flat, key=lambda p: p.error)
    return replace(best, kind=kind)


def certified(
    kind: str, coefficients: Sequence[float], bound: float, slack: float = 0.0
) -> CertifiedPolynomial:
    """The polynomial with these coefficients, whatever they are, and what is proved about it;
    ``slack`` is a relative uncertainty of every coefficient."""
    values = tuple(coefficients)
    degree, bound = _built_degree(len(values) - 1), _checked_bound(bound)
    proved = certify(values, bound, slack)
    return CertifiedPolynomial(_checked_kind(kind), degree, bound, values, *proved)


def smallest_degree(
    epsilon: float, bound: float, kind: str = "minimax", limit: int = 64
) -> CertifiedPolynomial:
    """The polynomial of smallest degree with certified error <= epsilon on [-bound, bound] (Lemma
    A.3 with the degree as a number). Raises InputError if no degree <= limit will do.

    >>> smallest_degree(1e-2, 1.0).degree
    3
    """
    epsilon, bound = check_number("epsilon", epsilon), _checked_bound(bound)
    limit = _built_degree(limit, "limit")
    found = first_degree(kind, epsilon, bound, limit)
    if found is not None:
        return built(kind, found, bound)
    raise InputError(
        f"epsilon={epsilon:g} is not reached by a {kind} polynomial of degree <= {limit} on "
        f"[-{bound:g}, {bound:g}]: at degree {limit} the certified error is "
        f"{built(kind, limit, bound).error:.3g}. Use a larger epsilon, a smaller bound or a "
        "larger limit (float64 rounding sets a floor near 1e-15 e^(2 bound))."
    )


def first_degree(kind: str, epsilon: float, bound: float, limit: int) -> int | None:
    """The degree of `smallest_degree`, or None."""
    log_bound = math.log(bound) if bound > 0.0 else -math.inf
    log_goal = math.log(epsilon) - 5 - 2 * bound
    for degree in range(limit + 1):
        if bound > widest_bound(epsilon, degree):
            continue
        if built(kind, degree, bound).error <= epsilon:
            return degree
        # truncation is at most 2 e^{2B} B^{g+1} / (g+1)! for all kinds: where that is below
        # epsilon / 70, a higher degree has little to gain but rounding
        if (degree + 1) * log_bound - math.lgamma(degree + 2) <= log_goal:
            return None
    return None


def largest_bound(
    degree: int, epsilon: float, kind: str = "minimax", tolerance: float = 1e-6
) -> float:
    """The largest B <= 300 with certified error <= epsilon at this degree, from below to a relative
    tolerance; 0.0 if epsilon is below the rounding floor (about 1e-15).

    >>> b = largest_bound(2, 0.05)
    >>> minimax(2, b).error <= 0.05 < minimax(2, 1.001 * b).error
    True
    """
    degree, tolerance = _built_degree(degree), check_number("tolerance", tolerance)
    epsilon = check_number("epsilon", epsilon)

    def log_ratio(bound: float) -> float:
        return math.log(max(built(kind, degree, bound).error, 1e-300) / epsilon)

    widest = min(WIDEST, widest_bound(epsilon, degree))
    low = high = min(1.0, widest)
    while high < widest and log_ratio(high) <= 0.0:
        low, high = high, min(2 * high, widest)
    while log_ratio(low) > 0.0:
        low, high = low / 2, low
        if low < 1e-17:
            return 0.0
    ends, logs, last = [low, high], [log_ratio(low), log_ratio(high)], -1
    if logs[1] <= 0.0:
        return high
    # the error is nearly a power of the bound: the Illinois method takes few steps on logarithms
    while ends[1] - ends[0] > tolerance * ends[0]:
        bound = ends[0] * (ends[1] / ends[0]) ** (logs[0] / (logs[0] - logs[1]))
        if not ends[0] < bound < ends[1]:
            bound = 0.5 * sum(ends)
        log = log_ratio(bound)
        side = int(log > 0.0)
        if side == last:  # twice on one side: give less weight to the other end
            logs[1 - side] /= 2
        ends[side], logs[side], last = bound, log, side
    return ends[0]


def paper_degree(epsilon: float, bound: float) -> float:
    """The paper's degree, constants taken as 1 (Lemma A.4, Section 3.1), with B an ENTRY bound.

        g = max{ log(1/eps) / log(log(1/eps) / B^2), B^2 }

    Lemma A.3 puts B^2, the largest score, where the text prints B inside the logarithm; where
    log(1/eps) <= B^2 it means Theta(B^2). A formula to plot beside `smallest_degree(epsilon,
    bound**2)`, not a guarantee.

    >>> round(paper_degree(1e-3, 1.0), 2), paper_degree(0.1, 3.0)
    (3.57, 9.0)
    """
    log_inverse, square = -math.log(check_number("epsilon", epsilon)), _checked_bound(bound) ** 2
    if log_inverse <= 0.0:
        raise InputError(f"epsilon must lie in (0, 1) for the paper's formula, got {epsilon:g}.")
    if square == 0.0 or log_inverse <= square:
        return square
    return max(log_inverse / math.log(log_inverse / square), square)


def paper_rank(dim: int, degree: int) -> int:
    """The paper's rank C(2(d + g), 2g) (Lemma A.4); `true_rank` is what is needed."""
    dim, degree = check_integer("dim", dim, 0), check_integer("degree", degree, 0)
    return math.comb(2 * (dim + degree), 2 * degree)


def true_rank(dim: int, degree: int) -> int:
    """Monomials of degree <= g in d variables: C(d + g, g), the features that p(q . k) needs.

    >>> [true_rank(64, g) for g in (1, 2, 3)]
    [65, 2145, 47905]
    """
    dim, degree = check_integer("dim", dim, 0), check_integer("degree", degree, 0)
    return math.comb(dim + degree, degree)


def _built_degree(degree: int, name: str = "degree") -> int:
    """A degree that a polynomial can be certified at."""
    return check_integer(name, degree, 0, LARGEST_DEGREE)


def _checked_bound(bound: float) -> float:
    return check_number("bound", bound, ">= 0")


def _checked_kind(kind: str) -> str:
    if kind not in KINDS:
        raise InputError(f"kind must be 'taylor', 'chebyshev' or 'minimax', got {kind!r}.")
    return kind
