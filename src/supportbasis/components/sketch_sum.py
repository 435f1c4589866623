"""The sketched component: a kernel s(z)^p through a sketch of p-fold tensor powers, linear in n.

s is a polynomial in z, so s(<q, k>) = <u(q), w(k)> with features u, w of the tokens. The sketch
phi of the (p/2)-fold power gives <phi(u), phi(w)> close to <u, w>^(p/2), and its square replaces
<u, w>^p: the paper's phi' = phi ⊗ phi, whose weights are never negative. Squares of inner
products are the streamed sums of `streaming` with the kernel t^2, so the z^2 features of a token
exist for one block of tokens only.

The degrees of s are weighed by the kernel alone, never by the lengths of the tokens of a call: a
row's sum depends on no other row, and its gradient is exact. Each token is divided by its own norm,
before and after the sketch, and norms are kept as logarithms: no power is so large as to overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..polynomials.features import Buffer, FeatureMap, Kernel
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from ..sketch import PolySketch
from .exact_sum import Index
from .streaming import Task
from .streaming_backward import StreamedSum

SQUARE = (0.0, 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class SketchSum(StreamedSum):
    """A sketched power over ``keys`` (sorted indices of live keys; None: all)."""

    kernel: PowerKernel
    keys: Index = None

    def task(self, head: Head, rows: Index) -> Task:
        return _SketchTask(self, head, rows)


class _SketchTask(Task):
    """Unit vectors x, y with log-factors: a pair has the weight exp(log_x + log_y) <x, y>^2.

    With t = z / (p bound) = <q / a, k / b>, a b = p bound / scale and a / b the kernel's balance,
    the monomials of degree k are sqrt|c_k| times those of q / a and of k / b. A kernel without
    polynomial is t itself: it has one degree, and its units cancel."""

    def __init__(self, component: SketchSum, head: Head, rows: Index):
        self.power_kernel = kernel = component.kernel
        assert kernel.sketch_size is not None, kernel
        poly, coefficients = kernel.polynomial, [0.0, 1.0]
        self.log_unit, self.log_units = math.log(head.scale), {"query": 0.0, "key": 0.0}
        if poly is not None:
            coefficients, self.log_unit = list(poly.coefficients), kernel.log_unit
            if poly.bound > 0:
                product = math.log(poly.bound) + math.log(kernel.power) - math.log(head.scale)
                ratio = math.log(kernel.balance)
                self.log_units = {"query": (product + ratio) / 2, "key": (product - ratio) / 2}
            else:
                coefficients = coefficients[:1]
        self.monomials = FeatureMap(head.dim, len(coefficients) - 1)
        coefficient = torch.tensor(coefficients, dtype=torch.float64)
        weight = self.monomials.multiplicity * coefficient[self.monomials.degrees]
        kept, device = weight.nonzero().squeeze(1), head.query.device
        below, weight = self.monomials.degree - self.monomials.degrees[kept], weight[kept]
        self.kept, self.degrees_below = kept.to(device), below.double().to(device)
        roots = {"query": weight.abs().sqrt(), "key": weight.abs().sqrt() * weight.sign()}
        self.roots = {side: root.to(device, head.dtype) for side, root in roots.items()}
        self.half = PolySketch(kernel.power, kernel.sketch_size, kernel.seed).half
        super().__init__(head, rows, component.keys, Kernel(SQUARE, (self.half.size,) * 2))

    def magnitude(self) -> Tensor:
        return self.head.query.new_ones(self.row_count, dtype=self.head.dtype)

    def unit(self, side: str, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _, weight, log_length = self._scaled(side, x)
        features, log_norm = _unit(self.monomials(tokens)[:, self.kept] * weight)
        sketched, log_sketched = _unit(self.half(features))
        power = self.power_kernel.power
        log_factor = power * (log_length + log_norm) + 2 * log_sketched
        if side == "query":  # the unit of a pair's weight counts once
            log_factor = log_factor + power * self.log_unit
        return sketched, log_factor

    def _scaled(self, side: str, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens with entries of at most 1, their divisors [tokens, 1], the weights of their
        features [tokens, kept], and the logarithm of the divisor of these weights.

        A token whose entries exceed the unit u is divided by its largest entry instead, m u, and
        the weights of degree k by m^(g - k): all its features are then m^g times too small."""
        log_unit = self.log_units[side]
        largest = tokens.detach().abs().amax(1, keepdim=True).double()
        log_divisor = largest.log()
        if self.power_kernel.polynomial is None:  # one degree: every token has a unit of its own
            log_divisor = torch.where(largest > 0, log_divisor, 0.0)
        else:
            log_divisor = log_divisor.clamp(min=log_unit)
        log_ratio = log_divisor - log_unit
        weight = self.roots[side] * (-self.degrees_below * log_ratio).exp().to(self.head.dtype)
        divisor = log_divisor.exp()
        log_length = (self.monomials.degree * log_ratio).squeeze(1).to(self.head.dtype)
        return (tokens.double() / divisor).to(self.head.dtype), divisor, weight, log_length

    def pull_back(self, side: str, x: Tensor, grad: Tensor, of_logs: Tensor) -> Tensor:
        """Gradient of some tokens from that of their unit vectors.

        Sums are of degree 2 in the sketched token and the sketch is homogeneous too, so gradients
        through lengths and through their logarithms cancel: every length is a plain divisor."""
        x, divisor, weight, _ = self._scaled(side, x)
        features, log_norm = _unit(self.monomials(x)[:, self.kept] * weight)
        _, log_sketched = _unit(self.half(features))
        grad = self.half.pull_back(features, grad * (-log_sketched).exp().unsqueeze(1))
        whole = x.new_zeros(len(x), self.monomials.count)
        whole[:, self.kept] = grad * (-log_norm).exp().unsqueeze(1) * weight
        buffer = Buffer(self.monomials, 1, len(x), x)
        buffer.write(x.unsqueeze(0))
        of_tokens = buffer.pull_back(lambda out: out.copy_(whole[:, 1:].T), len(x))
        return (of_tokens[0].T / divisor).to(self.head.dtype)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length one, and the logarithm of what they were divided by; zero rows stay zero."""
    length = torch.linalg.vector_norm(x, dim=-1)
    length = torch.where(length > 0, length, 1.0)
    return x / length.unsqueeze(-1), length.log()
