"""What a method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, TypeGuard

from ..errors import InputError
from ..plans import HeadPlan
from ..problem import Head


@dataclass(frozen=True)
class Method(ABC):
    """Chooses the components of one head from its data."""

    @abstractmethod
    def plan_head(self, head: Head) -> HeadPlan:
        """What this head will do."""

    def to_json(self) -> dict[str, Any]:
        return {"name": type(self).__name__, **asdict(self)}


def check_degree(degree: object) -> int:
    """A degree as a plain int, or an error."""
    if isinstance(degree, bool) or not isinstance(degree, Integral) or degree < 0:
        raise InputError(f"degree must be an integer >= 0, got {degree!r}")
    return int(degree)


def is_positive(number: object) -> TypeGuard[float]:
    """Whether this is a finite number above zero."""
    return (
        isinstance(number, Real)
        and not isinstance(number, bool)
        and 0 < float(number) < float("inf")
    )
