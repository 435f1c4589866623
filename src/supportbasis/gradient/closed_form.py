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

The weights of a plan come as groups of rows: low-rank factors, and exact keys beside them. For
weights U₁U₂ᵀ, with rows u_i, w_j, t_i and x_j,

    (U₁U₂ᵀ) ∘ (t xᵀ) = (U₁ ⊙ t)(U₂ ⊙ x)ᵀ,    row i of U₁ ⊙ t being u_i ⊗ t_i:

low rank again. Its product with x needs (U₂ ⊙ x)ᵀ x = Σ_j w_j ⊗ x_j ⊗ x_j, symmetric in the last
two, so half of it is summed (`Factors.moments`); u_i reads Σ_j a_ij x_j x_jᵀ from it, and that is
applied to t_i. The transposed product needs Σ_i u_i ⊗ t_i ⊗ x_i; nothing there is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from ..components.polynomial_sum import largest_norm, rescaled
from ..plans import ExactHead, HeadPlan, PolynomialHead, ThresholdHead
from ..plans.supports import take
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import FeatureMap, block_rows, odd_rows
from ..problem.problem import Head

TILE = 2**21  # exact weights at a time
LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Factors:
    """Weights u_i · w_j over some keys (None: all)."""

    rank: int
    left: Callable[[Tensor], Tensor]  # u_i of some rows, [rows, rank]
    right: Callable[[Tensor], Tensor]  # w_j of some keys, [keys, rank]
    keys: Tensor | None = None

    def moments(self, tokens: Tensor) -> Tensor:
        """Σ_j w_j ⊗ (x_j, upper triangle of x_j x_jᵀ) over the keys, [rank, columns]."""
        state = tokens.new_zeros(self.rank, moment_columns(tokens.shape[1]))
        row, column, _ = triangle(tokens.shape[1], tokens.device)
        for keys in self.key_blocks(tokens):
            x = tokens[keys]
            state.addmm_(self.right(keys).T, torch.cat([x, x[:, row].mul_(x[:, column])], 1))
        return state

    def key_blocks(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The keys, in blocks whose features and powers stay small."""
        keys = torch.arange(len(tokens), device=tokens.device) if self.keys is None else self.keys
        return keys.split(self.block(tokens)) if len(keys) else ()

    def block(self, tokens: Tensor) -> int:
        """Tokens at a time."""
        return block_rows(max(self.rank, tokens.shape[1] ** 2), tokens.dtype)


def polynomial_factors(
    head: Head,
    rows: Tensor | None,
    keys: Tensor | None,
    poly: CertifiedPolynomial,
    lse: Tensor,
) -> Factors:
    """p(scores) e^-lse through packed features: u_i = e^(unit - lse_i) W φ(q_i), w_j = φ(k_j)."""
    features = FeatureMap(head.dim, poly.degree)
    query_norm, key_norm = (
        largest_norm(take(norms, index))
        for norms, index in ((head.query_norms, rows), (head.key_norms, keys))
    )
    coefficients, log_unit = rescaled(poly, abs(head.scale) * query_norm * key_norm)
    by_degree = torch.tensor(coefficients, dtype=torch.float64)
    weights = (features.multiplicity * by_degree[features.degrees]).to(head.dtype)
    weights, share = weights.to(head.query.device), (log_unit - lse).exp().unsqueeze(1)
    return Factors(
        features.count,
        lambda rows: features(head.query[rows] / query_norm).mul_(weights).mul_(share[rows]),
        lambda keys: features(head.key[keys] / key_norm),
        keys,
    )


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows with the same disjoint parts: polynomial weights, and exact ones over some keys."""

    rows: Tensor
    polynomial: Factors | None
    keys: Tensor  # whose weights are exact

    def blocks(self, tokens: Tensor) -> Iterator[Tensor]:
        """The rows, in blocks for which tiles and features stay small."""
        size = max(LEAST_ROWS, TILE // max(1, tokens.shape[1] ** 2))
        size = min(size, max(LEAST_ROWS, TILE // max(1, len(self.keys))))
        if self.polynomial is not None:
            size = min(size, self.polynomial.block(tokens))
        return iter(self.rows.split(odd_rows(size)) if len(self.rows) else ())


def row_groups(head: Head, plan: HeadPlan, lse: Tensor, fallback: Tensor) -> list[RowGroup]:
    """The groups of a plan that ran, with its lse [n] and the failed rows it computed exactly [n].
    Rows without a sum are in none."""
    keys = torch.arange(head.n, device=head.query.device)
    if isinstance(plan, ExactHead):
        return [RowGroup(keys, None, keys)]
    if not isinstance(plan, PolynomialHead):
        raise TypeError(f"no gradient of the attention loss for {plan.kind} heads")
    small_rows = small_keys = large_keys = None
    if isinstance(plan, ThresholdHead):
        query_side, key_side = plan.split(head)
        small_rows, small_keys, large_keys = query_side.small, key_side.small, key_side.large
    factors = polynomial_factors(head, small_rows, small_keys, plan.polynomial, lse)
    is_small = torch.zeros_like(fallback)
    is_small[slice(None) if small_rows is None else small_rows] = True
    is_small &= ~fallback
    has_sum = lse > -torch.inf
    exact, rest = ((mask & has_sum).nonzero().squeeze(1) for mask in (~is_small, is_small))
    large_keys = keys[:0] if large_keys is None else large_keys
    return [RowGroup(exact, None, keys), RowGroup(rest, factors, large_keys)]


def exact_tile(head: Head, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """exp(score - lse), [rows, keys]."""
    score = head.query[rows] @ (head.key[keys] * head.scale).T
    return score.sub_(lse[rows].unsqueeze(1)).exp_()


def sparse_part(head: Head, lse: Tensor, groups: list[RowGroup], tokens: Tensor) -> Tensor:
    """The exact weights as a sparse matrix [n, n]."""
    index = [torch.zeros(2, 0, dtype=torch.long, device=tokens.device)]
    values = [tokens.new_zeros(0)]
    for group in groups:
        for rows in group.blocks(tokens):
            at = torch.meshgrid(rows, group.keys, indexing="ij")
            index.append(torch.stack(at).flatten(1))
            values.append(exact_tile(head, lse, rows, group.keys).flatten())
    shape = (head.n, head.m)
    return torch.sparse_coo_tensor(
        torch.cat(index, 1), torch.cat(values), shape, check_invariants=False
    )


def moment_columns(dim: int) -> int:
    """Numbers in x and the upper triangle of x xᵀ."""
    return dim + dim * (dim + 1) // 2


@lru_cache(maxsize=16)
def triangle(dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle, and the index of each of the d² entries in it."""
    row, column = torch.triu_indices(dim, dim, device=device).unbind(0)
    index = torch.empty(dim, dim, dtype=torch.long, device=device)
    index[row, column] = index[column, row] = torch.arange(len(row), device=device)
    return row, column, index.flatten()


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
