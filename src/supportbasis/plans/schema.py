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
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shown(repeated)} is repeated")
    return content


def shown(value: object) -> str:
    """A value in a message: short, and on one line.

    >>> shown("text"), shown([1, [2]]), shown(True), shown(None)
    ("'text'", 'a list of 2', 'true', 'null')
    """
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse(at: str, value: object, expected: str) -> NoReturn:
    raise ValueError(f"{at} is {shown(value)}; expected {expected}")


def integer(low: int, high: int, step: int = 1) -> Field:
    """An integer from low to high, in steps."""
    kind = "an integer" if step == 1 else f"a multiple of {step}"

    def read(value: Any, at: str) -> int:
        if type(value) is not int or not low <= value <= high or value % step:
            refuse(at, value, f"{kind} from {low} to {high}")
        return value

    return Field(read, int)


def number(low: float = -LARGEST, high: float = LARGEST, infinite: bool = False) -> Field:
    """A finite number from low to high; ``infinite`` also takes "inf", for which JSON has no
    number."""

    def read(value: Any, at: str) -> float:
        if infinite and value == "inf":
            return math.inf
        if type(value) not in (int, float) or not low <= value <= high:
            refuse(at, value, f"a number{_range(low, high)}" + (' or "inf"' if infinite else ""))
        return float(value)

    return Field(read, _plain)


def _range(low: float, high: float) -> str:
    least = "" if low == -LARGEST else " > 0" if low == LEAST else f" >= {low:g}"
    return least + ("" if high == LARGEST else f" and <= {high:g}" if least else f" <= {high:g}")


def _plain(value: Any) -> Any:
    """A single value as JSON has it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        raise ValueError(f"{type(value).__name__} cannot be written as JSON")
    return float(value) if math.isfinite(value) else str(float(value))


def text() -> Field:
    """Letters of one line."""

    def read(value: Any, at: str) -> str:
        if not isinstance(value, str) or not value.isprintable():
            refuse(at, value, "a line of text")
        return value

    return Field(read, _plain)


def choice(*values: str | int | bool | None) -> Field:
    """One of these values."""

    def read(value: Any, at: str) -> Any:
        if not any(type(value) is type(one) and value == one for one in values):
            names = " or ".join(dict.fromkeys(shown(one) for one in values))
            refuse(at, value, names)
        return value

    return Field(read, _plain)


def scalar() -> Field:
    """A string, a number, a boolean or null, which is checked by what it is handed to."""

    def read(value: Any, at: str) -> Any:
        if isinstance(value, (list, dict)):
            refuse(at, value, "a string, a number, a boolean or null")
        return math.inf if value == "inf" else value

    return Field(read, _plain)


def optional(field: Field) -> Field:
    """Null, or what the field holds."""
    return Field(
        lambda value, at: None if value is None else field.read(value, at),
        lambda value: None if value is None else field.write(value),
    )


def array(field: Field, least: int = 0, most: int | None = None) -> Field:
    """A list of at least so many and at most so many, as a tuple."""
    longest = sys.maxsize if most is None else most
    length = f"{least} or more" if most is None else f"{least} to {most}"

    def read(value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= longest:
            refuse(at, value, f"a list of {least if least == most else length}")
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

    def write(value: Any) -> dict[str, Any]:
        return {name: field.write(getattr(value, name)) for name, field in fields.items()}

    return Field(read, write)


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
