"""The sketched component: a kernel s(z)^p through a sketch of p-fold tensor powers, linear in n.

s is a polynomial in z, so s(<q, k>) = <u(q), w(k)> with features u, w of the tokens. The sketch
phi of the (p/2)-fold power gives <phi(u), phi(w)> close to <u, w>^(p/2), and its square stands in
for <u, w>^p: the paper's phi' = phi ⊗ phi, whose weights are never negative. Squares of inner
products are the streamed sums of `streaming` with the kernel t^2, so the z^2 features of a token
exist for one block of tokens only.

Each token is divided by its own norm, before and after the sketch, and the norms travel as
logarithms: nothing overflows, however large the power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cotangent import Cotangent, Gradients, add_tokens
from ..features import FeatureMap
from ..partial import Partial
from ..powers import PowerKernel
from ..problem import Head
from ..sketch import PolySketch
from .exact import take
from .polynomial import largest_norm, rescaled
from .streaming import Task
from .streaming_backward import add_gradients

SQUARE = (0.0, 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class SketchSum:
    """A sketched power over ``keys`` (sorted indices of live keys; None: all)."""

    kernel: PowerKernel
    keys: Tensor | None = None

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        """Add the sums over these keys to ``total``, which holds the given rows."""
        _SketchTask(head, rows, self.keys, self.kernel).run(total)

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        """Add what flows back from the sums of these rows; the largest norms, which set the units
        of the sketch, count as constants."""
        add_gradients(_SketchTask(head, rows, self.keys, self.kernel), total, cotangent)


class _SketchTask(Task):
    """Sketched queries and keys of unit length, with the logarithms of their lengths."""

    def __init__(self, head: Head, rows: Tensor | None, keys: Tensor | None, kernel: PowerKernel):
        assert kernel.sketch_size is not None
        super().__init__(head, rows, keys, FeatureMap(kernel.sketch_size, 2), SQUARE)
        self.sketch = Sketched(head, rows, keys, kernel)

    def queries(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.sketch.query(take(self.head.query, self.rows, start, stop))

    def key_tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        tokens, log_factor = self.sketch.key(take(self.head.key, self.keys, start, stop))
        log_weight = self.log_weight(start, stop)
        return tokens, log_factor if log_weight is None else log_factor + log_weight

    def add_query_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        query = take(self.head.query, self.rows, start, start + len(grad))
        add_tokens(total.query, self.rows, start, self.sketch.pull_back_query(query, grad))

    def add_key_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        key = take(self.head.key, self.keys, start, start + len(grad))
        add_tokens(total.key, self.keys, start, self.sketch.pull_back_key(key, grad))

    def magnitude(self) -> Tensor:
        return self.head.query.new_ones(self.row_count, dtype=self.head.dtype)


class Sketched:
    """Maps queries x and keys y to unit vectors and log-factors: the weight of a pair is
    ``exp(log_x + log_y) * <x, y>^2``."""

    def __init__(self, head: Head, rows: Tensor | None, keys: Tensor | None, kernel: PowerKernel):
        assert kernel.sketch_size is not None
        self.dtype, self.kernel = head.dtype, kernel
        self.query_norm = largest_norm(head.query_norms if rows is None else head.query_norms[rows])
        self.key_norm = largest_norm(head.key_norms if keys is None else head.key_norms[keys])
        reach = abs(head.scale) * self.query_norm * self.key_norm
        poly, self.log_unit = kernel.polynomial, kernel.log_unit
        coefficients: tuple[float, ...] = (0.0, 1.0)
        if poly is not None:
            coefficients = rescaled(poly, reach / kernel.power)
        elif reach > 0:
            self.log_unit = math.log(reach)
        self.features = FeatureMap(head.dim, len(coefficients) - 1)
        coefficient = torch.tensor(coefficients, dtype=torch.float64)
        weight = self.features.multiplicity * coefficient[self.features.order]
        self.kept = weight.nonzero().squeeze(1).to(head.query.device)
        self.weight = weight.to(head.query.device)[self.kept]
        self.half = PolySketch(kernel.power, kernel.sketch_size, kernel.seed).half

    def query(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        unit, log_factor = self._sketch(tokens, self.query_norm, self._query_root)
        return unit, log_factor + self.kernel.power * self.log_unit

    def key(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._sketch(tokens, self.key_norm, self._key_root)

    def pull_back_query(self, tokens: Tensor, grad: Tensor) -> Tensor:
        return self._pull_back(tokens, grad, self.query_norm, self._query_root)

    def pull_back_key(self, tokens: Tensor, grad: Tensor) -> Tensor:
        return self._pull_back(tokens, grad, self.key_norm, self._key_root)

    @property
    def _query_root(self) -> Tensor:
        return self.weight.abs().sqrt().to(self.dtype)

    @property
    def _key_root(self) -> Tensor:
        return self._query_root * self.weight.sign().to(self.dtype)

    def _sketch(self, tokens: Tensor, norm: float, root: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(tokens.to(self.dtype) / norm)[:, self.kept] * root
        features, log_length = _unit(features)
        sketched, log_sketched = _unit(self.half(features))
        return sketched, self.kernel.power * log_length + 2 * log_sketched

    def _pull_back(self, tokens: Tensor, grad: Tensor, norm: float, root: Tensor) -> Tensor:
        """Gradient of some tokens from that of their unit vectors.

        Sums are of degree 2 in the sketched token and the sketch is homogeneous too, so what flows
        back through the lengths and what flows back through their logarithms cancel: every
        length is a plain divisor.
        """
        x = tokens.to(self.dtype) / norm
        features, log_length = _unit(self.features(x)[:, self.kept] * root)
        _, log_sketched = _unit(self.half(features))
        grad = self.half.pull_back(features, grad * (-log_sketched).exp().unsqueeze(1))
        whole = x.new_zeros(len(x), self.features.count)
        whole[:, self.kept] = grad * (-log_length).exp().unsqueeze(1) * root
        lanes = x.unsqueeze(0)
        buffer = self.features.buffer(1, len(x), x)
        self.features.write(lanes, buffer)
        back = self.features.pull_back(
            buffer, lambda start, stop, out: out.copy_(whole[:, 1 + start : 1 + stop].T), len(x)
        )
        return back[0].T / norm


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length one, and the logarithm of what they were divided by; zero rows stay zero."""
    length = torch.linalg.vector_norm(x, dim=-1)
    length = torch.where(length > 0, length, 1.0)
    return x / length.unsqueeze(-1), length.log()
