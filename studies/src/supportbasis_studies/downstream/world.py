"""The world that the language speaks of: who lives where, works as what, eats and plays what.

It is the same for every training and every test. A model can only know it by heart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from .language import CITIES, FAMILY_NAMES, FIRST_NAMES, FOODS, INSTRUMENTS, JOBS, ids

SEED = 2026


@dataclass(frozen=True)
class Relation:
    """How a fact is told and asked for, and what it can be."""

    told: tuple[int, ...]  # between the name and the value
    asked: tuple[int, ...]  # before the name
    values: tuple[int, ...]


def _relation(told: str, asked: str, values: tuple[str, ...]) -> Relation:
    return Relation(tuple(ids(told)), tuple(ids(asked)), tuple(ids(values)))


RELATIONS = (
    _relation("lives in", "where lives", CITIES),
    _relation("works as", "what works", JOBS),
    _relation("eats", "what eats", FOODS),
    _relation("plays the", "what plays", INSTRUMENTS),
)


@dataclass(frozen=True)
class World:
    """Persons by their two names, and the value of every relation for each."""

    persons: tuple[tuple[int, int], ...]
    facts: tuple[tuple[int, ...], ...]

    def person(self, random: Random) -> int:
        """Someone; the k-th is spoken of about 1/k as often as the first."""
        return int((len(self.persons) + 1) ** random.random()) - 1


@cache
def world() -> World:
    random = Random(SEED)
    names = [(first, last) for first in ids(FIRST_NAMES) for last in ids(FAMILY_NAMES)]
    persons = random.sample(names, len(names))
    facts = [tuple(random.choice(r.values) for r in RELATIONS) for _ in persons]
    return World(tuple(persons), tuple(facts))
