"""Downstream tasks: attention as the authors published it, plans that are used again, the hook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import supportbasis as sb
from downstream_cases import random_models, saved_models
from supportbasis import InputError, Plan
from supportbasis_studies.downstream import documents, measure, methods, powers
from supportbasis_studies.downstream import reuse as reuse_module
from supportbasis_studies.downstream.emulation import emulated, emulated_weights, series
from supportbasis_studies.downstream.reuse import Reuse
from supportbasis_studies.models import attending, exact

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return random_models()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(tmp_path_factory.mktemp("weights"))


# ---- emulation -------------------------------------------------------------------------------


def slow_emulation(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, degree: int,
    share: float, revised: bool,
) -> Tensor:  # fmt: skip
    """The published evaluations in plain float64, head by head, one sequence."""
    heads = query.shape[0]
    score = np.einsum("hid,hjd->hij", query.double().numpy(), key.double().numpy()) * scale
    n, m = score.shape[1:]
    seen = np.tril(np.ones((n, m), dtype=bool), m - n) if causal else np.ones((n, m), dtype=bool)
    if revised:
        score -= np.where(seen, score, -np.inf).max(-1, keepdims=True)
    limits = []
    for head in range(heads):
        ordered = np.sort(score[head][seen])
        count = int(share * len(ordered))
        limits.append((ordered[max(0, count - 1)], ordered[len(ordered) - max(1, count)]))
    start, end = min(low for low, _ in limits), max(high for _, high in limits)
    nodes = np.cos(np.pi * (np.arange(4096) + 0.5) / 4096)
    fit = chebyshev.chebfit(nodes, np.exp((end - start) / 2 * nodes + (end + start) / 2), degree)
    output = []
    for head, (low, high) in enumerate(limits):
        weight = chebyshev.chebval((2 * score[head] - start - end) / (end - start), fit)
        weight = np.maximum(weight, 1e-8) if revised else weight
        if share:
            outer = (score[head] <= low) | (score[head] >= high)
            weight = np.where(outer, np.exp(score[head]), weight)
        weight = np.where(seen, weight, 0.0)
        output.append(weight @ value[head].double().numpy() / weight.sum(1, keepdims=True))
    return torch.from_numpy(np.stack(output))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("degree", "share"), [(4, 0.1), (6, 0.1), (4, 0.0), (6, 0.0)])
@pytest.mark.parametrize("revised", [False, True])
def test_the_emulation_is_the_published_one(
    causal: bool, degree: int, share: float, revised: bool
) -> None:
    generator = torch.Generator().manual_seed(degree)
    query, key, value = torch.randn(3, 2, 3, 37, 8, generator=generator, dtype=torch.float64)
    found = emulated(degree, share, revised=revised)(query, key, value, 0.3, causal)
    for sequence in range(2):
        mine = (x[sequence] for x in (query, key, value))
        truth = slow_emulation(*mine, 0.3, causal, degree, share, revised)
        torch.testing.assert_close(found[sequence], truth, rtol=1e-8, atol=1e-8)


def test_a_high_degree_is_softmax_and_the_ends_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 29, 8, generator=generator, dtype=torch.float64)
    truth = exact(query, key, value, 0.35, True)
    torch.testing.assert_close(emulated(24, 0.0)(query, key, value, 0.35, True), truth)
    scores = query @ key.transpose(-1, -2)
    weights = emulated_weights(scores, None, 2, 0.1)
    top = scores.amax((1, 2, 3), keepdim=True)
    order = scores.flatten(-2).argsort(-1)
    for place in (*order[0, 0, :84], *order[0, 0, -84:]):
        row, column = divmod(int(place), 29)
        expected = (scores[0, 0, row, column] - top[0, 0, 0, 0]).exp()
        torch.testing.assert_close(weights[0, 0, row, column], expected)


def test_the_revised_weights_of_a_row_do_not_cancel() -> None:
    """Scores over an interval on which a series of degree 4 goes far below zero."""
    scores = torch.linspace(-15, 15, 900).view(1, 1, 30, 30)
    first, revised = (
        emulated_weights(scores, None, 4, 0.1, revised=revised) for revised in (False, True)
    )
    assert float(first.min()) < 0 < float(revised.min())
    truth = scores.softmax(-1)
    wrong = [
        float((weights / weights.sum(-1, keepdim=True) - truth).norm() / truth.norm())
        for weights in (first, revised)
    ]
    assert wrong[1] < 0.1 * wrong[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in methods.NAMES if "emulation" in name])
def test_the_emulation_is_the_same_on_a_gpu(name: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(3, 2, 3, 37, 8, generator=generator, dtype=torch.float64)
    attend = methods.replacement(name).attend
    found = attend(*given.cuda(), 0.3, causal).cpu()
    torch.testing.assert_close(found, attend(*given, 0.3, causal), rtol=1e-8, atol=1e-8)


def test_the_series_survives_scores_that_overflow() -> None:
    query = 400 * torch.ones(1, 1, 5, 4)
    key = torch.linspace(-1, 1, 5)[:, None].expand(1, 1, 5, 4)
    output = emulated(4)(query, key, torch.ones(1, 1, 5, 2), 1.0, False)
    torch.testing.assert_close(output, torch.ones(1, 1, 5, 2))
    assert all(
        bool(c.isfinite().all()) for c in series(torch.tensor(500.0), 6, torch.tensor(-500.0))
    )


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_of_values(causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    truth = exact(torch.zeros_like(query), key, value, 1.0, causal)
    torch.testing.assert_close(methods.mean_of_values(query, key, value, 1.0, causal), truth)
    last = methods.mean_of_values(query[..., -2:, :], key, value, 1.0, causal)
    torch.testing.assert_close(last, truth[..., -2:, :])


@pytest.mark.parametrize("name", methods.NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_last_queries_alone_give_their_rows(name: str, causal: bool) -> None:
    """As a model that writes token by token asks for them; emulations choose limits anew."""
    query, key, value = torch.randn(3, 1, 2, 33, 64, generator=torch.Generator().manual_seed(1))
    method = methods.replacement(name)
    whole = method.attend(query / 32, key, value, 0.125, causal)
    last = method.attend(query[..., -1:, :] / 32, key, value, 0.125, causal)
    assert last.shape == (1, 2, 1, 64)
    torch.testing.assert_close(last, whole[..., -1:, :], rtol=1e-2, atol=1e-2)


# ---- plans that are used again ---------------------------------------------------------------


def tokens_of(*shape: int, spread: float = 1.0) -> list[Tensor]:
    """Query, key and value in float64; tokens of very different sizes."""
    made = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = torch.linspace(0.1, spread, shape[-2], dtype=torch.float64).unsqueeze(-1)
    return [*(made[:2] * sizes), made[2]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [2**24, 3 * 2 * 60 * 7])
def test_many_thresholds_at_once_are_those_of_the_library(
    causal: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of rows too, and with pairs of buckets that are exact."""
    monkeypatch.setattr(powers, "ENTRIES", entries)
    query, key, value = tokens_of(3, 2, 60, 8, spread=4.0)
    method = sb.MultiThreshold(degree=2)
    first, second = sb.plan(query[:1], key[:1], value[:1], method=method).heads
    assert len(first.row_edges) > 2
    with_exact = tuple(replace(pair, kernel=None) for pair in second.pairs[:2])
    heads = (first, replace(second, pairs=with_exact + second.pairs[2:]))
    plan = Plan(method, 8, heads)
    truth = sb.attention(query, key, value, is_causal=causal, scale=0.3, plan=plan)
    found = powers.by_powers(heads, query, key, value, 0.3, causal)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)


