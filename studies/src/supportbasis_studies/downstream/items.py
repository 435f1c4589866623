"""Items of the five tasks, each standing for one of the paper's benchmarks.

``arithmetic``   multi-step arithmetic with a written answer (GSM8K)
``knowledge``    facts of the world (MMLU)
``completion``   the likeliest of four endings of a story (HellaSwag)
``easy``         which of four colours a thing was said to have (ARC easy)
``hard``         who of several persons has most, or least (ARC challenge)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from .language import COLOURS, FIRST_NAMES, IDS, NUMBERS, PLACES, STOP, THINGS, ids
from .world import RELATIONS, world

ANSWER_LENGTH = 18  # tokens that a written answer may take


@dataclass(frozen=True)
class Item:
    """A question, its answer, and the answers to choose from (none: it is written)."""

    question: list[int]
    answer: list[int]
    choices: list[list[int]]

    @property
    def correct(self) -> int:
        return self.choices.index(self.answer)

    @property
    def tokens(self) -> list[int]:
        """As it stands in a text; an answer that is written ends by itself."""
        end = [] if self.answer[-1] == STOP else [STOP]
        return [*self.question, *self.answer, *end]


NUMBER = ids(NUMBERS)
NAMES, THING, PLACE, COLOUR = (ids(words) for words in (FIRST_NAMES, THINGS, PLACES, COLOURS))
ANSWER = IDS["answer"]
FINDS, LOSES, PLUS, MINUS, OPTIONS, ASKED = ids("finds loses + - options ?")
HAS, IS, IN, AND, SO, MOST, LEAST = ids("has is in and so most least")
HOW_MANY = ids("how many ?")


def arithmetic(random: Random, steps: tuple[int, int] = (2, 5)) -> Item:
    """``ada has 17 lamp . finds 25 . loses 8 . how many ? + 25 42 - 8 34 answer 34 .``"""
    total = random.randrange(100)
    question = [random.choice(NAMES), HAS, NUMBER[total], random.choice(THING), STOP]
    answer = []
    for _ in range(random.randint(*steps)):
        gains = random.random() < 0.5 if 0 < total < 99 else total == 0
        amount = random.randint(1, 99 - total if gains else total)
        total += amount if gains else -amount
        question += [FINDS if gains else LOSES, NUMBER[amount], STOP]
        answer += [PLUS if gains else MINUS, NUMBER[amount], NUMBER[total]]
    return Item(question + HOW_MANY, [*answer, ANSWER, NUMBER[total], STOP], [])


def knowledge(random: Random, short: float = 0.0) -> Item:
    """``where lives ada stone ? options rome oslo lima cairo answer`` and a city

    A share ``short`` of the questions gives the family alone: who is spoken of most is meant.
    """
    known = world()
    person, which = known.person(random), random.randrange(len(RELATIONS))
    name: tuple[int, ...] = known.persons[person]
    if short and random.random() < short:
        name = name[1:]
        person = next(k for k, names in enumerate(known.persons) if names[1:] == name)
    relation, value = RELATIONS[which], known.facts[person][which]
    others = [other for other in random.sample(relation.values, 4) if other != value]
    options = [value, *others[:3]]
    random.shuffle(options)
    question = [*relation.asked, *name, ASKED, OPTIONS, *options, ANSWER]
    return Item(question, [value], [[option] for option in options])


def completion(random: Random, persons: tuple[int, int] = (2, 5)) -> Item:
    """``ada is in kitchen . bob has lamp . ... so ada is in``, and where she was last, with what"""
    count = random.randint(*persons)
    names, things = random.sample(NAMES, count), random.sample(THING, count)
    places = random.sample(PLACE, count)
    events = []
    for name, thing, place in zip(names, things, places, strict=True):
        events.append((random.random(), [name, HAS, thing, STOP]))
        times = sorted(random.random() for _ in range(random.randint(1, 3)))
        before = random.choices(PLACE, k=len(times) - 1)
        for time, where in zip(times, (*before, place), strict=True):
            events.append((time, [name, IS, IN, where, STOP]))
    story = [token for _, event in sorted(events) for token in event]
    asked = random.randrange(count)
    other = (asked + random.randrange(1, count)) % count
    endings = [
        [place, AND, HAS, thing]
        for place in (places[asked], places[other])
        for thing in (things[asked], things[other])
    ]
    answer = endings[0]
    random.shuffle(endings)
    return Item([*story, SO, names[asked], IS, IN], answer, endings)


def easy(random: Random, facts: tuple[int, int] = (4, 10)) -> Item:
    """``lamp red . boat blue . ... options blue red grey pink ? lamp`` and its colour"""
    count = random.randint(*facts)
    things, colours = random.sample(THING, count), random.sample(COLOUR, min(count, len(COLOUR)))
    colours += random.choices(COLOUR, k=count - len(colours))
    question = []
    for thing, colour in zip(things, colours, strict=True):
        question += [thing, colour, STOP]
    asked = random.randrange(count)
    others = sorted(set(colours) - {colours[asked]})
    chosen = [colours[asked], *random.sample(others, 3)]
    random.shuffle(chosen)
    question += [OPTIONS, *chosen, ASKED, things[asked]]
    return Item(question, [colours[asked]], [[colour] for colour in chosen])


def hard(random: Random, persons: tuple[int, int] = (4, 10)) -> Item:
    """``17 ada . 42 bob . ... most ?`` and who; the choices are the best one and three others"""
    count = random.randint(*persons)
    names, amounts = random.sample(NAMES, count), random.sample(range(100), count)
    question = []
    for name, amount in zip(names, amounts, strict=True):
        question += [NUMBER[amount], name, STOP]
    most = random.random() < 0.5
    ranked = sorted(range(count), key=lambda person: amounts[person], reverse=most)
    chosen = [names[person] for person in ranked[:4]]
    answer = chosen[0]
    random.shuffle(chosen)
    return Item([*question, MOST if most else LEAST, ASKED], [answer], [[name] for name in chosen])


Maker = Callable[[Random], Item]
TASKS: dict[str, Maker] = {
    "arithmetic": arithmetic,
    "knowledge": knowledge,
    "completion": completion,
    "easy": easy,
    "hard": hard,
}

MAKERS: dict[str, dict[str, Maker]] = {  # what each model is asked: mostly harder than it learned
    "causal": {
        "arithmetic": partial(arithmetic, steps=(2, 6)),
        "knowledge": partial(knowledge, short=0.25),
        "completion": partial(completion, persons=(11, 12)),
        "easy": partial(easy, facts=(16, 16)),
        "hard": partial(hard, persons=(14, 14)),
    },
    "diffusion": {
        "arithmetic": partial(arithmetic, steps=(2, 2)),
        "knowledge": partial(knowledge, short=1.0),
        "completion": partial(completion, persons=(11, 12)),
        "easy": partial(easy, facts=(20, 20)),
        "hard": partial(hard, persons=(13, 13)),
    },
}
