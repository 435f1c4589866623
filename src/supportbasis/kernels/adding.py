"""Means over some more keys added to the rows they belong to, in one launch."""

from __future__ import annotations

from torch import Tensor

from . import adding_kernels as kernels
from .language import cdiv, power_of_two

ROWS = 32  # at a time


def add_means(
    output: Tensor, lse: Tensor, rows: Tensor, more: Tensor, size: Tensor, shift: Tensor
) -> None:
    """Add to mean values ``output`` [rows, dv] and log-sums ``lse``, in float32, the means ``more``
    [places, dv] and log-sums ``size`` of some rows over other keys. Each of ``rows`` [places] is
    there once, or is -1 for none; what is added lacks the ``shift`` of its row in its log-sum."""
    width = more.shape[1]
    kernels.add[(cdiv(len(rows), ROWS),)](
        output, lse, rows, more, size, shift, len(rows), width, power_of_two(width), ROWS
    )
