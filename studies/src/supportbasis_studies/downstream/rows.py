"""Rows of the study. One row holds all answers of a method to a task, a character for each item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..study import Row
from .answers import Answer


@dataclass(frozen=True)
class TaskRow(Row):
    """Answers to a task: 1 or 0 for each item."""

    model: str
    method: str
    task: str
    first: int  # number of the first item
    items: int
    length: int  # tokens of a prompt
    right: str
    parsed: str
    written: str  # right as the model writes it, not only the likeliest of the choices
    seconds: float
    exact_heads: float | None  # share, for methods of the library
    cost: float | None

    @property
    def accuracy(self) -> float:
        return self.right.count("1") / self.items

    @property
    def unparsable(self) -> float:
        return self.parsed.count("0") / self.items


def joined(rows: Sequence[TaskRow]) -> TaskRow:
    """One row of the parts of a task, as far as they follow one another from the first item on."""
    ranked = sorted(rows, key=lambda row: row.first)
    whole = ranked[0]
    for row in ranked[1:]:
        if row.first != whole.first + whole.items:
            break
        whole = replace(
            whole,
            items=whole.items + row.items,
            right=whole.right + row.right,
            parsed=whole.parsed + row.parsed,
            written=whole.written + row.written,
            seconds=whole.seconds + row.seconds,
            exact_heads=_shared(whole, row, "exact_heads"),
            cost=_shared(whole, row, "cost"),
        )
    return whole


def _shared(first: TaskRow, second: TaskRow, column: str) -> float | None:
    """The mean over the items of both."""
    values = [getattr(row, column) for row in (first, second)]
    if None in values:
        return None
    total = sum(row.items * value for row, value in zip((first, second), values, strict=True))
    return float(total / (first.items + second.items))


def digits(flags: Sequence[bool]) -> str:
    """A character for each.

    >>> digits([True, False])
    '10'
    """
    return "".join("1" if flag else "0" for flag in flags)


def task_answers(found: Sequence[Answer]) -> tuple[str, str, str]:
    return (
        digits([answer.right for answer in found]),
        digits([answer.parsed for answer in found]),
        digits([answer.written for answer in found]),
    )


@dataclass(frozen=True)
class TextRow(Row):
    """Perplexity of held-out text."""

    model: str
    method: str
    tokens: int
    perplexity: float
    exact_heads: float | None
    cost: float | None


@dataclass(frozen=True)
class RecallRow(Row):
    """Codes asked for at distances up to ``distance``, from half of it on."""

    model: str
    method: str
    form: str
    length: int
    distance: int
    asked: int
    right: int
    exact_heads: float | None
    cost: float | None


def recalled(rows: Sequence[RecallRow]) -> dict[int, float]:
    """Percent of the codes that come out right, by distance."""
    asked: dict[int, int] = {}
    right: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: row.distance):
        asked[row.distance] = asked.get(row.distance, 0) + row.asked
        right[row.distance] = right.get(row.distance, 0) + row.right
    return {reach: 100 * right[reach] / asked[reach] for reach in asked if asked[reach]}


@dataclass(frozen=True)
class LayerRow(Row):
    """Relative error of the hidden states after a layer."""

    model: str
    method: str
    layer: int
    error: float


@dataclass(frozen=True)
class StoryRow(Row):
    """stories260K on a text, and on the story it writes with exact attention."""

    model: str
    method: str
    tokens: int
    perplexity: float
    agreement: float  # share of tokens of the story that are still the likeliest
    same: int  # tokens of the story before the two part
