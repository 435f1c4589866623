"""What the kernels of one call of `sums` share: polynomials, tiles, precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.language import interpreted, power_of_two, tl


class Tile(NamedTuple):
    """Of one kernel: rows and columns that a program writes, tokens that it reads at a time."""

    rows: int
    columns: int
    tokens: int
    warps: int
    stages: int
    pairs: int = 1  # rows of the packing, of `square_state`


def choose_tiles(d: int, e: int, full_precision: bool, causal: bool) -> tuple[Tile, Tile, Tile]:
    """The fastest tiles of `square_state`, `read_out` and `contract` for keys and values of this
    width."""
    narrow, wide = max(d, e) <= 64, max(d, e) > 128
    state = Tile(min(d, 64), min(e, 128), 64, 4, 3, 4 if e <= 64 else 2)
    if full_precision:
        side, tokens, stages = (32, 16, 1) if wide else (64, 32, 2)
        state = Tile(min(d, 64), min(e, side), 32, 4, stages)
        read, contract = (Tile(side, min(x, side), tokens, 4, stages) for x in (e, d))
    elif wide:
        stages = 1 if causal else 2  # what shared memory holds
        read, contract = (Tile(64, min(x, 64), 32, 4, stages) for x in (e, d))
    else:
        rows, warps, stages = (128, 4, 3) if narrow else (64, 8, 2)
        read, contract = Tile(rows, e, 64, 4, stages), Tile(128, min(d, 64), 64, warps, stages)
    return state, read, contract


@dataclass(frozen=True, eq=False)
class Polynomials:
    """The polynomial of every head of the queries, the weight of every key, and how to sum."""

    coefficients: Tensor  # [batch * heads, 3] in <q, k>, divided by exp(unit)
    unit: Tensor  # [batch * heads]
    degree: int  # 1 or 2
    weight: Tensor | None = None  # [batch, key heads, m]; 0: a masked key
    causal: bool = False
    chunk: int = 1024  # tokens of a causal chunk: a multiple of the rows of all tiles
    precision: str = "tf32x3"  # of float32 products


class Setting:
    """Coefficients, shapes, dtypes and tiles that the kernels of one call share."""

    def __init__(self, query: Tensor, value: Tensor, polynomials: Polynomials) -> None:
        self.degree, self.causal = polynomials.degree, polynomials.causal
        self.coefficients, self.chunk = polynomials.coefficients, polynomials.chunk
        full = query.dtype == torch.float32 or interpreted()
        dim, self.value_dim = query.shape[-1], value.shape[-1]
        self.width, self.value_width = power_of_two(dim), power_of_two(self.value_dim)
        self.pairs = (dim + 1) // 2 if self.degree == 2 else 0
        self.blocks = self.pairs + 2 if self.degree == 2 else 1
        self.dtype = torch.float32 if full else torch.bfloat16  # of operands
        self.packed = not full
        self.precision = polynomials.precision if full else None  # of float32 products
        operand = tl.float32 if full else tl.bfloat16
        self.switches = {"OPERAND": operand, "PRECISION": self.precision}
        self.small = min(self.width, self.value_width, 32 if full else 64)  # tile of small moments
        tiles = choose_tiles(self.width, self.value_width, full, self.causal)
        self.state_tile, self.read_tile, self.contract_tile = tiles


def operands(x: Tensor, causal: bool) -> Tensor:
    """Rows of 16-bit tokens as the kernels take them: in bfloat16, since that is what products
    have, and for causal sums filled up with zeros to a power of two (docs/gpu-notes.md, "Traps",
    says what Triton 3.6 makes of other rows)."""
    if x.dtype == torch.float16 and not interpreted():
        x = x.bfloat16()
    extra = power_of_two(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, extra)) if causal and extra and x.dtype != torch.float32 else x
