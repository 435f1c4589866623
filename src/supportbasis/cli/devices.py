"""The device that a study runs on."""

from __future__ import annotations

import torch

from ..errors import InputError


def chosen_device(name: str) -> torch.device:
    """A device of PyTorch; it must know float64, which series are computed in.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError):
        raise InputError(
            f"--device: PyTorch sees no device {name!r} here; expected cpu, or one that it sees "
            "and that knows float64, for example cuda or cuda:1"
        ) from None
    return device
