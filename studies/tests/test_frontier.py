"""The frontier: baselines that do what their papers say, counted costs, and the command."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import time
import warnings
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
from supportbasis_studies import bench_commands  # noqa: E402
from supportbasis_studies.frontier import (  # noqa: E402
    findings,
    language,
    measure,
    shipped,
    sources,
    summary,
)
from supportbasis_studies.frontier.baselines import (  # noqa: E402
    BASELINES,
    ORACLES,
    Answer,
    Case,
    blocks,
    common,
    features,
    landmarks,
    sampling,
    windows,
)
from supportbasis_studies.frontier.encoder import Encoder  # noqa: E402
from supportbasis_studies.frontier.heads import (  # noqa: E402
    MAKERS,
    Capture,
    chosen_heads,
    parse_heads,
    stacked,
    synthetic,
)

MODELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "models"
CPU = torch.device("cpu")
ALL = BASELINES | ORACLES
NYSTROM = "landmarks (Nyström)"  # the only one that has no causal form
KINDS = [
    (name, causal) for name in ALL for causal in (False, True) if (name, causal) != (NYSTROM, True)
]
LISTS = [
    (name, causal)
    for name, causal in KINDS
    if ALL[name] not in (features.performer, landmarks.nystrom)
]
DROPPING = [
    (name, causal) for name, causal in LISTS if ALL[name] not in (blocks.centroids, sampling.hyper)
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def capture(
    n: int = 512, m: int | None = None, d: int = 8, size: float = 1.0, causal: bool = False
) -> Capture:
    m = m or n
    query, key, value = size * random(n, d), size * random(m, d, seed=1), random(m, d, seed=2)
    return Capture("random", 0, "0", query, key, value, causal)


def case(head: Capture, count: int = 64) -> Case:
    return Case(head, torch.arange(0, head.n, max(1, head.n // count)))


def error(at: Case, answer: Answer | None) -> float:
    """Relative error against float64 attention as it is written down."""
    assert answer is not None
    head = at.head
    score = head.query[at.rows].double() @ head.key.double().T / math.sqrt(head.d)
    if head.is_causal:
        score = torch.where(torch.arange(head.m) <= at.rows[:, None], score, -math.inf)
    exact = score.softmax(1) @ head.value.double()
    return float((answer.output.double() - exact).norm() / exact.norm())


# ---- baselines -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "causal"), LISTS)
def test_lists_of_everything_are_exact(name: str, causal: bool) -> None:
    for shape in ((512, 512), (500, 500 if causal else 333)):
        at = case(capture(*shape, size=1.5, causal=causal))
        answer = ALL[name](at, 1.0, 0)
        assert error(at, answer) < 1e-5


@pytest.mark.parametrize(("name", "causal"), KINDS)
def test_costs_are_within_the_budget_and_not_far_below(name: str, causal: bool) -> None:
    for shape in ((1000, 1000), (777, 777 if causal else 1024)):
        at = case(capture(*shape, causal=causal))
        spent = []
        for budget in (0.02, 0.05, 0.1, 0.2, 0.5):
            answer = ALL[name](at, budget, 0)
            if answer is not None:
                assert answer.cost <= budget * (1 + measure.ROUNDING)
                assert bool(answer.output.isfinite().all())
                spent.append(answer.cost / budget)
        assert spent and spent[-1] > 0.8


def weights(name: str, budget: float, causal: bool, n: int = 400) -> tuple[Case, Answer]:
    """A baseline on all rows, with values that make its output the weights themselves."""
    head = replace(capture(n, causal=causal), value=torch.eye(n))
    at = Case(head, torch.arange(n))
    answer = ALL[name](at, budget, 0)
    assert answer is not None
    return at, answer


@pytest.mark.parametrize(("name", "causal"), DROPPING)
def test_a_cost_holds_the_keys_that_are_seen(name: str, causal: bool) -> None:
    """Counted one by one. With values of 400 numbers, work that is not attention is little."""
    at, answer = weights(name, 0.3, causal)
    seen = int((answer.output > 0).sum()) / at.pairs
    assert seen <= answer.cost * (1 + 1e-6)
    assert answer.cost <= 1.05 * seen + 0.01


@pytest.mark.parametrize("causal", [False, True])
def test_the_cost_of_sampling_holds_the_keys_that_are_seen(causal: bool) -> None:
    """A key that is drawn twice, or in the own block, is paid and not seen."""
    at, answer = weights("LSH + sampling (HyperAttention)", 0.3, causal)
    assert 0.7 * answer.cost <= int((answer.output > 0).sum()) / at.pairs <= answer.cost


@pytest.mark.parametrize("name", [name for name, causal in KINDS if causal])
def test_causal_rows_see_nothing_later(name: str) -> None:
    _, answer = weights(name, 0.4, causal=True)
    assert float(answer.output.triu(1).abs().max()) == 0
    assert torch.allclose(answer.output.sum(1), torch.ones(400), atol=1e-4)
    assert float(answer.output[0, 0]) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(("name", "causal"), KINDS)
def test_tensors_are_made_on_the_device_of_the_head(name: str, causal: bool) -> None:
    """Where PyTorch makes tensors elsewhere unless told, any that are not told cannot be used."""
    at = case(capture(causal=causal))
    expected = ALL[name](at, 0.3, 0)
    with torch.device("meta"):
        truth = measure.Truth.of(at.head, 0)
        answer = ALL[name](Case(at.head, at.rows), 0.3, 0)
    assert truth.output.device == CPU
    assert expected is not None and answer is not None
    assert torch.equal(answer.output, expected.output)


def test_there_are_no_causal_landmarks() -> None:
    assert BASELINES[NYSTROM](case(capture(causal=True)), 0.5, 0) is None


@pytest.mark.parametrize(("name", "causal"), KINDS)
def test_more_budget_means_less_error(name: str, causal: bool) -> None:
    head = next(iter(synthetic(1024, 0, ("diffuse",))))
    head = replace(head, value=head.value + 1, is_causal=causal)  # the mean of V is not nothing
    at = case(head)
    found = [error(at, ALL[name](at, budget, 0)) for budget in (0.2, 0.8)]
    assert found[1] < found[0] < 0.5


@pytest.mark.parametrize(("name", "causal"), KINDS)
def test_the_same_seed_gives_the_same_answer_and_leaves_the_generator_alone(
    name: str, causal: bool
) -> None:
    at, state = case(capture(causal=causal)), torch.random.get_rng_state()
    first, second = (ALL[name](at, 0.3, 7) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first.output, second.output)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("causal", [False, True])
def test_keys_and_their_share_are_inverse(causal: bool) -> None:
    at = case(capture(200, causal=causal))
    for budget in (0.01, 0.3, 1.0):
        assert at.share(at.keys(budget)) == pytest.approx(budget)
    counted = sum(min(i + 1 if causal else 200, 30) for i in range(200)) / at.pairs
    assert at.share(30) == pytest.approx(counted)


def test_pairs_of_blocks_are_counted() -> None:
    for causal in (False, True):
        at = case(capture(150, causal=causal))
        seen = torch.ones(150, 150)
        seen = seen.tril() if causal else seen
        pairs = common.Grid.of(at, 64).pairs
        assert pairs.shape == (3, 3)
        assert float(pairs[2, 2]) == float(seen[128:, 128:].sum())
        assert float(pairs[2, 0]) == float(seen[128:, :64].sum())
        assert float(pairs.sum()) == at.pairs == float(seen.sum())


def test_no_choice_of_blocks_is_better_than_the_oracle() -> None:
    at = case(capture(1024, size=1.5))
    found = {name: error(at, ALL[name](at, 0.3, 0)) for name in ("top blocks, oracle",
             "top blocks (MInference)", "window + random (BigBird)")}  # fmt: skip
    assert min(found, key=lambda name: found[name]) == "top blocks, oracle"


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
    grid = common.Grid.of(case(capture(1024)), 16)
    kept = windows._block_mask(grid, first=2, wide=3, chance=5, seed=0)
    count = kept[2:].sum(1)
    assert bool((kept[:2]).all())
    assert int(count.max()) == 10 and int(count.min()) == 9  # the first two overlap
    grid = common.Grid.of(case(capture(1024, causal=True)), 16)
    kept = windows._block_mask(grid, first=2, wide=3, chance=5, seed=0)
    assert kept.sum(1).tolist() == [min(i + 1, 10) for i in range(64)]
    assert bool(kept.diagonal().all()) and not bool(kept.triu(1).any())


@pytest.mark.parametrize("causal", [False, True])
def test_sampling_is_right_on_average(causal: bool) -> None:
    head = capture(512, size=0.7, causal=causal)
    at = case(replace(head, value=head.key), 16)  # so that it matters which keys are taken
    answers = [sampling.hyper(at, 0.2, seed) for seed in range(300)]
    outputs = torch.stack([answer.output for answer in answers if answer is not None])
    mean = Answer(outputs.mean(0), 0.0, "")
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
    assert_features_improve(case(capture(512, size=0.4), 16))
    assert_features_improve(case(capture(1024, size=0.4, causal=True), 16))


def assert_features_improve(at: Case) -> None:
    few, many = (
        [error(at, features.performer(at, budget, seed)) for seed in range(20)]
        for budget in (0.1, 1.6)
    )
    ratio = sum(few) / sum(many)
    assert 2.5 < ratio < 6.5  # a sixteenth of the features: four times the error


@pytest.mark.parametrize("causal", [False, True])
def test_random_features_are_summed_in_parts(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at = case(capture(512, size=3.0, causal=causal))
    whole = features.performer(at, 0.5, 0)
    monkeypatch.setattr(features, "ENTRIES", 2000)
    parts = features.performer(at, 0.5, 0)
    assert whole is not None and parts is not None
    assert torch.allclose(whole.output, parts.output, rtol=1e-4, atol=1e-5)


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


def fake_language(folder: Path, context: int = 1024) -> Path:
    """A language model with random weights whose tokens are words: four heads share two keys."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {word: number for number, word in enumerate(("?", "import", "def", "return", "self"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
        initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


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
    plain = F.scaled_dot_product_attention

    def count(*arguments: Tensor, **options: object) -> Tensor:
        calls.append(1)
        return plain(*arguments, **options)

    model = language.Language.of(fake_language(tmp_path / "story"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
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

TINY = sources.Extent((256, 512), (256, 512), (512,), (), (0.4, 0.8), (0.1,), 2)


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
