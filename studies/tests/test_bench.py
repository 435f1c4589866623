"""``supportbasis bench``: its inputs, times and errors, and what it writes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import supportbasis as sb
from comparison_cases import (  # noqa: F401
    MACHINE,
    NUMBERS,
    assert_stands_alone,
    invoke,
    read,
    row,
    short,
)
from supportbasis_studies import bench_commands
from supportbasis_studies.comparison import bench, cases, measure, settings

TINY = bench.Sizes((128, 256), 256, 256, (64, 256), 0.01, 0.01)

pytestmark = pytest.mark.usefixtures("short")


# ---- inputs and measurements -----------------------------------------------------------------


@pytest.mark.parametrize("make", settings.GENERATED, ids=lambda make: make.__name__)
def test_generated_inputs_follow_the_seed_alone(make: object) -> None:
    before = torch.get_rng_state()
    first, again, other = make(100, 1), make(100, 1), make(100, 2)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_generated_inputs_have_the_stated_spread() -> None:
    n = 4096
    plain, outlying, heavy = (make(n) for make in settings.GENERATED)
    assert float(plain.query.std()) == pytest.approx(0.1, rel=0.01)
    assert float(plain.value.std()) == pytest.approx(1.0, rel=0.01)
    for tokens in (outlying.query, outlying.key):
        assert int((tokens.abs().amax(-1) > 2).sum()) == 41  # 1 % of 4096
    assert not torch.equal(outlying.query.abs().amax(-1) > 2, outlying.key.abs().amax(-1) > 2)
    assert float(heavy.query.std()) == pytest.approx(0.1, rel=0.1)
    assert float(heavy.query.abs().max()) > 1  # ten standard deviations


@pytest.mark.parametrize("causal", [False, True])
def test_exact_rows_agree_with_float64_attention(causal: bool) -> None:
    setting = settings.gaussian(700, is_causal=causal)
    tensors = (setting.query.double(), setting.key.double(), setting.value.double())
    expected = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    exact = measure.ExactRows.of(setting, 0)
    assert len(exact.rows) == 512
    assert max(exact.errors(expected)) < 1e-12
    relative, largest = exact.errors(2 * expected)
    assert relative == pytest.approx(1.0)
    wrong = expected[..., exact.rows, :].abs().max() / setting.value.abs().max()
    assert largest == pytest.approx(float(wrong))


def test_mean_of_v_is_attention_with_equal_weights() -> None:
    for causal in (False, True):
        setting = settings.gaussian(33, is_causal=causal)
        flat = replace(setting, query=torch.zeros_like(setting.query))
        timed_call = measure.mean_value(flat)
        timed_call.run()
        assert timed_call.output is not None
        assert max(measure.ExactRows.of(flat, 0).errors(timed_call.output)) < 1e-6


def test_what_ran_says_why_it_is_exact() -> None:
    """A head that falls back to exact attention is no silent one."""
    setting = settings.gaussian(64)
    (measured,) = measure.compare(
        setting, {"Auto()": sb.Auto()}, budget=0.01, tick=lambda share: None
    )
    (head,) = sb.plan(setting.query, setting.key, setting.value, method=sb.Auto()).heads
    assert head.kind == "exact" and head.reason
    assert measured.ran.startswith("exact") and head.reason in measured.ran


def test_warnings_become_notes() -> None:
    setting = settings.outliers(256)
    methods = {"Polynomial(2)": sb.Polynomial(2)}
    (measured,) = measure.compare(setting, methods, budget=0.01, tick=lambda share: None)
    assert "no usable denominator" in measured.note
    assert not measured.note.startswith("supportbasis")


# ---- bench -----------------------------------------------------------------------------------


def test_bench_runs_every_work_and_appends_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_commands, "QUICK_BENCH", TINY)
    code, text = invoke("bench", "--quick", "--out", tmp_path)
    assert code == 0
    rows = read(tmp_path / "results.csv")
    assert list(rows[0]) == [
        *MACHINE, "name", "method", "n", "d", "causal", *NUMBERS, "ran", "note"
    ]  # fmt: skip
    names = {r["name"] for r in rows}
    assert names == {job.name for job in bench.jobs(TINY)}
    assert {"single-n128", "causal-n256", "kde-256", "crossover-kde"} <= names
    assert "single-n256" in text and "crossover-single" in text
    assert_stands_alone((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG"
    assert len(read(tmp_path / "crossover.csv")) == 7

    code, _ = invoke("bench", "--quick", "--only", "degree1", "--out", tmp_path)
    assert code == 0
    assert [r["name"] for r in read(tmp_path / "results.csv")][len(rows) :] == ["degree1-n256"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "expected cpu or cuda"),
        (("--redraw",), "--redraw is for --device cuda"),
        (("frontier",), "--quick must come after frontier"),
    ],
)
def test_options_that_bench_cannot_follow_are_refused(
    arguments: tuple[str, ...], said: str
) -> None:
    code, text = invoke("bench", "--quick", *arguments)
    assert code == 2 and said in text


def test_help_lists_the_frontier() -> None:
    assert "frontier" in invoke("bench", "--help")[1]


def test_bench_on_a_gpu_gets_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = []
    monkeypatch.setattr(bench_commands, "run_gpu_bench", lambda *a, **k: received.append((a, k)))
    assert invoke("bench", "--device", "cuda", "--quick", "--out", tmp_path)[0] == 0
    (((only, out, _), options),) = received
    assert (only, out, options) == (None, tmp_path, {"quick": True, "redraw": False})


def test_bench_names_what_there_is(tmp_path: Path) -> None:
    code, text = invoke("bench", "--only", "nothing", "--out", tmp_path)
    assert code == 2
    for name in ("single-n8192", "single-n32768", "single-n131072", "degree1-n32768"):
        assert name in text
    for name in ("auto-n32768", "causal-n32768", "outliers-n32768", "kde-100k", "crossover-auto"):
        assert name in text


def test_quick_benchmarks_are_short() -> None:
    assert max(n for job in bench.jobs(bench.QUICK) for n in job.lengths) == 8192


def test_rows_are_not_appended_to_another_table(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(sb.InputError, match="other columns"):
        bench.run_bench(TINY, "kde", tmp_path, Console())
    assert (tmp_path / "results.csv").read_text() == "a,b\n1,2\n"


def test_crossover_is_where_the_ratio_stays_above_one() -> None:
    def sweep(*ratios: float, cost: float = 0.5) -> bench.Crossover:
        rows = [row(n=512 * 2**i, ratio=ratio, cost=cost) for i, ratio in enumerate(ratios)]
        return bench.crossover("crossover-x", rows)

    assert sweep(0.5, 2.0, 3.0).n == pytest.approx(512 * math.sqrt(2))
    assert sweep(2.0, 0.5, 0.5, 1.0).n == pytest.approx(4096)
    assert sweep(1.5, 2.0).n == 512
    assert sweep(0.2, 0.9).n is None
    assert sweep(1.1, 1.2, cost=1.0).n is None  # nothing was approximated
    assert "not faster than SDPA up to n=1024" in str(sweep(0.2, 0.9))


def test_exact_density_sums_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    points, data = (torch.randn(count, 3, generator=generator) for count in (50, 70))
    expected = (points[:, None] - data).square().sum(-1).div(-2).exp().mean(1)
    expected = expected / (2 * math.pi) ** 1.5
    for form in (cases.by_distance, cases.by_products):
        assert torch.allclose(form(points, data, chunk=16), expected, rtol=1e-5)


def test_times_are_drawn_for_each_baseline(tmp_path: Path) -> None:
    rows = [row(n=n, baseline=name) for n in (512, 1024) for name in ("SDPA", "SDPA causal")]
    bench.plot_times([*rows, row(seconds=None, ratio=None)], tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 1000
