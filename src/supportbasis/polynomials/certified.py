"""Polynomials that stand in for exp on [-B, B], each with a certified relative error.

A polynomial is kept in t = z / B and divided by e^B, so that nothing overflows:

    p(z) = e^B * s(t),    s(t) = sum_k c_k t^k,    t = z / B in [-1, 1].

Everything we state is about the ratio r = p(z) e^{-z} = e^{B (1 - t)} s(t), which is 1 where p is
exact. `_certify` proves bounds on r for the float64 coefficients that are returned, whatever the
way they were found; the builders (`taylor`, `chebyshev`, `minimax`) only have to be good, never
trusted. This is Lemma A.3 of the paper ("Corollary 2.2 in AS23") with numbers instead of Theta(.).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InputError

__all__ = [
    "CertifiedPolynomial",
    "certified",
    "chebyshev",
    "largest_bound",
    "minimax",
    "paper_degree",
    "paper_rank",
    "smallest_degree",
    "taylor",
    "true_rank",
]

_CELLS = 2048  # a power of two: grid points, 1 - t and the cell width are exact in float64
_WIDTH = 2.0 / _CELLS
_UNIT = 2.0**-53  # unit roundoff of float64
_TINY = 2.0**-1022  # smallest normal number: bounds the absolute error of an underflow
LARGEST_DEGREE = 256  # certification takes (degree + 1)^3 numbers, 185 MiB at twice this degree
_REMEZ_BOUND = 300.0  # beyond, e^{2B} leaves float64 and the exchange has nothing to look at
_WIDEST = 300.0  # `largest_bound` does not look further


def horner(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """sum_k c_k t^k entrywise, one pass over memory a degree.

    >>> horner((1.0, 2.0, 3.0), torch.tensor([2.0]))
    tensor([17.])
    """
    *lower, last = coefficients
    if not lower:
        return torch.full_like(t, last)
    value = (t * last).add_(lower.pop())
    for c in reversed(lower):
        constant = t.new_tensor(c)
        if t.requires_grad:
            value = torch.addcmul(constant, value, t)
        else:
            torch.addcmul(constant, value, t, out=value)
    return value


def derivative(coefficients: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of the derivative; of a constant, those of zero.

    >>> derivative((5.0, 1.0, 3.0)), derivative((5.0,))
    ((1.0, 6.0), (0.0,))
    """
    return tuple(k * c for k, c in enumerate(coefficients) if k) or (0.0,)


