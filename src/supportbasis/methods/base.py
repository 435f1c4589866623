"""What a method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

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


def check_degree(degree: object) -> None:
    """Raise unless this is an integer >= 0."""
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 0:
        raise InputError(f"degree must be an integer >= 0, got {degree!r}")


def is_positive(number: object) -> bool:
    """Whether this is a finite number above zero."""
    return (
        isinstance(number, (int, float))
        and not isinstance(number, bool)
        and 0 < number < float("inf")
    )
