"""The frontier: numbers, findings, the shipped models, and the command."""

from __future__ import annotations

import csv
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

import supportbasis as sb  # noqa: E402
from frontier_cases import ALL, CPU, NYSTROM, TINY, capture, fake_encoder, fake_language  # noqa: E402
from supportbasis_studies import bench_commands  # noqa: E402
from supportbasis_studies.frontier import findings, measure, shipped, sources, summary  # noqa: E402
from supportbasis_studies.frontier.heads import stacked  # noqa: E402

# ---- numbers ---------------------------------------------------------------------------------


def row(**changes: object) -> measure.Row:
    plain = measure.Row(
        "tsp50", 0, "0", 4096, 16, "float32", False, 1.0, measure.LISTS, measure.OURS, 0.15, 0.15,
        0.01, "", 0.5, 2.0, 4.0, plan="block", plan_seconds=1.0,
    )  # fmt: skip
    return replace(plain, **changes)


def baseline(**changes: object) -> measure.Row:
    plain = {"method": "top blocks (MInference)", "kind": measure.BASELINE, "plan": ""}
    return row(**(plain | {"seconds": None, "sdpa_seconds": None, "ratio": None} | changes))


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_the_sampled_rows(causal: bool) -> None:
    head = capture(700, causal=causal)
    truth = measure.Truth.of(head, 0)
    assert len(truth.rows.unique()) == measure.ROWS
    exact = F.scaled_dot_product_attention(*stacked([head]), is_causal=causal)[0, 0, truth.rows]
    assert truth.error(exact) < 1e-6
    assert truth.error(1.5 * exact) == pytest.approx(0.5, rel=1e-5)
    equal = replace(head, query=torch.zeros_like(head.query))
    assert measure._mean(measure.Truth.of(equal, 0)).error < 1e-6


