"""Checks that look at the entries of tensors, and when nobody can."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import InputError
from .rounding import compute_dtype


def check_finite(**tensors: Tensor) -> None:
    """Raise if a tensor has NaN or Inf. One reduction; the entries are searched only on failure."""
    for name, tensor in tensors.items():
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


def check_bias(mask: Tensor) -> None:
    """Raise if a bias has NaN or +inf."""
    if mask.dtype != torch.bool and bool((mask.isnan() | (mask == math.inf)).any()):
        raise InputError("attn_mask contains NaN or +inf; a bias is finite or -inf (masked)")


def is_watched() -> bool:
    """Whether tensors stand for others, inside a compiled graph or a transform of `torch.func`:
    then only operators see entries."""
    transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return bool(torch.compiler.is_compiling() or transforms())
