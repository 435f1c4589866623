"""Downstream tasks: items, answers, the sampler, reading."""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from downstream_cases import random_models
from supportbasis_studies.downstream import (
    answers,
    documents,
    items,
    language,
    methods,
    models,
    reading,
    sampler,
)
from supportbasis_studies.models import attending, exact

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return random_models()


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
