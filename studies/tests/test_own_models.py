"""Downstream tasks of a user's own model, by lm-eval."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from downstream_cases import invoke, random_models
from llada_cases import save_llada
from supportbasis import InputError
from supportbasis_studies import commands
from supportbasis_studies.downstream import (
    harness,
    language,
    methods,
    models,
    sampler,
    stories,
    study,
)
from supportbasis_studies.downstream.diffusion import Diffusion

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return random_models()


# ---- a user's own model ----------------------------------------------------------------------


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for lm-eval that runs the model once and says what it was asked."""
    asked: list[dict[str, Any]] = []

    def simple_evaluate(**given: Any) -> dict[str, Any]:
        asked.append(given)
        if given["tasks"] == ["offline"]:
            raise ConnectionError("no route to the hub")
        request = SimpleNamespace(args=("ada has", " lamp"))
        score = given["model"].loglikelihood([request])[0][0]
        numbers = {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1}
        samples = [{"filtered_resps": ["[invalid]"]}, {"filtered_resps": [str(score)]}]
        return {"results": {given["tasks"][0]: numbers}, "samples": {given["tasks"][0]: samples}}

    class HFLM:
        def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int):
            assert batch_size == 1
            self.model, self.tokenizer = pretrained, tokenizer

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            tokens = torch.tensor([self.tokenizer("".join(requests[0].args))["input_ids"]])
            return [(float(self.model(tokens).logits.detach().sum()), True)]

    parts = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    found = harness.find_spec
    monkeypatch.setattr(harness, "find_spec", lambda name: name == "lm_eval" or found(name))
    return asked


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> Path:
    """The tiny models with a tokenizer."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("own")
    tokenizer = Tokenizer(kinds.WordLevel(language.IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for kind, model in tiny.items():
        models.save_model(model, folder / kind)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
        ).save_pretrained(folder / kind)
    return folder


@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_a_model_of_the_users_goes_through_lm_eval(
    kind: str, own_model: Path, lm_eval: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(study, "NAMES", methods.NAMES[:2])
    given = ("--model", own_model / kind, "--tasks", "gsm8k", "--limit", 3, "--out", tmp_path)
    code, text = invoke(*given)
    assert code == 0 and "50.00 ± 10.0 (50 % unparsable)" in text and "60.57" in text
    assert [(call["tasks"], call["limit"]) for call in lm_eval] == [(["gsm8k"], 3)] * 2
    assert invoke(*given)[0] == 0 and len(lm_eval) == 2  # kept
    code, text = invoke("--model", own_model / kind, "--tasks", "offline", "--out", tmp_path)
    assert code == 2 and "offline could not be run with" in text and "network" in text


def test_rows_of_another_dtype_or_other_weights_are_not_used(
    own_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(own_model / "causal", folder)
    whole = harness.Wish(str(folder))
    found = [whole.unit("exact", "mmlu"), replace(whole, limit=3).unit("exact", "mmlu")]
    found.append(replace(whole, dtype=torch.bfloat16).unit("exact", "mmlu"))
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    found.append(whole.unit("exact", "mmlu"))
    assert len(set(found)) == 4


@pytest.mark.usefixtures("lm_eval")
def test_a_model_with_code_of_its_own_goes_through_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In LLaDA's shape; the answers of the stand-in are sums of logits, which must differ."""
    scores = []
    row = harness.benchmark_row

    def keep(unit: str, model: str, method: str, task: str, found: dict[str, Any]) -> Any:
        scores.append(float(found["samples"][task][1]["filtered_resps"][0]))
        return row(unit, model, method, task, found)

    monkeypatch.setattr(harness, "benchmark_row", keep)
    monkeypatch.setattr(study, "NAMES", (methods.EXACT, methods.AS23[4], methods.MEAN))
    folder = save_llada(tmp_path / "llada")
    given = ("--model", folder, "--tasks", "gsm8k", "--limit", 1, "--out", tmp_path / "out")
    code, text = invoke(*given)
    assert code == 2 and "--trust-remote-code" in text
    code, text = invoke(*given, "--trust-remote-code")
    assert code == 0, text
    assert len(scores) == 3 and len({round(score, 2) for score in scores}) == 3


