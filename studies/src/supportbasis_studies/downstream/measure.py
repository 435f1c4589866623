"""Units of the study: what one method does with one task, text or layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from supportbasis import InputError

from ..models import attending
from .answers import answers, questions
from .items import TASKS
from .methods import EXACT, Replacement, replacement
from .models import load_model
from .reading import held_out, hidden_errors, hidden_states, perplexity, recall
from .reuse import Reuse
from .rows import LayerRow, RecallRow, TaskRow, TextRow, task_answers

SEED = 7  # of all items: another one would be another set
SHORTEST = 32  # the smallest distance that has a row of its own


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is scored, and how its rows are named."""

    name: str
    folder: Path
    digest: str  # of its weights
    device: torch.device

    @staticmethod
    def of(name: str, folder: Path, device: torch.device) -> Subject:
        file = folder / "model.safetensors"
        if not file.is_file():
            raise InputError(
                f"the weights {file} are missing; install the package again, or train them: "
                f"python -m supportbasis_studies.downstream.train {name}"
            )
        return Subject(name, folder, sha256(file.read_bytes()).hexdigest()[:8], device)

    @cached_property
    def model(self) -> Any:
        return load_model(self.folder).to(self.device)

    @cached_property
    def _planned(self) -> dict[tuple[str, str, int], Replacement]:
        return {}

    def planned(self, name: str, task: str, length: int) -> Replacement:
        """A method with plans for a task, made on its first item whatever comes next: a run that
        was stopped goes on with the plans that it had."""
        at = (name, task, length)
        if at not in self._planned:
            made = self._planned[at] = replacement(name, self.model.config.num_hidden_layers)
            if isinstance(made.attend, Reuse) and made.attend.lasts:
                with attending(self.model, made.attend):
                    answers(self.model, questions(task, 1, length, SEED, self.name))
        self._planned[at].used.clear()
        return self._planned[at]

    def unit(self, *parts: object) -> str:
        return ", ".join(map(str, (self.name, self.digest, *parts)))


def measure_task(
    subject: Subject,
    unit: str,
    name: str,
    task: str,
    first: int,
    count: int,
    length: int,
    batch: int,
) -> list[TaskRow]:
    """Answers of a method to some items of a task."""
    asked, found = questions(task, count, length, SEED, subject.name, first), []
    method = subject.planned(name, task, length)
    model, start = subject.model, time.perf_counter()
    with attending(model, method.attend):
        for at in range(0, count, batch):
            found += answers(model, asked[at : at + batch])
    seconds = time.perf_counter() - start
    used = (method.used.exact_share, method.used.mean_cost)
    made = task_answers(found)
    return [TaskRow(unit, subject.name, name, task, first, count, length, *made, seconds, *used)]


def measure_text(
    subject: Subject, unit: str, name: str, length: int, windows: int
) -> list[TextRow]:
    method = replacement(name)
    tokens = held_out(length, windows, SEED)
    with attending(subject.model, method.attend):
        found = perplexity(subject.model, tokens.to(subject.device))
    used = (method.used.exact_share, method.used.mean_cost)
    return [TextRow(unit, subject.name, name, tokens.numel(), found, *used)]


def measure_recall(
    subject: Subject, unit: str, name: str, form: str, length: int, texts: int
) -> list[RecallRow]:
    """Codes by distance, an octave a row."""
    method = replacement(name)
    with attending(subject.model, method.attend):
        found = recall(subject.model, form, length, texts, SEED)
    used = (method.used.exact_share, method.used.mean_cost)
    rows, reach = [], SHORTEST
    while any(item.distance > reach // 2 for item in found):
        least = 0 if reach == SHORTEST else reach // 2
        mine = [item.right for item in found if least < item.distance <= reach]
        if mine:
            numbers = (form, length, reach, len(mine), sum(mine))
            rows.append(RecallRow(unit, subject.name, name, *numbers, *used))
        reach *= 2
    return rows


def measure_layers(
    subject: Subject, unit: str, name: str, length: int, prompts: int
) -> list[LayerRow]:
    """Hidden states on prompts of all tasks."""
    asked = [
        question.prompt
        for task in TASKS
        for question in questions(task, prompts, length, SEED, subject.name)
    ]
    tokens = torch.tensor(asked, device=subject.device)
    truth = hidden_states(subject.model, tokens, replacement(EXACT).attend)
    found = hidden_states(subject.model, tokens, replacement(name).attend)
    errors: Sequence[float] = hidden_errors(truth, found)
    return [LayerRow(unit, subject.name, name, at + 1, error) for at, error in enumerate(errors)]
