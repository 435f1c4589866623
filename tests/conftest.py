"""Shared fixtures. Plans depend on the speed of the machine; tests fix it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Auto chooses is the same everywhere."""
    monkeypatch.setenv("SUPPORTBASIS_DETERMINISTIC", "1")
