"""The frontier: baselines that do what their papers say, counted costs, and the command."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

import supportbasis as sb  # noqa: E402
from supportbasis.cli import app as app_module  # noqa: E402
from supportbasis.cli.frontier import claims, errors, language, shipped, sources, summary, timing  # noqa: E402
from supportbasis.cli.frontier.baselines import (  # noqa: E402
    BASELINES,
    VARIANTS,
    Answer,
    Case,
    blocks,
    features,
    landmarks,
    sampling,
    windows,
)
from supportbasis.cli.frontier.encoder import Encoder  # noqa: E402
from supportbasis.cli.frontier.heads import MAKERS, Capture, synthetic  # noqa: E402

MODELS = Path(__file__).resolve().parents[2] / "shared" / "data" / "models"
ALL = BASELINES | VARIANTS
LISTS = [name for name, method in BASELINES.items() if method is not features.performer]
LISTS.remove("landmarks (Nyström)")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def capture(n: int = 512, m: int | None = None, d: int = 8, size: float = 1.0) -> Capture:
    m = m or n
    query, key, value = size * random(n, d), size * random(m, d, seed=1), random(m, d, seed=2)
    return Capture("random", 0, "0", query, key, value)


def case(head: Capture, count: int = 64) -> Case:
    return Case(head, torch.arange(0, head.n, max(1, head.n // count)))


def error(at: Case, answer: Answer | None) -> float:
    """Relative error against float64 attention as it is written down."""
    assert answer is not None
    head = at.head
    score = head.query[at.rows].double() @ head.key.double().T / math.sqrt(head.d)
    exact = score.softmax(1) @ head.value.double()
    return float((answer.output.double() - exact).norm() / exact.norm())


# ---- baselines -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_everything_are_exact(name: str) -> None:
    for shape in ((512, 512), (500, 333)):
        at = case(capture(*shape, size=1.5))
        answer = BASELINES[name](at, 1.0, 0)
        assert error(at, answer) < 1e-5
        assert answer is not None and answer.keys == pytest.approx(at.head.m)


@pytest.mark.parametrize("name", ALL)
def test_costs_are_within_the_budget_and_not_far_below(name: str) -> None:
    for shape in ((1000, 1000), (777, 1024)):
        at = case(capture(*shape))
        spent = []
        for budget in (0.02, 0.05, 0.1, 0.2, 0.5):
            answer = ALL[name](at, budget, 0)
            if answer is not None:
                assert answer.cost <= budget * (1 + errors.ROUNDING)
                assert bool(answer.output.isfinite().all())
                spent.append(answer.cost / budget)
        assert spent and spent[-1] > 0.8


@pytest.mark.parametrize("name", LISTS)
def test_a_cost_holds_at_least_the_keys_of_the_lists(name: str) -> None:
    at = case(capture(1024))
    answer = BASELINES[name](at, 0.3, 0)
    assert answer is not None
    assert answer.keys / at.head.m <= answer.cost <= answer.keys / at.head.m + 0.12


@pytest.mark.parametrize("name", ALL)
def test_more_budget_means_less_error(name: str) -> None:
    head = next(iter(synthetic(1024, 0, ("diffuse",))))
    head = replace(head, value=head.value + 1)  # so that the mean of V is not nothing
    at = case(head)
    found = [error(at, ALL[name](at, budget, 0)) for budget in (0.2, 0.8)]
    assert found[1] < found[0] < 0.5


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_answer_and_leaves_the_generator_alone(name: str) -> None:
    at, state = case(capture()), torch.random.get_rng_state()
    first, second = (ALL[name](at, 0.3, 7) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first.output, second.output)
    assert torch.equal(state, torch.random.get_rng_state())


def planted(n: int, size: int) -> Capture:
    """Queries of each block of ``size`` want the keys of another block, and no others."""
    count = n // size
    target = torch.arange(count).roll(3)
    code = 12 * torch.eye(count)
    key = code.repeat_interleave(size, 0) + 0.3 * random(n, count)
    query = code[target].repeat_interleave(size, 0) + 0.3 * random(n, count, seed=1)
    return Capture("planted", 0, "0", query, key, random(n, count, seed=2))


@pytest.mark.parametrize("method", [blocks.top_blocks, blocks.antidiagonals, blocks.centroids])
def test_the_blocks_that_matter_are_found(method: Callable[..., Answer | None]) -> None:
    at = case(planted(2048, 64))
    assert error(at, method(at, 0.2, 0)) < 1e-3


def test_centroids_lose_nothing_where_blocks_are_constant() -> None:
    head = capture(1024)
    key, value = (x[::64].repeat_interleave(64, 0) for x in (head.key, head.value))
    at = case(replace(head, key=key, value=value))
    for budget, sizes in ((0.04, "0 of 16 blocks of 64"), (0.3, "15 of 64 blocks of 16")):
        answer = blocks.centroids(at, budget, 0)
        assert answer is not None and answer.sizes.startswith(sizes)
        assert error(at, answer) < 1e-5


def test_antidiagonals_are_summed_within_strides() -> None:
    query, key = random(12, 3), random(8, 3, seed=1)
    given = blocks._strided(query, 4) @ blocks._strided(key, 4, backwards=True).T
    score = query @ key.T
    for i in range(3):
        for j in range(2):
            block = score[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            assert float(given[i, j]) == pytest.approx(float(block.flip(1).trace()), rel=1e-4)


def test_sorting_makes_blocks_of_what_is_alike() -> None:
    head = next(iter(synthetic(2048, 0, ("own cluster",))))
    at = case(head)
    plain, ordered = (f(at, 0.3, 0) for f in (blocks.centroids, blocks.sorted_centroids))
    assert error(at, ordered) < 0.2 * error(at, plain)


def test_median_splits_are_an_order() -> None:
    x = random(300, 3)
    order = blocks._median_splits(x, 3)
    assert torch.equal(order.sort().values, torch.arange(300))
    assert float(x[order][:75].var(0).sum()) < float(x.var(0).sum())


def test_windows_see_neighbours_and_sinks() -> None:
    angle = torch.linspace(0, 3, 1024).unsqueeze(1)
    near = 12 * torch.cat([torch.cos(angle), torch.sin(angle)], 1)  # about 35 keys matter
    at = case(Capture("near", 0, "0", near, near, random(1024, 2)))
    assert error(at, windows.window(at, 0.3, 0)) < 1e-2 < error(at, windows.window(at, 0.05, 0))
    one = Capture("sink", 0, "0", random(512, 4) + 3, random(512, 4, seed=1), random(512, 4))
    one.key[2] = 20.0
    at = case(one)
    for method in (windows.window, windows.random_blocks):
        assert error(at, method(at, 0.2, 0)) < 1e-3


def test_random_blocks_are_drawn_once_each() -> None:
    rows = keys = blocks.Segments.of_size(1024, 16)
    kept = windows._block_mask(rows, keys, first=2, wide=3, chance=5, seed=0)
    count = kept[2:].sum(1)
    assert bool((kept[:2]).all())
    assert int(count.max()) == 10 and int(count.min()) == 9  # the first two overlap


def test_sampling_is_right_on_average() -> None:
    head = capture(512, size=0.7)
    at = case(replace(head, value=head.key), 16)  # so that it matters which keys are taken
    answers = [sampling.hyper(at, 0.2, seed) for seed in range(300)]
    outputs = torch.stack([answer.output for answer in answers if answer is not None])
    mean = Answer(outputs.mean(0), 0.0, 0.0, "")
    assert error(at, mean) < 0.1 < error(at, answers[0])


def test_hashing_finds_what_lies_in_the_same_direction() -> None:
    centres = 40 * random(8, 16)
    owner = torch.arange(1024) % 8
    query, key = (centres[owner] + 0.2 * random(1024, 16, seed=s) for s in (1, 2))
    at = case(Capture("clusters", 0, "0", query, key, random(1024, 16, seed=3)))
    answers = [sampling.hyper(at, 0.2577, seed) for seed in range(8)]
    assert answers[0] is not None and answers[0].sizes == "block 128, sample 128"
    found = [error(at, answer) < 1e-3 for answer in answers]
    assert sum(found) >= 5  # now and then two clusters share a code


def test_neighbours_in_the_gray_sequence_differ_in_one_bit() -> None:
    rank = sampling._gray_rank(torch.arange(128), 7)
    code = rank.argsort()
    assert torch.equal(rank.sort().values, torch.arange(128))
    assert all(int(a ^ b).bit_count() == 1 for a, b in pairwise(code))


def test_random_features_are_orthogonal_and_right_on_average() -> None:
    w = features._orthogonal(20, 8, torch.Generator().manual_seed(0))
    product = w[:8] @ w[:8].T
    assert float((product - product.diag().diag()).abs().max()) < 1e-4
    lengths = features._orthogonal(8000, 8, torch.Generator().manual_seed(0)).square().sum(1)
    assert float(lengths.mean()) == pytest.approx(8, rel=0.05)
    at = case(capture(512, size=0.4), 16)
    few, many = (
        [error(at, features.performer(at, budget, seed)) for seed in range(20)]
        for budget in (0.1, 1.6)
    )
    ratio = sum(few) / sum(many)
    assert 2.5 < ratio < 6.5  # a sixteenth of the features: four times the error


def test_random_features_survive_large_scores() -> None:
    at = case(capture(512, size=20.0))
    answer = features.performer(at, 0.3, 0)
    assert answer is not None and bool(answer.output.isfinite().all())


def test_landmarks_lose_nothing_where_segments_are_constant() -> None:
    head = capture(1024, d=16, size=1.5)
    key = head.key[::64].repeat_interleave(64, 0)
    at = case(replace(head, query=key + 0.1, key=key))
    budget = landmarks._work(at, 16) / at.exact_work
    answer = landmarks.nystrom(at, budget, 0)
    assert answer is not None and answer.sizes == "16 landmarks"
    products = 2 * 1024 * 16 * 32 + 24 * 16**3
    assert products <= answer.cost * at.exact_work <= 1.1 * products
    assert error(at, answer) < 1e-4
    middle = (4 * torch.eye(16) + random(16, 16)).double().softmax(1)
    assert torch.allclose(landmarks._inverse(middle) @ middle, torch.eye(16).double(), atol=1e-2)


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


def fake_encoder(folder: Path, told: int = 2) -> dict[str, Tensor]:
    """A file with the names and shapes of a trained encoder, and random weights."""
    width, count = 128, iter(range(10**6))
    draw = lambda *shape: random(*shape, seed=next(count)) / math.sqrt(shape[-1])  # noqa: E731
    weights = {"init_embed.weight": 3 * draw(width, told), "init_embed.bias": draw(width)}
    for layer in range(3):
        at = f"embedder.layers.{layer}."
        for side in ("query", "key", "val"):
            weights[f"{at}0.module.W_{side}"] = draw(8, width, 16)
        weights[f"{at}0.module.W_out"] = draw(8, 16, width)
        for index, shape in ((0, (64, width)), (2, (width, 64))):
            weights[f"{at}2.module.{index}.weight"] = draw(*shape)
            weights[f"{at}2.module.{index}.bias"] = draw(shape[0])
        for norm in (1, 3):
            for part in ("weight", "bias", "running_mean"):
                weights[f"{at}{norm}.normalizer.{part}"] = draw(width)
            weights[f"{at}{norm}.normalizer.running_var"] = 1 + draw(width).abs()
    folder.mkdir(parents=True)
    safetensors_torch.save_file(weights, folder / "model.safetensors")
    return weights


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
    monkeypatch.delenv(sources.VARIABLE, raising=False)
    assert "Only generated heads" in sources.Models.find(None).notes[0]
    with pytest.raises(sb.InputError, match="--models: there is no folder"):
        sources.Models.find(tmp_path / "nowhere")
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(sb.InputError, match=f"{sources.VARIABLE}: there is no folder"):
        sources.Models.find(None)
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path))

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
    assert [path.name for path in found.languages] == ["story"] and not found.notes
    made = language.source(found.languages[0], 4)
    assert (made.model, made.n, made.count) == ("story", 40, 4)
    with pytest.raises(sb.InputError, match="story cannot be run"):
        list(made.make())  # there are no weights
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


def test_an_encoder_is_trained_and_found(tmp_path: Path) -> None:
    """By the script that makes models nobody has looked at."""
    script = Path(__file__).parents[1] / "benchmarks" / "train_encoder.py"
    given = ["--points", "6", "--batch", "4", "--seconds", "0.2", "--prizes"]
    subprocess.run([sys.executable, script, tmp_path / "prizes", *given], check=True, timeout=120)
    (model,) = sources.Models.find(tmp_path).encoders
    assert (model.name, model.dim, model.points(3, 0).shape) == ("prizes", 16, (3, 3))
    heads = list(model.captures(model.points(40, 0), frozenset(range(24))))
    assert len(heads) == 24 and all(bool(head.query.isfinite().all()) for head in heads)
    bad = subprocess.run([sys.executable, script, tmp_path / "x", "--points", "1"],
                         capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert bad.returncode == 2 and "--points of at least 4" in bad.stderr


def test_heads_of_a_language_model_are_those_of_its_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {word: number for number, word in enumerate(language.START.split())}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    folder = tmp_path / "story"
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    made = language.source(sources.Models.find(tmp_path).languages[0], None)
    heads = list(made.make())
    assert (made.n, made.count, len(heads)) == (24, 8, 8)
    for head in heads:
        assert head.model == "story" and head.is_causal
        assert (head.n, head.m, head.d, head.dv) == (24, 24, 4, 4)
    assert torch.equal(heads[0].key, heads[1].key) and torch.equal(heads[0].value, heads[1].value)
    assert not torch.equal(heads[1].key, heads[2].key)  # of another group
    assert not torch.equal(heads[0].query, heads[1].query)


# ---- numbers ---------------------------------------------------------------------------------


def row(**changes: object) -> errors.Row:
    plain = errors.Row(
        "tsp50", 0, "0", 4096, 16, False, 1.0, errors.NAME, errors.OURS, 0.15, 0.15, 0.01, 100.0,
        1.0, "",
    )  # fmt: skip
    return replace(plain, **changes)


def test_errors_are_those_of_the_sampled_rows() -> None:
    head = capture(700)
    truth = errors.Truth.of(head, 0)
    assert len(truth.rows.unique()) == errors.ROWS
    exact = F.scaled_dot_product_attention(*head.tensors)[0, 0, truth.rows]
    assert truth.error(exact) < 1e-6
    assert truth.error(1.5 * exact) == pytest.approx(0.5, rel=1e-5)
    causal = errors.Truth.of(replace(head, is_causal=True), 0)
    exact = F.scaled_dot_product_attention(*head.tensors, is_causal=True)[0, 0, causal.rows]
    assert causal.error(exact) < 1e-6


def test_a_plan_that_costs_more_than_its_budget_is_no_answer() -> None:
    truth = errors.Truth.of(capture(256), 0)
    exact = errors.measure_ours(truth, 0.001)
    assert exact.cost == 1.0 and not exact.is_within and exact.error < 1e-5
    group = summary.groups([exact])[0]
    assert math.isinf(group.error(errors.NAME, 0.001, exact.name))


def test_losses_are_against_the_best_baseline_of_each_head() -> None:
    theirs = {"kind": errors.BASELINE, "method": "window + sinks (Longformer)"}
    rows = [row(head=str(i), error=e) for i, e in enumerate((0.01, 0.011, 0.013, 0.02))]
    rows += [row(head=str(i), error=0.01, **theirs) for i in range(4)]
    rows += [row(head="3", error=0.001, kind=errors.VARIANT, method="sorted blocks + centroids")]
    group = summary.groups(rows)[0]
    assert group.losses(0.15) == ["0.2", "0.3"]
    assert group.best_median(0.15) == ("window + sinks (Longformer)", 0.01)
    made = claims.error_claims(rows)
    assert [claim.holds for claim in made] == [True, True, False, False]
    assert "0.2, 0.3" in made[3].measured


def test_keys_are_interpolated_between_budgets() -> None:
    rows = [row(budget=b, cost=b, keys=k, error=e) for b, k, e in
            ((0.1, 100.0, 0.08), (0.2, 400.0, 0.005))]  # fmt: skip
    head, median = summary.keys_needed(summary.groups(rows)[0])
    assert head.keys == median.keys == pytest.approx(200)  # half-way on a log-log scale
    assert head.paid == pytest.approx(4096 * 0.1 * math.sqrt(2))
    assert not head.at_most
    one = summary.keys_needed(summary.groups(rows[1:])[0])[0]
    assert one.keys == 400 and one.at_most
    none = summary.keys_needed(summary.groups(rows[:1])[0])[0]
    assert none.keys is None


def test_growth_is_the_slope_of_heads_at_the_greatest_length() -> None:
    plain = timing.AutoRow(
        "tsp50", 0, "0", 1024, 16, 1.0, 0.02, "block", "", 0.1, 64.0, 5.0, 1.0, 0.01, 1.0, None, 3
    )  # fmt: skip
    rows = [plain, replace(plain, n=4096, seconds=4.0), replace(plain, head="1")]
    rows += [replace(row, model="other", seconds=row.seconds**2) for row in rows[:2]]
    made = timing.growths(rows)
    assert [item.head for item in made] == ["tsp50 0.0", "other 0.0"]
    assert [item.exponent for item in made] == pytest.approx([1.0, 2.0])


# ---- the shipped models ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(shipped.NAMES))
def test_heads_of_the_shipped_models(kind: str) -> None:
    pytest.importorskip("transformers")
    found = list(shipped.captures(kind, 256, 0, [0, 23]))
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
    assert not [item for item in sources.sources(sources.Models((), (), ()), TINY, 0)
                if item.model in shipped.NAMES.values()]  # fmt: skip


# ---- the command -----------------------------------------------------------------------------

TINY = sources.Extent(
    (256, 512), (512,), (0.4, 0.8), (300,), heads=2, timed=(256, 512), timed_synthetic=(512,),
    growth=(256, 512), growth_heads=2,
)  # fmt: skip


def invoke(*arguments: object) -> tuple[int, str]:
    chosen = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app_module.app, ["bench", "frontier", *chosen])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_command_measures_writes_and_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "QUICK_FRONTIER", TINY)
    monkeypatch.setattr(timing, "Auto", lambda tolerance: sb.BlockSupport(0.8))
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    fake_encoder(tmp_path / "models" / "tsp50")
    out = tmp_path / "out"
    code, text = invoke("--quick", "--time", "--heads", 2, "--models", tmp_path / "models",
                        "--out", out)  # fmt: skip
    assert code == 0
    assert "left out" not in text and "report.html" in text
    names = {path.name for path in out.iterdir()}
    assert names == {
        "report.html", "errors.csv", "plans.csv", "keys.csv", "times.csv", "frontier.png",
        "heads-n256.png", "heads-n512.png", "synthetic-n512.png", "keys.png", "times.png",
    }  # fmt: skip
    rows = read(out / "errors.csv")
    assert {r["method"] for r in rows if r["model"] == "tsp50"} >= set(ALL) | {errors.NAME}
    assert {r["n"] for r in rows if r["model"] == "tsp50"} == {"256", "512"}
    for r in rows:
        assert float(r["cost"]) <= float(r["budget"]) * 1.001 or r["ran"].startswith("exact")
    assert {r["kind"] for r in read(out / "times.csv")} <= {"block", "exact", "fitted"}
    for r in read(out / "plans.csv"):  # what Auto promises is timed, too
        promised = float(r["tolerance"]) in timing.PROMISED
        assert bool(r["speedup"]) == (promised and r["kind"] != "exact")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert "Which heads stay exact" in page


def test_lengths_and_heads_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sources.VARIABLE, raising=False)
    monkeypatch.setattr(app_module, "WHOLE_FRONTIER", TINY)
    code, text = invoke("--n", 300, "--n", 256, "--heads", 1, "--out", tmp_path)
    assert code == 0 and "Only generated heads are measured" in text
    rows = read(tmp_path / "errors.csv")
    assert {(r["n"], r["head"]) for r in rows} == {("256", "diffuse"), ("300", "diffuse")}


def test_a_models_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, text = invoke("--models", tmp_path / "nowhere", "--out", tmp_path)
    assert code == 2 and "--models: there is no folder" in text


def test_options_before_the_sub_command_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app_module.app, ["bench", "--quick", "frontier"])
    assert result.exit_code == 2 and "--quick must come after frontier" in result.output
