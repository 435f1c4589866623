"""Errors of a plan, estimated without running it.

Of attention: expected, on a small sample of scores (`expected_error`), by which polynomials are
chosen; and measured, on sampled query rows against all keys (`RowCheck`).

Of densities: an upper bound on the largest error over the largest density. The relative error of a
polynomial on the whole range of scores says little here: far from the data the density is tiny, and
its error does not matter. Instead, tokens are binned by norm. A pair of norms a, b has |score| <=
|scale| a b, so with E(s) = max over |z| <= s of |p(z) - e^z| the error of row i is at most
exp(row weight) * sum over key bins of (weight of the bin) * E(...).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..components import ExactSum, evaluate
from ..engine.jensen import least_lse
from ..plans import FittedHead, PolynomialHead, ThresholdHead
from ..plans.supports import take
from ..polynomials.balancing import transformed
from ..polynomials.certified import KINDS, CertifiedPolynomial, built
from ..polynomials.proofs import exp
from ..problem.problem import FAILED_SHARE, Head
from .sampling import RowSample

SCORE_ROWS, SCORE_KEYS = 64, 256
SAMPLED_SCORES = SCORE_ROWS * SCORE_KEYS
BINS, GRID = 64, 4096
PEAK_ROWS = 64  # on which the largest sum is estimated
ROWS, FEWEST, SHARE = 256, 128, 64  # at most and at least; one of so many in between
ENTRIES = 2**24


def expected_error(
    head: Head, rows: Tensor | None, keys: Tensor | None, poly: CertifiedPolynomial, power: int = 1
) -> float:
    """Relative root-mean-square error of the weights poly(z / power)^power of these rows and keys
    (None: all) on a sample of them, in float64: of the output, for random values."""
    row, key = _pick(rows, head.query, SCORE_ROWS, 0), _pick(keys, head.key, SCORE_KEYS, 1)
    scores = head.query[row].double() @ head.key[key].double().T * head.scale
    if not scores.numel():
        return 0.0
    log_weight = head.log_weights(torch.float64)[key].expand_as(scores)
    if head.query_log_weight is not None:
        log_weight = log_weight + head.query_log_weight[row].unsqueeze(1)
    total = scores + log_weight
    top = total.amax(1, keepdim=True) if head.normalise else total.max()
    exact = (total - top).exp()
    unit = (poly.bound + (log_weight - top) / power).exp()
    given = (poly(scores / power) * unit).pow_(power)
    if head.normalise:
        exact = exact / exact.sum(1, keepdim=True)
        given = given / given.sum(1, keepdim=True)
    error = (given - exact).square().sum() / exact.square().sum()
    return float(error.sqrt().nan_to_num(math.inf))


def _pick(index: Tensor | None, tokens: Tensor, count: int, seed: int) -> Tensor:
    """At most ``count`` entries of an index set (None: all tokens), private randomness."""
    index = torch.arange(len(tokens), device=tokens.device) if index is None else index
    if len(index) <= count:
        return index
    generator = torch.Generator().manual_seed(seed)
    return index[torch.randint(len(index), (count,), generator=generator).to(index.device)]


def best_polynomial(
    head: Head, rows: Tensor | None, keys: Tensor | None, degree: int, reach: float,
    epsilon: float = math.inf, power: int = 1, kind: str = "auto",
) -> CertifiedPolynomial:  # fmt: skip
    """Of Taylor, Chebyshev and relative minimax on [-reach, reach], the one of least expected
    error for these rows and keys among those certified positive and, if epsilon is given, to
    epsilon; if there is none, the one of least certified error. With a power, of z / power on that
    range. A ``kind`` other than "auto" is taken as it is.

    The sum of a density has no denominator to lose: there any sign will do, and minimax, which
    weighs all scores equally, is left out unless epsilon is given.
    """
    if kind != "auto":
        return built(kind, degree, reach)
    any_sign = head.is_density
    kinds = KINDS[:2] if any_sign and epsilon == math.inf else KINDS
    candidates = [built(kind, degree, reach) for kind in kinds]
    if usable := [p for p in candidates if (p.positive or any_sign) and p.error <= epsilon]:
        return min(usable, key=lambda poly: expected_error(head, rows, keys, poly, power))
    return min(candidates, key=lambda poly: poly.error)


def density_scale(head: Head, seed: int) -> float:
    """Log of the largest sum among sampled rows: a lower estimate of the largest of all."""
    picked = RowSample.draw(head, PEAK_ROWS, seed).rows
    total = evaluate([ExactSum(head.live_keys)], head, picked)
    assert head.query_log_weight is not None  # of a density
    return float((total.num[:, 0].log() + total.log_scale + head.query_log_weight[picked]).max())


def largest_error(head: Head, plan: PolynomialHead, log_peak: float) -> float:
    """Upper bound on the largest error of a plan in units of ``exp(log_peak)``."""
    poly, (rows, keys) = plan.polynomial, plan.smooth(head)
    log_weight = take(head.log_weights(torch.float64), keys)
    top = float(log_weight.max()) if len(log_weight) else 0.0
    row_bin, row_norm = _bins(take(head.query_norms, rows))
    key_bin, key_norm = _bins(take(head.key_norms, keys))
    assert head.query_log_weight is not None  # of a density
    row_weight = take(head.query_log_weight.double(), rows) + (top - log_peak)
    none = torch.full_like(row_norm, -math.inf)
    row_weight = none.scatter_reduce_(0, row_bin, row_weight, "amax")
    key_weight = torch.zeros_like(key_norm).scatter_add_(0, key_bin, (log_weight - top).exp())
    reach = abs(head.scale) * row_norm.unsqueeze(1) * key_norm
    error = _error_within(poly, reach) @ key_weight
    return exp(float((error.log() + poly.bound + row_weight).max()))


def _error_within(poly: CertifiedPolynomial, reach: Tensor) -> Tensor:
    """Max over |z| <= reach of |p(z) - e^z|, in units of exp(bound)."""
    top = float(reach.max())
    grid = torch.linspace(0.0, top, GRID, dtype=torch.float64, device=reach.device)
    both = torch.stack([grid, -grid])
    error = (poly(both) - (both - poly.bound).exp()).abs().amax(0).cummax(0).values
    step = reach * ((GRID - 1) / max(top, 1e-300))
    return error[step.ceil().long().clamp(max=GRID - 1)]


def _bins(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Bin of each token by norm, and the upper edge of each bin."""
    top = max(1e-300, float(norms.max()) if len(norms) else 0.0)
    edges = (torch.arange(BINS, device=norms.device, dtype=torch.float64) + 1) * (top / BINS)
    return (norms * (BINS / top)).long().clamp(max=BINS - 1), edges


