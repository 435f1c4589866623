"""Components of a support basis: which keys, and how they are summed.

A component adds the sums over its own keys to the `Partial` of a set of query rows; the components
of one row set have disjoint keys that together cover all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..cotangent import Cotangent, Gradients
from ..partial import Partial
from ..problem import Head
from .exact import ExactSum
from .fitted import FittedSum
from .lists import ListSum
from .polynomial import PolynomialSum
from .power import PowerSum
from .sketched import SketchSum

__all__ = [
    "Component",
    "ExactSum",
    "FittedSum",
    "ListSum",
    "PolynomialSum",
    "PowerSum",
    "SketchSum",
    "evaluate",
]


class Component(Protocol):
    """Anything that sums ``exp(score) v`` over its own keys for given query rows, and sends the
    gradients of these sums back to the tokens."""

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None: ...

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None: ...


def evaluate(components: Iterable[Component], head: Head, rows: Tensor | None) -> Partial:
    """The sums of all components for the given rows (None: every row)."""
    count = head.n if rows is None else len(rows)
    total = Partial.empty(count, head.value_dim, head.query, head.dtype)
    for component in components:
        component.add_to(total, head, rows)
    return total
