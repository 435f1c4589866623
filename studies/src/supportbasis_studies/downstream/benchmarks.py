"""The paper's five benchmarks from local files, asked as the authors' scripts ask them.

Their scripts for MMLU, HellaSwag and ARC give the prompts and the pattern that reads a letter.
There is none for GSM8K: its prompt and its pattern are ours. Splits are theirs: GSM8K, MMLU and
ARC test, HellaSwag validation.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supportbasis import InputError

from ..files import file_state

LETTERS = "ABCDE"


@dataclass(frozen=True)
class Asked:
    """A question as the user of a chat types it, its answer, and how an answer is read."""

    text: str
    answer: str
    pattern: str

    def read(self, written: str) -> str | None:
        """What is answered; None: nothing that the pattern finds."""
        if self.pattern == NUMBER:
            return last_number(written)
        found = re.search(self.pattern, written.strip())
        return found.group(1) if found else None


FOUR, FIVE = r"\b([A-D])\b", r"\b([A-E])\b"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def last_number(text: str) -> str | None:
    """The number after the last "####", or the last one there is, without commas and .0.

    >>> last_number("so 3 x 4 = 12 eggs"), last_number("#### 1,200.0 and 7"), last_number("none")
    ('12', '1200', None)
    """
    marked = text.rpartition("####")[2] if "####" in text else text
    found = re.findall(NUMBER, marked)
    if not found:
        return None
    number = found[0 if "####" in text else -1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _options(choices: list[str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))


def _gsm8k(item: dict[str, Any]) -> Asked:
    text = (
        "\nSolve the following problem. End with the answer as a number after ####.\n\n"
        f"Question: {item['question']}\n\nAnswer:"
    )
    number = last_number(item["answer"])
    assert number is not None
    return Asked(text, number, NUMBER)


def _mmlu(item: dict[str, Any]) -> Asked:
    choices = [item[f"choice{number}"] for number in range(4)]
    text = (
        "\nAnswer the following multiple-choice question:.\n\n"
        f"Questions: {item['question']}\n\nOptions:\n{_options(choices)}\n\n"
        "Answer with the letter (A, B, C, or D) that best answers the question.\nAnswer:"
    )
    return Asked(text, LETTERS[int(item["answer"])], FOUR)


def _hellaswag(item: dict[str, Any]) -> Asked:
    text = (
        "\nYou're given a context followed by four possible endings. Choose the best option to "
        f"complete the sentence.\n\nContext: {item['ctx']}\n\n"
        f"Options:\n{_options(item['endings'])}\n\n"
        "Answer with the letter (A, B, C, or D) that best completes the context.\nAnswer:"
    )
    return Asked(text, LETTERS[int(item["label"])], FOUR)


def _arc(item: dict[str, Any]) -> Asked:
    question = str(item["query"]).removeprefix("Question: ")
    text = (
        "\nYou're given a science question with multiple choices. Read the question carefully and "
        "choose the best answer. Respond with only the letter of the correct choice.\n\n"
        f"Question: {question}\n\nChoices:\n{_options(item['choices'])}\n\nAnswer:"
    )
    return Asked(text, LETTERS[int(item["gold"])], FIVE)


Maker = Callable[[dict[str, Any]], Asked]
FILES: dict[str, tuple[str, Maker]] = {
    "gsm8k": ("gsm8k_test.jsonl", _gsm8k),
    "mmlu": ("mmlu_test/*.csv", _mmlu),
    "hellaswag": ("hellaswag_val*.jsonl", _hellaswag),
    "arc_easy": ("arc_easy.jsonl", _arc),
    "arc_challenge": ("arc_challenge.jsonl", _arc),
}


def read_benchmark(folder: Path, task: str) -> list[Asked]:
    """All items of a benchmark, in the sequence of its files."""
    if task not in FILES:
        raise InputError(f"--tasks: {task!r} is not one of {', '.join(FILES)}")
    if not folder.is_dir():
        raise InputError(f"--data: there is no folder {folder}")
    pattern, make = FILES[task]
    files = sorted(folder.glob(pattern))
    if not files:
        raise InputError(f"--data: {folder} holds no {pattern}, which {task} is read from")
    made = []
    for file in files:
        try:
            made += [make(item) for item in _items(file)]
        except (OSError, ValueError, KeyError, IndexError, AssertionError, TypeError) as error:
            raise InputError(
                f"--data: {file} is not a file of {task} ({type(error).__name__}: {error})"
            ) from None
    return made


def data_state(folder: Path) -> str:
    """Changes with the files of the benchmarks."""
    return file_state(file for pattern, _ in FILES.values() for file in folder.glob(pattern))


def _items(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8") as lines:
        if file.suffix == ".csv":
            yield from csv.DictReader(lines)
        else:
            yield from (json.loads(line) for line in lines if line.strip())
