"""Kernels that are powers: exp(z) = exp(z/p)^p with a polynomial inside, and z^p itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from .certified import CertifiedPolynomial

INNER_REACH = 0.5  # |z / p| stays below, where low degrees are accurate
LARGEST_POWER = 2**40  # beyond that exp(z/p) is 1 in float64; such a kernel is never evaluated


@dataclass(frozen=True)
class PowerKernel:
    """The weight of a score z: s(z / p)^p with s close to exp, or z^p (``polynomial=None``)."""

    power: int  # p, even, so that no weight is negative
    polynomial: CertifiedPolynomial | None  # s, certified on the range of z / p
    sketch_size: int | None = None  # of the p-fold tensor power; None evaluates it exactly
    seed: int = 0  # of the sketch
    # length of a query over that of a key at which a sketch gives both sides equal weight; a
    # constant, so that a sketched weight depends on its own two tokens only
    balance: float = 1.0

    @property
    def log_unit(self) -> float:
        """Weights are ``exp(power * log_unit) * inner^power``."""
        return 0.0 if self.polynomial is None else self.polynomial.bound

    def log(self, score: Tensor) -> Tensor:
        """Log-weights of scores; -inf where the weight is zero."""
        inner = score if self.polynomial is None else self.polynomial(score / self.power)
        return inner.abs().log().add_(self.log_unit).mul_(self.power)

    def log_slope(self, score: Tensor) -> Tensor:
        """Derivative of `log`; not finite where the weight is zero."""
        if self.polynomial is None:
            return self.power / score
        inner = score / self.power
        return self.polynomial.slope(inner) / self.polynomial(inner)

    @property
    def log_ratio(self) -> tuple[float, float]:
        """Certified range of log(weight / exp(z)): p times that of the polynomial."""
        if self.polynomial is None:
            return -math.inf, math.inf
        low, high = self.polynomial.log_ratio
        if low == -math.inf:  # s may be negative, and an even power of it is not
            high = max(high, math.log1p(self.polynomial.error))
        return self.power * low, self.power * high

    def on(self, reach: float) -> PowerKernel:
        """The same kernel, certified for |z| <= reach where that is more than it was made for."""
        poly = self.polynomial
        if poly is None or reach <= self.power * poly.bound:
            return self
        return replace(self, polynomial=poly.on(reach / self.power))

    def __str__(self) -> str:
        text, poly = f"power {self.power}", self.polynomial
        if poly is not None:
            text += f" of {poly.kind} degree {poly.degree} on ±{poly.bound:.3g}"
        return text if self.sketch_size is None else f"{text}, sketch {self.sketch_size}"


def smallest_power(reach: float, constant: float) -> int:
    """The smallest even p >= max(2, C) with |z / p| <= 0.5 for |z| <= reach.

    >>> smallest_power(0.3, 0.1), smallest_power(1.7, 0.1), smallest_power(1.7, 9.5)
    (2, 4, 10)
    """
    least = max(2.0, constant, reach / INNER_REACH)
    return 2 * math.ceil(least / 2) if least < LARGEST_POWER else LARGEST_POWER


def normalising_constant(edge: float, other_edge: float, scale: float, dim: int, n: int) -> float:
    """C = T_l T_l' / ln n of Lemma G.3, whose scores carry 1/d; here |scale| d T_l T_l' / ln n."""
    return abs(scale) * dim * edge * other_edge / math.log(max(n, 2))
