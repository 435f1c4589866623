"""Kernel densities: an upper bound on the largest error of a plan, over the largest density.

The relative error of a polynomial on the whole range of scores says little here: far from the
data the density is tiny, and its error does not matter. Instead, tokens are binned by norm. A
pair of norms a, b has |score| <= |scale| a b, so with E(s) = max over |z| <= s of |p(z) - e^z| the
error of row i is at most exp(row weight) * sum over key bins of (weight of the bin) * E(...).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..components import ExactSum, evaluate
from ..plans import HeadPlan, PolynomialHead
from ..plans.supports import take
from ..polynomials.certified import CertifiedPolynomial
from ..problem.problem import Head
from .bounds import exp
from .sampling import RowSample

BINS = 64
GRID = 4096


def density_scale(head: Head, seed: int, rows: int = 64) -> float:
    """Log of the largest sum among sampled rows: a lower estimate of the largest of all."""
    picked = RowSample.draw(head, rows, seed).rows
    total = evaluate([ExactSum(head.live_keys)], head, picked)
    factor = 0.0 if head.query_log_weight is None else head.query_log_weight[picked]
    return float((total.num.abs().amax(1).log() + total.log_scale + factor).max())


def density_error(head: Head, plan: HeadPlan, log_peak: float) -> float:
    """Upper bound on the polynomial's largest error in units of ``exp(log_peak)``."""
    if not isinstance(plan, PolynomialHead):
        return 0.0
    return NormBins(head, plan).error(plan.polynomial, log_peak)


class NormBins:
    """The small rows and keys of a plan, binned by norm, for all polynomials of that split."""

    def __init__(self, head: Head, plan: HeadPlan):
        rows, keys = plan.smooth(head)
        row_norm, self.row_weight = _row_bins(head, rows)
        key_norm, self.key_weight, self.top = _key_bins(head, keys)
        self.reach = abs(head.scale) * row_norm.unsqueeze(1) * key_norm

    def error(self, poly: CertifiedPolynomial, log_peak: float) -> float:
        """Upper bound on the largest error of this polynomial in units of ``exp(log_peak)``."""
        if not self.reach.numel():
            return 0.0
        error = _error_within(poly, self.reach) @ self.key_weight
        return exp(float((error.log() + poly.bound + self.top + self.row_weight - log_peak).max()))


def _error_within(poly: CertifiedPolynomial, reach: Tensor) -> Tensor:
    """Max over |z| <= reach of |p(z) - e^z|, in units of exp(bound)."""
    top = float(reach.max())
    grid = torch.linspace(0.0, top, GRID, dtype=torch.float64, device=reach.device)
    both = torch.stack([grid, -grid])
    error = (poly(both) - (both - poly.bound).exp()).abs().amax(0).cummax(0).values
    step = reach * ((GRID - 1) / top) if top > 0 else torch.zeros_like(reach)
    return error[step.ceil().long().clamp(max=GRID - 1)]


def _bins(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Bin of each token by norm, and the upper edge of each bin."""
    top = max(float(norms.max()), 1e-300)
    bin_of = (norms * (BINS / top)).long().clamp(max=BINS - 1)
    edges = (torch.arange(BINS, device=norms.device, dtype=torch.float64) + 1) * (top / BINS)
    return bin_of, edges


def _row_bins(head: Head, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Upper norm and largest log-weight of each bin of rows."""
    norms = take(head.query_norms, rows)
    if not len(norms):
        return norms, norms
    weight = torch.zeros_like(norms)
    if head.query_log_weight is not None:
        weight = take(head.query_log_weight, rows).double()
    bin_of, edges = _bins(norms)
    largest = torch.full_like(edges, -math.inf).scatter_reduce_(0, bin_of, weight, "amax")
    return edges, largest


def _key_bins(head: Head, keys: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """Upper norm and total weight (times |value|) of each bin of keys, in units of exp(top)."""
    norms = take(head.key_norms, keys)
    if not len(norms):
        return norms, norms, 0.0
    weight, top = take(head.value, keys).abs().amax(1).double(), 0.0
    if head.key_log_weight is not None:
        log_weight = take(head.key_log_weight, keys).double()
        top = float(log_weight.max())
        weight = weight * (log_weight - top).exp()
    bin_of, edges = _bins(norms)
    return edges, torch.zeros_like(edges).scatter_add_(0, bin_of, weight), top
