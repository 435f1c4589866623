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
from ..plans import PolynomialHead
from ..plans.supports import take
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.proofs import exp
from ..problem.problem import Head
from .sampling import RowSample

BINS = 64
GRID = 4096
PEAK_ROWS = 64  # on which the largest sum is estimated


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