@pytest.fixture
def local_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real lm-eval with a task of choices, a group of it (as MMLU is) and one that is written
    and read by two filters (as GSM8K is); their data are a file."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "tasks"
    folder.mkdir()
    doc = {"asked": "ada has 17", "choices": ["lamp", "boat"], "gold": 1, "sum": "5"}
    (folder / "data.jsonl").write_text(f"{json.dumps(doc)}\n" * 4)
    common = {
        "dataset_path": "json", "test_split": "test", "doc_to_text": "{{asked}}",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")},
                           "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern},
                                  {"function": "take_first"}]}
        for name, pattern in (("strict-match", "answer (never)"), ("flexible-extract", "(.)"))
    ]  # fmt: skip
    metrics = [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")]
    exact_match = [{"metric": "exact_match", "aggregation": "mean"}]
    files: dict[str, dict[str, Any]] = {
        "choice": common | {
            "task": "own_choice", "output_type": "multiple_choice", "metric_list": metrics,
            "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
        },
        "group": {
            "group": "own_group", "task": ["own_choice"],
            "aggregate_metric_list": [{"metric": "acc"}],
        },
        "sum": common | {
            "task": "own_sum", "output_type": "generate_until", "doc_to_target": "{{sum}}",
            "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 4},
            "metric_list": exact_match, "filter_list": filters,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    whole = partial(lm_eval.simple_evaluate, task_manager=manager, bootstrap_iters=10)
    monkeypatch.setattr(lm_eval, "simple_evaluate", whole)
    short = partial(harness.Wish, writing=sampler.Sampling(length=4, steps=2, block=4))
    monkeypatch.setattr(commands, "BenchmarkWish", short)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies'
@pytest.mark.usefixtures("local_tasks")
@pytest.mark.parametrize("kind", [*sorted(models.CONTEXT), "llada"])
def test_the_real_lm_eval_takes_all_kinds_of_models(
    kind: str, own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "NAMES", (methods.EXACT, methods.MEAN, "MultiThreshold"))
    names = ("own_choice", "own_group", "own_sum")
    if kind == "llada":  # with code of its own
        save_llada(own_model / kind)
    model = ("--model", own_model / kind, *["--trust-remote-code"] * (kind == "llada"))
    given = (*model, "--tasks", ",".join(names), "--limit", 3)
    code, text = invoke(*given, "--out", tmp_path / "out")
    assert code == 0, text
    with (tmp_path / "out" / "benchmarks.csv").open(newline="", encoding="utf-8") as file:
        found = {(row["method"], row["task"]): row for row in csv.DictReader(file)}
    assert len(found) == 9 and {row["items"] for row in found.values()} == {"3"}
    for method in study.NAMES:
        choice, group, total = (found[method, name] for name in names)
        assert (choice["metric"], group["metric"]) == ("acc_norm,none", "acc,none")
        assert float(choice["accuracy"]) == float(group["accuracy"]) in (0.0, 1.0)
        assert total["metric"] == "exact_match,strict-match"
        assert float(total["accuracy"]) == 0.0 and float(total["unparsable"]) == 1.0
    code, text = invoke(*model, "--tasks", "nobody", "--out", tmp_path / "out")
    assert code == 2 and "nobody could not be run with" in text


@pytest.mark.usefixtures("lm_eval")
def test_a_tokenizer_without_an_end_is_refused(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval begins texts with it, or with the token that begins them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(own_model / "causal")
    tokenizer.eos_token = None
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    code, text = invoke("--model", own_model / "causal", "--tasks", "gsm8k", "--out", tmp_path)
    assert code == 2 and "neither begins nor ends texts" in text


def test_what_lm_eval_needs_is_said(
    tmp_path: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    code, text = invoke("--model", own_model / "causal", "--out", tmp_path)
    assert code == 2 and "supportbasis-studies[eval]" in text


@pytest.mark.usefixtures("lm_eval")
def test_models_that_are_not_there_are_said(tmp_path: Path) -> None:
    code, text = invoke("--model", "/no/such/folder", "--out", tmp_path)
    assert code == 2 and "there is no folder" in text
    code, text = invoke("--model", tmp_path, "--out", tmp_path)
    assert code == 2 and "cannot be read as a model" in text
    code, text = invoke("--model", "nobody/nothing", "--out", tmp_path)
    assert code == 2 and "neither a folder nor among the models" in text and "--download" in text
    code, text = invoke("--model", "nobody/nothing", "--tasks", " , ", "--out", tmp_path)
    assert code == 2 and "no task is named" in text


@pytest.mark.usefixtures("lm_eval")
def test_no_network_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub\nand so on")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    code, text = invoke("--model", "nobody/nothing", "--download", "--out", tmp_path)
    assert code == 2 and "couldn't connect" in text and "check the name and the network" in text
    assert "and so on" not in text


def test_likelihoods_of_a_diffusion_are_llada_s_estimate(tiny: dict[str, Any]) -> None:
    """One token to score leaves nothing to chance."""

    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": language.ids(text)}

        def decode(self, tokens: Tensor, **_: Any) -> str:
            return language.words_of(tokens.tolist())

    how = sampler.Sampling(length=4, steps=2, block=2)
    lm = Diffusion(tiny["diffusion"], Words(), how, draws=4)
    lm.mask = language.MASK
    request = SimpleNamespace(args=("ada has 17 ", "lamp"))
    found, likeliest = lm.loglikelihood([request])[0]
    tokens = torch.tensor([language.ids("ada has 17 <mask>")])
    with torch.no_grad():
        logs = lm._logits(tokens)[0, -1].log_softmax(-1)
    assert found == pytest.approx(float(logs[language.IDS["lamp"]]), rel=1e-4)
    assert likeliest == (int(logs.argmax()) == language.IDS["lamp"])
    assert lm.loglikelihood_rolling([SimpleNamespace(args=("ada has",))])[0] < 0
    text = lm.generate_until([SimpleNamespace(args=("ada has", {"until": ["zzz"]}))])[0]
    assert len(text.split()) == 4


# ---- stories260K -----------------------------------------------------------------------------


def test_a_story_read_with_exact_attention_stays_the_same(
    own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stories, "START", "ada has 17")
    monkeypatch.setattr(stories, "TOKENS", 24)
    monkeypatch.setattr(stories, "own_text", lambda: "ada has 17 lamp . " * 20)
    loaded = stories.load(own_model / "causal", CPU)
    row = stories.measure_story(loaded, "u", methods.EXACT)[0]
    assert row.agreement == 1.0 and row.same == 21
    broken = stories.measure_story(loaded, "u", methods.MEAN)[0]
    assert broken.same < 21
    monkeypatch.setattr(stories, "own_text", lambda: "ada has 17 lamp")
    with pytest.raises(InputError, match="makes 4 tokens of the text, fewer than a window of 24"):
        stories.load(own_model / "causal", CPU)


def test_the_folder_of_stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPPORTBASIS_MODELS", raising=False)
    assert stories.stories_folder(None) is None
    with pytest.raises(InputError, match="stories260K"):
        stories.stories_folder(tmp_path)
    (tmp_path / "stories260K").mkdir()
    monkeypatch.setenv("SUPPORTBASIS_MODELS", str(tmp_path))
    assert stories.stories_folder(None) == tmp_path / "stories260K"
