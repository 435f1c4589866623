"""The commands for a GPU, as far as a machine without one can run them."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from supportbasis import InputError
from supportbasis_studies.gpu import cases, lists, measure, study
from supportbasis_studies.gpu.measure import GpuRow
from supportbasis_studies.study import Machine, Records

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROW = GpuRow(
    "", "", "", "triton", 8, 0, 64, False, False, False, 2.0, 3.0, 2.5, None, "cudnn", 2.5, 1.25,
    0.3, 700.0, 1e-3, 3e-3, 0.1, 4.0, "3.6.0", "",
)  # fmt: skip


def run(out: Path, only: str | None = None, *, redraw: bool) -> str:
    console = Console(file=StringIO(), width=200)
    study.run_gpu_bench(only, out, console, redraw=redraw)
    return " ".join(console.file.getvalue().split())


def made_up(case: cases.Case) -> GpuRow:
    """A row in which times grow as they should."""
    ours, theirs = case.n * 1e-4, case.n**2 * 1e-8
    return replace(
        ROW, unit=case.unit, work=case.name, method=str(case.method), heads=case.heads, n=case.n,
        d=case.d, causal=case.causal, backward=case.backward, graph=case.graph, ms=ours,
        baseline_ms=theirs, ratio=theirs / ours, rate=None if case.backward else 0.3,
    )  # fmt: skip


def every_case() -> list[cases.Case]:
    return [*cases.CASES, *lists.list_cases(), *cases.CROSSOVER, *cases.sweep(study.LENGTHS)]


def test_units_have_names_of_their_own():
    names = [case.unit for case in every_case()]
    assert len(set(names)) == len(names)


def test_the_report_is_drawn_from_rows(tmp_path: Path) -> None:
    records = Records(tmp_path / "gpu.csv", GpuRow, Machine.here())
    records.add([made_up(case) for case in every_case()])
    text = run(tmp_path, redraw=True)
    assert "faster from n≈10000" in text
    for name in ("report.html", "lengths.png", "lengths.svg"):
        assert (tmp_path / name).stat().st_size > 0
    assert all(case.name in text for case in (*cases.CASES, *lists.list_cases()))


def test_errors_beyond_the_limit_are_red():
    rows = [made_up(cases.CASES[0]), replace(made_up(cases.CASES[0]), error=0.01)]
    assert study.case_table(rows).lost == {1}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [((20000, 40000), "faster from n≤20000"), ((2000, 4000), "not faster up to n=4000")],
)
def test_crossovers_at_the_ends(lengths, said):
    rows = [made_up(replace(cases.CROSSOVER[0], n=n)) for n in lengths]
    assert study.crossover(rows) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize(
    ("only", "redraw", "said"),
    [
        (None, False, "PyTorch sees no CUDA device"),
        ("nothing", False, "no case starts with 'nothing'"),
        (None, True, "without --redraw"),
    ],
)
def test_what_cannot_be_measured_is_said(only, redraw, said, tmp_path):
    with pytest.raises(InputError, match=said):
        run(tmp_path, only, redraw=redraw)


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_sampled_rows_are_those_of_each_head(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, 50, 8, generator=generator) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    wrong = exact.clone()
    wrong[0, 1] *= 1.5  # fewer tokens than rows are sampled: all of them count
    error, size = measure.sampled_squares(q, k, v, wrong, causal)
    expected = torch.tensor([0.0, 0.25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(error / size, expected, rtol=1e-12, atol=1e-20)
