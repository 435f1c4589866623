"""Answers of the two models to items of the tasks.

Choices are scored by likelihood, as benchmarks do. A token that is asked for alone is also taken
as if the model had written it: whether it is one of the choices at all says how many answers
could not have been parsed. Sums are written and parsed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..models import is_causal
from .documents import prompt
from .items import ANSWER, ANSWER_LENGTH, MAKERS, MINUS, NUMBER, PLUS, Item
from .language import END, MASK, STOP
from .sampler import Sampling, sample

WRITING = Sampling(length=ANSWER_LENGTH, steps=9, block=ANSWER_LENGTH)
MOST_WRITTEN = 24  # tokens of a causal model: one step more than it learned
SIGNS, NUMBERS = frozenset((PLUS, MINUS)), frozenset(NUMBER)


@dataclass(frozen=True)
class Question:
    """An item behind its prompt, all prompts of a set being equally long."""

    prompt: list[int]
    item: Item


def questions(
    task: str, count: int, length: int, seed: int, kind: str, first: int = 0
) -> list[Question]:
    """Some from ``first`` on. Each depends on the seed and its number alone."""
    made = []
    for number in range(first, first + count):
        random = Random(f"question {task} {seed} {number}")
        item = MAKERS[kind][task](random)
        made.append(Question(prompt(random, task, item, length), item))
    return made


@dataclass(frozen=True)
class Answer:
    """Whether it is right, could be parsed, and would be right as the model writes it."""

    right: bool
    parsed: bool
    written: bool


@torch.no_grad()
def answers(model: Any, asked: Sequence[Question]) -> list[Answer]:
    """To questions of one task, in one batch."""
    if not asked[0].item.choices:
        return _written(model, asked)
    if is_causal(model):
        return _likeliest(model, asked)
    return _filled(model, asked)


# ---- choices ---------------------------------------------------------------------------------


def _likeliest(model: Any, asked: Sequence[Question]) -> list[Answer]:
    """A causal model's likelihood of every choice after the prompt.

    Choices that differ in their last token alone share a pass.
    """
    inputs: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, question in enumerate(asked):
        for choice in question.item.choices:
            inputs.setdefault((number, tuple(choice[:-1])), len(inputs))
    size = len(asked[0].item.choices[0])
    logs = _logs(model, [[*asked[number].prompt, *start] for number, start in inputs], size)
    made = []
    for number, question in enumerate(asked):
        choices = question.item.choices
        found = [logs[inputs[number, tuple(choice[:-1])]] for choice in choices]
        scores = [_total(log, choice) for log, choice in zip(found, choices, strict=True)]
        made.append(_choice_answer(question.item, scores, found[0][0]))
    return made


def _logs(model: Any, tokens: Sequence[Sequence[int]], kept: int) -> Tensor:
    """Log-likelihoods at the last places, [batch, kept, vocabulary], brought here to be read."""
    given = torch.tensor(tokens, device=model.device)
    logits: Tensor = model(given, use_cache=False, logits_to_keep=kept).logits
    return logits.float().log_softmax(-1).cpu()


def _total(logs: Tensor, choice: Sequence[int]) -> float:
    return sum(float(logs[at, token]) for at, token in enumerate(choice))


def _filled(model: Any, asked: Sequence[Question]) -> list[Answer]:
    """A masked-diffusion model's likelihood of every choice in place of masks, token by token."""
    size = len(asked[0].item.choices[0])
    logs = _logs(model, [question.prompt + [MASK] * size + [STOP] for question in asked], size + 1)
    made = []
    for question, found in zip(asked, logs, strict=True):
        scores = [_total(found, choice) for choice in question.item.choices]
        made.append(_choice_answer(question.item, scores, found[0]))
    return made


