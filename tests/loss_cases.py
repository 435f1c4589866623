"""Training problems for the tests of `sb.gradient`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cases import gaussian
from supportbasis.gradient import attention_loss_gradient

NAMES = ("loss", "output", "weight_qk", "weight_v", "x")


def problem(
    n: int = 111, dim: int = 6, value_dim: int = 5, *, outliers: int = 0, seed: int = 0
) -> dict[str, Tensor]:
    x = gaussian(n, dim, seed=seed, std=0.4) + 0.2
    if outliers:
        x[:: n // outliers] *= 5
    return {
        "x": x,
        "weight": gaussian(dim, dim, seed=seed + 1, std=0.5),
        "weight_v": gaussian(dim, value_dim, seed=seed + 2),
        "target": gaussian(n, value_dim, seed=seed + 3),
    }


def run(data: dict[str, Tensor], scale: float, method: Any, **settings: Any) -> Any:
    arguments = {("weight_qk" if name == "weight" else name): y for name, y in data.items()}
    return attention_loss_gradient(**arguments, scale=scale, method=method, **settings)
