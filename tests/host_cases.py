"""Inputs of the tests of models of other packages."""

from __future__ import annotations

import torch


def smooth(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tokens [..., n, d] near a curve, which lists approximate well."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(*shape[:-1], 2, generator=generator)
    return torch.cos(3 * place @ torch.randn(2, shape[-1], generator=generator))


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    assert float(one.abs().max()) > 1e-3
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
