"""Partial sums: what every component returns, and the one division at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Partial:
    """Numerator and denominator of some rows over some keys, in units of ``exp(log_scale)``.

    For row i the true sums are ``exp(log_scale_i) * num_i = sum_j a_ij v_j`` and
    ``exp(log_scale_i) * den_i = sum_j a_ij``. A row without keys has ``den = 0`` and
    ``log_scale = -inf``. ``noise`` bounds the rounding error of ``den``, and of ``num`` divided
    by the largest |v|, in the same units: it grows with the sum of the magnitudes of the terms,
    so a row whose terms cancel is detected."""

    num: Tensor  # [rows, dv]
    den: Tensor  # [rows]
    log_scale: Tensor  # [rows]
    noise: Tensor  # [rows]

    @staticmethod
    def empty(rows: int, value_dim: int, like: Tensor, dtype: torch.dtype) -> Partial:
        """Sums over no key at all."""
        num = like.new_zeros(rows, value_dim, dtype=dtype)
        den, noise = num.new_zeros(2, rows)
        return Partial(num, den, torch.full_like(den, -math.inf), noise)

    def add_(self, other: Partial) -> Partial:
        """Add the sums of the same rows over other keys, in place."""
        top = torch.maximum(self.log_scale, other.log_scale)
        unit = torch.where(top > -math.inf, top, 0.0)
        mine, theirs = (self.log_scale - unit).exp_(), (other.log_scale - unit).exp_()
        self.num.mul_(mine.unsqueeze(1)).addcmul_(other.num, theirs.unsqueeze(1))
        self.den.mul_(mine).addcmul_(other.den, theirs)
        self.noise.mul_(mine).addcmul_(other.noise, theirs)
        self.log_scale.copy_(top)
        return self

    def put_(self, rows: Tensor | None, other: Partial) -> None:
        """Replace some rows (None: all, without a copy)."""
        if rows is None:
            self.num, self.den = other.num, other.den
            self.log_scale, self.noise = other.log_scale, other.noise
            return
        self.num[rows], self.den[rows] = other.num, other.den
        self.log_scale[rows], self.noise[rows] = other.log_scale, other.noise

    def __getitem__(self, rows: slice | Tensor) -> Partial:
        return Partial(self.num[rows], self.den[rows], self.log_scale[rows], self.noise[rows])

    @property
    def has_keys(self) -> Tensor:
        """Rows that attend to at least one key; NaN, a unit that overflowed, counts."""
        return self.log_scale != -math.inf

    @property
    def usable(self) -> Tensor:
        """Rows whose sums are finite and whose denominator exceeds its rounding error.

        ``noise`` is a worst case; rounding errors of independent sign are far smaller, so a
        denominator is unusable only below a sixteenth of it."""
        return self.finite & (self.den > self.noise / 16)

    @property
    def finite(self) -> Tensor:
        """Rows without NaN or Inf (one reduction: a sum of the row is as finite as its terms)."""
        return self.num.sum(-1).isfinite() & self.den.isfinite()

    def divide_(self, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Output rows and their log-sum-exp; rows that are not ``valid`` get zeros and -inf."""
        den = torch.where(valid, self.den, 1.0)
        output = self.num.div_(den.unsqueeze(1))
        if not bool(valid.all()):
            output.masked_fill_(~valid.unsqueeze(1), 0.0)
        lse = torch.where(valid, den.log() + self.log_scale, -math.inf)
        return output, lse


def merged(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs over disjoint sets of keys, joined by their log-sum-exps: output [..., n, dv] and lse
    [..., n] over the keys of both, in the dtype of the lse."""
    share = torch.sigmoid(first_lse - second_lse).nan_to_num(0.0).unsqueeze(-1)  # -inf: no keys
    output = torch.lerp(second.to(share.dtype), first.to(share.dtype), share)
    return output, torch.logaddexp(first_lse, second_lse)
