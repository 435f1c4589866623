"""``supportbasis plan``, ``profile`` and ``eval`` on a tiny model with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import supportbasis as sb
from cli_cases import assert_stands_alone, invoke, read
from supportbasis.cli import model_commands
from supportbasis.models import ladder, profiling

transformers = pytest.importorskip("transformers")
TEXT = "".join(f"{i * i % 97} times {i} and so on, line {i % 13}\n" for i in range(400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model whose tokens are characters, and a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    letters = {letter: number for number, letter in enumerate(["?", *sorted(set(TEXT))])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(
        path
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=len(letters), max_position_embeddings=1024,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 4
    model.save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is an option at any length."""
    monkeypatch.setattr(ladder, "FASTER", 0.0)
    monkeypatch.setattr(ladder, "SHARES", (0.0, 0.05, 0.3))
    monkeypatch.setattr(model_commands, "LENGTHS", (512, 1024, 4096))


def run(folder: Path, command: str, *more: Any) -> tuple[int, str]:
    return invoke(command, folder, "--text", folder / "text.txt", "--device", "cpu", *more)


def test_a_plan_is_made_used_and_evaluated(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    code, text = run(folder, "plan", "--kl", 0.02, "--tokens", 1024, "--out", out)
    assert code == 0, text
    assert "heads are approximated" in text
    plan = sb.ModelPlan.load(out)
    assert plan.limit == 0.02
    assert plan.tokens == 1024
    rows = read(tmp_path / "tiny" / "heads.csv")
    assert [(row["layer"], row["head"]) for row in rows] == [
        (f"model.layers.{i}.self_attn", str(h)) for i in range(2) for h in range(2)
    ]
    assert sum(float(row["kl"]) for row in rows) == pytest.approx(plan.predicted)
    page = (tmp_path / "tiny" / "report.html").read_text()
    assert_stands_alone(page)
    assert "ModelPlan: LlamaForCausalLM" in page

    folder_out = tmp_path / "eval"
    more = ("--plan", out, "--tokens", 1024, "--batches", 2, "--copies", 0, "--out", folder_out)
    code, text = run(folder, "eval", *more)
    assert code == 0, text
    assert "perplexity" in text
    (row,) = read(folder_out / "evaluation.csv")
    assert int(row["tokens"]) == 2048
    assert 0 <= float(row["kl"]) <= 0.02
    assert_stands_alone((folder_out / "report.html").read_text())


def test_a_profile_tells_what_every_head_is_like(folder: Path, tmp_path: Path) -> None:
    code, text = run(folder, "profile", "--tokens", 1024, "--out", tmp_path)
    assert code == 0, text
    rows = read(tmp_path / "heads.csv")
    assert len(rows) == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = {}

    def record(call: Any) -> torch.Tensor:
        found[call.site] = call
        return call.exact()

    from supportbasis.integrations.replacing import replaced

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT).input_ids[:1024]])
    with torch.no_grad(), replaced(model, record):
        model(ids)
    for number, row in enumerate(rows):
        call, head = found[number // 2], number % 2
        q, k = call.query[0, head], call.key[0, 0]
        assert float(row["query_std"]) == pytest.approx(float(q.std()), rel=1e-4)
        assert float(row["key_max"]) == pytest.approx(float(k.abs().max()), rel=1e-4)
        score = (q @ k.T / q.shape[1] ** 0.5).masked_fill(torch.ones(1024, 1024).triu(1) > 0, -1e9)
        entropy = torch.special.entr(score.softmax(-1)).sum(-1)
        assert float(row["entropy"]) == pytest.approx(float(entropy.mean()), rel=0.05)  # 256 rows
        uniform = torch.arange(1, 1025).log().mean()
        assert float(row["uniform"]) == pytest.approx(float(uniform), rel=0.02)
        assert row["planned_at_512"] == row["planned_at_1024"] == "True"
        assert row["planned_at_4096"] == "False"
    assert_stands_alone((tmp_path / "report.html").read_text())


def test_heads_that_cannot_be_approximated_are_said_to_be_exact() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40, sliding_window=16,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    found = profiling.profile(model, torch.randint(40, (1, 64)), (32, 64), progress=False)
    assert all("sliding window" in x.kind for head in found for x in head.prospects)
    for head in found:  # of row i there are min(i + 1, 16) keys
        seen = torch.arange(1, 65).clamp(max=16)
        assert head.uniform == pytest.approx(float(seen.log().mean()))
        assert head.entropy <= head.uniform


def test_the_length_follows_the_text(folder: Path, tmp_path: Path) -> None:
    """A power of two of which the text has as many batches, at most the context."""
    loaded = model_commands.LoadedModel("tiny", *_parts(folder), 1024)
    for characters, shape in ((8000, (3, 1024)), (2000, (3, 512))):
        path = tmp_path / "short.txt"
        path.write_text(TEXT[:characters])
        assert model_commands.batch_tokens(loaded, path, None, 3).shape == shape


def test_a_text_of_long_words_has_all_of_its_tokens(tmp_path: Path) -> None:
    """Tokens of more characters than the tokenizer is given for each at first."""

    def tokenizer(text: str, verbose: bool) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"{number:0200}" for number in range(30)))
    loaded = model_commands.LoadedModel("words", torch.empty(0), tokenizer, None)
    assert loaded.tokens(path, 20).tolist() == list(range(20))
    assert loaded.tokens(path, 64).tolist() == list(range(30))


def _parts(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_what_is_missing_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:300])
    text = folder / "text.txt"
    other = tmp_path / "other.json"
    other.write_text("{}")
    for arguments, message in (
        (("plan", folder), "--text"),
        (("plan", folder, "--text", tmp_path / "none.txt", "--kl", 1), "cannot be read"),
        (("plan", folder, "--text", short, "--kl", 1), "expected 3 batches of 512"),
        (("plan", folder, "--text", text, "--kl", 1, "--tokens", 4096), "at most 1024"),
        (("plan", folder, "--text", text, "--kl", 1, "--batches", 1), "--batches"),
        (("plan", folder, "--text", text), "one of kl and change"),
        (("plan", folder, "--text", text, "--kl", 1, "--out", tmp_path), "ends in .json"),
        (("plan", tmp_path / "none", "--text", text, "--kl", 1), "there is no folder"),
        (("plan", "nobody/nothing", "--text", text, "--kl", 1), "add --download"),
        (("plan", tmp_path, "--text", text, "--kl", 1), "cannot be read as a model"),
        (("plan", folder, "--text", text, "--kl", 1, "--device", "tpu9"), "sees no device"),
        (("plan", folder, "--text", text, "--kl", 1, "--dtype", "int8"), "expected one of"),
        (("eval", folder, "--text", text, "--plan", tmp_path / "none.json"), "none.json"),
        (("eval", folder, "--text", text, "--plan", other), "no model plan of this version"),
    ):
        code, said = invoke(*arguments)
        assert code == 2, said
        assert message in said, (arguments, said)
        assert "Traceback" not in said


def test_code_of_a_model_does_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    from supportbasis.cli.loading import Access, load_model

    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    config = json.loads((mine / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "brought.Brought"}
    (mine / "config.json").write_text(json.dumps(config))
    (mine / "brought.py").write_text("raise RuntimeError('it ran')\n")
    assert type(load_model(str(mine), Access()).model).__name__ == "LlamaForCausalLM"
    with pytest.raises(sb.InputError, match="it ran"):
        load_model(str(mine), Access(remote_code=True))
