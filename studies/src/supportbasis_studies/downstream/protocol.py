"""The authors' protocol: a zero-shot chat prompt, an answer of 32 tokens that a masked-diffusion
model writes in 8 steps of one block, read by a pattern.

A `Chat` is a model with its questions. The user's model has the chat template of its tokenizer and
the paper's benchmarks from files. The diffusion model of the package knows neither letters nor
English: it is asked the generated tasks, prompts of the task itself stand in for the chat template,
and the first choice among the words that it writes is its answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis import InputError
from supportbasis.cli.loading import LoadedModel, one_line

from ..files import model_state
from ..models import attending, without_cache
from .answers import Answer, questions
from .benchmarks import Asked, data_state, read_benchmark
from .diffusion import mask_token
from .harness import Wish, is_diffusion, load_for
from .items import ANSWER, NUMBER, TASKS, Item
from .language import MASK as OWN_MASK
from .language import STOP
from .measure import SEED, Subject
from .methods import AS23, EXACT, MEAN, OURS, REVISED, Replacement, replacement
from .reuse import Used
from .sampler import Sampling, sample

WRITING = Sampling(length=32, steps=8, block=32)
PLAN = "plan(kl=0.002)"
KL = 0.002
PROMPT = 256  # tokens of the prompts of generated tasks
PLANNED, BATCHES = 768, 3  # tokens and batches that the plan of a model is made on
QUESTIONS = 32  # of each task, at most, that those tokens are taken from
BEYOND = 10**6  # the first generated question that is planned on: none of them is scored
METHODS = {
    "exact": EXACT, "ours4": OURS[4], "ours6": OURS[6], "as23-4": AS23[4], "as23-6": AS23[6],
    "ours4-revised": REVISED[OURS[4]], "ours6-revised": REVISED[OURS[6]],
    "as23-4-revised": REVISED[AS23[4]], "as23-6-revised": REVISED[AS23[6]],
    "mean": MEAN, "single": "SingleThreshold", "multi": "MultiThreshold",
    "block": "BlockSupport(0.5)", "auto": "Auto", "plan": PLAN,
}  # fmt: skip


def chosen_methods(text: str | None) -> tuple[str, ...]:
    """Short names with commas between them, as the rows are named; exact is always there.

    >>> chosen_methods("ours6, mean")
    ('exact', 'ours (6), emulation', 'mean(V)')
    """
    if text is None:
        return tuple(METHODS.values())
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in METHODS:
            raise InputError(f"--methods: {name!r} is not one of {', '.join(METHODS)}")
    if not asked:
        raise InputError(
            f"--methods: no method is named in {text!r}; there are {', '.join(METHODS)}"
        )
    return tuple(METHODS[name] for name in METHODS if name in ("exact", *asked))


@dataclass(frozen=True)
class Prompted:
    """The tokens of a question, and what is asked."""

    tokens: list[int]
    asked: Asked | Item


class Chat(ABC):
    """A masked-diffusion model and the questions it is asked."""

    name: str
    digest: str  # changes with the weights and the questions
    tasks: tuple[str, ...]
    mask: int

    @property
    @abstractmethod
    def model(self) -> Any:
        """Loaded when it is needed."""

    @abstractmethod
    def prompted(self, task: str, first: int, count: int) -> list[Prompted]:
        """Some questions of a task."""

    @abstractmethod
    def size(self, task: str) -> int | None:
        """How many questions a task has; None: as many as one likes."""

    @abstractmethod
    def answer(self, question: Prompted, written: list[int]) -> Answer:
        """What the written tokens say."""

    @torch.no_grad()
    def answers(self, asked: Sequence[Prompted], batch: int) -> list[Answer]:
        """Written and read; questions of equal length together, so that nothing is padded."""
        ranked = sorted(range(len(asked)), key=lambda number: len(asked[number].tokens))
        found: dict[int, Answer] = {}
        for _, same in groupby(ranked, key=lambda number: len(asked[number].tokens)):
            numbers = list(same)
            for at in range(0, len(numbers), batch):
                part = numbers[at : at + batch]
                tokens = torch.tensor([asked[n].tokens for n in part], device=self.model.device)
                written = sample(self._logits, tokens, WRITING, self.mask).tolist()
                found |= {n: self.answer(asked[n], w) for n, w in zip(part, written, strict=True)}
        return [found[number] for number in range(len(asked))]

    def _logits(self, tokens: Tensor) -> Tensor:
        with one_line(self.name):
            logits: Tensor = self.model(tokens, **without_cache(self.model)).logits
        return logits

    @cached_property
    def plan(self) -> sb.ModelPlan:
        """A plan of the whole model, made on questions of all tasks."""
        with one_line(self.name):
            return sb.models.plan(self.model, self.planned_on(), kl=KL, progress=False)

    def planned_on(self) -> list[Tensor]:
        """Batches with a part of every task in each, of the last questions of a task: those are
        scored last, and they are the same whatever the limit is, so that a run that was stopped
        goes on with the plan that it had."""
        batches: list[list[int]] = [[] for _ in range(BATCHES)]
        for task in self.tasks:
            size = self.size(task)
            first = BEYOND if size is None else max(0, size - QUESTIONS)
            asked = reversed(self.prompted(task, first, QUESTIONS))
            tokens = [token for question in asked for token in question.tokens]
            length = min(PLANNED // len(self.tasks), len(tokens) // BATCHES)
            for number, batch in enumerate(batches):
                batch += tokens[number * length : (number + 1) * length]
        return [torch.tensor([batch], device=self.model.device) for batch in batches]

    @contextmanager
    def by(self, method: str) -> Iterator[Used]:
        """Within it, the model attends by a method."""
        if method == PLAN:
            used = Used()
            for layer in self.plan.layers:
                used.add(layer.plan.heads)
            with sb.models.use(self.model, self.plan, min_tokens=0):
                yield used
            return
        layers = getattr(self.model.config, "num_hidden_layers", None)
        chosen: Replacement = replacement(method, layers)
        with attending(self.model, chosen.attend) if method != EXACT else nullcontext():
            yield chosen.used


class OwnChat(Chat):
    """The diffusion model of the package on the generated tasks."""

    tasks, mask = tuple(TASKS), OWN_MASK

    def __init__(self, subject: Subject):
        self.subject = subject
        self.name, self.digest = subject.name, subject.digest

    @property
    def model(self) -> Any:
        return self.subject.model

    def prompted(self, task: str, first: int, count: int) -> list[Prompted]:
        asked = questions(task, count, PROMPT, SEED, self.subject.name, first)
        return [Prompted(question.prompt, question.item) for question in asked]

    def size(self, task: str) -> int | None:
        return None

    def answer(self, question: Prompted, written: list[int]) -> Answer:
        assert isinstance(question.asked, Item)
        found = read_own(question.asked, written)
        truth = question.asked.answer
        right = found == (truth if question.asked.choices else truth[-2:-1])
        return Answer(right, found is not None, right)


def read_own(item: Item, written: Sequence[int]) -> list[int] | None:
    """The first choice in what is written, as the published pattern takes the first letter; of a
    sum, the number after the first "answer"."""
    if not item.choices:
        at = list(written).index(ANSWER) + 1 if ANSWER in written else len(written)
        found = list(written[at : at + 1])
        return found if found and found[0] in NUMBER else None
    size = len(item.choices[0])
    for at in range(len(written) - size + 1):
        if size > 1 and written[at] == STOP:
            return None  # an ending of several words stands in the first sentence
        part = list(written[at : at + size])
        if part in item.choices:
            return part
    return None


class UserChat(Chat):
    """A model of the user's on benchmarks from files."""

    def __init__(self, wish: Wish, data: Path, device: torch.device):
        self.wish, self.data, self.device = wish, data, device
        self.name, self.tasks = wish.label, wish.tasks
        for task in self.tasks:
            self._read(task)  # raises where something is missing, before the model is loaded

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """Of what is asked for and of the files; of a model on the hub, once it was fetched."""
        parts = [str(self.wish.dtype), model_state(self.wish.name), data_state(self.data)]
        return sha256(" ".join(parts).encode()).hexdigest()[:8]

    @cached_property
    def _benchmarks(self) -> dict[str, list[Asked]]:
        return {}

    def _read(self, task: str) -> list[Asked]:
        if task not in self._benchmarks:
            self._benchmarks[task] = read_benchmark(self.data, task)
        return self._benchmarks[task]

    @cached_property
    def loaded(self) -> LoadedModel:
        found = load_for(self.wish, self.device)
        if not is_diffusion(found.model.config):
            raise InputError(
                f"--protocol: {found.name} is causal, and the paper's protocol writes with a "
                "masked-diffusion model; use --protocol lm-eval"
            )
        if not getattr(found.tokenizer, "chat_template", None):
            raise InputError(
                f"--protocol: the tokenizer of {found.name} has no chat template, which the "
                "paper's protocol needs; expected an instruction-tuned model"
            )
        return found

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def mask(self) -> int:  # type: ignore[override]
        return mask_token(self.model.config)

    def prompted(self, task: str, first: int, count: int) -> list[Prompted]:
        tokenizer, made = self.loaded.tokenizer, []
        for asked in self._read(task)[first : first + count]:
            chat = [{"role": "user", "content": asked.text}]
            with one_line(f"the tokenizer of {self.name}"):
                text = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=False
                )
                made.append(Prompted(list(tokenizer(text)["input_ids"]), asked))
        return made

    def size(self, task: str) -> int | None:
        return len(self._read(task))

    def answer(self, question: Prompted, written: list[int]) -> Answer:
        assert isinstance(question.asked, Asked)
        with one_line(f"the tokenizer of {self.name}"):
            text = self.loaded.tokenizer.decode(written, skip_special_tokens=True)
        found = question.asked.read(text)
        right = found == question.asked.answer
        return Answer(right, found is not None, right)


def only(chat: Chat, tasks: Sequence[str]) -> Chat:
    """Check that the tasks are among those of the chat."""
    for task in tasks:
        if task not in chat.tasks:
            raise InputError(f"--tasks: {task!r} is not one of {', '.join(chat.tasks)}")
    chat.tasks = tuple(tasks) or chat.tasks
    return chat
