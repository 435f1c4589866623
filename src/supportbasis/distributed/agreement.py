"""Do all ranks make the same call? A few numbers of each rank are compared before anything moves.

A rank whose own arguments are wrong takes part in the comparison too, so that the others raise at
once, and do not wait for it until the timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from zlib import crc32

import torch

from ..errors import InputError, SupportBasisError
from ..plans import Plan
from ..plans.files import to_json
from ..problem.caching import WeakCache
from .ranks import Ranks

Made = TypeVar("Made")
LONGEST = 200  # characters of a text in an error message

_prints: WeakCache[Plan, str, int] = WeakCache()


def fingerprint(plan: Plan) -> int:
    """A number that plans with the same settings share, whatever times were predicted for them."""

    def make() -> int:
        content = to_json(plan)
        for head in content["heads"]:
            head.pop("speedup")
        return crc32(repr(content).encode())

    return _prints.get(plan, "crc", make)


def together(ranks: Ranks, make: Callable[[], Made], what: str) -> list[Made]:
    """What ``make`` returns on all ranks, which are Python objects; raises everywhere if it raises
    anywhere."""
    try:
        made, error = make(), None
    except Exception as raised:
        made, error = None, raised
    found = ranks.gather_objects((made, None if error is None else f"{error}"))
    _raise_for(ranks, error, {r: text for r, (_, text) in enumerate(found) if text}, what)
    return [each for each, _ in found]


def agreed(
    ranks: Ranks,
    device: torch.device,
    make: Callable[[], tuple[Made, Mapping[str, Any], tuple[int, ...]]],
    size: int = 2,
) -> tuple[Made, list[tuple[int, ...]]]:
    """What ``make`` returns on this rank, and the counts of all ranks, ``size`` for each.

    ``make`` returns also the facts in which all ranks must agree, by name; raises everywhere if
    they do not, or if ``make`` raises anywhere.
    """
    error: Exception | None = None
    made: Made | None = None
    facts: Mapping[str, Any] = {}
    tokens: tuple[int, ...] = (0,) * size
    try:
        made, facts, tokens = make()
    except (SupportBasisError, TypeError) as raised:
        error = raised
    digest = crc32(repr([(name, str(fact)) for name, fact in facts.items()]).encode())
    own = torch.tensor([error is not None, digest, *tokens], device=device)
    found = [each.tolist() for each in ranks.gather(own)]
    if any(each[0] for each in found) or len({each[1] for each in found}) > 1:
        shown = {name: str(fact)[:LONGEST] for name, fact in facts.items()}
        texts = ranks.gather_objects((None if error is None else str(error), shown))
        _raise_for(ranks, error, {r: text for r, (text, _) in enumerate(texts) if text}, "call")
        raise InputError(_differences([each for _, each in texts]))
    assert made is not None
    return made, [tuple(each[2:]) for each in found]


def _raise_for(ranks: Ranks, own: Exception | None, failed: Mapping[int, str], what: str) -> None:
    if own is not None:
        raise own
    if failed:
        rank, text = next(iter(failed.items()))
        raise SupportBasisError(f"the {what} failed on rank {rank} of {ranks.size}: {text}")


def _differences(facts: list[dict[str, str]]) -> str:
    """Which facts differ, with the values of the ranks."""
    lines = []
    for name in facts[0]:
        values = [each.get(name, "?") for each in facts]
        if len(set(values)) > 1:
            other = next(r for r, value in enumerate(values) if value != values[0])
            lines.append(f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}")
    return "ranks disagree: " + "; ".join(lines or ["a long argument differs"])