@dataclass(frozen=True)
class CertifiedPolynomial:
    """A polynomial p with proven bounds on p(z) e^{-z} over [-bound, bound].

        p(z) = exp(bound) * sum_k coefficients[k] * (z / bound)^k

    `bound == 0` means the single point z = 0: then t := 0 and only coefficients[0] matters.

    Attributes:
        kind: "taylor", "chebyshev" or "minimax".
        degree: number of coefficients minus one.
        bound: B >= 0; what is stated holds for all real z in [-B, B].
        coefficients: c_k, in t = z / B and divided by e^B.
        error: upper bound of |p(z) - e^z| / e^z; inf when it leaves float64.
        log_ratio: (lower, upper) bounds of log(p(z) e^{-z}); lower is -inf when p is not
            certified positive.

    Example:
        >>> p = minimax(2, 1.0)
        >>> round(p.error, 3), p.positive
        (0.04, True)
        >>> z = torch.tensor([0.5], dtype=torch.float64)
        >>> abs(p(z).item() * math.exp(p.bound) / math.exp(0.5) - 1) <= p.error
        True
    """

    kind: str
    degree: int
    bound: float
    coefficients: tuple[float, ...]
    error: float
    log_ratio: tuple[float, float]

    @property
    def positive(self) -> bool:
        """Whether p > 0 is certified on all of [-bound, bound]."""
        return self.log_ratio[0] > -math.inf

    def __call__(self, z: Tensor) -> Tensor:
        """The SCALED value p(z) * exp(-bound): Horner in t = z / bound, in the dtype of z.

        >>> scaled = taylor(1, 2.0)(torch.tensor([1.0])).item()
        >>> round(scaled * math.exp(2.0), 6)  # 1 + z at z = 1
        2.0
        """
        return horner(self.coefficients, self._t(z))

    def slope(self, z: Tensor) -> Tensor:
        """The SCALED derivative p'(z) * exp(-bound).

        >>> taylor(1, 2.0).slope(torch.tensor([1.0])) * math.exp(2.0)  # of 1 + z
        tensor([1.])
        """
        if self.bound == 0.0:
            return torch.zeros_like(z)
        slopes = tuple(c / self.bound for c in derivative(self.coefficients))
        return horner(slopes, self._t(z))

    def _t(self, z: Tensor) -> Tensor:
        if self.bound == 0.0:
            return torch.zeros_like(z)
        if self.bound < 1e-30:  # would be flushed to zero in float32
            return (z.double() / self.bound).to(z.dtype)
        return z / self.bound

    def on(self, bound: float) -> "CertifiedPolynomial":
        """The same function p, certified on [-bound, bound] instead.

        The coefficients are re-expressed, c_k -> c_k (b/B)^k e^{B-b}. The certificate allows for
        the rounding of that step, so it holds for p as it stood before and as it stands after.
        Where float64 cannot hold the new coefficients they are infinite and error is inf. From
        `bound == 0` only the constant c_0 is known, and p is continued as that constant.

        >>> p = taylor(2, 1.0)
        >>> p.on(2.0).error > p.error > p.on(0.5).error
        True
        """
        new = _checked_bound(bound)
        old = self.bound
        log_stretch = math.log(new) - math.log(old) if new > 0 and old > 0 else 0.0
        log_factor = [k * log_stretch + (old - new) for k in range(self.degree + 1)]
        kept = self.degree + 1 if new > 0 and old > 0 else 1
        coefficients = tuple(
            # in two steps, for e^{B-b} may leave float64 where the product does not
            c * _exp(log_factor[k] / 2) * _exp(log_factor[k] / 2) if k < kept and c != 0.0 else 0.0
            for k, c in enumerate(self.coefficients)
        )
        log_size = abs(math.log(new)) + abs(math.log(old)) if kept > 1 else 0.0
        rounding = 8 * _UNIT * (1 + self.degree * (1 + log_size) + abs(old) + abs(new))
        return _certified(self.kind, coefficients, new, 0.0 if new == old else rounding)

    def weight_log_spread(self, with_exact: bool) -> float:
        """The spread ln(max r / min r) of the ratio r = p(z) e^{-z} over [-bound, bound].

        Unnormalised weights made with p err by factors at most this far apart. `with_exact` adds
        r = 1 to the range, because exact weights enter the same sum. inf if p is not positive.

        >>> p = minimax(2, 1.0)
        >>> p.weight_log_spread(False) <= math.log((1 + p.error) / (1 - p.error)) + 1e-12
        True
        """
        lower, upper = self.log_ratio
        if not self.positive:
            return math.inf
        return max(upper, 0.0) - min(lower, 0.0) if with_exact else upper - lower


# ------------------------------------------------------------------------------ public builders


def taylor(degree: int, bound: float) -> CertifiedPolynomial:
    """The Taylor polynomial of exp at 0: p(z) = sum_{k<=g} z^k / k!, so c_k = e^{-B} B^k / k!.

    >>> round(taylor(0, 1.0).error, 3)  # |1 - e^z| / e^z is largest at z = -1: e - 1
    1.718
    """
    return _build("taylor", _built_degree(degree), _checked_bound(bound))


def chebyshev(degree: int, bound: float) -> CertifiedPolynomial:
    """The interpolant of exp at the g + 1 Chebyshev nodes of [-B, B] (AS23; paper Algorithm 2).

    The nodes are z_i = B cos(pi (2i + 1) / (2g + 2)).

    >>> chebyshev(2, 1.0).error < taylor(2, 1.0).error
    True
    """
    return _build("chebyshev", _built_degree(degree), _checked_bound(bound))


