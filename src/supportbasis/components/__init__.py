"""Components of a support basis: which keys, and how they are summed.

A component is evaluated on a set of query rows and returns a `Partial`; the components of one
row set have disjoint keys that together cover all of them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..partial import Partial
from ..problem import Head
from .exact import ExactSum
from .polynomial import PolynomialSum

__all__ = ["Component", "ExactSum", "PolynomialSum"]


class Component(Protocol):
    """Anything that sums ``exp(score) v`` over its own keys for given query rows."""

    def evaluate(self, head: Head, rows: Tensor | None) -> Partial: ...
