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

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..problem.problem import Head
from .factors import Factors, triangle

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
    """The loss, its residual, and sums over blocks of rows, from m' [n, d] and the rows [n, 1] that
    have weights."""

    def __init__(self, layer: Layer, shifted: Tensor, has_sum: Tensor, inputs: bool):
        self.layer, self.parts = layer, dict[Factors, LowRankSum]()
        attended = shifted + layer.centre * has_sum
        self.output = attended @ layer.weight_v
        residual = self.output - layer.target
        self.loss = residual.square().sum(dtype=torch.float64)
        self.weight_v = attended.T @ residual
        self.t = residual @ layer.weight_v.T
        self.rho = (self.t * shifted).sum(1, keepdim=True)
        self.rows = torch.zeros_like(layer.x)  # N
        self.columns = torch.zeros_like(layer.x) if inputs else None  # M
        self.values = torch.zeros_like(layer.x) if inputs else None  # Z

    def add_low_rank(self, rows: Tensor, factors: Factors) -> None:
        """Low-rank weights of a block of rows."""
        if factors not in self.parts:
            self.parts[factors] = LowRankSum(factors, self.layer, self.columns is not None)
        left, t, rho = factors.left(rows), self.t[rows], self.rho[rows]
        self.rows[rows] += self.parts[factors].add(left, self.layer.x[rows], t, rho)

    def add_exact(self, rows: Tensor, keys: Tensor, tile: Tensor) -> None:
        """Exact weights [rows, keys]: sparse ∘ low-rank is sparse, so 𝒬 is formed there alone."""
        near, t = self.layer.shifted[keys], self.t[rows]
        pairs = (t @ near.T).sub_(self.rho[rows]).mul_(tile)
        self.rows[rows] += pairs @ near
        if self.columns is not None and self.values is not None:
            self.columns.index_add_(0, keys, pairs.T @ self.layer.x[rows])
            self.values.index_add_(0, keys, tile.T @ t)

    def finish(self) -> None:
        """Add the gradients of the keys through the low-rank parts."""
        if self.columns is None or self.values is None:
            return
        for factors, part in self.parts.items():
            for keys in factors.key_blocks(self.layer.x):
                columns, values = part.read(keys, self.layer.shifted[keys])
                self.columns.index_add_(0, keys, columns)
                self.values.index_add_(0, keys, values)


class LowRankSum:
    """What u_i reads of the keys, and Σ_i u_i ⊗ (x_i ⊗ t_i, ρ_i x_i, t_i), which w_j reads."""

    def __init__(self, factors: Factors, layer: Layer, inputs: bool):
        self.factors, self.dim = factors, layer.x.shape[1]
        self.moments = factors.moments(layer.shifted)
        columns = self.dim**2 + 2 * self.dim if inputs else 0
        self.state = layer.x.new_zeros(factors.rank, columns)

    def add(self, left: Tensor, x: Tensor, t: Tensor, rho: Tensor) -> Tensor:
        """Add a block of rows to the sums; their Σ_j a_ij (t_i · x'_j - ρ_i) x'_j."""
        if self.state.numel():
            outer = (x.unsqueeze(2) * t.unsqueeze(1)).flatten(1)
            self.state.addmm_(left.T, torch.cat([outer, rho * x, t], 1))
        moments = left @ self.moments
        square = moments[:, self.dim :].index_select(1, triangle(self.dim, t.device)[2])
        second = square.view(-1, self.dim, self.dim) @ t.unsqueeze(2)
        return second.squeeze(2) - rho * moments[:, : self.dim]

    def read(self, keys: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i a_ij (t_i · x_j - ρ_i) x_i and Σ_i a_ij t_i of some keys; ``near`` are their x_j."""
        sums = self.factors.right(keys) @ self.state
        square, shift, value = sums.split([self.dim**2, self.dim, self.dim], 1)
        turned = square.view(-1, self.dim, self.dim) @ near.unsqueeze(2)
        return turned.squeeze(2) - shift, value


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