def minimax(degree: int, bound: float) -> CertifiedPolynomial:
    """The p of degree g with the least max |p(z) e^{-z} - 1| on [-B, B] (weighted Remez exchange).

    At degree 0 this is p = 1 / cosh(B) with error tanh(B). Never worse than `chebyshev` and
    `taylor`: where the exchange ends in rounding noise or B > 300, the best of those and of
    1 / cosh(B) is returned. For large B the error tends to 1, and p to 0.

    >>> abs(minimax(0, 1.0).error - math.tanh(1.0)) < 1e-6
    True
    """
    return _build("minimax", _built_degree(degree), _checked_bound(bound))


def certified(kind: str, coefficients: Sequence[float], bound: float) -> CertifiedPolynomial:
    """The polynomial with these coefficients, whatever they are, and what is proved about it.

    >>> p = minimax(2, 1.0)
    >>> certified(p.kind, p.coefficients, p.bound) == p
    True
    """
    _built_degree(len(coefficients) - 1)
    return _certified(_checked_kind(kind), coefficients, _checked_bound(bound))


def smallest_degree(
    epsilon: float, bound: float, kind: str = "minimax", limit: int = 64
) -> CertifiedPolynomial:
    """The polynomial of smallest degree with certified error <= epsilon on [-bound, bound].

    Lemma A.3 with the degree as a number. Raises InputError if no degree <= limit will do.

    >>> smallest_degree(1e-2, 1.0).degree
    3
    """
    epsilon, bound = _checked_epsilon(epsilon), _checked_bound(bound)
    kind, limit = _checked_kind(kind), _built_degree(limit, "limit")
    best = math.inf
    for degree in range(limit + 1):
        p = _build(kind, degree, bound)
        if p.error <= epsilon:
            return p
        best = min(best, p.error)
    raise InputError(
        f"epsilon={epsilon:g} is not reached by a {kind} polynomial of degree <= {limit} on "
        f"[-{bound:g}, {bound:g}]: the best certified error is {best:.3g}. Use a larger epsilon, "
        "a smaller bound or a larger limit (float64 rounding sets a floor near 1e-15 e^(2 bound))."
    )


def largest_bound(degree: int, epsilon: float, kind: str = "minimax") -> float:
    """The largest B (to 1e-6 relative, from below) with certified error <= epsilon at this degree.

    0.0 if epsilon is below the rounding floor (about 1e-15); never more than 300.

    >>> b = largest_bound(2, 0.05)
    >>> minimax(2, b).error <= 0.05 < minimax(2, 1.001 * b).error
    True
    """
    return _largest_bound(_built_degree(degree), _checked_epsilon(epsilon), _checked_kind(kind))


def paper_degree(epsilon: float, bound: float) -> float:
    """The paper's degree, constants taken as 1 (Lemma A.4, Section 3.1), with B an ENTRY bound.

        g = max{ log(1/eps) / log(log(1/eps) / B^2), B^2 }

    Scores are at most B^2, so Lemma A.3 puts B^2 where the text prints B inside the logarithm. If
    log(1/eps) <= B^2 the first term is undefined; the lemma then means Theta(B^2): we return B^2.
    It is a formula to plot beside `smallest_degree(epsilon, bound**2)`, not a guarantee.

    >>> round(paper_degree(1e-3, 1.0), 2), paper_degree(0.1, 3.0)
    (3.57, 9.0)
    """
    epsilon, bound = _checked_epsilon(epsilon), _checked_bound(bound)
    square = bound * bound
    log_inverse = -math.log(epsilon)
    if log_inverse <= 0.0:
        raise InputError(f"epsilon must lie in (0, 1) for the paper's formula, got {epsilon:g}.")
    if square == 0.0:
        return 0.0
    if log_inverse <= square:
        return square
    return max(log_inverse / math.log(log_inverse / square), square)


def paper_rank(dim: int, degree: int) -> int:
    """The paper's rank C(2(d + g), 2g) (Lemma A.4); `true_rank` is what is needed.

    >>> paper_rank(64, 2)
    12082785
    """
    dim, degree = _checked_degree(dim, "dim"), _checked_degree(degree)
    return math.comb(2 * (dim + degree), 2 * degree)


