"""Which polynomial stands for exp: its kind and its degree, given or derived from an error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..accuracy.scores import BUILDERS
from ..errors import InputError
from ..polynomials.certified import LARGEST_DEGREE, true_rank
from ..polynomials.degrees import first_degree
from ..polynomials.features import RANK_LIMIT, largest_degree
from ..problem.checks import check_integer
from .base import is_positive

POLYNOMIALS = ("auto", "taylor", "chebyshev", "minimax")
DEGREE = 2  # where neither a degree nor an error is given
OPTIONS = ("epsilon", "polynomial", "c")  # not printed where they have their default


def check_polynomial(polynomial: object) -> None:
    """Raise unless this is a kind of polynomials."""
    if polynomial not in POLYNOMIALS:
        raise InputError(f"polynomial must be one of {POLYNOMIALS}, got {polynomial!r}")


def degree_or_error(degree: object, epsilon: object) -> tuple[int | None, float | None]:
    """A degree, or the certified error that it is derived from: one of the two."""
    if epsilon is None:
        return (DEGREE if degree is None else check_integer("degree", degree, 0)), None
    if degree is not None:
        raise InputError(
            f"degree is {degree!r} and epsilon is {epsilon!r}; expected one of them: epsilon "
            "derives the degree"
        )
    if not is_positive(epsilon):
        raise InputError(f"epsilon must be a finite number > 0 or None, got {epsilon!r}")
    return None, float(epsilon)


def strictest(polynomial: str) -> str:
    """The kind of least certified error among those that may be chosen."""
    return "minimax" if polynomial == "auto" else polynomial


def highest_degree(dim: int) -> int:
    """The highest degree that has few enough features and can be certified."""
    if true_rank(dim, LARGEST_DEGREE) <= RANK_LIMIT:
        return LARGEST_DEGREE
    return largest_degree(dim)


def derived_degree(epsilon: float, reach: float, dim: int, polynomial: str) -> int | None:
    """The smallest degree at which a polynomial of this kind is certified to epsilon on
    [-reach, reach] (Lemma A.3); None where there is none of few enough features."""
    build = BUILDERS[strictest(polynomial)]
    return first_degree(
        lambda degree: build(degree, reach).error, epsilon, reach, highest_degree(dim)
    )


def short_repr(method: Any) -> str:
    """As dataclasses print themselves, without options that have their default."""
    shown = [
        f"{field.name}={getattr(method, field.name)!r}"
        for field in fields(method)
        if not (field.name in OPTIONS and getattr(method, field.name) == field.default)
        and not (field.name == "degree" and method.degree is None)
    ]
    return f"{type(method).__name__}({', '.join(shown)})"
