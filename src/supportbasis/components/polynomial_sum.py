"""The polynomial component: p(scores) through packed features.

With t = <q, k> / (max|q| max|k|) in [-1, 1] and p = sum_k a_k t^k the tokens of `streaming` are
x = q / max|q| and y = k / max|k|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import InputError
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import FeatureMap
from ..problem.problem import Head
from .cotangent import Cotangent, Gradients, add_tokens
from .exact_sum import take
from .partial import Partial
from .streaming import Task
from .streaming_backward import add_gradients

LARGEST_REACH = 1e300  # replaces ranges that overflow float64


@dataclass(frozen=True, eq=False)
class PolynomialSum:
    """p(score) instead of exp(score) over ``keys`` (sorted indices of live keys; None: all)."""

    polynomial: CertifiedPolynomial
    keys: Tensor | None = None
    last: list[Task] = field(default_factory=list, init=False, repr=False)  # for the backward pass

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        """Add the sums over these keys to ``total``, which holds the given rows."""
        task = self.task(head, rows)
        task.run(total)
        self.last[:] = [task]

    def task(self, head: Head, rows: Tensor | None, norms: Tensor | None = None) -> Task:
        """The evaluation for some rows, in units of the given norms (None: of their own)."""
        return _PolynomialTask(head, rows, self.keys, self.polynomial, norms)

    def norms(self, head: Head, rows: Tensor | None) -> Tensor:
        """Norms of the longest of these rows and of these keys, [2, 1]."""
        sides = ((head.query_norms, rows), (head.key_norms, self.keys))
        found = [x if index is None else x[index] for x, index in sides]
        return torch.stack([x.max() if x.numel() else x.new_zeros(()) for x in found]).unsqueeze(1)

    def inner_gradients(self, total: Gradients, head: Head) -> Gradients:
        """What the evaluation adds gradients to: ``total`` itself."""
        return total

    def pull_back(self, inner: Gradients, total: Gradients, head: Head) -> None:
        """Nothing is transformed."""

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        """Add the gradients of the tokens from those of the rows' sums."""
        same = [task for task in self.last if task.head is head and task.rows is rows]
        task = same[0] if same else self.task(head, rows)
        add_gradients(task, total, cotangent)


class _PolynomialTask(Task):
    """Normalised queries and keys, and the polynomial in t."""

    def __init__(
        self,
        head: Head,
        rows: Tensor | None,
        keys: Tensor | None,
        poly: CertifiedPolynomial,
        norms: Tensor | None = None,
    ):
        query_norms = head.query_norms if rows is None else head.query_norms[rows]
        if norms is None:
            norms = PolynomialSum(poly, keys).norms(head, rows)
        self.query_norm, self.key_norm = (largest_norm(norm) for norm in norms)
        reach = abs(head.scale) * self.query_norm * self.key_norm
        features = FeatureMap(head.dim, poly.degree)
        coefficients, self.log_scale = rescaled(poly, reach)
        if not abs(self.log_scale) <= torch.finfo(head.dtype).max:
            raise InputError(
                f"a polynomial on ±{poly.bound:.3g} overflows {head.dtype}; use a smaller bound or "
                "float64"
            )
        super().__init__(head, rows, keys, features, coefficients)
        self._relative_norms = (query_norms / self.query_norm).to(head.dtype)

    def queries(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        query = take(self.head.query, self.rows, start, stop).to(self.head.dtype)
        return query / self.query_norm, query.new_full((stop - start,), self.log_scale)

    def key_tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        key = take(self.head.key, self.keys, start, stop).to(self.head.dtype)
        return key / self.key_norm, self.log_weight(start, stop)

    def add_query_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        add_tokens(total.query, self.rows, start, grad / self.query_norm)

    def add_key_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        add_tokens(total.key, self.keys, start, grad / self.key_norm)

    def magnitude(self) -> Tensor:
        magnitude = torch.zeros_like(self._relative_norms)
        for coefficient in reversed(self.coefficients):
            magnitude.mul_(self._relative_norms).add_(abs(coefficient))
        return magnitude


def largest_norm(norms: Tensor) -> float:
    """Largest norm, 1 for a side that is all zeros (its t is 0 whatever the unit)."""
    largest = float(norms.max()) if norms.numel() else 0.0
    return largest if largest > 0 else 1.0


def rescaled(poly: CertifiedPolynomial, reach: float) -> tuple[tuple[float, ...], float]:
    """a_k and u with p(z) = exp(u) sum_k a_k (z / reach)^k, the largest |a_k| being 1.

    That unit keeps sums, and the reciprocals of denominators that gradients are made of, within
    the range of float32: coefficients divided by exp(bound) alone are far below it where the range
    is wide, and far above it where a plan meets scores beyond its range.
    """
    log_ratio = -math.inf
    if poly.bound > 0 and reach > 0:
        log_ratio = math.log(min(reach, LARGEST_REACH)) - math.log(poly.bound)
    logs = [
        math.log(abs(c)) + (k * log_ratio if k else 0.0) if c else -math.inf
        for k, c in enumerate(poly.coefficients)
    ]
    top = max(logs)
    if top == -math.inf:  # the range is so wide that float64 holds none of them
        return (0.0,) * len(logs), 0.0
    signed = zip(logs, poly.coefficients, strict=True)
    return tuple(math.copysign(math.exp(log - top), c) for log, c in signed), poly.bound + top
