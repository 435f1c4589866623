"""The study of downstream tasks: intervals, statements, the command, stories."""

from __future__ import annotations

import csv
import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from downstream_cases import invoke, saved_models
from supportbasis.cli import loading
from supportbasis_studies import commands
from supportbasis_studies.downstream import (
    answers,
    documents,
    findings,
    items,
    measure,
    methods,
    models,
    rows,
    study,
    train,
)
from supportbasis_studies.models import attending, exact
from supportbasis_studies.statistics import mean_of_sets

CPU = torch.device("cpu")


# ---- intervals and statements ----------------------------------------------------------------


def test_paired_intervals_hold_their_mean_and_are_narrower() -> None:
    generator = torch.Generator().manual_seed(0)
    base = (torch.rand(500, generator=generator) < 0.8).double()
    other = base.clone()
    other[:10] = 1 - other[:10]
    pair = mean_of_sets([(other - base).tolist()])
    assert pair.low <= pair.value <= pair.high
    alone = mean_of_sets([other.tolist()])
    assert pair.high - pair.low < (alone.high - alone.low) / 2
    spread = 100 * float(base.std()) / math.sqrt(500)
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * spread, rel=0.15)


def scored(method: str, accuracy: float, count: int = 400) -> findings.Scored:
    right = "1" * round(accuracy * count) + "0" * (count - round(accuracy * count))
    rows = {
        task: findings.TaskRow(
            "u", "m", method, task, 0, count, 9, right, "1" * count, right, 0, None, None
        )
        for task in items.TASKS
    }
    return findings.Scored("m", method, rows)


def test_parts_of_a_task_are_joined_from_the_first_item_on() -> None:
    def part(first: int, right: str, exact_heads: float) -> rows.TaskRow:
        marks = (right, "1" * len(right), right)
        return rows.TaskRow(
            "u", "m", "Auto", "easy", first, len(right), 9, *marks, 1.0, exact_heads, 0.5
        )

    whole = rows.joined([part(2, "0", 0.4), part(0, "10", 1.0), part(9, "1", 0.0)])
    assert (whole.first, whole.items, whole.right) == (0, 3, "100")
    assert whole.exact_heads == pytest.approx(0.8) and whole.cost == pytest.approx(0.5)
    assert study.Extent(7, {}, 1, 1, (), 1).parts == [(0, 7)]
    assert study.Extent(70, {}, 1, 1, (), 1).parts == [(0, 50), (50, 20)]


def test_statements_are_confirmed_refuted_or_left_open() -> None:
    made = {
        methods.EXACT: scored(methods.EXACT, 0.9),
        methods.OURS[4]: scored(methods.OURS[4], 0.7),
        methods.OURS[6]: scored(methods.OURS[6], 0.9),
        methods.AS23[4]: scored(methods.AS23[4], 0.2),
        methods.AS23[6]: scored(methods.AS23[6], 0.4),
        methods.REVISED[methods.OURS[4]]: scored(methods.REVISED[methods.OURS[4]], 0.9),
    }
    verdicts = {item.text.split(":")[0]: item.verdict for item in findings.statements(made)}
    assert verdicts == {
        methods.OURS[6]: "confirmed",
        methods.OURS[4]: "refuted",
        methods.AS23[4]: "confirmed",
        methods.AS23[6]: "refuted",
        methods.REVISED[methods.OURS[4]]: "confirmed",
    }
    few = {name: scored(name, 0.9, 20) for name in made}
    assert all("cannot be confirmed" in item.verdict for item in findings.statements(few))


# ---- the command -----------------------------------------------------------------------------

