"""Entries that are captured are those of the model's own projections, and the rotated ones after.

One model of each of the paper's architectures, and one with code of its own in LLaDA's shape.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import supportbasis as sb
from llada_cases import save_llada
from supportbasis import InputError
from supportbasis.cli.app import app
from supportbasis.cli.loading import Access, load_model
from supportbasis_studies import commands
from supportbasis_studies.distribution import capture
from supportbasis_studies.distribution.capture import Layer, captured
from supportbasis_studies.downstream.methods import mean_of_values
from supportbasis_studies.models import attending

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 300, "max_position_embeddings": 64, "intermediate_size": 48}
N = 40


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llada(tmp_path_factory.mktemp("llada"))


def tiny(name: str, llada: Path) -> Any:
    import transformers as hf

    made = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2)),
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**TEXT, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, init_std=0.3)
        ),
        "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**TEXT)),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=64)
        ),
        "vit": lambda: hf.ViTModel(
            hf.ViTConfig(**SIZES, intermediate_size=48, image_size=32, patch_size=8)
        ),
        "llada": lambda: load_model(str(llada), Access(remote_code=True)).model,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made[name]().eval()


def given_to(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}
    return {"input_ids": torch.randint(4, 300, (1, N), generator=generator)}


PROJECTIONS = {  # as each architecture names them
    "llama": ("q_proj", "k_proj", "v_proj"),
    "opt": ("q_proj", "k_proj", "v_proj"),
    "phi": ("q_proj", "k_proj", "v_proj"),
    "llada": ("q_proj", "k_proj", "v_proj"),
    "gpt2": ("c_attn",),
}


def by_hand(model: Any, name: str) -> list[tuple[Tensor, ...]]:
    """Query, key and value of each layer from the outputs of its projections."""
    found: dict[str, list[Tensor]] = {}

    def hook(label: str) -> Any:
        return lambda module, args, output: found.setdefault(label, []).append(output)

    names = PROJECTIONS.get(name)
    if names is None:  # an older and a newer name of the same in ViT
        modules = [label for label, _ in model.named_modules()]
        names = ("query", "key", "value")
        if not any(label.endswith(".query") for label in modules):
            names = ("q_proj", "k_proj", "v_proj")
    hooks = [
        module.register_forward_hook(hook(label.rpartition(".")[2]))
        for label, module in model.named_modules()
        if label.rpartition(".")[2] in names
    ]
    with torch.no_grad():
        model(**given_to(model))
    for handle in hooks:
        handle.remove()
    if len(names) == 1:
        return [tuple(cut(x) for x in whole.chunk(3, -1)) for whole in found[names[0]]]
    return [tuple(cut(x) for x in sides) for sides in zip(*(found[n] for n in names), strict=True)]


def cut(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 8)).transpose(1, 2)


def layers_of(model: Any) -> list[Layer]:
    seen: list[Layer] = []
    with torch.no_grad(), captured(model, seen.append):
        model(**given_to(model))
    return seen


@pytest.mark.parametrize("name", ["llama", "opt", "phi", "gpt2", "vit", "llada"])
def test_captured_entries_are_those_of_the_projections(name: str, llada: Path) -> None:
    model = tiny(name, llada)
    true, seen = by_hand(model, name), layers_of(model)
    assert [layer.number for layer in seen] == [0, 1] and len(true) == 2
    rotates = name in ("llama", "phi", "llada")
    for layer, sides in zip(seen, true, strict=True):
        assert layer.is_rotated == rotates and layer.projected is not None
        for mine, side in zip(layer.projected, sides, strict=True):
            torch.testing.assert_close(mine, side)
        if not rotates:  # OPT scales its queries before attention: undone
            for mine, side in zip(layer.seen, sides, strict=True):
                torch.testing.assert_close(mine, side)


def test_opt_shows_its_queries_to_attention_too_small(llada: Path) -> None:
    """What is undone: without it the entries are too small by sqrt(d)."""
    from supportbasis_studies.models import observed

    model = tiny("opt", llada)
    found: list[Tensor] = []
    with torch.no_grad(), observed(model, lambda layer, query, *_: found.append(query)):
        model(**given_to(model))
    torch.testing.assert_close(found[0] * 8**0.5, layers_of(model)[0].seen[0])


def test_a_projection_that_is_cut_in_another_way_is_not_shown() -> None:
    """Query, key and value of each head side by side, under a name that elsewhere holds all queries
    first: cut as there, values would not be those of attention."""
    import transformers as hf

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
    for shared in (True, False):
        config = hf.GPTBigCodeConfig(**sizes, multi_query=shared, bos_token_id=1, eos_token_id=1)
        layers = layers_of(hf.GPTBigCodeForCausalLM(config).eval())
        assert [layer.projected is not None for layer in layers] == [shared] * 2
        assert not any(layer.is_rotated for layer in layers)


def turned(x: Tensor, part: int, base: float = 10000.0) -> Tensor:
    """Rotary embedding of the first ``part`` entries, halves paired."""
    half = part // 2
    angle = torch.arange(x.shape[-2])[:, None] * base ** -(torch.arange(half) / half)
    one, two, rest = x[..., :half], x[..., half:part], x[..., part:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


@pytest.mark.parametrize(("name", "part"), [("llama", 8), ("phi", 4), ("llada", 8)])
def test_attention_sees_them_rotated(name: str, part: int, llada: Path) -> None:
    model = tiny(name, llada)
    for layer, (query, key, value) in zip(layers_of(model), by_hand(model, name), strict=True):
        group = layer.seen[1].shape[1] // key.shape[1]  # LLaDA's code repeats shared keys
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        for mine, true in zip(layer.seen, (turned(query, part), turned(key, part), value),
                              strict=True):  # fmt: skip
            torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(layer.seen[0], query, atol=1e-2)


# ---- a model with code of its own ------------------------------------------------------------


@torch.no_grad()
def test_replacements_reach_a_model_with_code_of_its_own(llada: Path) -> None:
    model = tiny("llada", llada)
    given = given_to(model)
    truth = model(**given).logits
    with sb.models.use(model, sb.Exact()) as answers:
        torch.testing.assert_close(model(**given).logits, truth)
    assert answers.calls == 2 and set(answers.exact | answers.approximated) == {0, 1}
    with attending(model, mean_of_values):
        broken = model(**given).logits
    assert float((broken - truth).abs().max()) > 1e-2
    torch.testing.assert_close(model(**given).logits, truth)


def test_a_plan_is_made_for_a_model_with_code_of_its_own(llada: Path) -> None:
    model = tiny("llada", llada)
    tokens = torch.randint(4, 300, (1, 512), generator=torch.Generator().manual_seed(2))
    plan = sb.models.plan(model, [tokens], kl=0.1, progress=False)
    assert len(plan.layers) == 2 and all(len(layer.heads) == 4 for layer in plan.layers)
    with torch.no_grad(), sb.models.use(model, plan) as answers:
        model(tokens)
    assert answers.calls == 2


def distribution(folder: Path, out: Path, *more: str) -> tuple[int, str]:
    command = ["distribution", "--model", str(folder), "--window", "32", "--quick"]
    result = CliRunner().invoke(commands.reproduce, [*command, "--out", str(out), *more])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.slow
def test_its_distributions_are_reported_before_and_after_rotation(
    llada: Path, tmp_path: Path
) -> None:
    code, said = distribution(llada, tmp_path / "out", "--trust-remote-code")
    assert code == 0, said
    with (tmp_path / "out" / "layers.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 3  # texts, before and after, layers, sides
    assert {row["text"] for row in rows} == {
        text + more
        for text in ("natural text", "h repeated")
        for more in ("", ", before rotary embedding")
    }
    before = {row["side"]: row for row in rows if "before" in row["text"] and row["layer"] == "0"}
    after = {row["side"]: row for row in rows if "before" not in row["text"]}
    assert before["query"]["largest"] != after["query"]["largest"]
    again = distribution(llada, tmp_path / "out", "--trust-remote-code")[1]
    assert "kept" in again


@pytest.mark.slow
def test_projections_of_unknown_names_are_said_to_be_missing(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "FUSED", ())
    monkeypatch.setattr(capture, "SEPARATE", {})
    code, said = distribution(llada, tmp_path / "out", "--trust-remote-code")
    assert code == 0 and "that the study does not know" in " ".join(said.split())
    assert "before rotary" not in (tmp_path / "out" / "layers.csv").read_text()


@pytest.mark.slow
def test_rows_of_another_model_in_a_folder_of_this_name_are_not_used(
    llada: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what goes up comes down " * 3)
    given = ("--text", str(text), "--trust-remote-code")
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    shutil.copytree(llada, first)
    save_llada(second, n_kv_heads=4)
    for folder in (first, second, first):
        code, said = distribution(folder, tmp_path / "out", *given)
        assert code == 0, said
    assert "kept" in said  # the first one's rows
    with (tmp_path / "out" / "layers.csv").open(newline="", encoding="utf-8") as file:
        spreads = {row["unit"]: row["std"] for row in csv.DictReader(file)}
    assert len(spreads) == 4 and len(set(spreads.values())) == 2  # of values, which do not rotate


def test_a_text_that_is_too_short_is_said(llada: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    wanted = "fewer than a window of 32; give a longer text"
    for letters, more in ((9, ""), (20, " or --window 20")):
        text.write_text("x" * letters)
        code, said = distribution(llada, tmp_path, "--trust-remote-code", "--text", str(text))
        assert code == 2 and said.strip().endswith(f"has {letters} tokens, {wanted}{more}")


def test_its_code_is_run_only_when_asked_and_its_errors_are_a_line(
    llada: Path, tmp_path: Path
) -> None:
    code, said = distribution(llada, tmp_path)
    assert code == 2 and "brings its own code" in said and "--trust-remote-code" in said
    assert len(said.strip().splitlines()) == 1
    broken = save_llada(tmp_path / "broken")
    file = broken / "modeling_tiny_llada.py"
    file.write_text(file.read_text().replace("return self.attn_out(", "return self.no_such("))
    code, said = distribution(broken, tmp_path, "--trust-remote-code")
    said = " ".join(said.split())
    assert code == 2 and "failed as it ran (AttributeError" in said and "Traceback" not in said
    file.write_text("raise RuntimeError('it does not even load')")
    code, said = distribution(broken, tmp_path, "--trust-remote-code")
    assert code == 2 and "does not even load" in " ".join(said.split())


@pytest.mark.parametrize("command", ["plan", "profile", "eval"])
def test_errors_of_its_code_are_a_line_in_commands_of_the_library(
    command: str, llada: Path, tmp_path: Path
) -> None:
    name = f"fails_in_{command}"  # transformers keeps the code of a folder by its name
    folder, text = save_llada(tmp_path / name), tmp_path / "text.txt"
    file = folder / "modeling_tiny_llada.py"
    file.write_text(file.read_text().replace("return self.attn_out(", "return self.no_such("))
    text.write_text("what goes up comes down " * 100)
    plan = tmp_path / "plan.json"
    making = ["--kl", "0.1", "--out", str(plan)]
    more = {"plan": making, "eval": ["--plan", str(plan)]}.get(command, [])
    common = ["--text", str(text), "--trust-remote-code"]
    if command == "eval":
        made = CliRunner().invoke(app, ["plan", str(llada), *common, *making])
        assert made.exit_code == 0, made.output
    result = CliRunner().invoke(app, [command, str(folder), *common, *more])
    said = " ".join(result.output.split())
    assert result.exit_code == 2, said
    assert f"model: {name} failed as it ran (AttributeError: 'TinyBlock'" in said


def test_a_dtype_or_device_that_there_is_not(llada: Path, tmp_path: Path) -> None:
    code, said = distribution(llada, tmp_path, "--trust-remote-code", "--dtype", "int7")
    assert code == 2 and "--dtype: got 'int7'" in said
    code, said = distribution(llada, tmp_path, "--trust-remote-code", "--device", "nowhere")
    assert code == 2 and "--device" in said


def test_weights_are_float32_on_a_cpu_whatever_the_file_has(llada: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_llada(tmp_path / "half")
    file = folder / "model.safetensors"
    halves = {name: x.to(torch.bfloat16) for name, x in load_file(file).items()}
    save_file(halves, file, metadata={"format": "pt"})
    assert load_model(str(folder), Access(remote_code=True)).model.dtype == torch.float32
    chosen = load_model(str(folder), Access(remote_code=True), dtype=torch.bfloat16)
    assert chosen.model.dtype == torch.bfloat16


def test_pictures_are_not_text(tmp_path: Path, llada: Path) -> None:
    tiny("vit", llada).save_pretrained(tmp_path)
    found = load_model(str(tmp_path), Access())
    assert found.tokenizer is None
    with pytest.raises(InputError, match="pictures"):
        found.tokens(tmp_path, 5)
