"""The closed form of the gradient, block of rows by block of rows, without an n x n matrix.

With weights Â (rows add up to 1), V = XY, residual R = ÂV - E and t = R Yᵀ, the matrix
𝒬 = R Vᵀ = t Xᵀ has low rank, and r_i = Σ_j Â_ij 𝒬_ij = t_i · m_i with m = ÂX. All is made of

    N = (Â∘𝒬 - diag(r) Â) X,    row i: Σ_j Â_ij (t_i · x_j - r_i) x_j,
    M = (Â∘𝒬 - diag(r) Â)ᵀ X,   row j: Σ_i Â_ij (t_i · x_j - r_i) x_i,    and Z = Âᵀ t:

    ∂L/∂W = 2 scale Xᵀ N,   ∂L/∂Y = 2 mᵀ R,   ∂L/∂X = 2 scale (N Wᵀ + M W) + 2 Z.

Row i of N is the covariance of the tokens under the weights of row i, times t_i. Tokens are
measured from their mean c, so that no covariance is a difference of large numbers: x = x' + c,
m = m' + c and t_i · x_j - r_i = t_i · x'_j - t_i · m'_i. Weights that were cut to low rank do not
add up to 1; for them c = 0.

A plan has low-rank weights, and exact ones beside them. For weights U₁U₂ᵀ with rows u_i and w_j,

    (U₁U₂ᵀ) ∘ (t xᵀ) = (U₁ ⊙ t)(U₂ ⊙ x)ᵀ,    row i of U₁ ⊙ t being u_i ⊗ t_i:

low rank again. Its product with x needs (U₂ ⊙ x)ᵀ x = Σ_j w_j ⊗ x_j ⊗ x_j, symmetric in the last
two, so half of it is summed (`Sums.add_low_rank`); u_i reads Σ_j a_ij x_j x_jᵀ from it, and that is
applied to t_i. The transposed product needs Σ_i u_i ⊗ t_i ⊗ x_i; nothing there is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..components.polynomial_sum import PolynomialSum
from ..plans import ExactHead, HeadPlan, PolynomialHead, ThresholdHead
from ..polynomials.features import block_rows
from ..problem.problem import Head

TILE = 2**21  # exact weights at a time
LEAST_ROWS = 16

Exact = tuple[Tensor, Tensor]  # rows and keys between which weights are exact


@dataclass(frozen=True, eq=False)
class Call:
    """Checked tensors, detached, in the dtype of all sums."""

    x: Tensor  # [n, d]
    pair: tuple[Tensor, ...]  # (W,) [d, d], or (W_Q, W_K) [d, h]; [heads, ...] of several heads
    weight_v: Tensor  # [d, dv], or [heads, d, dv]
    goal: Tensor  # [n, dv], or [heads, n, dv]: the target, or the gradient from above

    @property
    def query(self) -> Tensor:
        return self.x @ self.pair[0]

    @property
    def key(self) -> Tensor:
        return self.x @ self.pair[1] if len(self.pair) == 2 else self.x


@dataclass(frozen=True, eq=False)
class Factors:
    """Weights u_i · w_j between some rows and some keys."""

    rows: Tensor
    keys: Tensor
    rank: int
    left: Callable[[Tensor], Tensor]  # u_i of some rows, [rows, rank]
    right: Callable[[Tensor], Tensor]  # w_j of some keys, [keys, rank]


def weights_of(
    head: Head, plan: HeadPlan, lse: Tensor, fallback: Tensor
) -> tuple[list[Factors], list[Exact]]:
    """The disjoint weights of a plan that ran, with its lse [n] and the failed rows it computed
    exactly [n]. Rows without a sum are in none."""
    everything = torch.arange(head.n, device=lse.device)
    if isinstance(plan, ExactHead):
        return [], [(everything, everything)]
    assert isinstance(plan, PolynomialHead)
    small_rows, small_keys = ~fallback, torch.ones_like(fallback)
    if isinstance(plan, ThresholdHead):
        small_rows &= head.query_maxima <= plan.threshold
        small_keys = head.key_maxima <= plan.threshold
    exact, rows = everything[~small_rows], everything[small_rows & (lse > -torch.inf)]
    keys = everything[small_keys]
    # p(scores) e^-lse through packed features: u_i = e^(unit - lse_i) W φ(q_i), w_j = φ(k_j)
    task = PolynomialSum(plan.polynomial, keys).task(head, rows)
    share = (task.shift - lse).exp().unsqueeze(1)

    def left(some: Tensor) -> Tensor:
        unit, _ = task.unit("query", head.query[some])
        return task.features(unit).mul_(task.weights).mul_(share[some])

    def right(some: Tensor) -> Tensor:
        return task.features(task.unit("key", head.key[some])[0])

    factors = Factors(rows, keys, task.features.count, left, right)
    return [factors], [(exact, everything), (rows, everything[~small_keys])]


def exact_tiles(
    head: Head, lse: Tensor, parts: list[Exact]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of rows, their keys, and exp(score - lse) [rows, keys]."""
    for all_rows, keys in parts:
        key = head.key[keys] * head.scale
        for rows in all_rows.split(max(LEAST_ROWS, TILE // max(1, len(keys)))):
            yield rows, keys, (head.query[rows] @ key.T).sub_(lse[rows].unsqueeze(1)).exp_()


def sparse_part(head: Head, lse: Tensor, parts: list[Exact]) -> Tensor:
    """The exact weights as a sparse matrix [n, n]."""
    index, values = [], []
    for rows, keys, tile in exact_tiles(head, lse, parts):
        index.append(torch.cartesian_prod(rows, keys).T)
        values.append(tile.flatten())
    where, shape = torch.cat(index, 1), (head.n, head.m)
    return torch.sparse_coo_tensor(where, torch.cat(values), shape, check_invariants=False)


class Sums:
    """The loss, its residual, and sums over parts of the weights, from m' [n, d] and the rows [n]
    that have weights. ``inputs``: with M and Z, which only ∂L/∂X needs."""

    def __init__(self, call: Call, centre: Tensor, shifted: Tensor, has_sum: Tensor, inputs: bool):
        self.x, self.near, self.inputs = call.x, call.x - centre, inputs
        attended = shifted + centre * has_sum.unsqueeze(1)
        self.output = attended @ call.weight_v
        residual = self.output - call.goal
        self.loss = residual.square().sum(dtype=torch.float64)
        self.weight_v = 2 * attended.T @ residual
        self.t = residual @ call.weight_v.T
        self.rho = (self.t * shifted).sum(1, keepdim=True)
        self.rows, self.columns, self.values = call.x.new_zeros(3, *call.x.shape)  # N, M, Z

    def add_exact(self, rows: Tensor, keys: Tensor, tile: Tensor) -> None:
        """Exact weights [rows, keys]: sparse ∘ low-rank is sparse, so 𝒬 is formed there alone."""
        near, t = self.near[keys], self.t[rows]
        pairs = (t @ near.T).sub_(self.rho[rows]).mul_(tile)
        self.rows[rows] += pairs @ near
        if self.inputs:
            self.columns.index_add_(0, keys, pairs.T @ self.x[rows])
            self.values.index_add_(0, keys, tile.T @ t)

    def add_low_rank(self, factors: Factors) -> None:
        """Low-rank weights: rows read Σ_j w_j ⊗ (x_j, upper triangle of x_j x_jᵀ), and keys
        Σ_i u_i ⊗ (x_i ⊗ t_i, ρ_i x_i, t_i)."""
        dim = self.x.shape[1]
        size = block_rows(max(factors.rank, dim**2), self.x.dtype)
        row, column = torch.triu_indices(dim, dim, device=self.x.device).unbind(0)
        index = row.new_empty(dim, dim)  # of all d² entries in the triangle
        index[row, column] = index[column, row] = torch.arange(len(row), device=row.device)
        moments = self.x.new_zeros(factors.rank, dim + len(row))
        for keys in factors.keys.split(size):
            x = self.near[keys]
            moments.addmm_(factors.right(keys).T, torch.cat([x, x[:, row] * x[:, column]], 1))
        state = self.x.new_zeros(factors.rank, dim**2 + 2 * dim if self.inputs else 0)
        for rows in factors.rows.split(size):
            left, x, t, rho = factors.left(rows), self.x[rows], self.t[rows], self.rho[rows]
            read = left @ moments
            square = read[:, dim:].index_select(1, index.flatten()).view(-1, dim, dim)
            self.rows[rows] += (square @ t.unsqueeze(2)).squeeze(2) - rho * read[:, :dim]
            if self.inputs:
                outer = (x.unsqueeze(2) * t.unsqueeze(1)).flatten(1)
                state.addmm_(left.T, torch.cat([outer, rho * x, t], 1))
        for keys in factors.keys.split(size) if self.inputs else ():
            read = factors.right(keys) @ state
            square, shift, value = read.split([dim**2, dim, dim], 1)
            turned = square.view(-1, dim, dim) @ self.near[keys].unsqueeze(2)
            self.columns.index_add_(0, keys, turned.squeeze(2) - shift)
            self.values.index_add_(0, keys, value)


def row_gradients(call: Call, head: Head, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of ÂXY and of N with exact weights, in float64."""
    x, weight_v, target = call.x.double(), call.weight_v.double(), call.goal.double()
    key, near = head.key.double() * head.scale, x - x.mean(0)
    outputs, gradients = [], []
    for part in rows.split(max(1, TILE // head.m)):
        weight = (head.query[part].double() @ key.T).softmax(1)
        output = weight @ x @ weight_v
        t = (output - target[part]) @ weight_v.T
        pairs = weight * (t @ near.T - (t * (weight @ near)).sum(1, keepdim=True))
        outputs.append(output)
        gradients.append(pairs @ near)
    return torch.cat(outputs), torch.cat(gradients)
