"""The power component: a kernel s(z)^p, pair by pair, in the tiles of the exact component.

Quadratic, like exact sums; it shows what the power alone does to the answer, without a sketch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..polynomials.certified import horner
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff, sum_depth, unit_roundoff
from .exact_sum import SUM_BLOCK, ExactSum, Span
from .partial import Partial

NOTHING = -1e30  # logarithm of a weight that is zero


@dataclass(frozen=True, eq=False)
class PowerSum(ExactSum):
    """All pairs of the given rows with ``keys``, weighed by a power instead of exp."""

    kernel: PowerKernel = field(kw_only=True)

    def _log_kernel(self, score: Tensor) -> Tensor:
        return self.kernel.log(score).clamp_(min=NOTHING)

    def _log_slope(self, score: Tensor) -> Tensor | None:
        return self.kernel.log_slope(score)

    def _row_tile(self, head: Head, rows: Tensor | None, span: Span, keys: int) -> Partial:
        """All keys for the rows of one tile. A row whose weights are all zero attends to keys, but
        has no usable denominator."""
        tile = super()._row_tile(head, rows, span, keys)
        empty = (tile.log_scale > -math.inf) & (tile.log_scale < NOTHING / 2)
        tile.num[empty], tile.den[empty], tile.log_scale[empty] = 0.0, 0.0, 0.0
        return tile

    def _rounding(self, head: Head, rows: Tensor | None, keys: int) -> Tensor:
        """Rounding of each row's inner values s(z), in units of exp(log_unit)."""
        norms = head.query_norms if rows is None else head.query_norms[rows]
        key_norm = self._largest_key(head)
        reach = abs(head.scale) * norms * key_norm
        unit, poly = product_roundoff(head.dtype), self.kernel.polynomial
        if poly is None:
            return (reach * gamma(head.dim + 6, unit)).to(head.dtype)
        t = reach / (self.kernel.power * poly.bound) if poly.bound > 0 else torch.zeros_like(reach)
        size = horner([abs(coefficient) for coefficient in poly.coefficients], t)
        return (size * gamma(head.dim + 6 + 3 * poly.degree, unit)).to(head.dtype)

    def _noise(self, head: Head, tile: Partial, rounding: Tensor, keys: int) -> Tensor:
        """Rounding of a tile's sums.

        An error e of every s changes a sum of m terms s^p by at most p e sum s^(p-1), and
        sum s^(p-1) <= m^(1/p) (sum s^p)^(1 - 1/p), so by the share p e (m / sum s^p)^(1/p).
        """
        power, unit = self.kernel.power, unit_roundoff(head.dtype)
        log_mass = math.log(keys)
        if head.key_log_weight is not None:
            live = head.key_log_weight if self.keys is None else head.key_log_weight[self.keys]
            log_mass = float(live.double().logsumexp(0))
        log_sum = tile.den.log() + tile.log_scale - power * self.kernel.log_unit
        share = power * rounding * ((log_mass - log_sum) / power).exp()
        logs = 4 * unit * (tile.log_scale.abs() + 100)  # of the logarithms and exponents
        total = gamma(sum_depth(keys, SUM_BLOCK) + 16, product_roundoff(head.dtype))
        relative = torch.nan_to_num(torch.expm1(share) + logs + total, nan=1.0, posinf=1.0)
        return tile.den * (relative.clamp(max=1.0) if head.normalise else relative)