class RowCheck:
    """Exact output of sampled rows, computed once, against which any plan can be compared."""

    def __init__(self, head: Head, tolerance: float, seed: int) -> None:
        self.head, self.tolerance = head, tolerance
        dtype = torch.float64 if tolerance < 1e-5 else head.dtype
        wanted = min(ROWS, max(FEWEST, head.n // SHARE))
        count = max(16, min(wanted, ENTRIES // max(1, head.m)))
        self.sample = RowSample.draw(head, count, seed)
        self.rows, self.value = self.sample.rows, head.value.to(dtype)
        self.scores = (head.query[self.rows].to(dtype) * head.scale) @ head.key.to(dtype).T
        self.log_weight = head.log_weights(dtype)  # [m]; of pairs [rows, m] in a causal head
        if head.is_causal:
            later = torch.arange(head.m, device=head.key.device) > self.rows.unsqueeze(1)
            self.log_weight = self.log_weight.masked_fill(later, -math.inf)
        total = self.scores + self.log_weight
        self.top = total.amax(1, keepdim=True)
        self.top.masked_fill_(self.top == -math.inf, 0.0)
        self.weight = (total - self.top).exp_()
        self.exact = self._output(self.weight)

    def _output(self, weight: Tensor) -> Tensor:
        output = weight @ self.value
        output = output / weight.sum(1, keepdim=True) if self.head.normalise else output
        return output.nan_to_num()

    def error(self, plan: PolynomialHead | FittedHead) -> tuple[float, float]:
        """Measured error of the plan on the sampled rows, and its upper limit."""
        weight = self._fitted(plan) if isinstance(plan, FittedHead) else self._polynomial(plan)
        rows, keys = plan.split(self.head)
        if keys.large is not None:
            weight[:, keys.large] = self.weight[:, keys.large]
        if rows.large is not None:
            large = torch.isin(self.rows, rows.large)
            weight[large] = self.weight[large]
        if isinstance(plan, FittedHead):
            log_sum = weight.sum(1).log().double() + self.top.squeeze(1)
            failed = ~(log_sum >= least_lse(plan, self.head, self.rows))
            if self.sample.total(failed.double()) > FAILED_SHARE * self.head.n:
                return math.inf, math.inf  # too many exact rows: the cost would be wrong
            weight[failed] = self.weight[failed]
        squared = (self._output(weight) - self.exact).double().square().sum(-1)
        size = self.exact.double().square().sum(-1)
        return self.sample.frobenius_limit(squared, size)

    def small_share(self, plan: ThresholdHead) -> float:
        """Root mean square, over sampled small rows, of the share of weight on small keys: of an
        error of the polynomial that much reaches the output."""
        rows, keys = plan.split(self.head)
        weight = self.weight
        if rows.large is not None:
            weight = weight[~torch.isin(self.rows, rows.large)]
        if keys.large is None or not len(weight):
            return 1.0
        total = weight.sum(1).double()
        large = weight[:, keys.large].sum(1).double() / total.where(total > 0, 1.0)
        return float((1 - large).clamp(min=0).square().mean().sqrt())

    def _polynomial(self, plan: PolynomialHead) -> Tensor:
        return plan.polynomial(self.scores).mul_((plan.bound - self.top + self.log_weight).exp_())

    def _fitted(self, plan: FittedHead) -> Tensor:
        balanced = transformed(self.head, plan.transform)
        query, key = balanced.query[self.rows].to(self.scores), balanced.key.to(self.scores)
        shift = plan.transform.row_shift(self.head, self.rows).unsqueeze(1) - self.top
        log_weight = balanced.log_weights(self.scores.dtype) + shift
        log_weight.masked_fill_(self.log_weight == -math.inf, -math.inf)
        return plan.fitted(query, key).mul_(log_weight.exp_())
