"""Shared fixtures. Plans depend on the speed of the machine; tests fix it."""

from __future__ import annotations

import pytest

from supportbasis.plans import cost


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a plain two-core machine, so that what Auto chooses is the same everywhere."""
    pairs = ((4.0, 9e-10), (16.0, 6.5e-10), (64.0, 1.65e-9))
    rates = cost.Rates(pairs, feature=2e-10, product=1.2e-11, scan=1e-10)
    monkeypatch.setattr(cost, "calibrate", lambda device, dtype: rates)
