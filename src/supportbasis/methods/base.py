"""`Method`, the base class, and checks that methods share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from ..errors import InputError
from ..plans import ExactHead, HeadPlan
from ..polynomials.features import RANK_LIMIT
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
