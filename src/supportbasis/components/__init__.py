"""Components of a support basis: sums over disjoint sets of keys, and their gradients.

A component adds the sums over its own keys to the `Partial` of a set of query rows; the components
of one row set have disjoint keys that together cover all of them.

====================  ====================================================================
`partial`             `Partial`: sums of rows, and the one division
`cotangent`           `Cotangent` and `Gradients`: the same for the backward pass
`exact_sum`           exp(score), or a power of it; `flash`: by PyTorch's CPU kernel
`polynomial_sum`      a polynomial of the score, certified or fitted
`sketch_sum`          a power of the score through a sketch
`streaming`           sums of features in blocks of rows; `streaming_backward`: gradients
====================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..problem.problem import Head
from .cotangent import Cotangent, Gradients
from .exact_sum import ExactSum, PowerSum
from .partial import Partial
from .polynomial_sum import FittedSum, PolynomialSum
from .sketch_sum import SketchSum

__all__ = ["ExactSum", "FittedSum", "PolynomialSum", "PowerSum", "SketchSum"]


class Component(Protocol):
    """A sum of ``exp(score) v`` over its own keys for given query rows, and its gradients."""

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        """Add the sums over its keys to ``total``, which holds the given rows (None: all)."""

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        """Add the gradients of the tokens from those of the rows' sums; weights are recomputed."""


def evaluate(components: Iterable[Component], head: Head, rows: Tensor | None) -> Partial:
    """The sums of all components for the given rows (None: every row)."""
    count = head.n if rows is None else len(rows)
    total = Partial.empty(count, head.value_dim, head.query, head.dtype)
    for component in components:
        component.add_to(total, head, rows)
    return total
