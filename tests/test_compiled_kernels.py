"""Kernels compile for a device that is not there; Triton's interpreter compiles nothing."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compiled_kernels.py"


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("strict lists, bfloat16, d=64", {"split", "tilt", "select", "attend", "leaf_gradients"}),
        ("single threshold, bfloat16, d=64, causal", {"square_state", "read_out", "contract"}),
    ],
)
def test_kernels_compile(case: str, kernels: set[str], tmp_path: Path) -> None:
    made = compiled("--only", case, "--out", str(tmp_path / "rows.csv"))
    assert made.returncode == 0, made.stdout + made.stderr
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert kernels <= {row["kernel"] for row in rows}
    assert all(0 < int(row["registers"]) <= 255 for row in rows)


def test_nothing_compiled_is_a_failure() -> None:
    assert compiled("--only", "no such case").returncode == 1
