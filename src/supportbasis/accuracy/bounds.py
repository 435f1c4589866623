"""Bounds of how far a plan distorts the weights of a head: the proved part of a certificate."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..lists.list_sum import list_reach
from ..plans import BucketHead, ExactHead, HeadPlan, ListHead, PolynomialHead, PowerHead
from ..plans.supports import is_empty, score_reach
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.powers import PowerKernel
from ..polynomials.proofs import exp, expm1
from ..problem.problem import Head

SKETCH_FAILURE = 0.05  # probability that the bound on a sketch does not hold


class Distortion(NamedTuple):
    """Bounds of given / exact weights over all pairs of a head; with a sketch they hold with
    probability 95 % over its seed."""

    spread: float  # ln rho: how far one weight of a row can be distorted against another
    error: float  # largest relative error of one weight
    nonnegative: bool  # whether no weight can be negative, whatever the distortion


def distortion(head: Head, plan: HeadPlan) -> Distortion:
    if isinstance(plan, ExactHead) or not head.n or not head.m:
        return Distortion(0.0, 0.0, True)
    if isinstance(plan, PowerHead):
        error = math.inf if plan.is_sketched else 0.0  # a weight may be zero: nothing is relative
        return Distortion(error, error, True)
    if isinstance(plan, BucketHead):
        return _of_buckets(head, plan)
    if isinstance(plan, ListHead):
        return _of_lists(head, plan)
    if isinstance(plan, PolynomialHead):
        poly, mixed = recertified(head, plan)
        return Distortion(poly.weight_log_spread(with_exact=mixed), poly.error, poly.positive)
    return Distortion(math.inf, math.inf, False)  # fitted: measured, not bounded


def _of_lists(head: Head, plan: ListHead) -> Distortion:
    """Tilted keys, as derived in `docs/guarantees.md`: with r the widest range of scores within a
    closed leaf, its mean value errs by 2 tanh(r / 4) max|V| at most, and its mass before the factor
    1 + s / 2 is at least exp(-r^2 / 8) of the true one; log(1 + s / 2) <= s / 2 <= r^2 / 8d,
    because a variance is at most the square of half a diameter."""
    widest = abs(head.scale) * list_reach(head, plan.lists)
    mass = (1 + 1 / max(1, head.dim)) * widest**2 / 8
    bound = 2 * math.tanh(widest / 4) + 2 * math.tanh(mass / 4)
    spread = 4 * math.atanh(bound / 2) if bound < 2 * (1 - 1e-12) else math.inf
    return Distortion(spread, math.inf, True)


def recertified(head: Head, plan: PolynomialHead) -> tuple[CertifiedPolynomial, bool]:
    """The plan's polynomial on the range of this data, which may be wider than the plan's; and
    whether exact keys are mixed in."""
    poly, (rows, keys) = plan.polynomial, plan.split(head)
    reach = score_reach(head, rows.small, keys.small)
    mixed = keys.large is not None and not is_empty(rows.small)
    return (poly if reach <= poly.bound else poly.on(reach)), mixed


def _of_buckets(head: Head, plan: BucketHead) -> Distortion:
    """The worst row bucket: the spread of the pairs that its rows see."""
    row_sets, key_sets = plan.buckets(head)
    failure = SKETCH_FAILURE / len(plan.pairs) / max(1, head.n * head.m)
    seen: dict[int, list[tuple[float, float]]] = {}
    for pair in plan.pairs:
        rows, keys = row_sets[pair.row], key_sets[pair.key]
        if not is_empty(rows) and not is_empty(keys):
            kernel = pair.kernel and pair.kernel.on(score_reach(head, rows, keys))
            seen.setdefault(pair.row, []).append(_log_ratio(kernel, failure))
    spread = error = 0.0
    for ranges in seen.values():
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        spread, error = max(spread, high - low), max(error, expm1(high), -expm1(low))
    return Distortion(spread, error, True)


def _log_ratio(kernel: PowerKernel | None, failure: float) -> tuple[float, float]:
    """Range of log(given / exact) in one pair of buckets. The error of a sketch is relative to the
    lengths |u| |w| of what is sketched, while the weight <u, w> may be as small as exp(-reach)."""
    if kernel is None:
        return 0.0, 0.0
    low, high = kernel.log_ratio
    poly, power = kernel.polynomial, kernel.power // 2
    if kernel.sketch_size is None or poly is None or low == -math.inf:
        return low, high
    lengths = math.log(sum(abs(c) for c in poly.coefficients))  # in units of exp(bound)
    condition = exp(power * (lengths - poly.log_ratio[0] + 2 * poly.bound))
    error = sketch_error(power, kernel.sketch_size, failure) * condition
    if not error < 1:
        return -math.inf, math.inf
    return low + 2 * math.log1p(-error), high + 2 * math.log1p(error)


def sketch_error(power: int, size: int, failure: float) -> float:
    """Error of <S x^power, S y^power> over |x|^power |y|^power that one pair passes with
    probability ``failure`` at most, for the Gaussian tree.

    Its variance is at most v = (1 + 8/z)^(power-1) - 1, and 2/z without a tree; it is a polynomial
    of degree D = 2 max(1, 2 power - 2) in Gaussian numbers, so that by hypercontractivity its L_t
    norm is at most (t - 1)^(D/2) sqrt(v). Markov's inequality, at the best t, does the rest.

    >>> 0.1 < sketch_error(1, 10**4, 1e-3) < 0.4
    True
    """
    variance = 2 / size if power == 1 else expm1((power - 1) * math.log1p(8 / size))
    degree = 2 * max(1, 2 * power - 2)
    logs = [-math.log(failure) / t + degree / 2 * math.log(t - 1) for t in range(2, 256)]
    return exp(min(logs) + math.log(variance) / 2)
