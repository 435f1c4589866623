"""`Method`, the base class; `Exact`; and what methods share: checks of arguments, and the kind and
degree of a polynomial, given or derived from an error."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..errors import InputError
from ..plans import ExactHead, HeadPlan
from ..polynomials.certified import KINDS, first_degree
from ..polynomials.features import RANK_LIMIT, largest_degree
from ..problem.checks import check_integer, check_number
from ..problem.problem import Head

LARGEST_SKETCH = math.isqrt(RANK_LIMIT)  # its square, halved by symmetry, is the number of features
POLYNOMIALS = ("auto", *KINDS)
DEGREE = 2  # where neither a degree nor an error is given
OPTIONS = ("epsilon", "polynomial", "c")  # not printed where they have their default


@dataclass(frozen=True)
class Method(ABC):
    """Chooses the components of one head from its data."""

    @property
    def promises_error(self) -> bool:
        """False: the caller chose a cost, so a large measured error is warned about."""
        return getattr(self, "tolerance", 0.0) is not None

    def __repr__(self) -> str:
        """As dataclasses print themselves, without options that have their default."""
        shown = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
            or not (field.name in OPTIONS or (field.name == "degree" and value is None))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _set(self, **values: object) -> None:
        """Arguments as they are kept, for `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def plan_head(self, head: Head) -> HeadPlan: ...

    def shared(self, heads: Sequence[Head], plans: Sequence[HeadPlan]) -> Sequence[HeadPlan]:
        """Approximate plans of one head for its batch elements, of which one will serve all."""
        return plans

    def plan_exactly(self, head: Head, reason: str) -> HeadPlan:
        """The plan of one head when no approximation applies to the call."""
        return exact_plan(head, reason)


def check_is_method(method: object) -> None:
    """Raise unless it is a method, or None."""
    if method is not None and not isinstance(method, Method):
        raise InputError(f"method must be a method such as sb.Auto(), got {method!r}")


@dataclass(frozen=True)
class Exact(Method):
    """Every pair is computed: D^-1 A V with A = exp(scale Q K^T) (Definition 1.1).

    ``scale = 1/d`` gives the paper's definition; the default is 1/sqrt(d), as in SDPA.

    >>> import torch, supportbasis as sb
    >>> q = torch.zeros(1, 2, 4); v = torch.arange(2.0).reshape(1, 2, 1)
    >>> sb.attention(q, q, v, method=sb.Exact())
    tensor([[[0.5000],
             [0.5000]]])
    """

    def plan_head(self, head: Head) -> HeadPlan:
        return exact_plan(head, "")


def exact_plan(head: Head, reason: str) -> ExactHead:
    return ExactHead(reason=reason, n=head.n, m=head.m)


def live_count(head: Head) -> int:
    """Keys that are not padded: a padded call plans as if the others were absent."""
    return head.m if head.live_keys is None else len(head.live_keys)


def check_sketch_size(size: object) -> int | None:
    """A sketch size as a plain int, None for no sketch, or an error."""
    return None if size is None else check_integer("sketch_size", size, 1, LARGEST_SKETCH)


def check_polynomial(polynomial: object) -> None:
    if polynomial not in POLYNOMIALS:
        raise InputError(f"polynomial must be one of {POLYNOMIALS}, got {polynomial!r}")


def polynomial_settings(degree: object, epsilon: object, kind: object) -> dict[str, float | None]:
    """A degree, or the certified error that it is derived from: one of the two."""
    check_polynomial(kind)
    if epsilon is None:
        degree = DEGREE if degree is None else check_integer("degree", degree, 0)
        return {"degree": degree, "epsilon": None}
    if degree is None:
        return {"degree": None, "epsilon": check_number("epsilon", epsilon)}
    raise InputError(
        f"degree is {degree!r} and epsilon is {epsilon!r}; expected one of them: epsilon "
        "derives the degree"
    )


def strictest(polynomial: str) -> str:
    """The kind of least certified error among those that may be chosen."""
    return "minimax" if polynomial == "auto" else polynomial


def derived_degree(epsilon: float, reach: float, dim: int, polynomial: str) -> int | None:
    """The smallest degree at which a polynomial of this kind is certified to epsilon on
    [-reach, reach] (Lemma A.3); None where there is none of few enough features."""
    return first_degree(strictest(polynomial), epsilon, reach, largest_degree(dim))
