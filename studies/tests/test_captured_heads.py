"""Heads that methods are measured on: generated ones, and those of models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

import supportbasis as sb  # noqa: E402
from frontier_cases import CPU, fake_encoder, fake_language  # noqa: E402
from supportbasis.integrations import calls as calls_of_models  # noqa: E402
from supportbasis_studies.frontier import language, sources  # noqa: E402
from supportbasis_studies.frontier.encoder import Encoder  # noqa: E402
from supportbasis_studies.frontier.heads import (  # noqa: E402
    MAKERS,
    chosen_heads,
    parse_heads,
    stacked,
    synthetic,
)

MODELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "models"


# ---- heads -----------------------------------------------------------------------------------


def test_generated_heads_are_what_they_say() -> None:
    heads = {head.name: head for head in synthetic(2048, 3)}
    assert list(heads) == list(MAKERS)
    for name, sigma in {"diffuse": 0.5, "clusters": 4, "own cluster": 4, "isotropic": 1}.items():
        assert heads[name].sigma == pytest.approx(sigma, rel=0.02)
    assert int(torch.linalg.matrix_rank(heads["diffuse"].key, rtol=1e-4)) == 16
    sink = heads["sinks"]
    score = sink.query @ sink.key.T * sink.scale
    assert float(score[:, :4].mean()) == pytest.approx(10, rel=0.2)
    again = next(iter(synthetic(2048, 3, ("diffuse",))))
    assert torch.equal(again.query, heads["diffuse"].query)
    other = next(iter(synthetic(2048, 4, ("diffuse",))))
    assert not torch.equal(other.query, again.query)


def naive_layer(weights: dict[str, Tensor], layer: int, hidden: Tensor) -> Tensor:
    """The layer in float64, one head after the other."""
    at = f"embedder.layers.{layer}."

    def norm(index: int, x: Tensor) -> Tensor:
        get = lambda part: weights[f"{at}{index}.normalizer.{part}"].double()  # noqa: E731
        scaled = (x - get("running_mean")) / (get("running_var") + 1e-5).sqrt()
        return scaled * get("weight") + get("bias")

    total = hidden.clone()
    for head in range(8):
        q, k, v = (hidden @ weights[f"{at}0.module.W_{x}"][head].double() for x in
                   ("query", "key", "val"))  # fmt: skip
        mixed = (q @ k.T / 4).softmax(1) @ v
        total += mixed @ weights[f"{at}0.module.W_out"][head].double()
    total = norm(1, total)
    wide = total @ weights[f"{at}2.module.0.weight"].double().T
    wide = (wide + weights[f"{at}2.module.0.bias"].double()).clamp(min=0)
    wide = wide @ weights[f"{at}2.module.2.weight"].double().T
    return norm(3, total + wide + weights[f"{at}2.module.2.bias"].double())


def test_captured_heads_are_those_of_the_encoder(tmp_path: Path) -> None:
    weights = fake_encoder(tmp_path / "tsp50")
    model = Encoder.load(tmp_path / "tsp50")
    points = model.points(60, 0)
    heads = list(model.captures(points, frozenset({0, 5, 8, 23})))
    assert [head.name for head in heads] == ["0.0", "0.5", "1.0", "2.7"]
    hidden = points.double() @ weights["init_embed.weight"].double().T
    hidden += weights["init_embed.bias"].double()
    for layer in range(3):
        for head in (head for head in heads if head.layer == layer):
            for side, tensor in (("query", head.query), ("key", head.key), ("val", head.value)):
                weight = weights[f"embedder.layers.{layer}.0.module.W_{side}"]
                expected = hidden @ weight[int(head.head)].double()
                assert torch.allclose(tensor.double(), expected, rtol=1e-3, atol=1e-4)
        hidden = naive_layer(weights, layer, hidden)


@pytest.mark.skipif(not (MODELS / "tsp50").is_dir(), reason=f"no trained encoder in {MODELS.name}")
def test_heads_of_the_trained_encoder_have_their_known_spread() -> None:
    known = [0.4, 0.9, 2.0, 2.1, 1.0, 2.3, 1.8, 0.0, 5.0, 1.5, 8.5, 9.6, 1.6, 12.8, 3.3, 2.9]
    known += [2.3, 2.2, 4.6, 4.1, 7.1, 2.0, 7.8, 4.0]
    model = Encoder.load(MODELS / "tsp50")
    heads = model.captures(model.points(1024, 0), frozenset(range(24)))
    for head, sigma in zip(heads, known, strict=True):
        assert (head.n, head.d, head.dv) == (1024, 16, 16)
        assert head.sigma == pytest.approx(sigma, rel=0.1, abs=0.06)


def test_models_that_are_missing_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(sources.MODELS, raising=False)
    assert "No trained models" in sources.Models.find(None).notes[0]
    with pytest.raises(sb.InputError, match="--models: there is no folder"):
        sources.Models.find(tmp_path / "nowhere")
    monkeypatch.setenv(sources.MODELS, str(tmp_path / "nowhere"))
    with pytest.raises(sb.InputError, match=f"{sources.MODELS}: there is no folder"):
        sources.Models.find(None)
    monkeypatch.setenv(sources.MODELS, str(tmp_path))

    def note() -> str:
        found = sources.Models.find(None)
        assert not found.encoders and not found.languages
        *first, last = found.notes
        assert "there is no model in" in last
        return "".join(first)

    assert not note()
    (tmp_path / "tsp50").mkdir()
    assert "tsp50 is left out: it has no file model.safetensors" in note()
    path = tmp_path / "tsp50" / "model.safetensors"
    path.write_bytes(b"nothing of the kind")
    assert "model.safetensors cannot be read" in note()
    safetensors_torch.save_file({"x": torch.ones(1)}, path)
    assert "no tensor init_embed.weight" in note()
    path.unlink()
    path.parent.rmdir()
    weights = fake_encoder(tmp_path / "tsp50")
    name = "embedder.layers.1.0.module.W_query"
    safetensors_torch.save_file(weights | {name: torch.ones(4, 128, 32)}, path)
    assert "W_query is (4, 128, 32), expected 8 heads" in note()


@pytest.mark.slow
def test_every_model_of_the_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    fake_encoder(tmp_path / "tsp50")
    fake_encoder(tmp_path / "prizes", told=3)
    config = {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_positions": 40}
    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / ".cache").mkdir()
    found = sources.Models.find(tmp_path)
    assert [model.name for model in found.encoders] == ["prizes", "tsp50"]
    assert found.encoders[0].points(5, 0).shape == (5, 3)
    heads = list(found.encoders[0].captures(found.encoders[0].points(50, 0), frozenset({1, 9})))
    assert [(head.model, head.layer, head.head) for head in heads] == [
        ("prizes", 0, "1"), ("prizes", 1, "1")
    ]  # fmt: skip
    (story,) = found.languages
    assert (story.name, story.layers, story.heads, story.context) == ("story", 3, 2, 40)
    assert story.within((8, 32, 64)) == (8, 32) and story.within((64,)) == (40,)
    with pytest.raises(sb.InputError, match="tokenizer of story knows no words"):
        list(story.source(16, 4, None, CPU).make())
    for text, said in (
        ("{", "cannot be used"),
        ("{}", "cannot be used"),
        (json.dumps({"model_type": "vit"}), "max_position_embeddings"),
        (json.dumps({"model_type": "distilbert"}), "distilbert, no causal language model"),
    ):
        (tmp_path / "story" / "config.json").write_text(text, encoding="utf-8")
        assert said in sources.Models.find(tmp_path).notes[0]
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    alone = sources.Models.find(tmp_path)
    assert len(alone.encoders) == 2 and not alone.languages and "pip install" in alone.notes[0]


@pytest.mark.slow
def test_an_encoder_is_trained_and_found(tmp_path: Path) -> None:
    """By the script that makes models nobody has looked at."""
    script = Path(__file__).parents[2] / "benchmarks" / "train_encoder.py"
    given = ["--points", "6", "--batch", "4", "--seconds", "0.2", "--prizes"]
    subprocess.run([sys.executable, script, tmp_path / "prizes", *given], check=True, timeout=120)
    (model,) = sources.Models.find(tmp_path).encoders
    assert (model.name, model.dim, model.points(3, 0).shape) == ("prizes", 16, (3, 3))
    heads = list(model.captures(model.points(40, 0), frozenset(range(24))))
    assert len(heads) == 24 and all(bool(head.query.isfinite().all()) for head in heads)
    bad = subprocess.run([sys.executable, script, tmp_path / "x", "--points", "1"],
                         capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert bad.returncode == 2 and "--points of at least 4" in bad.stderr


def test_captured_heads_make_the_output_of_the_layer(tmp_path: Path) -> None:
    """Exact attention of what was captured is what the model's output projection is given."""
    transformers = pytest.importorskip("transformers")
    folder, text = fake_language(tmp_path / "story"), tmp_path / "text"
    text.write_text("def import return self x " * 20, encoding="utf-8")
    heads = list(language.Language.of(folder).source(50, None, text, CPU).make())
    assert [head.name for head in heads] == [f"{i}.{j}" for i in range(2) for j in range(4)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    tokens = torch.tensor([[2, 1, 3, 4, 0] * 10])
    with torch.no_grad():
        model(tokens)
    for layer in range(2):
        mine = [head for head in heads if head.layer == layer]
        assert all(head.is_causal and (head.n, head.m, head.d) == (50, 50, 8) for head in mine)
        output = F.scaled_dot_product_attention(*stacked(mine), is_causal=True)
        expected = given[layer].view(1, 50, 4, 8).transpose(1, 2)
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_layers_beyond_the_last_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = calls_of_models.SDPA

    def count(*arguments: Tensor, **options: object) -> Tensor:
        calls.append(1)
        return plain(*arguments, **options)

    model = language.Language.of(fake_language(tmp_path / "story"))
    monkeypatch.setattr(calls_of_models, "SDPA", count)
    (head,) = model.source(300, ((0, 3),), None, CPU).make()
    assert head.name == "0.3" and not calls
    (head,) = model.source(300, ((1, 3),), None, CPU).make()
    assert head.name == "1.3" and len(calls) == 1


def test_texts_are_read_as_they_are(tmp_path: Path) -> None:
    text = language.standard_library()
    assert text.startswith("# file: ") and text.count("# file: ") > 50
    names = [line for line in text.splitlines() if line.startswith("# file: a")]
    assert names == sorted(names) and "# file: ast.py" in names
    model = language.Language.of(fake_language(tmp_path / "story"))
    short = tmp_path / "short"
    short.write_text("def def", encoding="utf-8")
    with pytest.raises(sb.InputError, match=r"--text: .*short has 2 tokens of story, expected 300"):
        model._tokens(short, 300)
    (model.folder / "model.safetensors").unlink()
    with pytest.raises(sb.InputError, match="--model: story cannot be run"):
        list(model.source(300, 1, None, CPU).make())
    with pytest.raises(sb.InputError, match=r"--text: .*nowhere cannot be read"):
        model._tokens(tmp_path / "nowhere", 300)
    long = tmp_path / "long"
    long.write_text("continuously " * 200 + "self", encoding="utf-8")  # more than 6 letters a word
    assert model._tokens(long, 201).tolist() == [0] * 200 + [4]


@pytest.mark.parametrize("given", ["0", "x", "1.", "0.1,2", "-1.0", "0.0.1"])
def test_heads_that_are_no_heads_are_refused(given: str) -> None:
    with pytest.raises(sb.InputError, match="--heads: got"):
        parse_heads(given)


def test_heads_are_spread_over_layers_and_numbers() -> None:
    chosen = chosen_heads("x", 6, 6, 6)
    assert [layer for layer, _ in chosen] == [head for _, head in chosen] == list(range(6))
    assert len(set(chosen_heads("x", 6, 4, 13))) == 13
    assert len(chosen_heads("x", 6, 4, None)) == len(set(chosen_heads("x", 6, 4, 100))) == 24
    assert chosen_heads("x", 2, 2, ((1, 1),)) == [(1, 1)]
    for beyond in ((2, 0), (0, 2)):
        with pytest.raises(sb.InputError, match=r"--heads: x has no head"):
            chosen_heads("x", 2, 2, (beyond,))
