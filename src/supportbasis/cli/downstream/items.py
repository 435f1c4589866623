"""Items of the five tasks, each standing for one of the paper's benchmarks.

``arithmetic``   multi-step arithmetic with a written answer (GSM8K)
``knowledge``    facts of the world, answered by a letter (MMLU)
``completion``   the likeliest of four endings of a story (HellaSwag)
``easy``         which of four things is said to have a colour (ARC easy)
``hard``         which of four persons has most or least (ARC challenge)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .language import COLOURS, FIRST_NAMES, IDS, LETTERS, NUMBERS, PLACES, STOP, THINGS, ids
from .world import RELATIONS, world

ANSWER_LENGTH = 16  # tokens that a written answer may take


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
LETTER = ids(LETTERS)
ANSWER = IDS["answer"]
HAS, FINDS, LOSES, PLUS, MINUS = ids("has finds loses + -")
HOW_MANY = ids("how many ?")
SO, IS, IN, THE, WITH, TO, WENT, TOOK, WHICH, ASKED = ids("so is in the with to went took which ?")
WHO, MOST, LEAST, OF = ids("who has-most has-least of")


def arithmetic(random: Random, steps: tuple[int, int] = (2, 4)) -> Item:
    """``ada has 17 lamp . finds 25 . loses 8 . how many ? + 25 42 - 8 34 answer 34 .``"""
    total = random.randrange(100)
    question = [random.choice(NAMES), HAS, NUMBER[total], random.choice(THING), STOP]
    answer = []
    for _ in range(random.randint(*steps)):
        gains = random.random() < 0.5 if 0 < total < 99 else total == 0
        amount = random.randint(1, min(40, 99 - total if gains else total))
        total += amount if gains else -amount
        question += [FINDS if gains else LOSES, NUMBER[amount], STOP]
        answer += [PLUS if gains else MINUS, NUMBER[amount], NUMBER[total]]
    return Item(question + HOW_MANY, [*answer, ANSWER, NUMBER[total], STOP], [])


def knowledge(random: Random) -> Item:
    """``where lives ada stone ? A rome B oslo C lima D cairo answer`` and a letter"""
    known = world()
    person, which = known.person(random), random.randrange(len(RELATIONS))
    relation, value = RELATIONS[which], known.facts[person][which]
    others = [other for other in random.sample(relation.values, 4) if other != value]
    options = [value, *others[:3]]
    random.shuffle(options)
    question = [*relation.asked, *known.persons[person], ASKED]
    for letter, option in zip(LETTER, options, strict=True):
        question += [letter, option]
    answer = LETTER[options.index(value)]
    return Item([*question, ANSWER], [answer], [[letter] for letter in LETTER])


def completion(random: Random, persons: int = 4) -> Item:
    """Persons go to places and take things; where is one of them at last, and with what?"""
    names = random.sample(NAMES, persons)
    places, things = random.sample(PLACE, persons + 2), random.sample(THING, persons)
    events = []
    for number, name in enumerate(names):
        events.append((random.random(), [name, TOOK, THE, things[number], STOP]))
        goes = [places[number], places[random.randrange(persons, persons + 2)]]
        times = sorted(random.random() for _ in goes[: random.randint(1, 2)])
        for time, place in zip(times, reversed(goes[: len(times)]), strict=True):
            events.append((time, [name, WENT, TO, THE, place, STOP]))
    story = [token for _, event in sorted(events) for token in event]
    asked = random.randrange(persons)
    other = (asked + random.randrange(1, persons)) % persons
    endings = [
        [place, WITH, thing]
        for place in (places[asked], places[other])
        for thing in (things[asked], things[other])
    ]
    answer = endings[0]
    random.shuffle(endings)
    return Item([*story, SO, names[asked], IS, IN, THE], answer, endings)


def easy(random: Random, facts: tuple[int, int] = (5, 8)) -> Item:
    """``the lamp is red . ... which is red ? boat lamp cup key answer lamp``"""
    count = random.randint(*facts)
    things, colours = random.sample(THING, count), random.sample(COLOUR, count)
    question = []
    for thing, colour in zip(things, colours, strict=True):
        question += [THE, thing, IS, colour, STOP]
    options = random.sample(range(count), 4)
    colour = colours[random.choice(options)]
    answer = things[colours.index(colour)]
    chosen = [things[option] for option in options]
    question += [WHICH, IS, colour, ASKED, *chosen, ANSWER]
    return Item(question, [answer], [[thing] for thing in chosen])


def hard(random: Random, persons: tuple[int, int] = (5, 8)) -> Item:
    """``ada has 17 . bob has 42 . ... who of ada bob cam dan has-most ? answer bob``"""
    count = random.randint(*persons)
    names, amounts = random.sample(NAMES, count), random.sample(range(100), count)
    question = []
    for name, amount in zip(names, amounts, strict=True):
        question += [name, HAS, NUMBER[amount], STOP]
    options = random.sample(range(count), 4)
    most = random.random() < 0.5
    best = (max if most else min)(options, key=lambda option: amounts[option])
    chosen = [names[option] for option in options]
    question += [WHO, OF, *chosen, MOST if most else LEAST, ASKED, ANSWER]
    return Item(question, [names[best]], [[name] for name in chosen])


Maker = Callable[[Random], Item]
TASKS: dict[str, Maker] = {
    "arithmetic": arithmetic,
    "knowledge": knowledge,
    "completion": completion,
    "easy": easy,
    "hard": hard,
}
