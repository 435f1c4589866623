"""The polynomial component: p(scores) through packed features.

With t = <q, k> / (max|q| max|k|) in [-1, 1] and p = sum_k a_k t^k the tokens of `streaming` are
x = q / max|q| and y = k / max|k|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import FeatureMap
from ..problem.problem import Head
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
        if norms is not None:
            return self._new_task(head, rows, norms)
        if not any(task.head is head and task.rows is rows for task in self.last):
            self.last[:] = [self._new_task(head, rows, self.norms(head, rows))]
        return self.last[0]

    def _new_task(self, head: Head, rows: Index, norms: Tensor) -> Task:
        """Normalised queries and keys, and the polynomial in t."""
        poly, (query_norm, key_norm) = self.polynomial, (largest_norm(norm) for norm in norms)
        coefficients, shift = rescaled(poly, abs(head.scale) * query_norm * key_norm)
        if not abs(shift) <= torch.finfo(head.dtype).max:
            raise InputError(
                f"a polynomial on ±{poly.bound:.3g} overflows {head.dtype}; use a smaller bound or "
                "float64"
            )
        task = Task(head, rows, self.keys, FeatureMap(head.dim, poly.degree), list(coefficients))
        task.norm, task.shift = {"query": query_norm, "key": key_norm}, shift
        return task

    def norms(self, head: Head, rows: Index) -> Tensor:
        """Norms of the longest of these rows and of these keys, [2, 1]."""
        sides = (take(head.query_norms, rows), take(head.key_norms, self.keys))
        return torch.stack([pad(norms, (0, 1)).max() for norms in sides]).unsqueeze(1)


def largest_norm(norms: Tensor) -> float:
    """Largest norm, 1 for a side that is all zeros (its t is 0 whatever the unit)."""
    largest = float(norms.max())
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
