"""Tests that run a whole study are slow."""

from __future__ import annotations

import pytest

collect_ignore = ["data"]  # code that comes with models

WHOLE = {"done", "study"}  # fixtures that run one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WHOLE & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