TINY = study.Extent(2, dict.fromkeys(items.TASKS, 40), 1, 40, ((220, 1),), 1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    monkeypatch.setattr(commands, "QUICK_DOWNSTREAM", dict.fromkeys(models.CONTEXT, TINY))
    monkeypatch.setattr(study, "FOLDER", weights)
    monkeypatch.delenv("SUPPORTBASIS_MODELS", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_command_measures_resumes_and_redraws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = invoke("--quick", "--out", tmp_path)
    assert code == 0 and "cannot be confirmed" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "report.html", "tasks.csv", "perplexity.csv", "recall.csv", "layers.csv", "accuracy.png",
        "accuracy.svg", "layers.png", "layers.svg", "recall.png", "recall.svg",
    }  # fmt: skip
    with (tmp_path / "tasks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(methods.NAMES) * len(items.TASKS)
    assert {row["method"] for row in rows} == set(methods.NAMES)
    assert all(len(row["right"]) == 2 for row in rows)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "75.07" in page and "LLaDA-8B (paper)" in page and str(tmp_path) not in page

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    for name in ("measure_task", "measure_text", "measure_recall", "measure_layers"):
        monkeypatch.setattr(study, name, never)
    assert invoke("--quick", "--out", tmp_path)[0] == 0
    (tmp_path / "accuracy.png").unlink()
    assert invoke("--quick", "--redraw", "--out", tmp_path)[0] == 0
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.usefixtures("small")
def test_what_is_missing_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = invoke("--quick", "--redraw", "--out", tmp_path)
    assert code == 2 and "without --redraw" in text
    code, text = invoke("--tasks", "mmlu", "--out", tmp_path)
    assert code == 2 and "add --model" in text
    code, text = invoke("--quick", "--models", tmp_path / "nowhere", "--out", tmp_path)
    assert code == 2 and "--models: there is no folder" in text
    for device in ("abacus", "meta", "cuda:99"):
        code, text = invoke("--quick", "--device", device, "--out", tmp_path)
        assert code == 2 and f"--device: PyTorch sees no device '{device}'" in text
    (tmp_path / "stories260K").mkdir()
    code, text = invoke("--quick", "--models", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "cannot be read as a model" in text
    with monkeypatch.context() as bare:
        bare.setattr(loading, "find_spec", lambda name: None)
        code, text = invoke("--quick", "--out", tmp_path)
        assert code == 2 and "supportbasis[hf]" in text
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    code, text = invoke("--quick", "--out", tmp_path)
    assert code == 2 and "downstream.train causal" in text


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ran_out", ["disk", "memory"])
def test_what_is_finished_is_kept_when_something_runs_out(
    ran_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, measured = study.measure_task, []

    def limited(*given: Any) -> Any:
        measured.append(given)
        if len(measured) > 2:
            raise {
                "disk": OSError(errno.ENOSPC, "No space left on device"),
                "memory": torch.OutOfMemoryError("CUDA out of memory"),
            }[ran_out]
        return whole(*given)

    monkeypatch.setattr(study, "measure_task", limited)
    result = CliRunner().invoke(
        commands.reproduce, ["downstream", "--quick", "--out", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1].startswith("supportbasis reproduce downstream: ")
    assert "finished parts are kept" in " ".join(result.output.split())
    with (tmp_path / "tasks.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2
    assert not list(tmp_path.glob("*.new"))


def test_the_weights_that_are_shipped() -> None:
    files = [models.FOLDER / kind / "model.safetensors" for kind in models.CONTEXT]
    assert sum(file.stat().st_size for file in files) < 16e6
    for kind, context in models.CONTEXT.items():
        config = models.load_model(models.FOLDER / kind).config
        assert config.head_dim == 64 and config.num_hidden_layers >= 4
        assert config.max_position_embeddings == context >= 1024
        assert config.is_causal == (kind == "causal")
        log = (models.FOLDER / kind / "training.csv").read_text(encoding="utf-8")
        assert log.startswith("step,length,tokens,seconds,loss,plain,arithmetic")


@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_the_models_answer_better_than_chance(kind: str) -> None:
    model = models.load_model(models.FOLDER / kind)
    with attending(model, exact):
        found = answers.answers(model, answers.questions("easy", 8, 120, measure.SEED, kind))
    assert sum(answer.right for answer in found) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_training_learns_and_saves_in_bf16(kind: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    how = train.Settings(kind, 6, 512, ((64, 0.5), (128, 1.0)), 3e-3, 0, 1, math.inf)
    model = models.new_model(kind, 0, layers=1, width=64)
    train.train(how, model, tmp_path)
    with (tmp_path / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["step"] == "1" and set(documents.KINDS) < set(rows[0])
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    again = models.load_model(tmp_path)
    for name, parameter in model.named_parameters():
        rounded = parameter.detach().bfloat16().float()
        torch.testing.assert_close(again.get_parameter(name).detach(), rounded, rtol=0, atol=0)


def test_rates_rise_and_fall() -> None:
    rates = [train.rate_at(step / 100, 1.0) for step in range(101)]
    assert rates[0] < 0.05 and max(rates) == pytest.approx(1.0, abs=0.02) and rates[-1] < 1e-6
