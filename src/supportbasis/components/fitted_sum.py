"""The fitted component: a polynomial of transformed scores, of high degree in few directions.

The tokens of `streaming` are the leading coordinates of the balancing transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..polynomials.balancing import Transform, transformed
from ..polynomials.features import FeatureMap
from ..polynomials.fitting import FittedKernel
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff
from .cotangent import Gradients
from .exact_sum import Index, take
from .polynomial_sum import largest_norm
from .streaming import Task
from .streaming_backward import StreamedSum


@dataclass(frozen=True, eq=False)
class FittedSum(StreamedSum):
    """p(x, y) instead of exp(score) over ``keys`` (sorted indices of live keys; None: all)."""

    kernel: FittedKernel
    transform: Transform
    keys: Index = None

    def task(self, head: Head, rows: Index, norms: Tensor | None = None) -> Task:
        norms = self.norms(head, rows) if norms is None else norms
        shift = self.transform.row_shift(head, rows)
        return _FittedTask(self, transformed(head, self.transform), rows, shift, norms)

    def norms(self, head: Head, rows: Index) -> Tensor:
        """Norms of the longest of these rows and of these keys in the leading coordinates of each
        degree, [2, degree]."""
        balanced = transformed(head, self.transform)
        sides = (take(balanced.query, rows), take(balanced.key, self.keys))
        norms = [x[:, :span].norm(dim=1) for x in sides for span in self.kernel.spans]
        return torch.stack([pad(norm, (0, 1)).max() for norm in norms]).view(2, -1)

    def inner_gradients(self, total: Gradients, head: Head) -> Gradients:
        query, key = torch.zeros_like(total.query), torch.zeros_like(total.key)
        return Gradients(query, key, total.value, key.new_zeros(head.m), query.new_zeros(head.n))

    def pull_back(self, inner: Gradients, total: Gradients, head: Head) -> None:
        self.transform.pull_back(inner, total, head.scale)


class _FittedTask(Task):
    """Coordinates in units of the longest query and key, and the kernel in these units."""

    def __init__(self, made: FittedSum, head: Head, rows: Index, shift: Tensor, norms: Tensor):
        self.fitted, self.shift, self.norms = made.kernel, shift, norms
        kernel = made.kernel
        query_norm, key_norm = (largest_norm(norm[:1]) for norm in norms)
        self.norm = {"query": query_norm, "key": key_norm}
        coefficients = [a * (query_norm * key_norm) ** k for k, a in enumerate(kernel.coefficients)]
        features = FeatureMap(kernel.spans[0], kernel.degree, kernel.spans)
        super().__init__(head, rows, made.keys, features, coefficients)
        self.scaled = FittedKernel(tuple(coefficients), kernel.spans)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scaled(x, y)

    def kernel_gradients(self, x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self.scaled.gradients(x, y, grad)

    def noise(self) -> Tensor:
        """Typical rounding error of sum_k |a_k| |x_i|_k^k max_j |y_j|_k^k, norms in the leading r_k
        coordinates, with independent errors of the terms: no bound is proved for a fitted
        polynomial, and worst cases would exclude most rows."""
        query = take(self.head.query, self.rows)
        magnitude = query.new_full((len(query),), abs(self.fitted.coefficients[0]))
        for k, span in enumerate(self.fitted.spans, 1):
            reach = query[:, :span].norm(dim=1) * largest_norm(self.norms[1, k - 1 : k])
            magnitude += abs(self.fitted.coefficients[k]) * reach**k
        depth = 4 * math.sqrt(self.all_keys + self.features.count)
        return magnitude * gamma(math.ceil(depth), product_roundoff(self.head.dtype))
