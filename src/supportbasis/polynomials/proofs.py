"""Proofs: bounds of r = e^{B (1 - t)} s(t) for given float64 coefficients of s, on a grid of cells.

The bounds hold however the coefficients were found.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

CELLS = 2048  # a power of two: grid points, 1 - t and the cell width are exact in float64
WIDTH = 2.0 / CELLS
UNIT = 2.0**-53  # unit roundoff of float64
EXPONENTS = torch.linspace(2.0, 0.0, CELLS + 1, dtype=torch.float64)  # 1 - t on the grid, exact
TINY = 2.0**-1022  # smallest normal number: bounds the absolute error of an underflow


@lru_cache(maxsize=4096)
def certify(
    coefficients: tuple[float, ...], bound: float, slack: float = 0.0
) -> tuple[float, tuple[float, float]]:
    """Proven (error, (lower, upper) of log r) for r = e^{B(1-t)} s(t), t in [-1, 1].

    Bounds rho = e^{-B(1-a)} r on each cell [a, a + h] and multiplies back in the log domain.
    `slack` is a relative uncertainty of every coefficient."""
    if not all(map(math.isfinite, coefficients)):
        return math.inf, (-math.inf, math.inf)
    if bound == 0.0:
        return _certify_point(coefficients[0], slack)
    low, high = _enclose(torch.tensor(coefficients, dtype=torch.float64), bound, slack)
    exponents = EXPONENTS[:-1] * bound
    upper = _log_product(exponents, high, 1.0).max().item()
    lower = _log_product(exponents, low, -1.0).min().item()
    below = -math.expm1(lower)
    if lower == -math.inf:  # r may be negative
        below = 1.0 + exp(_log_product(exponents, -low, 1.0).max().item())
    return max(expm1(upper), below) * (1 + 8 * UNIT), (lower, upper)


def _enclose(c: Tensor, bound: float, slack: float) -> tuple[Tensor, Tensor]:
    """Per cell [a, a + h], (lower, upper) bounds of rho(t) = e^{-B(t-a)} s(t).

    Two enclosures, intersected. Chord: rho stays within h^2/8 max|rho''| of the chord between its
    end values, and |rho''| <= |s'' - 2B s' + B^2 s|; tight where p is close to exp. Flat: s stays
    within h^2/8 max|s''| of its own chord, and e^{-Bh} <= e^{-B(t-a)} <= 1; better for large B."""
    powers = _tables(len(c) - 1)[0]
    operations = margin_operations(len(c) - 1)
    stiffness = 1 + (len(c) + bound) * WIDTH  # an underflow of c_k also enters the bulges
    underflow = 4 * operations * TINY * stiffness * stiffness
    s = powers @ c
    margin = (powers.abs() @ c.abs()) * (operations * UNIT + slack) + underflow
    top, bottom = s + margin, s - margin
    decay = math.exp(-bound * WIDTH)
    chord, flat = _bulges(c, bound, slack)
    chord_high = torch.maximum(top[:-1], decay * top[1:]) + chord
    chord_low = torch.minimum(bottom[:-1], decay * bottom[1:]) - chord
    flat_high = torch.maximum(top[:-1], top[1:]) + flat
    flat_low = torch.minimum(bottom[:-1], bottom[1:]) - flat
    flat_high = torch.where(flat_high < 0, decay * flat_high, flat_high)
    flat_low = torch.where(flat_low > 0, decay * flat_low, flat_low)
    return torch.maximum(chord_low, flat_low), torch.minimum(chord_high, flat_high)


def margin_operations(degree: int) -> int:
    """Operations whose rounding a certificate allows for: of powers @ c, and what follows it."""
    return 2 * degree + 26


def widest_bound(epsilon: float, degree: int) -> float:
    """A bound beyond which no polynomial of this degree is certified to epsilon, whatever its
    coefficients, so that searches build none that cannot do.

    By the degree: on [-B, 0] such a p is at most 1 + epsilon, so at z = B it is at most
    (1 + epsilon) T_g(3) <= (1 + epsilon) e^{g acosh 3}, but it is at least (1 - epsilon) e^B there.
    By rounding: at z = -B the certificate allows for that of sum_k c_k t^k, relative to
    sum_k |c_k|, which is at least p(B) e^{-B} >= 1 - epsilon, and there e^{2B} multiplies it. For
    epsilon >= 1 nothing is known: p = 0 has an error of 1."""
    if epsilon >= 1.0:
        return math.inf
    by_degree = degree * math.acosh(3.0) + 2 * math.atanh(epsilon)
    by_rounding = 0.5 * math.log(epsilon / ((1.0 - epsilon) * margin_operations(degree) * UNIT))
    return (1 + 1e-9) * max(0.0, min(by_degree, by_rounding))


def _bulges(c: Tensor, bound: float, slack: float) -> tuple[Tensor, Tensor]:
    """Per cell, h^2/8 max|s'' - 2B s' + B^2 s| and h^2/8 max|s''|."""
    k = torch.arange(len(c) + 2, dtype=torch.float64)
    first = torch.nn.functional.pad(c, (0, 2)) * k  # k c_k, so s' has coefficients first[1:]
    second = (first * (k - 1))[2:]
    chord = torch.stack((second, -2 * bound * first[1:-1], bound * bound * c))
    return _largest(chord, slack) * (WIDTH**2 / 8), _largest(second[None], slack) * (WIDTH**2 / 8)


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
    rounding = ((2 * count + 32) * UNIT + slack) * (1 + WIDTH / 2) ** count * size
    at_node = (terms + tail @ q.abs() + rounding) * (1 + 1e-9)
    return torch.maximum(at_node[:-1], at_node[1:])


