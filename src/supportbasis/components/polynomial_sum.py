"""Polynomial components: a certified or a fitted polynomial of the score, through packed features.

With t = <q, k> / (max|q| max|k|) in [-1, 1] and p = sum_k a_k t^k the tokens of `streaming` are
x = q / max|q| and y = k / max|k|. Those of a fitted polynomial are the leading coordinates of the
balancing transform: its degrees are high, in few directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError
from ..polynomials.balancing import Transform, transformed
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import Kernel
from ..polynomials.fitting import FittedKernel
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff
from .exact_sum import Index, take
from .streaming import Task
from .streaming_backward import StreamedSum

LARGEST_REACH = 1e300  # replaces ranges that overflow float64


@dataclass(frozen=True, eq=False)
class PolynomialSum(StreamedSum):
    """p(score) instead of exp(score) over ``keys`` (sorted indices of live keys; None: all)."""

    polynomial: CertifiedPolynomial
    keys: Index = None
    last: list[Task] = field(default_factory=list, init=False, repr=False)  # for the backward pass

    def task(self, head: Head, rows: Index, norms: Tensor | None = None) -> Task:
        """Normalised queries and keys, in units of the given norms (None: of their own), and the
        polynomial in t."""
        if norms is None:
            if any(task.head is head and task.rows is rows for task in self.last):
                return self.last[0]
            norms = self.norms(head, rows)
        poly, (query_norm, key_norm) = self.polynomial, (largest_norm(norm) for norm in norms)
        coefficients, shift = rescaled(poly, abs(head.scale) * query_norm * key_norm)
        if not abs(shift) <= torch.finfo(head.dtype).max:
            raise InputError(
                f"a polynomial on ±{poly.bound:.3g} overflows {head.dtype}; use a smaller bound or "
                "float64"
            )
        kernel = Kernel(coefficients, (head.dim,) * poly.degree)
        self.last[:] = [Task(head, rows, self.keys, kernel, (query_norm, key_norm), shift)]
        return self.last[0]

    def norms(self, head: Head, rows: Index) -> Tensor:
        """Norms of the longest of these rows and of these keys, [2, 1]."""
        return _longest([take(head.query_norms, rows), take(head.key_norms, self.keys)])


@dataclass(frozen=True, eq=False)
class FittedSum(StreamedSum):
    """p(x, y) instead of exp(score) over ``keys`` (sorted indices of live keys; None: all)."""

    kernel: FittedKernel
    transform: Transform
    keys: Index = None

    def task(self, head: Head, rows: Index, norms: Tensor | None = None) -> Task:
        """In units of the given norms (None: of their own)."""
        return _FittedTask(self, head, rows, self.norms(head, rows) if norms is None else norms)

    def norms(self, head: Head, rows: Index) -> Tensor:
        """The same norms in the leading coordinates of each degree, [2, degree]."""
        balanced = transformed(head, self.transform)
        sides = (take(balanced.query, rows), take(balanced.key, self.keys))
        return _longest([x[:, :span].norm(dim=1) for x in sides for span in self.kernel.spans])


class _FittedTask(Task):
    """Coordinates in units of the longest query and key, and the kernel in these units."""

    logs_vary = True

    def __init__(self, made: FittedSum, head: Head, rows: Index, norms: Tensor):
        self.made, self.scale, self.norms = made, head.scale, norms
        units = largest_norm(norms[0, 0]), largest_norm(norms[1, 0])
        unit, spans = math.prod(units), made.kernel.spans
        kernel = Kernel(tuple(a * unit**k for k, a in enumerate(made.kernel.coefficients)), spans)
        balanced, shift = transformed(head, made.transform), made.transform.row_shift(head, rows)
        super().__init__(balanced, rows, made.keys, kernel, units, shift)

    def pull_back(self, side: str, x: Tensor, grad: Tensor, of_logs: Tensor) -> Tensor:
        grad = super().pull_back(side, x, grad, of_logs)
        return self.made.transform.pull_back(side, grad, of_logs, self.scale)

    def noise(self) -> Tensor:
        """Typical rounding error of sum_k |a_k| |x_i|_k^k max_j |y_j|_k^k, norms in the leading r_k
        coordinates, with independent errors of the terms: no bound is proved for a fitted
        polynomial, and worst cases would exclude most rows."""
        query = take(self.head.query, self.rows)
        constant, *coefficients = map(abs, self.made.kernel.coefficients)
        magnitude, spans = query.new_full((len(query),), constant), self.kernel.spans
        for k, (a, span) in enumerate(zip(coefficients, spans, strict=True), 1):
            reach = query[:, :span].norm(dim=1) * largest_norm(self.norms[1, k - 1])
            magnitude += a * reach**k
        depth = 4 * math.sqrt(self.all_keys + self.features.count)
        return magnitude * gamma(math.ceil(depth), product_roundoff(self.head.dtype))


def _longest(norms: list[Tensor]) -> Tensor:
    """The largest norm of each set of tokens (0: it is empty), of queries and then of keys."""
    return torch.stack([pad(norm, (0, 1)).max() for norm in norms]).view(2, -1)


def largest_norm(norm: Tensor) -> float:
    """A norm as a unit; 1 for a side that is all zeros (its t is 0 whatever the unit)."""
    length = float(norm)
    return length if length > 0 else 1.0


def rescaled(poly: CertifiedPolynomial, reach: float) -> tuple[tuple[float, ...], float]:
    """a_k and u with p(z) = exp(u) sum_k a_k (z / reach)^k, the largest |a_k| being 1.

    That unit keeps sums, and the reciprocals of denominators that gradients are made of, within
    the range of float32: coefficients divided by exp(bound) alone are far below it where the range
    is wide, and far above it where a plan meets scores beyond its range."""
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
