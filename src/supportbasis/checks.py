"""The check that every entry of a tensor is a finite number."""

from __future__ import annotations

from torch import Tensor

from .errors import InputError
from .rounding import compute_dtype


def check_finite(**tensors: Tensor) -> None:
    """Raise if a tensor has NaN or Inf. One reduction; the entries are searched only on failure."""
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if bool(tensor.sum(dtype=compute_dtype(tensor.dtype)).isfinite()):
            continue
        bad = ~tensor.isfinite()
        count = int(bad.sum())
        if count:  # a sum of huge finite entries may overflow without any of them being at fault
            first = tuple(bad.nonzero()[0].tolist())
            raise InputError(
                f"{name} has {count} non-finite entries (NaN or Inf), the first at {first}; "
                "expected finite numbers"
            )
