"""Texts to learn from, made from a seed: the tasks, sentences about the world, and recall.

A token of an answer carries the number of its task, so that training can weigh it and tell how
well each task is answered: a coded token is ``token + KIND · task``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from .items import ANSWER_LENGTH, NUMBER, PLACE, TASKS, THING, Item
from .language import BOS, END, SPECIAL, STOP, WORDS, ids
from .world import RELATIONS, world

KIND = 512
KINDS = ("plain", *TASKS, "recall", "fact", "copy")
RECALL, FACT, COPY = (KINDS.index(kind) for kind in ("recall", "fact", "copy"))
SHARES = {  # of the documents, by number; recall has by far the longest
    "text": 0.1,
    "arithmetic": 0.14,
    "knowledge": 0.14,
    "completion": 0.14,
    "easy": 0.12,
    "hard": 0.12,
    "recall": 0.14,
    "copy": 0.1,
}
SHORTEST, LONGEST = 20, 400  # tokens of a document of a task, about
KEYS = THING + PLACE  # that codes belong to: sentences about the world do not speak of them

CODE, ALSO, WHILE, AND, TEXT, COPIED = ids("code also while and text copy")


def sentence(random: Random) -> list[int]:
    """One or two facts of one or two persons of the world."""
    known = world()
    person = known.person(random)
    first, second = random.sample(range(len(RELATIONS)), 2)
    told = _fact(person, first)
    form = random.randrange(3)
    if form == 1:
        told += [AND, ALSO, *_fact(person, second)[2:]]
    elif form == 2:
        told += [WHILE, *_fact(known.person(random), first)]
    return [*told, STOP]


def _fact(person: int, which: int) -> list[int]:
    known = world()
    value = known.facts[person][which] + KIND * FACT
    return [*known.persons[person], *RELATIONS[which].told, value]


def prose(random: Random, length: int) -> list[int]:
    """Sentences about the world."""
    tokens = [BOS, TEXT]
    while len(tokens) < length:
        tokens += sentence(random)
    return tokens


def task_document(random: Random, task: str, length: int, padded: bool) -> list[int]:
    """Items of one task; the last written answer is filled up with ends where ``padded``."""
    make, kind = TASKS[task], KINDS.index(task)
    tokens, item = [BOS], make(random)
    while True:
        tokens += item.question
        tokens += [token + KIND * kind for token in item.answer]
        if item.choices:
            tokens.append(STOP)
        if len(tokens) >= length:
            break
        item = make(random)
    if padded and not item.choices:
        tokens += [END + KIND * kind] * (ANSWER_LENGTH - len(item.answer))
    return tokens


@dataclass(frozen=True)
class Hidden:
    """A text with codes hidden in it, and questions for them at its end."""

    tokens: list[int]  # coded
    asked: list[tuple[int, int]]  # where an answer stands, and how far behind it the code


def needles(random: Random, length: int, count: int) -> Hidden:
    """``code lamp 37 .`` here and there in sentences; at the end, all are asked for."""
    keys, codes = random.sample(KEYS, count), random.choices(NUMBER, k=count)
    space = length - 2 - 8 * count
    places = sorted(random.randrange(max(1, space)) for _ in keys)
    tokens, found, filler = [BOS, TEXT], [], 0
    for key, code, place in zip(keys, codes, places, strict=True):
        while filler < place:
            told = sentence(random)
            filler += len(told)
            tokens += told
        found.append(len(tokens) + 2)
        tokens += [CODE, key, code, STOP]
    while len(tokens) < length - 4 * count:
        tokens += sentence(random)
    return _asked(random, tokens, keys, codes, found)


def pairs(random: Random, length: int, count: int) -> Hidden:
    """Codes one after the other, then sentences, and at the end all are asked for."""
    keys, codes = random.sample(KEYS, count), random.choices(NUMBER, k=count)
    tokens, found = [BOS, TEXT], []
    for key, code in zip(keys, codes, strict=True):
        found.append(len(tokens) + 2)
        tokens += [CODE, key, code, STOP]
    while len(tokens) < length - 4 * count:
        tokens += sentence(random)
    return _asked(random, tokens, keys, codes, found)


def _asked(
    random: Random, tokens: list[int], keys: list[int], codes: list[int], found: list[int]
) -> Hidden:
    asked = []
    for number in random.sample(range(len(keys)), len(keys)):
        tokens += [CODE, keys[number]]
        asked.append((len(tokens), len(tokens) - found[number]))
        tokens += [codes[number] + KIND * RECALL, STOP]
    return Hidden(tokens, asked)


def copied(random: Random, length: int) -> list[int]:
    """Words in any order, and the same again."""
    words = random.sample(range(len(SPECIAL), len(WORDS)), max(4, min(100, length // 2)))
    return [BOS, COPIED, *words, STOP, COPIED, *(word + KIND * COPY for word in words), STOP]


def document(random: Random, space: int, padded: bool) -> list[int]:
    """One text of any kind, of at most about ``space`` tokens."""
    kind = random.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    if kind == "recall":
        length = _length(random, SHORTEST, max(40, space))
        count = random.randint(1, max(1, min(24, length // 10)))
        make = pairs if random.random() < 0.5 else needles
        return make(random, length, count).tokens
    length = _length(random, SHORTEST, min(LONGEST, space))
    if kind == "text":
        return prose(random, length)
    if kind == "copy":
        return copied(random, length)
    return task_document(random, kind, length, padded)


def _length(random: Random, least: int, most: int) -> int:
    """As likely to be in one octave as in another."""
    return int(math.exp(random.uniform(math.log(least), math.log(most))))


def row(random: Random, length: int, padded: bool = False) -> list[int]:
    """Texts one after the other, cut at the front, so that the last one is whole."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += document(random, max(SHORTEST + 1, length - len(tokens)), padded)
    return tokens[-length:]


def prompt(random: Random, task: str, item: Item, length: int) -> list[int]:
    """Answered items of the task before the question, exactly ``length`` tokens in all."""
    shots = [token % KIND for token in task_document(random, task, length, False)]
    return [*shots, *item.question][-length:]