def test_many_thresholds_are_planned_for_all_items_of_a_batch() -> None:
    query, key, value = tokens_of(3, 2, 40, 8)
    reuse = Reuse(sb.MultiThreshold(), 6)
    found = reuse(query, key, value, 0.3, False)
    for item in range(3):  # what is certified for all of them is for each
        mine = (x[item : item + 1] for x in (query, key, value))
        truth = exact(*mine, 0.3, False)
        assert float((found[item] - truth).norm() / truth.norm()) < 0.1
    assert reuse.used.heads == 6 and reuse.used.exact == 0


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries for which plans are made."""
    made: list[tuple[int, ...]] = []

    def noted(query: Tensor, *given: Any, **options: Any) -> Plan:
        made.append(tuple(query.shape))
        return sb.plan(query, *given, **options)

    monkeypatch.setattr(reuse_module, "make_plan", noted)
    return made


def test_lists_are_planned_on_the_first_item_of_each_layer_and_length(
    planned: list[tuple[int, ...]],
) -> None:
    query, key, value = (x.float() for x in tokens_of(3, 2, 300, 16, spread=0.2))
    method = sb.BlockSupport(0.6)
    reuse = Reuse(method, 2)
    first, second = (sb.plan(x[:1], x[:1], value[:1], method=method) for x in (query, key))
    assert {head.kind for head in first.heads + second.heads} == {"lists"}
    for _ in range(2):
        for x, plan in ((query, first), (key, second)):  # two layers, in turn
            whole = Plan(method, 16, plan.heads)
            truth = sb.attention(x, x, value, plan=whole)
            found = reuse(x, x, value, 0.25, False)
            torch.testing.assert_close(found, truth, rtol=0, atol=0)
    assert planned == [(1, 2, 300, 16)] * 2
    assert reuse.used.heads == 4 * 6
    assert reuse.used.mean_cost == pytest.approx((first.cost + second.cost) / 2)
    short = (x[..., :280, :] for x in (query, key, value))
    reuse(*short, 0.25, False)
    assert planned[2:] == [(1, 2, 280, 16)]


def test_thresholds_are_planned_for_every_item(planned: list[tuple[int, ...]]) -> None:
    query, key, value = tokens_of(2, 2, 80, 4)
    method = sb.SingleThreshold(1.0)
    reuse = Reuse(method, 1)
    truth = sb.attention(query, key, value, method=method, scale=0.3)
    torch.testing.assert_close(reuse(query, key, value, 0.3, False), truth, rtol=0, atol=0)
    assert planned == [(1, 2, 80, 4), (2, 2, 80, 4)]
    reuse = Reuse(method, None)
    reuse(query, key, value, 0.3, False)
    assert planned[2:] == [(2, 2, 80, 4)]


def test_a_part_is_answered_the_same_whatever_was_answered_before(weights: Path) -> None:
    """Plans are those of the first item, also in a run that goes on from the middle."""

    def part(subject: measure.Subject, first: int) -> tuple[str, str, float | None]:
        given = (subject, "u", "BlockSupport(0.5)", "easy", first, 2, 200, 2)
        (row,) = measure.measure_task(*given)
        return row.right, row.written, row.cost

    whole, rest = (measure.Subject.of("diffusion", weights / "diffusion", CPU) for _ in range(2))
    part(whole, 0)
    found = part(whole, 2)
    assert part(rest, 2) == found
    assert found[2] is not None and found[2] < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:supportbasis. BlockSupport")  # of random tokens
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", methods.LIBRARY)
def test_the_library_in_a_model_on_a_gpu(name: str, causal: bool) -> None:
    """A second item has the plan of the first; many thresholds give the numbers of a CPU."""
    given = torch.stack([x.float() for x in tokens_of(2, 2, 300, 64)])
    options: dict[str, Any] = {"is_causal": causal, "scale": 0.125}
    method = methods.replacement(name, 1)
    first, second = (given[:, item : item + 1].cuda() for item in range(2))
    method.attend(*first, 0.125, causal)
    found = method.attend(*second, 0.125, causal)
    if name == "MultiThreshold":
        truth = methods.replacement(name, 1).attend(*second.cpu(), 0.125, causal).cuda()
    else:
        plan = sb.plan(*first, **options, method=methods.LIBRARY[name])
        truth = sb.attention(*second, **options, plan=plan)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)


# ---- the hook --------------------------------------------------------------------------------


def test_exact_attention_changes_nothing(tiny: dict[str, Any]) -> None:
    tokens = torch.tensor([documents.row(Random(0), 40)]) % documents.KIND
    model = tiny["causal"]
    with torch.no_grad():
        truth = model(tokens).logits
        with attending(model, exact):
            found = model(tokens).logits
        again = model(tokens).logits
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, truth, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "looks_ahead"), [("causal", False), ("diffusion", True)])
def test_only_the_diffusion_model_looks_ahead(
    tiny: dict[str, Any], kind: str, looks_ahead: bool
) -> None:
    tokens = torch.tensor([documents.row(Random(0), 24)]) % documents.KIND
    other = tokens.clone()
    other[0, -1] = 9
    for name in methods.NAMES:
        with torch.no_grad(), attending(tiny[kind], methods.replacement(name).attend):
            moved = tiny[kind](tokens).logits[0, 0] - tiny[kind](other).logits[0, 0]
        if "emulation" not in name:  # its limits and interval are those of the whole sequence
            assert bool(moved.abs().max() > 1e-6) == looks_ahead, name


def test_shared_keys_are_repeated() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        tokens = torch.arange(12).unsqueeze(0)
        truth = model(tokens).logits
        with attending(model, exact):
            torch.testing.assert_close(model(tokens).logits, truth)


def test_models_with_their_own_code_are_reached_where_they_call_pytorch() -> None:
    class Own(torch.nn.Module):
        def _can_set_attn_implementation(self) -> bool:
            return False

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(1, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    with attending(Own(), methods.mean_of_values):
        torch.testing.assert_close(Own()(x), x.mean(-2, keepdim=True).expand_as(x))
        with pytest.raises(InputError, match="masks its attention"):
            Own()(x, torch.ones(7, 7))