def test_heads_of_a_call_have_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    heads = [capture(512, size=size, causal=True) for size in (0.5, 1.5)]
    truths = [measure.Truth.of(head, 0) for head in heads]
    settings = [("P", 0.1, sb.Polynomial(2)), ("E", 0.2, sb.Exact()), ("F", 0.3, sb.Exact())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the second head is too large for its polynomial
        rows = measure.measure_ours(truths, settings, lambda _: None)
    assert [(r.method, r.setting) for r in rows] == [
        (name, setting) for name, setting, _ in settings for _ in heads
    ]
    for head, truth, found in zip(heads, truths, rows[:2], strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = sb.attention(*stacked([head]), is_causal=True, method=sb.Polynomial(2))
        assert found.error == pytest.approx(truth.error(output[0, 0, truth.rows]), rel=1e-4)
        assert not found.is_exact
    assert rows[1].error > 3 * rows[0].error
    for found in rows:
        assert found.together == 2 and found.rounds == measure.LEAST_ROUNDS
        assert found.ratio == pytest.approx(found.sdpa_seconds / found.seconds)
    for found in rows[2:]:
        assert found.is_exact and found.error < 1e-6
        assert found.seconds == rows[2].seconds  # exact plans are timed once


def test_times_are_the_best_of_calls_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    calls: list[str] = []

    def wait(name: str, seconds: list[float]) -> Tensor:
        calls.append(name)
        time.sleep(seconds.pop(0))
        return torch.zeros(1)

    first, second = [0.2, 0.02, 0.1], [0.05, 0.2, 0.2]
    best, rounds = measure.in_turns([lambda: wait("a", first), lambda: wait("b", second)], CPU)
    assert rounds == 3 and calls == ["a", "b"] * 3
    assert 0.02 <= best[0] < 0.05 <= best[1] < 0.1


def test_a_plan_that_costs_more_than_its_budget_is_no_answer() -> None:
    rows = [
        row(),
        row(head="1", cost=1.0, plan="exact", error=1e-7),
        baseline(),
        baseline(head="1"),
    ]
    (group,) = summary.groups(rows)
    assert group.errors(measure.LISTS, 0.15) == [0.01, math.inf]
    assert math.isinf(group.median(measure.LISTS, 0.15))
    assert group.best_median(0.15) == ("top blocks (MInference)", 0.01)


def test_curves_are_of_settings_that_every_head_has() -> None:
    rows = [row(head=str(i), error=e, ratio=g) for i, (e, g) in
            enumerate(((0.1, 2.0), (0.2, 4.0), (0.6, 0.5)))]  # fmt: skip
    rows += [row(setting=0.3), baseline(cost=0.12)]
    (group,) = summary.groups(rows)
    (point,) = group.curve(measure.LISTS, lambda r: r.time)
    assert point[:3] == (0.15, 0.5, 0.2)
    assert (point.low, point.high) == pytest.approx((0.12, 0.52))
    assert baseline(cost=0.12).time == 0.12  # it is not timed
    assert group.only("0.1").heads == ["0.1"]


def test_findings_are_what_the_rows_say() -> None:
    auto = {"method": measure.AUTO, "setting": 0.03}
    rows = [row(head=str(i), error=e) for i, e in enumerate((0.01, 0.02, 0.03))]
    rows += [row(head=str(i), setting=0.05, cost=0.05, error=0.2, ratio=9.0) for i in range(3)]
    rows += [baseline(head=str(i), error=0.04) for i in range(3)]
    rows += [baseline(head=str(i), setting=0.05, cost=0.04, error=0.03) for i in range(3)]
    rows += [row(head=str(i), error=e, plan=p, ratio=20.0, **auto) for i, (e, p) in
             enumerate(((0.02, "block"), (1e-7, "exact"), (1e-7, "exact")))]  # fmt: skip
    said = findings.paragraph(summary.groups(rows)[0])
    assert "BlockSupport(budget=0.15) is fastest: 4× SDPA's speed" in said
    assert "error 0.02, 90th percentile 0.028, worst 0.03 on head 0.2" in said
    assert "median error is 0.15× (top blocks (MInference), 5 %) to 2× (top blocks" in said
    assert "Auto(0.03) leaves 2 of 3 heads exact; the others err by at most 0.02" in said
    broken = [replace(r, error=0.05) if r.method == measure.AUTO else r for r in rows]
    said = findings.paragraph(summary.groups(broken)[0])
    assert "1 exceed 1.25 times the tolerance, most 0.05 on head 0.0" in said
    slow = [replace(r, ratio=0.5) for r in rows if r.kind == measure.OURS]
    assert "no faster than SDPA (0.5×)" in findings.paragraph(summary.groups(slow)[0])
    poor = [replace(r, error=1.0) for r in rows]
    assert "no setting of ours" in findings.paragraph(summary.groups(poor)[0])


def test_growth_is_the_slope_of_median_times() -> None:
    rows = [row(n=n, head=str(i), seconds=s * i) for n, s in ((1024, 1), (4096, 8)) for i in (1, 3)]
    grid = findings.growth_table(summary.groups(rows))
    assert grid.lines == [["BlockSupport(budget=0.15)", "2.00 s", "16.00 s", "1.50"]]
    assert findings.growth_table(summary.groups(rows[:2])).lines[0][-1] == "—"


def test_tables_hold_every_setting() -> None:
    rows = [row(head=str(i), error=e) for i, e in enumerate((0.01, 0.03))]
    rows += [baseline(head=str(i)) for i in range(2)]
    rows += [
        baseline(head=str(i), method=measure.MEAN, kind=measure.FREE, error=0.5) for i in range(2)
    ]
    (group,) = summary.groups(rows)
    (line,) = findings.our_table(group).lines
    assert line[0] == "BlockSupport(budget=0.15)" and line[1] == "0.02"
    assert line[5:9] == ["0 of 2", "4×", "4×", "4×"]
    lines = findings.equal_cost_table(group).lines
    assert [entry[0] for entry in lines] == [measure.LISTS, "top blocks (MInference)", measure.MEAN]
    assert [entry[1] for entry in lines] == ["0.02", "0.01", "0.5"]


@pytest.mark.skipif(not hasattr(sb, "FittedPolynomial"), reason="there is no FittedPolynomial yet")
def test_all_of_ours_are_measured() -> None:
    made = measure.our_settings((0.1, 0.2), (0.03,))
    assert [(name, setting) for name, setting, _ in made] == [
        (measure.LISTS, 0.1), (measure.LISTS, 0.2), (measure.LISTS_WITHIN, 0.03),
        (measure.FITTED, 0.03), (measure.AUTO, 0.03),
    ]  # fmt: skip
    assert made[-1][2] == sb.Auto(0.03) and made[0][2] == sb.BlockSupport(budget=0.1)


# ---- the shipped models ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(shipped.NAMES))
def test_heads_of_the_shipped_models(kind: str) -> None:
    pytest.importorskip("transformers")
    found = list(shipped.captures(kind, 256, 0, [(0, 0), (5, 3)]))
    assert [head.name for head in found] == ["0.0", "5.3"]
    for head in found:
        assert head.model == shipped.NAMES[kind] and head.is_causal == (kind == "causal")
        assert head.query.shape == head.key.shape == head.value.shape == (256, 64)
        assert head.sigma > 0.05


def test_the_shipped_heads_are_left_out_with_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert shipped.missing() is None
    assert "no weights" in str(shipped.missing(tmp_path))
    assert [source.count for source in shipped.sources(3, 0, 4096)] == [3, 3]
    with_shipped = replace(TINY, shipped=(256,))
    none = sources.Models((), ())
    names = [source.model for source in sources.sources(none, TINY, 0, None, CPU)]
    assert names == ["synthetic"]
    names = [source.model for source in sources.sources(none, with_shipped, 0, None, CPU)]
    assert names == ["synthetic", *shipped.NAMES.values()]
    assert not sources.sources(replace(none, alone=True), with_shipped, 0, None, CPU)


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is measured, of ours a budget and a tolerance."""
    monkeypatch.setattr(bench_commands, "QUICK_FRONTIER", TINY)
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    monkeypatch.delenv(sources.MODELS, raising=False)
    monkeypatch.setattr(
        measure,
        "our_settings",
        lambda budgets, tolerances: [
            *((measure.LISTS, b, sb.BlockSupport(budget=b)) for b in budgets),
            *((measure.AUTO, t, sb.Auto(t)) for t in tolerances),
        ],
    )


def invoke(*arguments: object) -> tuple[int, str]:
    chosen = [str(argument) for argument in arguments]
    result = CliRunner().invoke(bench_commands.bench, ["frontier", *chosen])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_command_measures_writes_and_says(tmp_path: Path) -> None:
    fake_encoder(tmp_path / "models" / "tsp50")
    out = tmp_path / "out"
    code, text = invoke("--quick", "--heads", 2, "--models", tmp_path / "models", "--out", out)
    assert code == 0
    assert "left out" not in text and "report.html" in text
    names = {path.name for path in out.iterdir()}
    drawn = [f"{model}-{axis}" for model in ("tsp50", "synthetic") for axis in ("cost", "time")]
    pictures = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert names == {"report.html", "frontier.csv", *pictures}
    rows = read(out / "frontier.csv")
    assert {"device", "model", "layer", "head", "n", "causal", "method", "setting", "cost", "error",
            "seconds", "sdpa_seconds", "ratio"} <= set(rows[0])  # fmt: skip
    trained = [r for r in rows if r["model"] == "tsp50"]
    assert {r["method"] for r in trained} >= set(ALL) | {measure.LISTS, measure.AUTO, measure.MEAN}
    assert {(r["n"], r["layer"], r["head"]) for r in trained} == {
        (n, *head) for n in ("256", "512") for head in (("0", "0"), ("1", "5"))
    }
    for r in rows:
        is_ours = r["kind"] == measure.OURS
        assert bool(r["seconds"]) == bool(r["ratio"]) == is_ours
        if not is_ours:
            assert float(r["cost"]) <= float(r["setting"]) * 1.001
    page = (out / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert "Auto(0.1) leaves" in page and page.count("<img") == 4


@pytest.mark.usefixtures("tiny")
def test_a_language_model_alone(tmp_path: Path) -> None:
    folder = fake_language(tmp_path / "story")
    code, text = invoke("--quick", "--model", folder, "--lengths", "600,300", "--heads", "0.1,1.3",
                        "--out", tmp_path / "out")  # fmt: skip
    assert code == 0 and "No trained models" not in text
    rows = read(tmp_path / "out" / "frontier.csv")
    assert {(r["model"], r["n"], r["layer"], r["head"], r["causal"]) for r in rows} == {
        ("story", n, *head, "True") for n in ("300", "600") for head in (("0", "1"), ("1", "3"))
    }
    assert {r["method"] for r in rows} >= (set(ALL) - {NYSTROM}) | {measure.LISTS, measure.AUTO}


@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_measured_is_explained(tmp_path: Path) -> None:
    folder = fake_language(tmp_path / "story")
    for given, said in (
        (("--model", folder, "--models", tmp_path), "expected one of the two"),
        (("--model", tmp_path / "nowhere"), "--model: there is no folder"),
        (("--model", tmp_path), "has no file model.safetensors"),
        (("--model", folder, "--lengths", "2048"), "2048 is more than the context of story, 1024"),
        (("--model", folder, "--lengths", "100"), "--lengths: got '100'"),
        (("--model", folder, "--lengths", "512,x"), "--lengths: got '512,x'"),
        (("--model", folder, "--heads", "2.0"), "story has no head 2.0"),
        (("--model", folder, "--device", "moon"), "--device: PyTorch sees no device 'moon'"),
        (("--text", folder), "--text is read by causal language models"),
    ):
        code, text = invoke("--quick", *given, "--out", tmp_path / "out")
        assert code == 2 and said in text


def test_a_models_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, text = invoke("--models", tmp_path / "nowhere", "--out", tmp_path)
    assert code == 2 and "--models: there is no folder" in text
