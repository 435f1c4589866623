"""The closed form of the gradient, block of rows by block of rows, without an n x n matrix.

With weights Â (rows add up to 1), V = XY, residual R = ÂV - E and t = R Yᵀ, the matrix
𝒬 = R Vᵀ = t Xᵀ has low rank, and r_i = Σ_j Â_ij 𝒬_ij = t_i · m_i with m = ÂX. All is made of

    N = (Â∘𝒬 - diag(r) Â) X,    row i: Σ_j Â_ij (t_i · x_j - r_i) x_j,
    M = (Â∘𝒬 - diag(r) Â)ᵀ X,   row j: Σ_i Â_ij (t_i · x_j - r_i) x_i,    and Z = Âᵀ t:

    ∂L/∂W = 2 scale Xᵀ N,   ∂L/∂Y = 2 mᵀ R,   ∂L/∂X = 2 scale (N Wᵀ + M W) + 2 Z.

Row i of N is the covariance of the tokens under the weights of row i, times t_i. Covariances do not
depend on where zero is; tokens are measured from their mean c, so that none is a difference of
large numbers: x = x' + c and t_i · x_j - r_i = t_i · x'_j - ρ_i with ρ_i = r_i - t_i · c. Weights
that were cut to low rank need not add up to 1, and the formulas below keep their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..problem import Head
from .factors import Adjoint, Factors, moment_columns, times_second
from .weights import BlockWeights

SAMPLE_TILE = 2**21


@dataclass(frozen=True, eq=False)
class Layer:
    """Tokens, value weights and target, and the tokens measured from their mean."""

    x: Tensor  # [n, d]
    weight_v: Tensor  # [d, dv]
    target: Tensor  # [n, dv]
    centre: Tensor  # [d]
    shifted: Tensor  # [n, d]

    @staticmethod
    def of(x: Tensor, weight_v: Tensor, target: Tensor) -> Layer:
        centre = x.mean(0)
        return Layer(x, weight_v, target, centre, x - centre)

    def double(self) -> Layer:
        return Layer(*(getattr(self, f.name).double() for f in fields(self)))


class Sums:
    """What blocks of rows add to."""

    def __init__(self, layer: Layer, factored: Iterable[Factors], inputs: bool):
        n, dim = layer.x.shape
        self.layer, self.factored = layer, tuple(factored)
        self.loss = torch.zeros((), dtype=torch.float64, device=layer.x.device)
        self.output = torch.zeros_like(layer.target)
        self.rows = layer.x.new_zeros(n, dim)  # N
        self.weight_v = torch.zeros_like(layer.weight_v)  # mᵀR
        self.columns = layer.x.new_zeros(n, dim) if inputs else None  # M
        self.values = layer.x.new_zeros(n, dim) if inputs else None  # Z
        self.moments = {factors: factors.moments(layer.shifted) for factors in self.factored}
        self.adjoints = {f: Adjoint(f, layer.x) for f in self.factored} if inputs else {}

    def add(self, rows: Tensor, weights: BlockWeights) -> None:
        """A block of rows with its weights."""
        layer, dim = self.layer, self.layer.x.shape[1]
        centre, x = layer.centre, layer.x[rows]
        moments = x.new_zeros(len(rows), moment_columns(dim))
        for factors, left in weights.lefts.items():
            moments.addmm_(left, self.moments[factors])
        mass, mean, second = moments.split([1, dim, moments.shape[1] - dim - 1], 1)
        attended = mean + mass * centre  # m
        keys, tile = weights.keys, weights.tile
        if keys is not None and tile is not None:
            near = layer.shifted[keys]
            attended = attended + tile @ near + tile.sum(1, keepdim=True) * centre
        output = attended @ layer.weight_v
        residual = output - layer.target[rows]
        t = residual @ layer.weight_v.T
        rho = (t * (attended - centre)).sum(1, keepdim=True)
        change = (t * mean).sum(1, keepdim=True) - rho * mass
        gradient = times_second(second, t) - rho * mean + change * centre
        if keys is not None and tile is not None:
            pairs = tile * (t @ near.T - rho)
            gradient = gradient + pairs @ near + pairs.sum(1, keepdim=True) * centre
            if self.columns is not None and self.values is not None:
                self.columns.index_add_(0, keys, pairs.T @ x)
                self.values.index_add_(0, keys, tile.T @ t)
        for factors, adjoint in self.adjoints.items():
            if factors in weights.lefts:
                adjoint.add(weights.lefts[factors], x, t, rho)
        self.loss += residual.square().sum(dtype=torch.float64)
        self.output[rows], self.rows[rows] = output, gradient
        self.weight_v.addmm_(attended.T, residual)

    def finish(self) -> None:
        """Add what the low-rank parts say about the keys."""
        if self.columns is None or self.values is None:
            return
        for factors, adjoint in self.adjoints.items():
            for keys in factors.key_blocks(self.layer.shifted):
                columns, values = adjoint.read(keys, self.layer.shifted[keys])
                self.columns.index_add_(0, keys, columns)
                self.values.index_add_(0, keys, values)


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
