"""The closed form of the gradient, block of rows by block of rows, without an n x n matrix.

With weights Â (rows add up to 1), V = XY, residual R = ÂV - E and t = R Yᵀ, the matrix
𝒬 = R Vᵀ = t Xᵀ has low rank, and r_i = Σ_j Â_ij 𝒬_ij = t_i · m_i with m = ÂX. All is made of

    N = (Â∘𝒬 - diag(r) Â) X,    row i: Σ_j Â_ij (t_i · x_j - r_i) x_j,
    M = (Â∘𝒬 - diag(r) Â)ᵀ Q,   row j: Σ_i Â_ij (t_i · x_j - r_i) q_i,    and Z = Âᵀ R,

with q = W_Qᵀ x and W = W_Q W_Kᵀ (W_K = 1 where W came whole):

    ∂L/∂W = 2 scale Xᵀ N,   ∂L/∂Y = 2 mᵀ R,   ∂L/∂X = 2 scale (N Wᵀ + M W_Kᵀ) + 2 Z Yᵀ.

Row i of N is the covariance of the tokens under the weights of row i, times t_i. Tokens are
measured from their mean c, so that no covariance is a difference of large numbers: x = x' + c,
m = m' + c and t_i · x_j - r_i = t_i · x'_j - t_i · m'_i = τ_i · ξ_j, where τ = (t, -t · m') and
ξ = (x', 1). Weights that were cut to low rank do not add up to 1; for them c = 0.

A plan has low-rank weights, and exact ones beside them. For weights U₁U₂ᵀ with rows u_i and w_j,

    (U₁U₂ᵀ) ∘ (τ ξᵀ) = (U₁ ⊙ τ)(U₂ ⊙ ξ)ᵀ,    row i of U₁ ⊙ τ being u_i ⊗ τ_i:

low rank again. Its product with x' needs Σ_j w_j ⊗ ξ_j ⊗ x'_j, symmetric in the last two, so half
of it is summed (`Sums.add_low_rank`); u_i reads Σ_j a_ij x'_j ξ_jᵀ from it, and that is applied to
τ_i. The transposed product needs Σ_i u_i ⊗ τ_i ⊗ q_i; nothing there is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..components import ExactSum, PolynomialSum
from ..components.streaming import Task
from ..errors import InputError
from ..plans import HeadPlan
from ..polynomials.features import block_rows
from ..problem.problem import Head

TILE = 2**21  # exact weights at a time
LEAST_ROWS = 16
STATE_LIMIT = 2**28  # numbers in the sums of a polynomial's features: 1 GiB of float32

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
    low_rank, exact = list[Factors](), [(everything[fallback], everything)]
    for group in plan.basis(head):
        rows = everything if group.rows is None else group.rows
        rows = rows[(lse[rows] > -torch.inf) & ~fallback[rows]]
        for part in group.components:
            assert isinstance(part, (ExactSum, PolynomialSum))
            keys = everything if part.keys is None else part.keys
            if isinstance(part, ExactSum):
                exact.append((rows, keys))
            else:
                low_rank.append(_factors(part.task(head, rows), rows, keys, lse))
    return low_rank, exact


def _factors(task: Task, rows: Tensor, keys: Tensor, lse: Tensor) -> Factors:
    """p(scores) e^-lse through packed features: u_i = e^(unit - lse_i) W φ(q_i), w_j = φ(k_j)."""
    share = (task.shift - lse).exp().unsqueeze(1)

    def features(side: str, some: Tensor) -> Tensor:
        return task.features(task.unit(side, getattr(task.head, side)[some])[0])

    def left(some: Tensor) -> Tensor:
        return features("query", some).mul_(task.weights).mul_(share[some])

    return Factors(rows, keys, task.features.count, left, partial(features, "key"))


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
    where = torch.cat([torch.cartesian_prod(*part) for part in parts]).T
    values = torch.cat([tile.flatten() for *_, tile in exact_tiles(head, lse, parts)])
    return torch.sparse_coo_tensor(where, values, (head.n, head.m), check_invariants=False)


class Sums:
    """The loss, its residual, and sums over parts of the weights, from m' [n, d] and the rows [n]
    that have weights. ``inputs``: with M and Z, which only ∂L/∂X needs."""

    def __init__(self, call: Call, centre: Tensor, shifted: Tensor, has_sum: Tensor, inputs: bool):
        self.inputs, self.query = inputs, call.query
        self.tokens = pad(call.x - centre, (0, 1), value=1.0)  # ξ
        attended = shifted + centre * has_sum.unsqueeze(1)
        self.output = attended @ call.weight_v
        self.residual = self.output - call.goal
        self.loss = self.residual.square().sum(dtype=torch.float64)
        self.weight_v = 2 * attended.T @ self.residual
        t = self.residual @ call.weight_v.T
        self.slopes = torch.cat([t, -(t * shifted).sum(1, keepdim=True)], 1)  # τ
        sides = (call.x, self.query, self.residual)
        self.rows, self.keys, self.values = map(torch.zeros_like, sides)  # N, M, Z

    def add_exact(self, rows: Tensor, keys: Tensor, tile: Tensor) -> None:
        """Exact weights [rows, keys]: sparse ∘ low-rank is sparse, so 𝒬 is formed there alone."""
        tokens = self.tokens[keys]
        pairs = (self.slopes[rows] @ tokens.T).mul_(tile)
        self.rows[rows] += pairs @ tokens[:, :-1]
        if self.inputs:
            self.keys.index_add_(0, keys, pairs.T @ self.query[rows])
            self.values.index_add_(0, keys, tile.T @ self.residual[rows])

    def add_low_rank(self, factors: Factors) -> None:
        """Low-rank weights: rows read Σ_j w_j ⊗ (upper triangle of x'_j ξ_jᵀ), and keys
        Σ_i u_i ⊗ (τ_i ⊗ q_i, R_i)."""
        dim, head_dim = self.rows.shape[1], self.query.shape[1]
        size = block_rows(max(factors.rank, dim**2), self.tokens.dtype)
        row, column = torch.triu_indices(dim, dim + 1, device=self.tokens.device).unbind(0)
        index = row.new_empty(dim + 1, dim + 1)  # of all entries in the triangle
        index[row, column] = index[column, row] = torch.arange(len(row), device=row.device)
        widths = [(dim + 1) * head_dim, self.residual.shape[1]]
        columns = [len(row), sum(widths) if self.inputs else 0]
        if factors.rank * sum(columns) > STATE_LIMIT:
            raise InputError(
                f"method needs sums of {factors.rank} features by {sum(columns)} columns, more "
                f"than {STATE_LIMIT} numbers; use a lower degree, a pair weight_qk of fewer "
                "columns, or sb.Exact()"
            )
        moments, state = self.tokens.new_zeros(factors.rank, sum(columns)).split(columns, 1)
        for keys in factors.keys.split(size):
            tokens = self.tokens[keys]
            moments.addmm_(factors.right(keys).T, tokens[:, row] * tokens[:, column])
        for rows in factors.rows.split(size):
            left, slopes = factors.left(rows), self.slopes[rows].unsqueeze(2)
            read = (left @ moments).index_select(1, index[:dim].flatten()).view(-1, dim, dim + 1)
            self.rows[rows] += (read @ slopes).squeeze(2)
            if self.inputs:
                outer = (slopes * self.query[rows].unsqueeze(1)).flatten(1)
                state.addmm_(left.T, torch.cat([outer, self.residual[rows]], 1))
        for keys in factors.keys.split(size) if self.inputs else ():
            of_keys, of_values = (factors.right(keys) @ state).split(widths, 1)
            turned = self.tokens[keys].unsqueeze(1) @ of_keys.view(-1, dim + 1, head_dim)
            self.keys.index_add_(0, keys, turned.squeeze(1))
            self.values.index_add_(0, keys, of_values)


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
