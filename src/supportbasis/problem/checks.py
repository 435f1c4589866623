"""Checks of the entries of tensors, and whether a call is traced and cannot be checked."""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor

from ..errors import InputError
from .rounding import compute_dtype
from .tracing import check_visible, is_tracing

__all__ = ["check_bias", "check_finite", "check_integer", "check_seed", "is_tracing"]


def check_finite(**tensors: Tensor) -> None:
    """Raise if a tensor has NaN or Inf. One reduction; the entries are searched only on failure."""
    for name, tensor in tensors.items():
        check_visible(name, tensor)
        tensor = tensor.detach()
        if math.isfinite(tensor.sum(dtype=compute_dtype(tensor.dtype)).item()):
            continue
        bad = ~tensor.isfinite()
        count = int(bad.sum())
        if count:  # a sum of huge finite entries may overflow without any of them being at fault
            first = tuple(bad.nonzero()[0].tolist())
            raise InputError(
                f"{name} has {count} non-finite entries (NaN or Inf), the first at {first}; "
                "expected finite numbers"
            )


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """A plain int of this range, or an error."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least:
        raise InputError(f"{name} must be an integer >= {least}, got {value!r}")
    if most is not None and number > most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value!r}")
    return number


def check_seed(seed: object) -> int:
    """A seed as a plain int, or an error: seeds and what is derived from them (seed + 1, ...) go
    into generators that take 64 bits."""
    integral = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not integral or not 0 <= int(seed) < 2**63:  # type: ignore[call-overload]
        raise InputError(f"seed must be an integer with 0 <= seed < 2**63, got {seed!r}")
    return int(seed)  # type: ignore[call-overload]


def check_bias(mask: Tensor) -> None:
    """Raise if a bias has NaN or +inf."""
    check_visible("attn_mask", mask)
    if mask.dtype != torch.bool and bool((mask.isnan() | (mask == math.inf)).any()):
        raise InputError("attn_mask contains NaN or +inf; a bias is finite or -inf (masked)")
