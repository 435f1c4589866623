"""What the kernels of one call of `sums` share: polynomials, checked inputs, tiles, precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..runtime.language import interpreted, power_of_two, require, tl
from .tiles import Tiles, choose_tiles

CHUNK = 1024  # tokens of a causal chunk


@dataclass(frozen=True, eq=False)
class Polynomials:
    """The polynomial of every head of the queries, the weight of every key, and how to sum."""

    coefficients: Tensor  # [batch * heads, 3] in <q, k>, divided by exp(unit)
    unit: Tensor  # [batch * heads]
    degree: int
    weight: Tensor | None = None  # [batch, key heads, m]; 0: a masked key
    causal: bool = False
    chunk: int = CHUNK
    precision: str = "tf32x3"  # of float32 products
    tiles: Tiles | None = None


@dataclass(frozen=True, eq=False)
class Setting:
    """Coefficients, shapes, dtypes and tiles that the kernels of one call share."""

    coefficients: Tensor
    degree: int
    dim: int
    value_dim: int
    dtype: torch.dtype  # of operands
    precision: str | None  # of float32 products
    tiles: Tiles
    causal: bool
    chunk: int

    @property
    def pairs(self) -> int:
        return (self.dim + 1) // 2 if self.degree == 2 else 0

    @property
    def blocks(self) -> int:
        return self.pairs + 2 if self.degree == 2 else 1

    @property
    def width(self) -> int:
        return power_of_two(self.dim)

    @property
    def value_width(self) -> int:
        return power_of_two(self.value_dim)

    @property
    def switches(self) -> dict[str, Any]:
        operand = tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32
        return {"OPERAND": operand, "PRECISION": self.precision}

    @property
    def packed(self) -> bool:
        return self.dtype == torch.bfloat16 and not interpreted()


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if shapes, dtypes or devices do not fit; does not synchronise with the host."""
    require()
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"query: got {query.dtype}, expected bfloat16, float16 or float32")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or not all(x.shape):
            raise InputError(
                f"{name}: got shape {tuple(x.shape)}, expected [batch, heads, n, width], not empty"
            )
        if x.dtype != query.dtype or x.device != query.device:
            raise InputError(
                f"{name}: got {x.dtype} on {x.device}, expected {query.dtype} on {query.device}"
            )
        if x.shape[-1] > 256:
            raise InputError(f"{name}: got a width of {x.shape[-1]}, expected at most 256")
    if key.shape != (query.shape[0], key.shape[1], key.shape[2], query.shape[3]):
        raise InputError(f"key: got {tuple(key.shape)} with query {tuple(query.shape)}")
    if value.shape[:3] != key.shape[:3]:
        raise InputError(f"value: got {tuple(value.shape)} with key {tuple(key.shape)}")
    if query.shape[1] % key.shape[1]:
        raise InputError(f"key: got {key.shape[1]} heads, expected a divisor of {query.shape[1]}")


def setting_of(query: Tensor, value: Tensor, polynomials: Polynomials) -> Setting:
    """The `Setting` of a call; raises for a degree or a chunk that the kernels do not have."""
    degree, chunk, causal = polynomials.degree, polynomials.chunk, polynomials.causal
    if degree not in (1, 2):
        raise InputError(f"degree: got {degree}, expected 1 or 2")
    full = query.dtype == torch.float32 or interpreted()
    dim, value_dim = query.shape[-1], value.shape[-1]
    tiles = polynomials.tiles or choose_tiles(dim, value_dim, full, causal)
    if chunk % max(tiles.read.rows, tiles.contract.rows, tiles.state.tokens, 64):
        raise InputError(f"chunk: got {chunk}, expected a multiple of the kernels' rows")
    return Setting(
        polynomials.coefficients,
        degree, dim, value_dim,
        torch.float32 if full else torch.bfloat16,
        polynomials.precision if full else None,
        tiles, causal, chunk,
    )  # fmt: skip


def operands(x: Tensor, causal: bool) -> Tensor:
    """Rows of 16-bit tokens as the kernels take them: in bfloat16, since that is what products
    have, and for causal sums filled up with zeros to a power of two.

    Compiled by Triton 3.6 for Hopper, the loop over a chunk was wrong where neither keys nor values
    have a multiple of 16 entries, and where float16 tokens of 24 were to be rounded inside it
    (docs/gpu-notes.md, "Traps").
    """
    width = power_of_two(x.shape[-1])
    if x.dtype == torch.float16 and not interpreted():
        x = x.bfloat16()
    if not causal or x.dtype == torch.float32 or width == x.shape[-1]:
        return x
    return F.pad(x, (0, width - x.shape[-1]))
