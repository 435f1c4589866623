"""Coefficients of polynomials that approximate exp: Taylor, Chebyshev interpolation, Remez.

Nothing depends on their accuracy: `proofs` bounds the error of any coefficients. Interpolation is
done in decimal arithmetic with enough digits.
"""

import math
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from itertools import pairwise

import torch
from torch import Tensor

from .proofs import CELLS, EXPONENTS, WIDTH, exp

WIDEST = 300.0  # bound; beyond, e^{2B} leaves float64 and the exchange cannot evaluate the ratio


def _taylor(degree: int, bound: float) -> tuple[float, ...]:
    log_bound = math.log(bound)
    return tuple(exp(k * log_bound - math.lgamma(k + 1) - bound) for k in range(degree + 1))


def _chebyshev(degree: int, bound: float) -> tuple[float, ...]:
    count = degree + 1
    nodes = [-math.cos(math.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    with localcontext(_context(degree, bound)):
        t, y = _samples(nodes, bound)
        return _monomials(t, _divided_differences(t, y))


COEFFICIENTS = {"taylor": _taylor, "chebyshev": _chebyshev}


def remez(degree: int, bound: float) -> tuple[float, ...] | None:
    """Best iterate of the exchange, or None where the ratio overflows float64."""
    if bound > WIDEST:
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
    zero; divided differences are linear in E. Returns those of p, its Newton coefficients."""
    t, y = _samples(reference, bound)
    plain = _divided_differences(t, y)
    signed = _divided_differences(t, [v if i % 2 == 0 else -v for i, v in enumerate(y)])
    level = plain[-1] / signed[-1]
    newton = [a - level * b for a, b in zip(plain[:-1], signed[:-1], strict=True)]
    return newton, float(abs(level))


def _deviation(nodes: Sequence[float], newton: Sequence[Decimal], bound: float) -> Tensor:
    """The values p(z) e^{-z} - 1 on the grid.

    From the Newton form with ascending nodes: s is e^{-2B} times smaller on the left than on the
    right, and this form keeps relative accuracy there, which powers of t would lose."""
    grid = 1.0 - EXPONENTS
    s = torch.full_like(grid, float(newton[-1]))
    for node, d in zip(reversed(nodes[: len(newton) - 1]), reversed(newton[:-1]), strict=True):
        s = s * (grid - node) + float(d)
    return torch.exp(EXPONENTS * bound) * s - 1.0


def _extrema(deviation: Tensor) -> list[float]:
    """The point of largest |deviation| between consecutive sign changes, refined by a parabola."""
    negative = deviation < 0
    changes = torch.nonzero(negative[1:] != negative[:-1]).flatten() + 1
    size, points = deviation.abs(), []
    for start, stop in pairwise([0, *changes.tolist(), CELLS + 1]):
        i, shift = start + int(size[start:stop].argmax()), 0.0
        if start < i < stop - 1:
            left, here, right = size[i - 1 : i + 2].tolist()
            curvature = left - 2 * here + right
            shift = 0.5 * (left - right) / curvature if curvature < 0 else 0.0
        points.append(-1.0 + (i + shift) * WIDTH)
    return points


def _context(degree: int, bound: float) -> Context:
    """Digits enough that e^{2B} and the growth of monomial coefficients leave float64 accuracy."""
    digits = 40 + 2 * degree + int(0.9 * min(bound, 400.0))
    return Context(prec=digits, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])


def _samples(nodes: Sequence[float], bound: float) -> tuple[list[Decimal], list[Decimal]]:
    """Nodes t_i and values e^{B (t_i - 1)} in the current decimal context."""
    t = [Decimal(node) for node in nodes]
    return t, [(Decimal(bound) * (node - 1)).exp() for node in t]


def _divided_differences(t: Sequence[Decimal], y: Sequence[Decimal]) -> list[Decimal]:
    d = list(y)
    for j in range(1, len(d)):
        d[j:] = [(d[i] - d[i - 1]) / (t[i] - t[i - j]) for i in range(j, len(d))]
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