def true_rank(dim: int, degree: int) -> int:
    """Monomials of degree <= g in d variables: C(d + g, g), the features that p(q . k) needs.

    >>> [true_rank(64, g) for g in (1, 2, 3)]
    [65, 2145, 47905]
    """
    dim, degree = _checked_degree(dim, "dim"), _checked_degree(degree)
    return math.comb(dim + degree, degree)


# --------------------------------------------------------------------------------- coefficients


@lru_cache(maxsize=4096)
def _build(kind: str, degree: int, bound: float) -> CertifiedPolynomial:
    if bound == 0.0:
        return _certified(kind, (1.0,) + (0.0,) * degree, 0.0)
    if kind != "minimax":
        return _certified(kind, _COEFFICIENTS[kind](degree, bound), bound)
    candidates = [_build(other, degree, bound) for other in _COEFFICIENTS]
    coefficients = _remez(degree, bound)
    if coefficients is not None:
        candidates.append(_certified(kind, coefficients, bound))
    best = min(candidates, key=lambda p: p.error)
    constant = 2 * math.exp(-2 * bound) / (1 + math.exp(-2 * bound))
    if best.error >= 1.0 and constant > _TINY:  # rounding spoiled it: 1 / cosh(B) is better
        flat = _certified(kind, (constant,) + (0.0,) * degree, bound)
        best = min(best, flat, key=lambda p: p.error)
    return replace(best, kind=kind)


def _taylor(degree: int, bound: float) -> tuple[float, ...]:
    log_bound = math.log(bound)
    return tuple(_exp(k * log_bound - math.lgamma(k + 1) - bound) for k in range(degree + 1))


