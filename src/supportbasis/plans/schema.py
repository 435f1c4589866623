"""Fields of JSON files: one definition for reading and for writing.

A `Field` reads a JSON value into what the library holds and writes it back; what it cannot read is
a `ValueError` of one line that names the field, what came and what was expected. Nothing that is
read is evaluated, and nothing else is accepted: no unknown, missing or repeated
names, no NaN, no booleans or strings for numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

LARGEST = sys.float_info.max
LEAST = math.ulp(0.0)  # the smallest number above zero
SHOWN = 40  # characters of a value in a message


@dataclass(frozen=True)
class Field:
    """Reads a value at a path such as "heads[0].cost", and writes it."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any]


def parse(text: str) -> Any:
    """The JSON value of a text; a `ValueError` where it is none, or not a unique one.

    >>> parse('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the name 'a' is repeated
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shown(repeated)} is repeated")
    return dict(pairs)


def shown(value: object) -> str:
    """A value in a message: short, and on one line.

    >>> shown("text"), shown([1, [2]]), shown(True), shown(None)
    ("'text'", 'a list of 2', 'true', 'null')
    """
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = json.dumps(value) if value is None or isinstance(value, bool) else ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse(at: str, value: object, expected: str) -> NoReturn:
    raise ValueError(f"{at} is {shown(value)}; expected {expected}")


def single(
    accepts: Callable[[Any], bool], expected: str, convert: Callable[[Any], Any] = lambda x: x
) -> Field:
    """One value that is neither a list nor an object."""

    def read(value: Any, at: str) -> Any:
        if not accepts(value):
            refuse(at, value, expected)
        return convert(value)

    return Field(read, _plain)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if not isinstance(value, Real):
        raise ValueError(f"{type(value).__name__} cannot be written as JSON")
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))


TEXT = single(lambda x: isinstance(x, str) and x.isprintable(), "a line of text")
# checked by what it is handed to
ANY = single(
    lambda x: not isinstance(x, (list, dict)),
    "a string, a number, a boolean or null",
    lambda x: math.inf if x == "inf" else x,
)


def integer(low: int, high: int, step: int = 1) -> Field:
    """An integer from low to high, in steps."""
    kind = "an integer" if step == 1 else f"a multiple of {step}"
    return single(
        lambda x: type(x) is int and low <= x <= high and x % step == 0,
        f"{kind} from {low} to {high}",
    )


def number(low: float = -LARGEST, high: float = LARGEST, infinite: bool = False) -> Field:
    """A finite number from low to high; ``infinite`` also takes "inf", for which JSON has no
    number."""
    least = "" if low == -LARGEST else " > 0" if low == LEAST else f" >= {low:g}"
    most = "" if high == LARGEST else " and" * bool(least) + f" <= {high:g}"
    return single(
        lambda x: (infinite and x == "inf") or (type(x) in (int, float) and low <= x <= high),
        f"a number{least}{most}" + ' or "inf"' * infinite,
        float,
    )


def choice(*values: str | int | bool | None) -> Field:
    """One of these values."""
    return single(
        lambda x: any(type(x) is type(one) and x == one for one in values),
        " or ".join(dict.fromkeys(map(shown, values))),
    )


def optional(field: Field) -> Field:
    """Null, or what the field holds."""
    return Field(
        lambda value, at: None if value is None else field.read(value, at),
        lambda value: None if value is None else field.write(value),
    )


def array(field: Field, least: int = 0, most: int = sys.maxsize) -> Field:
    """A list of at least so many and at most so many, as a tuple."""
    length = "or more" if most == sys.maxsize else f"to {most}"

    def read(value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            refuse(at, value, f"a list of {least}" + f" {length}" * (least != most))
        return tuple(field.read(one, f"{at}[{i}]") for i, one in enumerate(value))

    return Field(read, lambda values: [field.write(value) for value in values])


def record(build: Callable[..., Any], fields: Mapping[str, Field]) -> Field:
    """An object with exactly these names; ``build`` takes them as keywords, and what it finds wrong
    with them together is a `ValueError` too. Written from the attributes of the same names."""

    def read(value: Any, at: str) -> Any:
        content = {name: member(value, name, field, at) for name, field in fields.items()}
        for name in value:
            if name not in fields:
                raise ValueError(f"{_join(at, shown(name)[1:-1])} is not a name of a plan")
        try:
            return build(**content)
        except ValueError as error:
            raise ValueError(f"{at}: {error}" if at else str(error)) from None

    return Field(
        read, lambda value: {name: f.write(getattr(value, name)) for name, f in fields.items()}
    )


def member(value: Any, name: str, field: Field, at: str = "") -> Any:
    """What the field reads under a name of an object."""
    if not isinstance(value, dict):
        refuse(at or "it", value, "an object")
    if name not in value:
        raise ValueError(f"{_join(at, name)} is missing")
    return field.read(value[name], _join(at, name))


def union(tag: str, cases: Mapping[str, Field], tag_of: Callable[[Any], str]) -> Field:
    """An object whose entry ``tag`` says which of the records the others make."""

    def read(value: Any, at: str) -> Any:
        which = member(value, tag, choice(*cases), at)
        return cases[which].read({k: v for k, v in value.items() if k != tag}, at)

    def write(value: Any) -> dict[str, Any]:
        which = tag_of(value)
        if which not in cases:
            raise ValueError(f"{tag} is {which!r}; expected one of {', '.join(cases)}")
        return {tag: which, **cases[which].write(value)}

    return Field(read, write)


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
