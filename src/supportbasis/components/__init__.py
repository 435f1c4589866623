"""Components of a support basis: which keys, and how they are summed.

A component adds the sums over its own keys to the `Partial` of a set of query rows; the components
of one row set have disjoint keys that together cover all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..problem.problem import Head
from .cotangent import Cotangent, Gradients
from .exact_sum import ExactSum
from .fitted_sum import FittedSum
from .partial import Partial
from .polynomial_sum import PolynomialSum
from .power_sum import PowerSum
from .sketch_sum import SketchSum

__all__ = [
    "Component",
    "ExactSum",
    "FittedSum",
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