def _chebyshev(degree: int, bound: float) -> tuple[float, ...]:
    count = degree + 1
    nodes = [-math.cos(math.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    with localcontext(_context(degree, bound)):
        t, y = _samples(nodes, bound)
        return _monomials(t, _divided_differences(t, y))


_COEFFICIENTS: dict[str, Callable[[int, float], tuple[float, ...]]] = {
    "taylor": _taylor,
    "chebyshev": _chebyshev,
}


def _remez(degree: int, bound: float) -> tuple[float, ...] | None:
    """Best iterate of the exchange, or None where float64 cannot look at the ratio."""
    if bound > _REMEZ_BOUND:
        return None
    best, best_peak, last_level = None, math.inf, 0.0
    reference = [-math.cos(math.pi * i / (degree + 1)) for i in range(degree + 2)]
    with localcontext(_context(degree, bound)):
        for _ in range(30):
            newton, level = _levelled(reference, bound)
            deviation = _deviation(reference, newton, bound)
            peak = deviation.abs().max().item()
            if peak < best_peak:
                best, best_peak = (reference, newton), peak
            # Equioscillation, NaN, or noise: in exact arithmetic the level grows at each exchange.
            if not peak > level * (1 + 1e-6) or level <= last_level:
                break
            last_level = level
            # p - exp has at most g + 1 zeros, for its derivative of order g + 1 is -exp; so there
            # are g + 2 extrema, and another count means rounding noise or a grid too coarse.
            reference = _extrema(deviation)
            if len(reference) != degree + 2:
                break
        return None if best is None else _monomials([Decimal(t) for t in best[0][:-1]], best[1])


def _levelled(reference: Sequence[float], bound: float) -> tuple[list[Decimal], float]:
    """The p of degree g with p e^{-z} - 1 = -(-1)^i E at the g + 2 reference points, and |E|.

    Values y_i (1 - (-1)^i E) lie on a polynomial of degree g iff their last divided difference is
    zero; divided differences are linear in E. Returns those of p, its Newton coefficients.
    """
    t, y = _samples(reference, bound)
    plain = _divided_differences(t, y)
    signed = _divided_differences(t, [v if i % 2 == 0 else -v for i, v in enumerate(y)])
    level = plain[-1] / signed[-1]
    newton = [a - level * b for a, b in zip(plain[:-1], signed[:-1], strict=True)]
    return newton, float(abs(level))


def _deviation(nodes: Sequence[float], newton: Sequence[Decimal], bound: float) -> Tensor:
    """The values p(z) e^{-z} - 1 on the grid.

    From the Newton form with ascending nodes: s is e^{-2B} times smaller on the left than on the
    right, and this form keeps relative accuracy there, which powers of t would lose.
    """
    grid = 1.0 - _exponents()
    s = torch.full_like(grid, float(newton[-1]))
    for node, d in zip(reversed(nodes[: len(newton) - 1]), reversed(newton[:-1]), strict=True):
        s = s * (grid - node) + float(d)
    return torch.exp(_exponents() * bound) * s - 1.0


def _extrema(deviation: Tensor) -> list[float]:
    """The point of largest |deviation| between consecutive sign changes, refined by a parabola."""
    negative = deviation < 0
    changes = torch.nonzero(negative[1:] != negative[:-1]).flatten() + 1
    edges = [0, *(int(i) for i in changes.tolist()), _CELLS + 1]
    size = deviation.abs()
    points = []
    for start, stop in pairwise(edges):
        i = start + int(size[start:stop].argmax())
        shift = 0.0
        if start < i < stop - 1:
            left, here, right = size[i - 1 : i + 2].tolist()
            curvature = left - 2 * here + right
            shift = 0.5 * (left - right) / curvature if curvature < 0 else 0.0
        points.append(-1.0 + (i + shift) * _WIDTH)
    return points


def _context(degree: int, bound: float) -> Context:
    """Digits enough that e^{2B} and the growth of monomial coefficients leave float64 accuracy."""
    digits = 40 + 2 * degree + int(0.9 * min(bound, 400.0))
    return Context(prec=digits, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])


def _samples(nodes: Sequence[float], bound: float) -> tuple[list[Decimal], list[Decimal]]:
    """Nodes t_i and values e^{B (t_i - 1)} in the current decimal context."""
    t = [Decimal(node) for node in nodes]
    scale = Decimal(bound)
    return t, [(scale * (node - 1)).exp() for node in t]


def _divided_differences(t: Sequence[Decimal], y: Sequence[Decimal]) -> list[Decimal]:
    d = list(y)
    for j in range(1, len(d)):
        for i in range(len(d) - 1, j - 1, -1):
            d[i] = (d[i] - d[i - 1]) / (t[i] - t[i - j])
    return d


def _monomials(t: Sequence[Decimal], newton: Sequence[Decimal]) -> tuple[float, ...]:
    """Coefficients of sum_i newton_i prod_{j<i} (x - t_j) in powers of x, rounded once."""
    poly = [newton[-1]]
    for node, d in zip(reversed(t[:-1]), reversed(newton[:-1]), strict=True):
        shifted = [d, *poly]
        for k, c in enumerate(poly):
            shifted[k] -= node * c
        poly = shifted
    return tuple(float(c) for c in poly)


@lru_cache(maxsize=1024)
def _largest_bound(degree: int, epsilon: float, kind: str) -> float:
    def meets(bound: float) -> bool:
        return _build(kind, degree, bound).error <= epsilon

    low, high = 0.0, 1.0
    while meets(high):
        if high == _WIDEST:
            return high
        low, high = high, min(2 * high, _WIDEST)
    if low == 0.0:
        low = 0.5
        while not meets(low):
            low, high = low / 2, low
            if low < 1e-17:
                return 0.0
    while high - low > 1e-6 * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


# -------------------------------------------------------------------------------- certification


def _certified(
    kind: str, coefficients: Sequence[float], bound: float, slack: float = 0.0
) -> CertifiedPolynomial:
    error, log_ratio = _certify(tuple(coefficients), bound, slack)
    return CertifiedPolynomial(
        kind, len(coefficients) - 1, bound, tuple(coefficients), error, log_ratio
    )


@lru_cache(maxsize=4096)
def _certify(
    coefficients: tuple[float, ...], bound: float, slack: float = 0.0
) -> tuple[float, tuple[float, float]]:
    """Proven (error, (lower, upper) of log r) for r = e^{B(1-t)} s(t), t in [-1, 1].

    Bounds rho = e^{-B(1-a)} r on each cell [a, a + h] and multiplies back in the log domain.
    `slack` is a relative uncertainty of every coefficient.
    """
    if not all(map(math.isfinite, coefficients)):
        return math.inf, (-math.inf, math.inf)
    if bound == 0.0:
        return _certify_point(coefficients[0], slack)
    low, high = _enclose(torch.tensor(coefficients, dtype=torch.float64), bound, slack)
    exponents = _exponents()[:-1] * bound
    upper = _log_product(exponents, high, 1.0).max().item()
    lower = _log_product(exponents, low, -1.0).min().item()
    negative = _log_product(exponents, -low, 1.0).max().item() if lower == -math.inf else -math.inf
    return _from_logs(lower, upper, negative)


def _enclose(c: Tensor, bound: float, slack: float) -> tuple[Tensor, Tensor]:
    """Per cell [a, a + h], (lower, upper) bounds of rho(t) = e^{-B(t-a)} s(t).

    Two enclosures, intersected. Chord: rho stays within h^2/8 max|rho''| of the chord between its
    end values, and |rho''| <= |s'' - 2B s' + B^2 s|; tight where p is close to exp. Flat: s stays
    within h^2/8 max|s''| of its own chord, and e^{-Bh} <= e^{-B(t-a)} <= 1; better for large B.
    """
    powers = _tables(len(c) - 1)[0]
    operations = 2 * len(c) + 24  # those of powers @ c, and of what follows here
    stiffness = 1 + (len(c) + bound) * _WIDTH  # an underflow of c_k also enters the bulges
    underflow = 4 * operations * _TINY * stiffness * stiffness
    s = powers @ c
    margin = (powers.abs() @ c.abs()) * (operations * _UNIT + slack) + underflow
    top, bottom = s + margin, s - margin
    decay = math.exp(-bound * _WIDTH)
    chord, flat = _bulges(c, bound, slack)
    chord_high = torch.maximum(top[:-1], decay * top[1:]) + chord
    chord_low = torch.minimum(bottom[:-1], decay * bottom[1:]) - chord
    flat_high = torch.maximum(top[:-1], top[1:]) + flat
    flat_low = torch.minimum(bottom[:-1], bottom[1:]) - flat
    flat_high = torch.where(flat_high < 0, decay * flat_high, flat_high)
    flat_low = torch.where(flat_low > 0, decay * flat_low, flat_low)
    return torch.maximum(chord_low, flat_low), torch.minimum(chord_high, flat_high)


def _bulges(c: Tensor, bound: float, slack: float) -> tuple[Tensor, Tensor]:
    """Per cell, h^2/8 max|s'' - 2B s' + B^2 s| and h^2/8 max|s''|."""
    k = torch.arange(len(c) + 2, dtype=torch.float64)
    first = torch.nn.functional.pad(c, (0, 2)) * k  # k c_k, so s' has coefficients first[1:]
    second = (first * (k - 1))[2:]
    chord = torch.stack((second, -2 * bound * first[1:-1], bound * bound * c))
    return _largest(chord, slack) * (_WIDTH**2 / 8), _largest(second[None], slack) * (_WIDTH**2 / 8)


def _largest(parts: Tensor, slack: float) -> Tensor:
    """Per cell, an upper bound of |q| for the polynomial q with coefficients parts.sum(0).

    Around the nearer end point, with |x| <= h/2, |q(t + x)| <= sum_j |q^(j)(t)| / j! (h/2)^j. The
    first terms are evaluated, the rest is bounded by sum_k |q_k| C(k, j) (h/2)^j, valid on [-1, 1].
    """
    count = parts.shape[1]
    powers, shifts, tail = _tables(count - 1)
    q = parts.sum(0)
    size = parts.abs().sum()  # before cancellation, for the rounding margin
    terms = (powers @ (shifts @ q).T).abs().sum(1)
    rounding = ((2 * count + 32) * _UNIT + slack) * (1 + _WIDTH / 2) ** count * size
    at_node = (terms + tail @ q.abs() + rounding) * (1 + 1e-9)
    return torch.maximum(at_node[:-1], at_node[1:])


def _log_product(exponents: Tensor, factor: Tensor, direction: float) -> Tensor:
    """log(e^exponents * factor), moved up (+1) or down (-1) by its rounding; -inf if factor <= 0.

    NaN, which only arises from overflow, becomes inf in the unsafe direction.
    """
    log = torch.log(factor.clamp(min=0.0))
    rounding = 4 * _UNIT * (1 + exponents + log.clamp(min=-800.0).abs())
    return torch.nan_to_num(
        exponents + log + direction * rounding,
        nan=direction * math.inf,
        posinf=math.inf,
        neginf=-math.inf,
    )


def _certify_point(c: float, slack: float) -> tuple[float, tuple[float, float]]:
    """The certificate of r = c at the single point z = 0."""
    low, high = c - abs(c) * slack, c + abs(c) * slack
    error = max(abs(low - 1.0), abs(high - 1.0))
    lower = math.log(low) if low > 0 else -math.inf
    upper = math.log(high) if high > 0 else -math.inf
    margin = 4 * _UNIT * max(abs(x) if math.isfinite(x) else 0.0 for x in (lower, upper))
    return error * (1 + 4 * _UNIT), (lower - margin, upper + margin)


def _from_logs(lower: float, upper: float, negative: float) -> tuple[float, tuple[float, float]]:
    """The largest |r - 1| from log bounds of r, and of -r where r may be negative."""
    above = _exp(upper) if upper > 700 else math.expm1(upper)
    below = 1.0 + _exp(negative) if lower == -math.inf else -math.expm1(lower)
    return max(above, below) * (1 + 8 * _UNIT), (lower, upper)


@lru_cache(maxsize=64)
def _tables(degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per degree: t_i^k [cells + 1, g + 1], the shifts [J, g + 1, g + 1] and their tail [g + 1].

    shifts[j] maps the coefficients of q to those of q^(j) / j! (h/2)^j; tail[k] is the sum over
    the j left out, sum_{j >= J} C(k, j) (h/2)^j.
    """
    grid = torch.arange(_CELLS + 1, dtype=torch.float64) * _WIDTH - 1.0
    powers = torch.ones(_CELLS + 1, degree + 1, dtype=torch.float64)
    for k in range(1, degree + 1):
        powers[:, k] = powers[:, k - 1] * grid
    kept = min(degree + 1, 3 + degree // 6)
    shifts = torch.zeros(kept, degree + 1, degree + 1, dtype=torch.float64)
    tail = torch.zeros(degree + 1, dtype=torch.float64)
    for k in range(degree + 1):
        for j in range(k + 1):
            term = math.comb(k, j) * (_WIDTH / 2) ** j
            if j < kept:
                shifts[j, k - j, k] = term
            else:
                tail[k] += term
    return powers, shifts, tail


@lru_cache(maxsize=1)
def _exponents() -> Tensor:
    """1 - t on the grid, exact."""
    return 2.0 - torch.arange(_CELLS + 1, dtype=torch.float64) * _WIDTH


# --------------------------------------------------------------------------------------- checks


def _exp(x: float) -> float:
    """e^x, inf where it leaves float64."""
    return math.exp(x) if x < 709.0 else math.inf


def _checked_degree(degree: int, name: str = "degree") -> int:
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 0:
        raise InputError(f"{name} must be an integer >= 0, got {degree!r}.")
    return degree


def _built_degree(degree: int, name: str = "degree") -> int:
    """A degree that a polynomial can be certified at."""
    if _checked_degree(degree, name) > LARGEST_DEGREE:
        raise InputError(f"{name} must be an integer from 0 to {LARGEST_DEGREE}, got {degree!r}.")
    return degree


def _checked_bound(bound: float) -> float:
    value = _checked_number(bound, "bound")
    if value < 0.0:
        raise InputError(f"bound must be a finite number >= 0, got {bound!r}.")
    return value + 0.0  # -0.0 -> 0.0


def _checked_epsilon(epsilon: float) -> float:
    value = _checked_number(epsilon, "epsilon")
    if value <= 0.0:
        raise InputError(f"epsilon must be a finite number > 0, got {epsilon!r}.")
    return value


def _checked_number(value: float, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {value!r}.")
    return number


def _checked_kind(kind: str) -> str:
    if kind != "minimax" and kind not in _COEFFICIENTS:
        raise InputError(f"kind must be 'taylor', 'chebyshev' or 'minimax', got {kind!r}.")
    return kind
