"""The study of downstream tasks: its language, its protocols, and what it writes."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import supportbasis as sb
from llada_cases import save_llada
from supportbasis import InputError, Plan
from supportbasis.cli import loading
from supportbasis_studies import commands
from supportbasis_studies.downstream import (
    answers,
    documents,
    findings,
    harness,
    items,
    language,
    measure,
    methods,
    models,
    powers,
    reading,
    rows,
    sampler,
    stories,
    study,
    train,
)
from supportbasis_studies.downstream import reuse as reuse_module
from supportbasis_studies.downstream.diffusion import Diffusion
from supportbasis_studies.downstream.emulation import emulated, emulated_weights, series
from supportbasis_studies.downstream.reuse import Reuse
from supportbasis_studies.models import attending, exact
from supportbasis_studies.statistics import mean_of_sets

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """Random models whose attention matters."""
    made = {}
    for kind in models.CONTEXT:
        model = models.new_model(kind, 0, layers=2, width=64).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
        made[kind] = model
    return made


# ---- the language and its items --------------------------------------------------------------


def test_every_word_is_one_token() -> None:
    assert len(set(language.WORDS)) == len(language.WORDS) <= models.VOCABULARY < documents.KIND
    assert language.words_of(language.ids("ada has 17 lamp .")) == "ada has 17 lamp ."


@given(st.integers(0, 10**6), st.sampled_from(sorted(items.TASKS)))
@settings(max_examples=200, deadline=None)
def test_items_have_one_right_answer(seed: int, task: str) -> None:
    item = items.TASKS[task](Random(seed))
    if task == "arithmetic":
        assert not item.choices and len(item.answer) <= items.ANSWER_LENGTH
        assert answers.parse(item.answer) == item.answer[-2] == _sum(item.question)
    else:
        assert len(item.choices) == 4
        assert [choice for choice in item.choices if choice == item.answer] == [item.answer]
        assert len({tuple(choice) for choice in item.choices}) == 4


def _sum(question: list[int]) -> int:
    """By reading the words."""
    words = language.words_of(question).split()
    total = int(words[2])
    for verb, amount in zip(words[5::3], words[6::3], strict=False):
        if verb in ("finds", "loses"):
            total += int(amount) if verb == "finds" else -int(amount)
    return language.IDS[str(total)]


def test_hard_items_ask_for_the_extreme() -> None:
    item = items.hard(Random(3))
    words = language.words_of(item.question).split()
    has = dict(zip(words[1:-2:3], map(int, words[0:-2:3]), strict=True))
    best = (max if words[-2] == "most" else min)(has, key=lambda name: has[name])
    assert language.words_of(item.answer) == best


def test_completions_ask_for_the_last_place() -> None:
    for seed in range(20):
        item = items.completion(Random(seed))
        *story, question = language.words_of(item.question).split(" . ")
        name = question.split()[1]
        where = [event.split()[3] for event in story if event.startswith(f"{name} is in")]
        what = [event.split()[2] for event in story if event.startswith(f"{name} has")]
        assert language.words_of(item.answer) == f"{where[-1]} and has {what[0]}"


@pytest.mark.parametrize("make", [documents.needles, documents.pairs])
def test_codes_stand_where_they_are_said_to_stand(make: Any) -> None:
    hidden = make(Random(1), 400, 12)
    assert len(hidden.asked) == 12 and abs(len(hidden.tokens) - 400) < 40
    for place, distance in hidden.asked:
        answer = hidden.tokens[place]
        assert answer // documents.KIND == documents.RECALL
        assert answer % documents.KIND == hidden.tokens[place - distance]
        assert hidden.tokens[place - 1] == hidden.tokens[place - distance - 1]  # the key


def test_rows_and_prompts_have_their_length_and_the_seed_decides() -> None:
    row = documents.row(Random(5), 300, padded=True)
    assert len(row) == 300 and row == documents.row(Random(5), 300, padded=True)
    asked = answers.questions("easy", 3, 120, seed=1, kind="causal")
    assert [len(question.prompt) for question in asked] == [120] * 3
    assert answers.questions("easy", 2, 120, seed=1, kind="causal") == asked[:2]
    assert asked[0].prompt[-len(asked[0].item.question) :] == asked[0].item.question


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


# ---- answers ---------------------------------------------------------------------------------


def test_likelihoods_of_choices_are_sums_over_their_tokens(tiny: dict[str, Any]) -> None:
    model, asked = tiny["causal"], answers.questions("completion", 3, 60, seed=2, kind="causal")
    found = answers.answers(model, asked)
    for question, answer in zip(asked, found, strict=True):
        scores = []
        for choice in question.item.choices:
            tokens = torch.tensor([question.prompt + choice])
            with torch.no_grad():
                logs = model(tokens).logits[0].log_softmax(-1)
            steps = range(len(choice))
            start = len(question.prompt) - 1
            scores.append(sum(float(logs[start + at, choice[at]]) for at in steps))
        assert answer.right == (scores.index(max(scores)) == question.item.correct)


def test_guesses_do_not_change_what_is_written(tiny: dict[str, Any]) -> None:
    model = tiny["causal"]
    for question in answers.questions("arithmetic", 6, 40, seed=3, kind="causal"):
        text: list[int] = []
        while len(text) < items.ANSWER_LENGTH and answers._form(text) == "open":
            with torch.no_grad():
                logits = model(torch.tensor([question.prompt + text])).logits[0, -1]
            text.append(int(logits.argmax()))
        assert answers.write(model, [question]) == [text]


@pytest.mark.parametrize("name", [name for name in methods.NAMES if name != "MultiThreshold"])
@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_a_batch_is_answered_as_one_by_one(tiny: dict[str, Any], kind: str, name: str) -> None:
    """Also by methods that plan; many thresholds are planned for a whole batch."""
    model = tiny[kind]
    tokens = torch.tensor([documents.row(Random(seed), 48) for seed in range(3)]) % documents.KIND
    with torch.no_grad(), attending(model, methods.replacement(name).attend):
        together = model(tokens).logits
        alone = torch.cat([model(row.unsqueeze(0)).logits for row in tokens])
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)
        for task in ("arithmetic", "completion"):
            asked = answers.questions(task, 3, 60, seed=4, kind=kind)
            each = [answers.answers(model, [question])[0] for question in asked]
            assert answers.answers(model, asked) == each


def test_a_model_that_knows_is_right_and_a_model_of_nans_is_unparsable() -> None:
    asked = answers.questions("easy", 2, 50, seed=0, kind="causal")

    class Oracle:
        config = SimpleNamespace(is_causal=True)
        device = CPU

        def __init__(self, value: float):
            self.value = value

        def __call__(self, tokens: Tensor, **_: Any) -> Any:
            logits = torch.full((len(tokens), 1, models.VOCABULARY), min(self.value, 0.0))
            for row, question in zip(logits, asked, strict=True):
                row[0, question.item.answer[0]] = self.value
            return SimpleNamespace(logits=logits)

    assert answers.answers(Oracle(5.0), asked) == [answers.Answer(True, True, True)] * 2
    assert answers.answers(Oracle(math.nan), asked) == [answers.Answer(False, False, False)] * 2


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("+ 5 9 answer 9 .", "9"),
        ("+ 5 9 - 2 7 answer 7 . <end> <end>", "7"),
        ("+ 5 9 answer 9", None),
        ("+ 5 answer 9 .", None),
        ("answer 9 . 9", None),
        ("ada has 9 .", None),
        ("", None),
    ],
)
def test_only_sums_in_the_form_that_was_shown_are_parsed(text: str, result: str | None) -> None:
    expected = None if result is None else language.IDS[result]
    assert answers.parse(language.ids(text)) == expected


# ---- the sampler -----------------------------------------------------------------------------


def test_the_sampler_keeps_the_surest_tokens_first_and_goes_block_by_block() -> None:
    mask, seen = 9, []

    def logits(tokens: Tensor) -> Tensor:
        seen.append(tokens.clone())
        found = torch.zeros(*tokens.shape, 10)
        for place in range(tokens.shape[1]):
            found[:, place, place % 7] = 1.0 + place  # the later, the surer
        return found

    how = sampler.Sampling(length=4, steps=4, block=2)
    written = sampler.sample(logits, torch.tensor([[1, 2, 3]]), how, mask)
    assert written.tolist() == [[3, 4, 5, 6]]
    masks = [(tokens[0, 3:] == mask).tolist() for tokens in seen]
    assert masks == [[True] * 4, [True, False, True, True], [False, False, True, True],
                     [False, False, True, False]]  # fmt: skip


def test_gumbel_noise_draws_from_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)
    drawn = sampler.noisy(logits, 2.0, generator).argmax(-1)
    share = torch.bincount(drawn, minlength=3) / 20000
    truth = (logits[0] / 2.0).softmax(-1)
    assert (share - truth).abs().max() < 4 * math.sqrt(0.25 / 20000)
    assert bool((sampler.noisy(logits, 0.0, generator) == logits).all())


@pytest.mark.parametrize(("length", "steps", "block"), [(8, 4, 3), (8, 3, 4)])
def test_uneven_sampling_is_refused(length: int, steps: int, block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        sampler.Sampling(length, steps, block)


# ---- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary(kind: str) -> None:
    model = models.new_model(kind, 0, layers=1, width=64).eval()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    found = reading.perplexity(model, reading.held_out(48, 2, 0))
    assert found == pytest.approx(models.VOCABULARY, rel=1e-4)


@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_recall_asks_for_all_codes(tiny: dict[str, Any], kind: str) -> None:
    for form in reading.FORMS:
        found = reading.recall(tiny[kind], form, 300, 2, 0)
        assert len(found) == 2 * reading.HIDDEN
        assert all(0 < item.distance < 300 for item in found)


def test_hidden_errors_are_none_for_exact_and_some_for_the_mean(tiny: dict[str, Any]) -> None:
    tokens = torch.tensor([documents.row(Random(0), 40)]) % documents.KIND
    truth = reading.hidden_states(tiny["causal"], tokens, exact)
    assert len(truth) == 2
    assert reading.hidden_errors(truth, truth) == [0.0, 0.0]
    found = reading.hidden_states(tiny["causal"], tokens, methods.mean_of_values)
    assert all(error > 1e-3 for error in reading.hidden_errors(truth, found))


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
def weights(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for kind, model in tiny.items():
        models.save_model(model, folder / kind)
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    monkeypatch.setattr(commands, "QUICK_DOWNSTREAM", dict.fromkeys(models.CONTEXT, TINY))
    monkeypatch.setattr(study, "FOLDER", weights)
    monkeypatch.delenv("SUPPORTBASIS_MODELS", raising=False)


def invoke(*arguments: object) -> tuple[int, str]:
    chosen = [str(argument) for argument in arguments]
    result = CliRunner().invoke(commands.reproduce, ["downstream", *chosen])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


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


@pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies'
@pytest.mark.usefixtures("local_tasks")
@pytest.mark.parametrize("kind", sorted(models.CONTEXT))
def test_the_real_lm_eval_takes_both_kinds_of_models(
    kind: str, own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "NAMES", (methods.EXACT, methods.MEAN, "MultiThreshold"))
    names = ("own_choice", "own_group", "own_sum")
    given = ("--model", own_model / kind, "--tasks", ",".join(names), "--limit", 3)
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
    code, text = invoke("--model", own_model / kind, "--tasks", "nobody", "--out", tmp_path / "out")
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
