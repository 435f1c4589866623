"""Choose one option for each head: the least time whose effects stay within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STEPS = 100  # of bisection


class Option(NamedTuple):
    """What a setting of a head takes, and what it does to the prediction."""

    time: float
    effect: float


def allocate(heads: Sequence[Sequence[Option]], limit: float) -> list[int]:
    """The index of an option for each head, so that the sum of effects is at most ``limit``.

    Each head needs an option without effect. By bisection on the multiplier of effects; what the
    limit leaves is spent on the single changes that save the most time for their effect.

    >>> allocate([[Option(1.0, 0.0), Option(0.2, 0.1)], [Option(1.0, 0.0), Option(0.5, 0.3)]], 0.2)
    [1, 0]
    """
    low, high = 0.0, 1.0
    while _effect(heads, _cheapest(heads, high)) > limit and high < 1e30:
        high *= 10.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        fits = _effect(heads, _cheapest(heads, middle)) <= limit
        low, high = (low, middle) if fits else (middle, high)
    if _effect(heads, _cheapest(heads, 0.0)) <= limit:
        high = 0.0
    chosen = _cheapest(heads, high)
    if _effect(heads, chosen) > limit:  # only options without effect are left
        chosen = [min(range(len(x)), key=lambda i: (x[i].effect, x[i].time)) for x in heads]
    return _spend(heads, chosen, limit)


def pays(times: Sequence[float], exact: float, fixed: float) -> bool:
    """Whether the heads of a layer that take less time than exact ones save the ``fixed`` time of a
    call of their own. The time of each holds the part of it that it has if no head is exact.

    >>> pays([1.0, 1.0, 1.0, 0.4], exact=1.0, fixed=1.0), pays([0.4] * 4, exact=1.0, fixed=1.0)
    (False, True)
    """
    others = [time for time in times if time < exact]
    missing = fixed * (1 - len(others) / max(1, len(times)))
    return sum(exact - time for time in others) > missing


def _cheapest(heads: Sequence[Sequence[Option]], multiplier: float) -> list[int]:
    def price(option: Option) -> float:
        return option.time + multiplier * option.effect

    return [min(range(len(x)), key=lambda i: price(x[i])) for x in heads]


def _effect(heads: Sequence[Sequence[Option]], chosen: Sequence[int]) -> float:
    return sum(options[i].effect for options, i in zip(heads, chosen, strict=True))


def _spend(heads: Sequence[Sequence[Option]], chosen: list[int], limit: float) -> list[int]:
    left = limit - _effect(heads, chosen)
    while True:
        best, gain = None, 0.0
        for number, (options, i) in enumerate(zip(heads, chosen, strict=True)):
            for j, option in enumerate(options):
                saved, more = options[i].time - option.time, option.effect - options[i].effect
                if saved > 0 and more <= left and saved / max(more, 1e-30) > gain:
                    best, gain = (number, j, more), saved / max(more, 1e-30)
        if best is None:
            return chosen
        number, j, more = best
        chosen[number], left = j, left - more
