"""Shared fixtures. Plans depend on the speed of the machine; tests fix it."""

from __future__ import annotations

import math
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch: `make test` has one process a core

import pytest
import torch
from torch import Tensor


def pytest_configure(config: pytest.Config) -> None:
    """Tests of GPUs run only where ``-m`` names them, whatever else it chooses."""
    chosen = config.option.markexpr
    if chosen and "gpu" not in chosen:
        config.option.markexpr = f"({chosen}) and not gpu"


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Auto chooses is the same everywhere."""
    monkeypatch.setenv("SUPPORTBASIS_DETERMINISTIC", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """Memory that nobody wrote holds NaN, or a large number."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(math.nan if x.is_floating_point() else 10**8)

    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
