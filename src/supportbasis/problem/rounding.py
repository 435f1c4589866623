"""Precision: the dtype of all sums, and the worst-case rounding of floating-point sums."""

from __future__ import annotations

import math

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of all sums: float64 for float64 input, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding a real number to ``dtype``: half its epsilon."""
    return torch.finfo(dtype).eps / 2


def product_roundoff(dtype: torch.dtype) -> float:
    """The same for the operands of a matrix product: ``torch.set_float32_matmul_precision`` lets
    float32 products run in tf32 ("high") or bfloat16 ("medium")."""
    if dtype != torch.float32:
        return unit_roundoff(dtype)
    coarser = {"high": 2.0**-11, "medium": 2.0**-8}
    return coarser.get(torch.get_float32_matmul_precision(), 2.0**-24)


def gamma(depth: float, unit: float) -> float:
    """``depth * u / (1 - depth * u)``: relative error of a sum in which no term passes through
    more than ``depth`` roundings; 1 (nothing is known) where the formula breaks down."""
    return min(1.0, depth * unit / (1 - depth * unit)) if depth * unit < 0.5 else 1.0


def sum_depth(terms: int, block: int) -> int:
    """Roundings on the longest path of a sum taken in blocks, whatever the order inside."""
    return min(terms, block) + math.ceil(terms / max(1, block))
