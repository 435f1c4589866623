"""The closed form of the gradient, block of rows by block of rows, without an n x n matrix.

With weights Â (rows add up to 1), V = XY, residual R = ÂV - E and t = R Yᵀ, the matrix
𝒬 = R Vᵀ = t Xᵀ has low rank, and r_i = Σ_j Â_ij 𝒬_ij = t_i · m_i with m = ÂX. All is made of

    N = (Â∘𝒬 - diag(r) Â) X,    row i: Σ_j Â_ij (t_i · x_j - r_i) x_j,
    M = (Â∘𝒬 - diag(r) Â)ᵀ X,   row j: Σ_i Â_ij (t_i · x_j - r_i) x_i,    and Z = Âᵀ t:

    ∂L/∂W = 2 scale Xᵀ N,   ∂L/∂Y = 2 mᵀ R,   ∂L/∂X = 2 scale (N Wᵀ + M W) + 2 Z.

Row i of N is the covariance of the tokens under the weights of row i, times t_i. Covariances do not
depend on where zero is: tokens are measured from their mean c, so that none is a difference of
large numbers: x = x' + c, m = m' + c and t_i · x_j - r_i = t_i · x'_j - t_i · m'_i. Weights that
were cut to low rank do not add up to 1; for them c = 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..problem.problem import Head
from .factors import Adjoint, Factors, times_second
from .weights import BlockWeights

SAMPLE_TILE = 2**21


@dataclass(frozen=True, eq=False)
class Layer:
    """Tokens, value weights and target, and the tokens measured from ``centre``."""

    x: Tensor  # [n, d]
    weight_v: Tensor  # [d, dv]
    target: Tensor  # [n, dv]
    centre: Tensor  # [d]
    shifted: Tensor  # [n, d]

    @staticmethod
    def of(x: Tensor, weight_v: Tensor, target: Tensor, centred: bool) -> Layer:
        centre = x.mean(0) if centred else torch.zeros_like(x[0])
        return Layer(x, weight_v, target, centre, x - centre)

    def double(self) -> Layer:
        return Layer(*(getattr(self, f.name).double() for f in fields(self)))


class Sums:
    """Sums over blocks of rows."""

    def __init__(self, layer: Layer, factored: Iterable[Factors], inputs: bool):
        n, dim = layer.x.shape
        self.layer, factored = layer, tuple(factored)
        self.loss = torch.zeros((), dtype=torch.float64, device=layer.x.device)
        self.output = torch.zeros_like(layer.target)
        self.rows = layer.x.new_zeros(n, dim)  # N
        self.weight_v = torch.zeros_like(layer.weight_v)  # mᵀR
        self.columns = layer.x.new_zeros(n, dim) if inputs else None  # M
        self.values = layer.x.new_zeros(n, dim) if inputs else None  # Z
        self.moments = {factors: factors.moments(layer.shifted) for factors in factored}
        self.adjoints = {f: Adjoint(f, layer.x) for f in factored} if inputs else {}

    def add(self, rows: Tensor, weights: BlockWeights) -> None:
        """A block of rows with its weights."""
        layer, x = self.layer, self.layer.x[rows]
        parts: list[_LowRankRows | _ExactRows] = []
        if weights.lefts:
            parts.append(_LowRankRows(self, weights.lefts))
        if weights.keys is not None and weights.tile is not None:
            parts.append(_ExactRows(self, weights.keys, weights.tile))
        shifted = torch.zeros_like(x)  # m'
        for part in parts:
            shifted += part.attended
        attended = shifted + layer.centre if parts else shifted
        output = attended @ layer.weight_v
        residual = output - layer.target[rows]
        t = residual @ layer.weight_v.T
        rho = (t * shifted).sum(1, keepdim=True)
        for part in parts:
            self.rows[rows] += part.gradient(t, rho)
            if self.columns is not None and self.values is not None:
                part.add_columns(x, t, rho, self.columns, self.values)
        self.output[rows] = output
        self.loss += residual.square().sum(dtype=torch.float64)
        self.weight_v.addmm_(attended.T, residual)

    def finish(self) -> None:
        """Add the gradients of the keys through the low-rank parts."""
        if self.columns is None or self.values is None:
            return
        for factors, adjoint in self.adjoints.items():
            for keys in factors.key_blocks(self.layer.shifted):
                columns, values = adjoint.read(keys, self.layer.shifted[keys])
                self.columns.index_add_(0, keys, columns)
                self.values.index_add_(0, keys, values)


class _LowRankRows:
    """Low-rank weights of a block: rows need Σ_j a_ij x'_j and Σ_j a_ij x'_j x'_jᵀ of them."""

    def __init__(self, sums: Sums, lefts: dict[Factors, Tensor]):
        self.sums, self.lefts, dim = sums, lefts, sums.layer.x.shape[1]
        products = (left @ sums.moments[factors] for factors, left in lefts.items())
        moments = functools.reduce(Tensor.add_, products)
        self.attended, self.second = moments[:, :dim], moments[:, dim:]

    def gradient(self, t: Tensor, rho: Tensor) -> Tensor:
        return times_second(self.second, t) - rho * self.attended

    def add_columns(
        self, x: Tensor, t: Tensor, rho: Tensor, columns: Tensor, values: Tensor
    ) -> None:
        for factors, left in self.lefts.items():
            self.sums.adjoints[factors].add(left, x, t, rho)


class _ExactRows:
    """Exact weights of a block: sparse ∘ low-rank is sparse, so 𝒬 is formed at their keys alone."""

    def __init__(self, sums: Sums, keys: Tensor, tile: Tensor):
        self.keys, self.tile = keys, tile
        self.near = sums.layer.shifted[keys]
        self.attended = tile @ self.near

    def gradient(self, t: Tensor, rho: Tensor) -> Tensor:
        self.pairs = (t @ self.near.T).sub_(rho).mul_(self.tile)
        return self.pairs @ self.near

    def add_columns(
        self, x: Tensor, t: Tensor, rho: Tensor, columns: Tensor, values: Tensor
    ) -> None:
        columns.index_add_(0, self.keys, self.pairs.T @ x)
        values.index_add_(0, self.keys, self.tile.T @ t)


def row_gradients(layer: Layer, head: Head, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of ÂXY and of N with exact weights, in the precision of the layer."""
    key = head.key.to(layer.x.dtype) * head.scale
    outputs, gradients = [], []
    for part in rows.split(max(1, SAMPLE_TILE // head.m)):
        weight = (head.query[part].to(key.dtype) @ key.T).softmax(1)
        attended = weight @ layer.shifted
        output = (attended + layer.centre) @ layer.weight_v
        t = (output - layer.target[part]) @ layer.weight_v.T
        pairs = weight * (t @ layer.shifted.T - (t * attended).sum(1, keepdim=True))
        outputs.append(output)
        gradients.append(pairs @ layer.shifted)
    return torch.cat(outputs), torch.cat(gradients)
