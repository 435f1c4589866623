"""The efficiency study: what it times, what it calls an error, and what it keeps."""

from __future__ import annotations

import csv
import errno
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

import supportbasis as sb
from supportbasis import InputError
from supportbasis.cli.terminal import console
from supportbasis_studies import commands
from supportbasis_studies import study as shared
from supportbasis_studies.comparison.measure import with_method
from supportbasis_studies.efficiency import (
    Extent,
    authors,
    findings,
    inputs,
    measure,
    methods,
    rows,
    study,
)
from supportbasis_studies.study import Machine, Records, Row

TINY = Extent(
    lengths=(96, 128),
    steps=4,
    together=2,
    budget=0.01,
    map_lengths=(128,),
    sigmas=(inputs.PAPER_SIGMA, 1.0),
    authors=(96, 4),
)
PICTURES = {"thresholds", "thresholds-theory", "errors", "map"}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def invoke(out: Path, *options: str):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "QUICK_EFFICIENCY", TINY)
        command = ["efficiency", "--quick", "--out", str(out), *options]
        return CliRunner().invoke(commands.reproduce, command)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("efficiency") / "new"
    result = invoke(out)
    if result.exception is not None:
        raise result.exception
    return out, " ".join(result.output.split())


# ---- the command -----------------------------------------------------------------------------


