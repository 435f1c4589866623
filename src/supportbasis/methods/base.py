"""`Method`, the base class, and what methods share: checks of arguments, and the kind and degree of
a polynomial, given or derived from an error."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from ..accuracy.scores import BUILDERS
from ..errors import InputError
from ..plans import ExactHead, HeadPlan
from ..polynomials.certified import LARGEST_DEGREE, true_rank
from ..polynomials.degrees import first_degree
from ..polynomials.features import RANK_LIMIT, largest_degree
from ..problem.checks import check_integer
from ..problem.problem import Head

LARGEST_SKETCH = math.isqrt(RANK_LIMIT)  # its square, halved by symmetry, is the number of features


@dataclass(frozen=True)
class Method(ABC):
    """Chooses the components of one head from its data."""

    @property
    def promises_error(self) -> bool:
        """False: the caller chose a cost, so a large measured error is warned about."""
        return True

    def _set(self, **values: object) -> None:
        """Arguments as they are kept, for `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def plan_head(self, head: Head) -> HeadPlan:
        """The plan of one head."""

    def plan_batch(self, heads: Sequence[Head]) -> list[HeadPlan]:
        """Plans of one head for each batch element, of which one will serve all of them."""
        return [self.plan_head(head) for head in heads]

    def plan_exactly(self, head: Head, reason: str) -> HeadPlan:
        """The plan of one head when no approximation applies to the call."""
        return exact_plan(head, reason)


def exact_plan(head: Head, reason: str) -> ExactHead:
    """The plan that computes everything, and why it was chosen."""
    return ExactHead(reason=reason, n=head.n, m=head.m)


def live_count(head: Head) -> int:
    """Keys that are not padded: a padded call plans as if the others were absent."""
    return head.m if head.live_keys is None else len(head.live_keys)


def check_sketch_size(size: object) -> int | None:
    """A sketch size as a plain int, None for no sketch, or an error."""
    if size is None:
        return None
    if is_integer(size) and 1 <= size <= LARGEST_SKETCH:
        return int(size)
    raise InputError(
        f"sketch_size must be an integer from 1 to {LARGEST_SKETCH} or None, got {size!r}"
    )


def is_integer(number: object) -> TypeGuard[int]:
    return isinstance(number, Integral) and not isinstance(number, bool)


def is_positive(number: object) -> TypeGuard[float]:
    """Whether this is a finite number above zero."""
    if not isinstance(number, Real) or isinstance(number, bool):
        return False
    try:
        return 0 < float(number) < math.inf
    except OverflowError:  # an integer that no float can hold
        return False


def check_positive(name: str, number: object) -> float:
    """A finite number above zero as a float, or an error."""
    if not is_positive(number):
        raise InputError(f"{name} must be a finite number > 0, got {number!r}")
    return float(number)


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
