"""``supportbasis selftest``: it passes where kernels are right, and says so where they are not."""

from __future__ import annotations

import pytest
import torch

from device_cases import CUDA, needs_triton

pytest.importorskip("typer")

from cli_cases import invoke
from supportbasis.cli import selftest

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@needs_triton
@pytest.mark.skipif(CUDA, reason="kernels are compiled in this process")
def test_selftest_says_pass_or_fail(monkeypatch):
    case = selftest.Case("exact", selftest.Exact(), torch.float32, d=16, dv=16)
    monkeypatch.setattr(selftest, "IN_INTERPRETER", [case])
    code, text = invoke("selftest", "--device", "cpu")
    assert code == 0
    assert "PASS: all 1 cases" in text
    monkeypatch.setattr(selftest, "OUTPUT", 0.0)
    code, text = invoke("selftest", "--device", "cpu")
    assert code == 1
    assert "FAIL: 1 of 1 cases are wrong on the CPU" in text

    def broken(*_: object) -> None:
        raise RuntimeError("out of resources\nand more")

    monkeypatch.setattr(selftest, "_compared", broken)
    line = f"FAIL  {case}: RuntimeError: out of resources"
    assert selftest.check(case, "cpu") == (False, line)


def test_selftest_refuses_unknown_devices():
    code, text = invoke("selftest", "--device", "tpu")
    assert code == 2
    assert "expected cpu or cuda" in text
