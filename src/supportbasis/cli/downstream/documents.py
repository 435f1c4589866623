"""Texts to learn from, made from a seed: the tasks, sentences about the world, and recall.

A token of an answer carries the number of its task, so that training can weigh it and tell how
well each task is answered: a coded token is ``token + KIND · task``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from .items import ANSWER_LENGTH, LETTER, NUMBER, TASKS, Item
from .language import BOS, END, IDS, STOP, ids
from .world import RELATIONS, world

KIND = 512
KINDS = ("text", *TASKS, "recall")
RECALL = KINDS.index("recall")
SHARES = {  # of the documents, by number; recall is by far the longest
    "text": 0.14,
    "arithmetic": 0.2,
    "knowledge": 0.2,
    "completion": 0.14,
    "easy": 0.1,
    "hard": 0.14,
    "recall": 0.08,
}
SHORTEST, LONGEST = 60, 500  # tokens of a document of a task, about

THE, CODE, OF, IS, WHAT, ASKED, ALSO, WHILE, AND = ids("the code of is what ? also while and")
TEXT = IDS["text"]


def sentence(random: Random) -> list[int]:
    """One or two facts of one or two persons of the world."""
    known = world()
    person = known.person(random)
    first, second = random.sample(range(len(RELATIONS)), 2)
    told = [*known.persons[person], *RELATIONS[first].told, known.facts[person][first]]
    form = random.randrange(3)
    if form == 0:
        return [*told, STOP]
    if form == 1:
        told += [AND, ALSO, *RELATIONS[second].told, known.facts[person][second]]
        return [*told, STOP]
    other = known.person(random)
    told += [WHILE, *known.persons[other], *RELATIONS[first].told, known.facts[other][first]]
    return [*told, STOP]


def prose(random: Random, length: int) -> list[int]:
    """Sentences about the world."""
    tokens = [BOS, TEXT]
    while len(tokens) < length:
        tokens += sentence(random)
    return tokens


def coded(item: Item, kind: int) -> list[int]:
    answer = [token + KIND * kind for token in item.answer]
    return [*item.question, *answer, *item.tokens[len(item.question) + len(item.answer) :]]


def task_document(random: Random, task: str, length: int, padded: bool) -> list[int]:
    """Items of one task; the last written answer is filled up with ends where ``padded``."""
    make, kind = TASKS[task], KINDS.index(task)
    tokens, last = [BOS], []
    while len(tokens) < length:
        item = make(random)
        last = coded(item, kind)
        tokens += last
    if padded and not item.choices:
        tokens += [END + KIND * kind] * (ANSWER_LENGTH - len(item.answer))
    return tokens


@dataclass(frozen=True)
class Needles:
    """A long text with codes hidden in it, and questions for them at its end."""

    tokens: list[int]  # coded
    asked: list[tuple[int, int]]  # where an answer stands, and how far behind it the code


def needles(random: Random, length: int, count: int) -> Needles:
    """``the code of ada stone is 37 .`` here and there in prose; at the end, all are asked for."""
    known = world()
    persons = random.sample(range(len(known.persons)), count)
    codes = [random.choice(NUMBER) for _ in persons]
    room = length - 2 - 18 * count
    places = sorted(random.randrange(max(1, room)) for _ in persons)
    tokens, found, filler = [BOS, TEXT], [], 0
    for person, code, place in zip(persons, codes, places, strict=True):
        while filler < place:
            told = sentence(random)
            filler += len(told)
            tokens += told
        found.append(len(tokens) + 6)
        tokens += [THE, CODE, OF, *known.persons[person], IS, code, STOP]
    while len(tokens) < length - 10 * count:
        tokens += sentence(random)
    asked = []
    for number in random.sample(range(count), count):
        tokens += [WHAT, IS, THE, CODE, OF, *known.persons[persons[number]], ASKED]
        asked.append((len(tokens), len(tokens) - found[number]))
        tokens += [codes[number] + KIND * RECALL, STOP]
    return Needles(tokens, asked)


def pairs(random: Random, count: int) -> list[int]:
    """``ada stone 37 ; bob hill 12 ; ...`` and then each name again, with its number."""
    known = world()
    chosen = [known.persons[number] for number in random.sample(range(len(known.persons)), count)]
    codes = [random.choice(NUMBER) for _ in chosen]
    tokens = [BOS, CODE]
    for person, code in zip(chosen, codes, strict=True):
        tokens += [*person, code, STOP]
    for number in random.sample(range(count), count):
        tokens += [*chosen[number], codes[number] + KIND * RECALL, STOP]
    return tokens


def document(random: Random, room: int, padded: bool) -> list[int]:
    """One text of any kind, of at most about ``room`` tokens."""
    kind = random.choices(KINDS, tuple(SHARES.values()))[0]
    if kind == "recall":
        longest = max(128, room)
        length = int(math.exp(random.uniform(math.log(96), math.log(longest))))
        if random.random() < 0.4:
            return pairs(random, max(2, min(64, length // 8)))
        return needles(random, length, min(24, max(1, length // 64))).tokens
    length = int(math.exp(random.uniform(math.log(SHORTEST), math.log(min(LONGEST, room)))))
    if kind == "text":
        return prose(random, length)
    return task_document(random, kind, length, padded)


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
