"""The commands for a GPU, as far as a machine without one can run them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from device_cases import CUDA, needs_triton

pytest.importorskip("typer")

from rich.console import Console

from supportbasis.cli import selftest
from supportbasis.cli.gpu import lists, study, works
from supportbasis.cli.gpu.rows import GpuRow
from supportbasis.cli.machine import Machine
from supportbasis.cli.records import Records
from supportbasis.errors import InputError
from test_cli import invoke

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROW = GpuRow(
    "", "", "", "triton", 8, 0, 64, False, False, False, 2.0, 3.0, 2.5, None, "cudnn", 2.5, 1.25,
    0.3, 700.0, 1e-3, 3e-3, 0.1, 4.0, "3.6.0", "",
)  # fmt: skip


def made_up(work: works.Work) -> GpuRow:
    """A row in which times grow as they should."""
    ours, theirs = work.n * 1e-4, work.n**2 * 1e-8
    return replace(
        ROW, unit=work.unit, work=work.name, method=str(work.method), heads=work.heads, n=work.n,
        d=work.d, causal=work.causal, backward=work.backward, graph=work.graph, ms=ours,
        baseline_ms=theirs, ratio=theirs / ours, rate=None if work.backward else 0.3,
    )  # fmt: skip


def every_work() -> list[works.Work]:
    return [*works.WORKS, *lists.list_works(), *works.CROSSOVER, *works.sweep(study.LENGTHS)]


def test_units_have_names_of_their_own():
    names = [work.unit for work in every_work()]
    assert len(set(names)) == len(names)


def test_the_report_is_drawn_from_rows(tmp_path: Path) -> None:
    records = Records(tmp_path / "gpu.csv", GpuRow, Machine.here())
    records.add([made_up(work) for work in every_work()])
    code, text = invoke("bench", "--device", "cuda", "--redraw", "--out", tmp_path)
    assert code == 0, text
    assert "faster from n≈10000" in text
    for name in ("report.html", "lengths.png", "lengths.svg"):
        assert (tmp_path / name).stat().st_size > 0
    assert all(work.name in text for work in (*works.WORKS, *lists.list_works()))


def test_errors_beyond_the_limit_are_red():
    rows = [made_up(works.WORKS[0]), replace(made_up(works.WORKS[0]), error=0.01)]
    assert study.table(rows).lost == {1}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [((20000, 40000), "faster from n≤20000"), ((2000, 4000), "not faster up to n=4000")],
)
def test_crossovers_at_the_ends(lengths, said):
    rows = [made_up(replace(works.CROSSOVER[0], n=n)) for n in lengths]
    assert study.crossover(rows) == said


@pytest.mark.skipif(CUDA, reason="there is a device")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--device", "cuda"), "PyTorch sees no CUDA device"),
        (("bench", "--device", "cuda", "--only", "nothing"), "no work starts with 'nothing'"),
        (("bench", "--device", "cuda", "--redraw"), "nothing of this is in"),
        (("bench", "--device", "tpu"), "expected cpu or cuda"),
        (("bench", "--redraw"), "--redraw is for --device cuda"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, said, tmp_path):
    code, text = invoke(*arguments, "--out", tmp_path)
    assert code == 2
    assert said in text


@needs_triton
@pytest.mark.skipif(CUDA, reason="kernels are compiled in this process")
def test_selftest_says_pass_or_fail(monkeypatch, capsys):
    case = selftest.Case("exact", selftest.Exact(), torch.float32, d=16, dv=16)
    monkeypatch.setattr(selftest, "IN_INTERPRETER", [case])
    assert selftest.run_selftest("cpu", Console(width=200))
    assert "PASS: all 1 cases" in capsys.readouterr().out
    monkeypatch.setattr(selftest, "OUTPUT", 0.0)
    code, text = invoke("selftest", "--device", "cpu")
    assert code == 1
    assert "FAIL: 1 of 1 cases are wrong on the CPU" in text

    def broken(*_: object) -> None:
        raise RuntimeError("out of resources\nand more")

    monkeypatch.setattr(selftest, "_compared", broken)
    assert selftest.check(case, "cpu").problem == "RuntimeError: out of resources"


def test_selftest_refuses_unknown_devices():
    with pytest.raises(InputError, match="expected cpu or cuda"):
        selftest.run_selftest("tpu", Console())
