"""What the tests of demo and bench share: how to call one, what it wrote, a made-up measurement."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from supportbasis_studies import bench_commands
from supportbasis_studies.comparison import demo, measure

MACHINE = ["date", "device", "cpu", "cores", "torch", "version", "commit"]
NUMBERS = ["seconds", "baseline", "baseline_seconds", "ratio", "relative_error", "max_error"]
NUMBERS += ["bound", "cost", "repeats"]


def invoke(command: str, *arguments: object) -> tuple[int, str]:
    app = getattr(bench_commands, command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(**changes: object) -> measure.Measurement:
    """A measurement with round numbers."""
    plain = measure.Measurement(
        name="job",
        method="Auto(1e-3)",
        n=1024,
        d=64,
        causal=False,
        seconds=1.0,
        baseline="SDPA",
        baseline_seconds=2.0,
        ratio=2.0,
        relative_error=1e-4,
        max_error=1e-5,
        bound=1e-2,
        cost=0.5,
        repeats=2,
    )
    return replace(plain, **changes)


def assert_stands_alone(page: str) -> None:
    """Nothing is fetched: every source is inline, and no address appears."""
    assert not re.search(r"https?:|file:|<script|<link|@import|url\(", page)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of every call, whatever the machine."""
    monkeypatch.setattr(demo, "BUDGET", 0.01)
    monkeypatch.setattr(measure, "MOST_ROUNDS", 2)
