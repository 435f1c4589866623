"""Published methods do what their papers say, at the costs that are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

from frontier_cases import ALL, CPU, NYSTROM, capture, case, error, random  # noqa: E402
from supportbasis_studies.frontier import measure  # noqa: E402
from supportbasis_studies.frontier.baselines import (  # noqa: E402
    BASELINES,
    Answer,
    Case,
    blocks,
    common,
    features,
    landmarks,
    sampling,
    windows,
)
from supportbasis_studies.frontier.heads import Capture, synthetic  # noqa: E402

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