def _log_product(exponents: Tensor, factor: Tensor, direction: float) -> Tensor:
    """log(e^exponents * factor), moved up (+1) or down (-1) by its rounding; -inf if factor <= 0.

    NaN, which only arises from overflow, becomes inf in the unsafe direction."""
    log = factor.clamp(min=0.0).log()
    rounding = 4 * UNIT * (1 + exponents + log.clamp(min=-800.0).abs())
    total = exponents + log + direction * rounding
    return total.nan_to_num(direction * math.inf, math.inf, -math.inf)


def _certify_point(c: float, slack: float) -> tuple[float, tuple[float, float]]:
    """The certificate of r = c at the single point z = 0."""
    low, high = c - abs(c) * slack, c + abs(c) * slack
    error = max(abs(low - 1.0), abs(high - 1.0)) * (1 + 4 * UNIT)
    lower, upper = (math.log(x) if x > 0 else -math.inf for x in (low, high))
    margin = 4 * UNIT * max(abs(x) if math.isfinite(x) else 0.0 for x in (lower, upper))
    return error, (lower - margin, upper + margin)


@lru_cache(maxsize=64)
def _tables(degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per degree: t_i^k [cells + 1, g + 1], the shifts [J, g + 1, g + 1] and their tail [g + 1].

    shifts[j] maps the coefficients of q to those of q^(j) / j! (h/2)^j; tail[k] is the sum over
    the j left out, sum_{j >= J} C(k, j) (h/2)^j."""
    grid = 1.0 - EXPONENTS
    powers = torch.stack([torch.ones_like(grid), *[grid] * degree], 1).cumprod(1)
    kept = min(degree + 1, 3 + degree // 6)
    shifts = torch.zeros(kept, degree + 1, degree + 1, dtype=torch.float64)
    tail = torch.zeros(degree + 1, dtype=torch.float64)
    for k in range(degree + 1):
        terms = [math.comb(k, j) * (WIDTH / 2) ** j for j in range(k + 1)]
        for j, term in enumerate(terms[:kept]):
            shifts[j, k - j, k] = term
        tail[k] = sum(terms[kept:])
    return powers, shifts, tail


def exp(x: float) -> float:
    """e^x, inf where it leaves float64."""
    return math.exp(x) if x < 709.0 else math.inf


def expm1(x: float) -> float:
    """e^x - 1, inf where it leaves float64."""
    return math.expm1(x) if x < 709.0 else math.inf