def test_it_writes_rows_pictures_and_a_report_that_stands_alone(done: tuple[Path, str]) -> None:
    out, text = done
    expected = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == expected | {
        "efficiency.csv",
        "authors.csv",
        "report.html",
    }
    page = (out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|<script|<link|@import|url\(", page)
    assert page.count("<img ") == len(PICTURES)
    words = re.sub(r'"data:image[^"]*"|<style>.*?</style>', "", page, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf)\b", words)
    assert "statements hold" in text and "mean(V)" in text


def test_rows_cover_every_curve_of_both_scales(done: tuple[Path, str]) -> None:
    found = read(done[0] / "efficiency.csv")
    sweep = [row for row in found if row["part"] == "thresholds"]
    setting = inputs.paper_setting(96, inputs.EXPERIMENTS, 0)
    lines = {"SDPA", "mean(V)", methods.NAIVE, *methods.line_methods(setting)}
    for n in TINY.lengths:
        for scale in inputs.SCALES:
            mine = [r for r in sweep if (r["n"], r["scale"]) == (str(n), scale)]
            sweeps = {methods.SINGLE, methods.SINGLE_CHEBYSHEV}
            assert {r["method"] for r in mine} == lines | sweeps
            for method in sweeps:
                found_at = [float(r["threshold"]) for r in mine if r["method"] == method]
                assert found_at == TINY.thresholds
    mapped = [row for row in found if row["part"] == "map"]
    assert len(mapped) == 2 * len(TINY.sigmas) * (2 + len(methods.map_methods()))
    assert all(float(row["sdpa_seconds"]) > 0 for row in found)


def test_the_full_study_is_the_papers() -> None:
    full = inputs.FULL
    assert full.lengths == (8192, 16384, 24576, 32768)
    assert (full.thresholds[0], full.thresholds[-1], len(full.thresholds)) == (0.15, 0.5, 30)
    assert {0.1, 0.3, 1.0, 2.0} < set(full.sigmas) and max(full.map_lengths) == 131072
    names = [unit.name for unit in measure.units(None, full, 0)]
    assert len(set(names)) == len(names)


def test_the_authors_script_is_repeated() -> None:
    """Its numbers, and that disjoint parts and a better polynomial err less than it does."""
    assert inputs.FULL.authors == (4096, 30) and len(authors.thresholds(30)) == 29
    assert (authors.D, authors.DEGREE, authors.SIGMA) == (64, 2, 0.1)
    found = authors.measured("unit", 256, [0.3, 0.4], 0, lambda _: None)
    errors = {row.method: row.error for row in found if row.threshold == 0.4}
    assert errors[authors.OURS_BEST] <= errors[authors.OURS] < errors[authors.AS23]
    assert errors[authors.AUTHORS] < errors[authors.AS23] < errors[authors.ONES]
    exact = authors.measured("unit", 64, [0.01], 0, lambda _: None)  # all rows are large
    by_method = {row.method: row for row in exact}
    assert by_method[authors.OURS].error == 0.0 and by_method[authors.OURS].exact_share == 1.0
    assert by_method[authors.AUTHORS].error > 0  # p(0) is not 1
    assert "fair ratios" in " ".join(authors.findings(found))


def test_a_threshold_beyond_all_entries_gains_nothing_in_the_fair_comparison() -> None:
    """Both lines have the interval of AS23: what is left is the threshold's."""
    rows = authors.measured("unit", 128, [0.9], 0, lambda _: None)
    errors = {row.method: row.error for row in rows}
    assert all(row.exact_share == 0.0 for row in rows)
    assert errors[authors.OURS] == errors[authors.AS23]
    assert errors[authors.OURS_BEST] == errors[authors.ONE_BEST]


def test_a_second_run_measures_nothing(
    done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (done[0] / "efficiency.csv").read_bytes()
    monkeypatch.setattr(measure, "_race", None)
    monkeypatch.setattr(measure, "_map_row", None)
    result = invoke(done[0], "--redraw")
    assert result.exit_code == 0 and "and kept" in result.output
    monkeypatch.setattr(study, "publish", lambda *_: None)
    monkeypatch.setattr(study, "_paper", lambda *_: None)
    monkeypatch.setattr(study, "_errors", lambda *_: None)
    monkeypatch.setattr(study, "_map", lambda *_: None)
    result = invoke(done[0])
    assert result.exit_code == 0 and "and kept" in result.output
    assert (done[0] / "efficiency.csv").read_bytes() == before


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(TINY, lengths=(96,), map_lengths=())
    machine = Machine.here()
    records = Records(tmp_path / "efficiency.csv", rows.EfficiencyRow, machine)
    wanted = measure.units(records, small, 0)
    records.add(wanted[0].run(lambda share: None))
    again = Records(tmp_path / "efficiency.csv", rows.EfficiencyRow, machine)
    assert again.rows == records.rows and again.has(wanted[0].name)
    ran = []
    units = [
        replace(unit, records=again, run=lambda tick, u=unit: ran.append(u.name) or u.run(tick))
        for unit in wanted
    ]
    shared.measure(units, console())
    assert ran == [unit.name for unit in wanted[1:]]
    found = again.of([unit.name for unit in wanted])
    assert list(dict.fromkeys(row.unit for row in found)) == [unit.name for unit in wanted]


def test_redraw_without_rows_says_what_to_do(tmp_path: Path) -> None:
    result = invoke(tmp_path, "--redraw")
    assert result.exit_code == 2 and "without --redraw" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(done[0] / "efficiency.csv", tmp_path)
    kept = (tmp_path / "efficiency.csv").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared, "write_csv", full)
    result = invoke(tmp_path, "--seed", "1")
    assert result.exit_code == 2 and "finished parts are kept" in result.output
    assert (tmp_path / "efficiency.csv").read_bytes() == kept
    assert not list(tmp_path.glob("*.new"))


# ---- rows that are kept ----------------------------------------------------------------------


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    setting = inputs.paper_setting(96, inputs.EXPERIMENTS, 0)
    made = rows.EfficiencyRow(
        unit="a, b", part="map", seed=0, n=96, d=setting.dim, scale="1/d", sigma=0.1, outliers=True,
        method="m", seconds=1e-300, sdpa_seconds=2.0, ratio=math.inf, max_error=0.5,
        exact_share=1.0, ran="“x”\ny", note="",
    )  # fmt: skip
    machine = Machine.here()
    Records(tmp_path / "x.csv", rows.EfficiencyRow, machine).add([made])
    assert Records(tmp_path / "x.csv", rows.EfficiencyRow, machine).rows == [made]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="other columns"):
        Records(tmp_path / "x.csv", Row, Machine.here())


# ---- what is timed ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", inputs.SCALES)
def test_the_papers_computation_is_softmax_in_any_number_of_pieces(
    scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = inputs.paper_setting(111, scale, 0)
    score = setting.query.double() @ setting.key.double().mT * inputs.SCALES[scale]
    exact = score.softmax(-1) @ setting.value.double()
    whole = methods.naive(setting).call()
    monkeypatch.setattr(methods, "MATRIX_BYTES", 4 * 111 * 40)
    assert methods.pieces(111) == 3
    for output in (whole, methods.naive(setting).call()):
        assert float((output - exact).abs().max()) < 1e-6


def test_the_entry_bound_holds_and_is_wider_than_the_norm_bound() -> None:
    setting = inputs.harder_setting(200, 1.0, False, 0)
    score = setting.query.double() @ setting.key.double().mT / 8
    bound = methods.entry_bound(setting)
    norms = [float(x.norm(dim=-1).max()) for x in (setting.query, setting.key)]
    assert float(score.abs().max()) <= norms[0] * norms[1] / 8 <= bound


@pytest.mark.parametrize("sigma", [0.1, 2.0])
def test_harder_scores_have_the_spread_they_are_called_by(sigma: float) -> None:
    setting = inputs.harder_setting(512, sigma, False, 0)
    score = setting.query @ setting.key.mT / 8
    assert float(score.std()) == pytest.approx(sigma, rel=0.02)
    worse = inputs.harder_setting(512, sigma, True, 0)
    changed = (worse.query != setting.query).any(-1).sum()
    assert int(changed) == 5  # one per cent


# ---- errors ----------------------------------------------------------------------------------


METHODS = {
    "AS23": sb.Polynomial(1),
    "single": sb.SingleThreshold(1.0, 1),
    "multi": sb.MultiThreshold(2.0, 1),
    "exact": sb.Exact(),
}


@pytest.mark.parametrize("name", METHODS)
def test_matrix_errors_are_those_of_the_matrix_that_ran(name: str) -> None:
    n = 90
    setting = inputs.harder_setting(n, 0.2, False, 0)
    truth = rows.Truth.of(setting, 0)
    assert len(truth.rows) == n
    plan = sb.plan(setting.query, setting.key, setting.value, method=METHODS[name])
    unit = replace(setting, value=torch.eye(n)[None, None])  # whose output is the matrix itself
    given = with_method(unit, name, METHODS[name]).call()[0, 0].double()
    exact = (setting.query.double() @ setting.key.double().mT / 8).softmax(-1)[0, 0]
    expected = float((given - exact).norm() / exact.norm())
    assert truth.matrix_error(plan.heads[0]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    if name != "exact":
        assert expected > 1e-4


def test_the_error_of_the_mean_is_that_of_equal_weights() -> None:
    setting = inputs.harder_setting(100, 1.0, False, 0)
    truth = rows.Truth.of(setting, 0)
    exact = (setting.query.double() @ setting.key.double().mT / 8).softmax(-1)
    expected = float((exact - 0.01).norm() / exact.norm())
    assert truth.mean_error() == pytest.approx(expected, rel=1e-12)


def test_shares_of_exact_pairs_are_counted() -> None:
    setting = inputs.harder_setting(100, 0.2, False, 0)
    tensors = (setting.query, setting.key, setting.value)
    large = [(x[0, 0].abs().amax(1) > 1.2) for x in tensors[:2]]
    expected = float((large[0][:, None] | large[1][None]).double().mean())
    plan = sb.plan(*tensors, method=sb.SingleThreshold(1.2, 1)).heads[0]
    assert 0 < expected < 1
    assert rows.exact_share(plan) == pytest.approx(expected)
    assert rows.exact_share(sb.plan(*tensors, method=sb.Polynomial(1)).heads[0]) == 0
    assert rows.exact_share(sb.plan(*tensors, method=sb.Exact()).heads[0]) == 1


# ---- the map ---------------------------------------------------------------------------------


def cell(**changes: object) -> rows.EfficiencyRow:
    plain = rows.EfficiencyRow(
        unit="u", part="map", seed=0, n=8, d=4, scale="1/√d", sigma=1.0, outliers=False, method="m",
        seconds=1.0, sdpa_seconds=2.0, ratio=2.0, output_error=1e-3, max_error=1e-3,
        exact_share=0.1, cost=0.5, ran="", note="",
    )  # fmt: skip
    return replace(plain, **changes)


def test_a_cell_of_the_map_says_what_happened() -> None:
    assert (findings.verdict(cell()), findings.map_cell(cell())) == ("wins", "2×")
    slow = cell(ratio=0.5)
    assert (findings.verdict(slow), findings.map_cell(slow)) == ("loses", "0.5×")
    wrong = cell(output_error=0.2)
    assert (findings.verdict(wrong), findings.map_cell(wrong)) == ("wrong", "off 20 %")
    assert findings.verdict(cell(output_error=math.nan)) == "wrong"
    assert findings.verdict(cell(exact_share=1.0, cost=1.0)) == "exact"
    absent = cell(seconds=None, ratio=None, output_error=None, cost=1.5)
    assert (findings.verdict(absent), findings.map_cell(absent)) == ("not run", "cost 1.5")
