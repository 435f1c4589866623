"""Vectors for the tests of PolySketch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases import gaussian

BASES = ("gaussian", "srht", "tensorsketch")
bases = pytest.mark.parametrize("base", BASES)

ERRORS = 4.5  # standard errors


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(gaussian(*shape, seed=seed), dim=-1)


def standard_error(samples: Tensor) -> Tensor:
    return samples.std(0) / math.sqrt(len(samples))


def assert_mean(samples: Tensor, truth: Tensor | float) -> None:
    assert bool(((samples.mean(0) - truth).abs() <= ERRORS * standard_error(samples)).all())
