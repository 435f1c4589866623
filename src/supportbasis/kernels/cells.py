"""Blocks of queries gathered from their heads, with what selection knows of them.

The layers of `supportbasis.blocks`: blocks whose queries are far apart are left to be split, and
queries that are far from all others of their block are left to be alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import FAR, UNUSUAL
from . import cells_kernels as kernels
from .language import power_of_two

ENTRIES = 8192  # of queries that one program holds
COUNTED = 16  # queries that the others are compared with at a time


class Gathered(NamedTuple):
    """Blocks of one size."""

    head: Tensor  # [blocks]
    rows: Tensor  # [blocks, size], -1 for none
    query: Tensor  # [blocks, size, d]
    mean: Tensor  # [blocks, d]
    variance: Tensor  # [blocks, d]
    wide: Tensor  # [blocks]: whether its queries are so far apart that none was taken
    alone: Tensor  # [blocks, size]: rows that were left out, -1 for none


def gathered(
    query: Tensor,
    rows: Tensor,
    head: Tensor,
    spectrum: Tensor,
    dtype: torch.dtype,
    largest: float,
    splits: bool,
) -> Gathered:
    """Queries [tokens, d] at ``rows`` [blocks, size], -1 for none, as ``dtype`` with no entry
    beyond ``largest``; ``spectrum`` [heads, d] is that of the ``head`` [blocks]. Empty places count
    as other queries of their block. Only if ``splits`` a block may be too wide to be taken."""
    blocks, size = rows.shape
    d, held = query.shape[1], power_of_two(size, 2)
    width = min(power_of_two(d, 1), max(1, ENTRIES // held))
    new = query.new_empty
    made = Gathered(
        head, torch.empty_like(rows), new(blocks, size, d, dtype=dtype), new(blocks, d),
        new(blocks, d), new(blocks, dtype=torch.bool), torch.empty_like(rows),
    )  # fmt: skip
    kernels.gather[(blocks,)](
        query, rows, head, spectrum, new(blocks, size), *made[1:], size, d, largest,
        held, width, min(held, COUNTED), FAR, UNUSUAL, splits,
        num_warps=min(8, max(1, held * width // 1024)),
    )  # fmt: skip
    return made
