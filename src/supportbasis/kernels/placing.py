"""Rows by their places in a table: taken from it, summarised in blocks, and added to it.

Places of -1 are none. Where rows are added to, each has one place at most, so that no two programs
write to one row and the result is the same in every run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import placing_kernels as kernels
from .language import cdiv, power_of_two

ROWS = 32  # at a time
ENTRIES = 8192  # of a block that one program holds


def taken(table: Tensor, rows: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """Rows of a ``table`` [rows, d], [*rows.shape, d] in a dtype, with no entry beyond ``largest``;
    zeros for none."""
    width, table = table.shape[1], table.contiguous()
    made = table.new_empty(*rows.shape, width, dtype=dtype)
    kernels.take[(cdiv(rows.numel(), ROWS),)](
        table, rows, made, rows.numel(), width, largest, largest < math.inf, power_of_two(width),
        ROWS,
    )  # fmt: skip
    return made


def measured(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [blocks, d] of the rows of blocks [blocks, size], none of which is -1."""
    (blocks, size), width = rows.shape, table.shape[1]
    mean, variance = (table.new_empty(blocks, width) for _ in range(2))
    held = power_of_two(size, 2)
    columns = min(power_of_two(width, 1), max(1, ENTRIES // held))
    kernels.measure[(blocks,)](
        table, rows, mean, variance, size, width, held, columns,
        num_warps=min(8, max(1, held * columns // 1024)),
    )  # fmt: skip
    return mean, variance


def add_rows(total: Tensor, rows: Tensor, more: Tensor) -> None:
    """Add ``more`` [places, d] to the rows of ``total`` [rows, d] at ``rows`` [places], or to each
    row of blocks [places, size] the same."""
    rows, width = rows.view(len(rows), -1), total.shape[1]
    kernels.add_rows[(cdiv(rows.numel(), ROWS),)](
        total, rows, more.contiguous(), rows.numel(), rows.shape[1], width, power_of_two(width),
        ROWS,
    )  # fmt: skip


def add_means(
    output: Tensor, lse: Tensor, rows: Tensor, more: Tensor, size: Tensor, shift: Tensor
) -> None:
    """Add to mean values ``output`` [rows, dv] and log-sums ``lse``, in float32, the means ``more``
    [places, dv] and log-sums ``size`` of some rows over other keys; what is added lacks the
    ``shift`` of its row in its log-sum."""
    width = more.shape[1]
    kernels.add_means[(cdiv(len(rows), ROWS),)](
        output, lse, rows, more, size, shift, len(rows), width, power_of_two(width), ROWS
    )
