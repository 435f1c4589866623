"""Certificates: an upper bound on the error, and a measurement of it on sampled rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..lists.list_sum import list_reach, row_risks
from ..plans import BucketHead, FittedHead, HeadPlan, ListHead, Plan, PolynomialHead, PowerHead
from ..plans.supports import is_empty, score_reach
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.powers import PowerKernel
from ..polynomials.proofs import exp, expm1
from ..problem.problem import FAILED_SHARE, Head, Outcome, Problem
from ..problem.rounding import unit_roundoff
from .estimates import largest_error
from .sampling import RowSample, Sketch, exact_rows

SAMPLED_ROWS, SEED = 256, 0
CONFIDENCE = 0.95
FURTHEST = 14.0  # of logarithms of sums that are compared
VACUOUS = 1.0  # zeros are never further off
SKETCH_FAILURE = 0.05  # probability that the bound on a sketch does not hold


@dataclass(frozen=True, eq=False)
class Certificate:
    """Measured errors and proved bounds, for each (batch, head).

    ``bound``
        Proved: max|output - exact| <= bound * max|V|. For a kernel sum the error of row i is
        relative to its exact row sum: |S - AV|_i <= bound * (A1)_i * max|V|. With a sketch it
        holds with probability 95 % over the seed, and is mostly vacuous (1 or more).
    ``measured``, ``limit``
        Relative Frobenius error (gaussian_kde: largest error over largest density) on ``rows``
        sampled query rows, and an upper limit for all rows that holds with probability
        ``confidence`` over the choice of rows, as far as errors among the rows left out are like
        those found: outlier queries are sampled almost surely, but a few wrong rows that
        no measure tells from the rest can be missed. The limit is infinite where a sketch failed
        on more than 1 % of the rows. `PowerAttention` is compared with the power itself.
    ``invalid_rows``
        Rows whose denominator was unusable; ``fallback_rows`` of them were computed exactly.
    """

    bound: Tensor  # [batch, heads]
    measured: Tensor  # [batch, heads]
    limit: Tensor  # [batch, heads]
    rows: int
    confidence: float
    invalid_rows: Tensor  # [batch, heads]
    fallback_rows: Tensor  # [batch, heads]

    def holds(self, tolerance: float) -> bool:
        """Whether the measured error of every head, at its upper limit, is within tolerance."""
        return bool((self.limit <= tolerance).all())

    def bound_holds(self, tolerance: float) -> bool:
        """Whether the proved bound of every head is within tolerance."""
        return bool((self.bound <= tolerance).all())

    def __str__(self) -> str:
        if not self.bound.numel():
            return "Certificate: no heads"
        if not self.rows:
            return "Certificate: nothing was measured"
        bound, measured, limit = (float(x.max()) for x in (self.bound, self.measured, self.limit))
        vacuous = " (vacuous)" if bound >= VACUOUS else ""
        text = (
            f"Certificate: bound {bound:.3g}{vacuous}, measured {measured:.3g} (below {limit:.3g} "
            f"with confidence {self.confidence:g}, {self.rows} rows)"
        )
        invalid, fallback = int(self.invalid_rows.sum()), int(self.fallback_rows.sum())
        text += f", {invalid} rows without a usable denominator" if invalid else ""
        return text + (f" ({fallback} of them computed exactly)" if fallback else "")

    __repr__ = __str__


def certify(problem: Problem, plan: Plan, outcome: Outcome) -> Certificate:
    """Bound and measure the error of an outcome against the exact result."""
    is_random = problem.dropout_p > 0  # a random output has no exact one to be compared with
    start = (math.inf, math.nan, math.inf) if is_random else (0.0, 0.0, 0.0)
    shape = (problem.batch, problem.heads)
    bound, measured, limit = (torch.full(shape, x, dtype=torch.float64) for x in start)
    for b, h, head in () if is_random else problem.each_head():
        at, its = (b, h), plan.heads[h]
        bound[at] = error_bound(head, its, outcome, at)
        if head.n:
            measured[at], limit[at] = sampled_error(head, its, outcome, at)
    rows = 0 if is_random else min(problem.n, SAMPLED_ROWS)
    confidence = 1.0 if rows == problem.n else CONFIDENCE
    counts = (outcome.invalid_rows.long().cpu(), outcome.fallback_rows.long().cpu())
    return Certificate(bound, measured, limit, rows, confidence, *counts)


def error_bound(head: Head, plan: HeadPlan, outcome: Outcome, at: tuple[int, int]) -> float:
    """Polynomial part + rounding of the sums + rounding of the output, for one head."""
    if not bool(outcome.output[at].isfinite().all()):
        return math.inf
    eta = float(outcome.rounding[at])
    largest = float(head.value.abs().max()) if head.value.numel() else 0.0
    vanishing = torch.finfo(head.query.dtype).smallest_normal / largest if largest else 0.0
    narrow = 2 * unit_roundoff(head.query.dtype)
    invalid = int(outcome.invalid_rows[at]) > int(outcome.fallback_rows[at])  # zeros
    spread, error, nonnegative = distortion(head, plan)
    if not head.normalise:
        lse = outcome.lse[at][outcome.lse[at] > -math.inf].double()
        least = float(lse.min()) if lse.numel() else math.inf  # rows far below the unit underflow
        underflow = min(1.0, vanishing * exp(float(outcome.log_scale[at]) - least))
        underflow += torch.finfo(head.dtype).smallest_normal / largest if largest else 0.0
        total = error + (1 + error) * (1 + eta) * (eta + narrow) + underflow
        return max(total, 1.0) if invalid else total
    output = float(outcome.output[at].abs().max()) if outcome.output[at].numel() else 0.0
    trivial = 1 + output / largest if largest > 0 else 0.0
    if spread == math.inf and not nonnegative:
        return trivial if isinstance(plan, FittedHead) else math.inf
    polynomial = 2 * math.tanh(spread / 4)
    rounding = 2 * eta / (1 - eta) if eta < 1 else math.inf
    total = polynomial + rounding + narrow + vanishing
    return min(trivial, max(total, 1.0) if invalid else total)


def sampled_error(
    head: Head, plan: HeadPlan, outcome: Outcome, at: tuple[int, int]
) -> tuple[float, float]:
    """Measured error on sampled rows, and its upper limit for all rows."""
    output = outcome.output[at].to(head.dtype)
    # estimates of every row's error: large outputs, sums that differ from those estimated over a
    # few keys, and weight on tilted keys
    measures = [(output - output.mean(0)).square().sum(1).double()]
    if not isinstance(plan, PowerHead) and head.normalise and head.n > SAMPLED_ROWS:
        away = (Sketch.of(head, SEED).lse - outcome.lse[at].double()).abs()
        measures.append(away.nan_to_num(0.0, FURTHEST).clamp(max=FURTHEST).expm1().square())
    if isinstance(plan, ListHead) and head.n > SAMPLED_ROWS and head.m:
        measures.append(row_risks(head, plan.lists))
    sample = RowSample.draw(head, SAMPLED_ROWS, SEED, tuple(measures))
    log_scale = float(outcome.log_scale[at])
    kernel = plan.kernel if isinstance(plan, PowerHead) else None
    exact = exact_rows(head, sample.rows, log_scale, kernel)
    error = outcome.output[at][sample.rows].double() - exact
    failed = plan.is_sketched and int(outcome.fallback_rows[at]) > FAILED_SHARE * head.n
    if not head.is_density:
        unit = max([1e-300, *(float(x.abs().max()) for x in (error, exact) if x.numel())])
        error, exact = error / unit, exact / unit  # so that squares neither vanish nor overflow
        measured, limit = sample.frobenius_limit(error.square().sum(-1), exact.square().sum(-1))
        return measured, math.inf if failed else limit
    peak = max(float(exact.abs().max()), 1e-300)  # largest error over largest density
    measured = float(error.abs().max()) / peak
    if len(sample.rows) == head.n:
        return measured, math.inf if failed else measured
    # the weights' error is bounded for all rows; twice the measured one is left for rounding
    if isinstance(plan, PolynomialHead):
        return measured, 2 * measured + largest_error(head, plan, math.log(peak) + log_scale)
    relative = distortion(head, plan).error
    largest = float(outcome.output[at].double().abs().max()) / peak
    bound = relative / (1 - relative) * largest if relative < 1 else math.inf
    return measured, 2 * measured + bound


class Distortion(NamedTuple):
    """Bounds of given / exact weights over all pairs of a head; with a sketch they hold with
    probability 95 % over its seed."""

    spread: float  # ln rho: how far one weight of a row can be distorted against another
    error: float  # largest relative error of one weight
    nonnegative: bool  # whether no weight can be negative, whatever the distortion


def distortion(head: Head, plan: HeadPlan) -> Distortion:
    if plan.kind == "exact" or not head.n or not head.m:
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