def _choice_answer(item: Item, scores: Sequence[float], first: Tensor) -> Answer:
    if not all(map(math.isfinite, scores)):
        return Answer(False, False, False)
    right = scores.index(max(scores)) == item.correct
    if len(item.answer) > 1:
        return Answer(right, True, right)
    token = int(first.argmax())
    return Answer(right, [token] in item.choices, [token] == item.answer)


# ---- written answers -------------------------------------------------------------------------


def _written(model: Any, asked: Sequence[Question]) -> list[Answer]:
    if is_causal(model):
        texts = write(model, asked)
    else:
        prompts = torch.tensor([question.prompt for question in asked], device=model.device)
        texts = sample(lambda x: model(x, use_cache=False).logits, prompts, WRITING, MASK).tolist()
    made = []
    for question, text in zip(asked, texts, strict=True):
        result = parse(text)
        right = result is not None and result == question.item.answer[-2]
        made.append(Answer(right, result is not None, right))
    return made


def parse(text: Sequence[int]) -> int | None:
    """The number a written sum ends in; None where it does not have the form that was shown."""
    return text[text.index(ANSWER) + 1] if _form(text) == "whole" else None


def _form(text: Sequence[int]) -> str:
    """Whether a sum is "whole", "open", or "broken": sign, number, total, ..., answer, number."""
    for at in range(0, len(text), 3):
        step = text[at : at + 3]
        wanted = (SIGNS, NUMBERS, NUMBERS) if step[0] in SIGNS else ({ANSWER}, NUMBERS, {STOP})
        if any(token not in among for token, among in zip(step, wanted, strict=False)):
            return "broken"
        if step[0] == ANSWER and len(step) == 3:
            rest = text[at + 3 :]
            return "whole" if all(token == END for token in rest) else "broken"
    return "open"


def write(model: Any, asked: Sequence[Question]) -> list[list[int]]:
    """What a causal model writes, always taking the likeliest token, until its form is broken.

    A guess of what follows is read in the same pass, and what comes out is kept as far as the
    guess was right. The guess adds up from where the text is: it only saves passes.
    """
    texts: list[list[int]] = [[] for _ in asked]
    active = list(range(len(asked)))
    while active:
        guesses = [_guess(texts[number], asked[number].item) for number in active]
        tokens = [asked[n].prompt + guess for n, guess in zip(active, guesses, strict=True)]
        given = torch.tensor(tokens, device=model.device)
        logits = model(given, use_cache=False, logits_to_keep=MOST_WRITTEN + 1).logits
        for number, guess, found in zip(active, guesses, logits.argmax(-1).tolist(), strict=True):
            _accept(texts[number], guess, found)
        active = [n for n in active if _form(texts[n]) == "open" and len(texts[n]) < MOST_WRITTEN]
    return texts


def _guess(text: list[int], item: Item) -> list[int]:
    """The text so far, and the steps of the item that follow its last one; filled up."""
    steps = [item.answer[at : at + 2] for at in range(0, len(item.answer) - 3, 3)]
    whole = len(text) - len(text) % 3
    begun, last = text[whole:], text[whole - 3 : whole - 1] if whole else []
    done = steps.index(last) + 1 if last in steps else whole // 3
    if begun in steps:
        done = steps.index(begun)
    total = (text[whole - 1] if whole else item.question[2]) - NUMBER[0]
    rest: list[int] = []
    for sign, amount in [] if begun == [ANSWER] else steps[done:]:
        change = amount - NUMBER[0]
        total = min(99, max(0, total + (change if sign == PLUS else -change)))
        rest += [sign, amount, NUMBER[total]]
    rest = [*rest, ANSWER, NUMBER[total], STOP][len(begun) :]
    return [*text, *rest, *[STOP] * MOST_WRITTEN][:MOST_WRITTEN]


def _accept(text: list[int], guess: list[int], found: list[int]) -> None:
    """Add tokens to the text, as long as they follow from tokens that are its own."""
    for at in range(len(text), MOST_WRITTEN):
        text.append(found[at])
        if found[at] != guess[at] or _form(text) != "open":
            return
