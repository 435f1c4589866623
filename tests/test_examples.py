"""The examples run, at settings that take a second."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_regression(tmp_path):
    state = torch.get_rng_state()
    example = load("attention_regression")
    arguments = ["--tokens", "400", "--steps", "12", "--out", str(tmp_path)]
    curves = example.main(arguments)
    exact, basis = curves["exact"], curves["support basis, degree 2"]
    gain = exact.losses[0] - exact.losses[-1]
    assert gain > 0.1 * exact.losses[0]
    assert abs(basis.losses[-1] - exact.losses[-1]) < 0.1 * gain
    assert (tmp_path / "attention-regression.png").stat().st_size > 10_000
    lines = (tmp_path / "attention-regression.csv").read_text().splitlines()
    assert len(lines) == 1 + 13 * len(curves)
    assert torch.equal(state, torch.get_rng_state())


def test_train_text(tmp_path):
    state = torch.get_rng_state()
    example = load("train_text")
    example.LAYERS, example.BATCH = 2, 2
    text = ["--text", str(EXAMPLES.parent / "README.md")]
    curves, rows = example.main(["--quick", "--steps", "4", *text, "--out", str(tmp_path)])
    exact, basis = curves["exact"], curves["support basis"]
    first, last = exact.held_out[0], exact.held_out[4]
    assert last < first - 0.05
    assert abs(basis.held_out[4] - last) < 0.02 * last
    assert basis.losses != exact.losses  # something was approximated
    assert rows["Exact()"].error == 0 and rows["Exact()"].loss == last
    assert 0 < rows["SingleThreshold(3)"].error < 0.2
    assert (tmp_path / "train-text.png").stat().st_size > 10_000
    lines = (tmp_path / "train-text.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 * len(curves)
    lines = (tmp_path / "train-text-methods.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows)
    assert torch.equal(state, torch.get_rng_state())


def test_the_text_is_there():
    texts = list(itertools.islice(load("train_text").docstrings(), 300))
    assert sum(len(text.split()) for text in texts) > 1000


def test_transformers_model(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    text = "".join(f"{i} times {i} is {i * i}.\n" for i in range(300))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=len(letters), max_position_embeddings=1024, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    plan = load("transformers_model").main(str(tmp_path), "text.txt")
    assert plan.upper <= plan.limit
    assert (tmp_path / "model.plan.json").exists()
    assert "calls by the plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        pytest.param(
            "transformers_model", "transformers_model.py MODEL TEXT", marks=pytest.mark.slow
        ),
        ("context_parallel", "torchrun"),
    ],
)
def test_examples_that_need_arguments_say_how_to_run_them(name, usage):
    pytest.importorskip("transformers")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=120,
        env=environment | {"PYTHONPATH": str(EXAMPLES.parent / "src")},
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert usage in done.stderr and "Traceback" not in done.stderr


def test_diffusers_model(capsys):
    pytest.importorskip("diffusers")
    example = load("diffusers_model")
    example.PIXELS, example.STEPS = 32, 4
    assert example.main() < example.LIMIT
    assert "calls; the sample changed" in capsys.readouterr().out


def test_tabpfn_model(capsys):
    pytest.importorskip("tabpfn")
    assert load("tabpfn_model").main(600) < 0.03
    assert "long calls" in capsys.readouterr().out


def test_training_model(capsys):
    state = torch.get_rng_state()
    try:
        losses, plans = load("training_model").main(1024, 10)
    finally:
        torch.set_rng_state(state)
    assert min(losses[-3:]) < 0.7 * losses[0]
    assert 1 <= plans < 10
    assert "exact: " in capsys.readouterr().out


@pytest.mark.slow
def test_context_parallel_by_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    script = [str(EXAMPLES / "context_parallel.py"), "--tokens", "700", "--dim", "8"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    header, _, *rows = done.stdout.splitlines()
    assert header == "4 ranks, 700 tokens, 4 heads of dim 8, causal"
    assert len(rows) == 4
    for row in rows:
        *_, output, gradient, sent, _, _, _ = row.split()
        assert float(output) < 1e-5 and float(gradient) < 1e-4 and float(sent) > 0, row
