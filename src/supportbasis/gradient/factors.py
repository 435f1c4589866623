"""The weights Â of a plan as groups of rows: low-rank factors, and exact keys beside them.

For weights U₁U₂ᵀ and the matrix t xᵀ of the gradient, with rows u_i, w_j, t_i and x_j,

    (U₁U₂ᵀ) ∘ (t xᵀ) = (U₁ ⊙ t)(U₂ ⊙ x)ᵀ,    row i of U₁ ⊙ t being u_i ⊗ t_i:

low rank again. Its product with x needs (U₂ ⊙ x)ᵀ x = Σ_j w_j ⊗ x_j ⊗ x_j, symmetric in the last
two, so half of it is summed (`Factors.moments`); u_i reads Σ_j a_ij x_j x_jᵀ from it, and that is
applied to t_i. The transposed product needs Σ_i u_i ⊗ t_i ⊗ x_i; nothing there is symmetric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..components.polynomial_sum import largest_norm, rescaled
from ..plans import ExactHead, HeadPlan, PolynomialHead, ThresholdHead
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import FeatureMap, block_rows, odd_rows
from ..problem.problem import Head

TILE = 2**21  # exact weights at a time
LEAST_ROWS = 16


class Factors(ABC):
    """Weights u_i · w_j over some keys (None: all)."""

    rank: int
    keys: Tensor | None

    @abstractmethod
    def left(self, rows: Tensor) -> Tensor:
        """u_i, [rows, rank]."""

    @abstractmethod
    def right(self, keys: Tensor) -> Tensor:
        """w_j, [keys, rank]."""

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


class PolynomialFactors(Factors):
    """p(scores) e^-lse through packed features: u_i = e^(unit - lse_i) W φ(q_i), w_j = φ(k_j)."""

    def __init__(
        self,
        head: Head,
        rows: Tensor | None,
        keys: Tensor | None,
        poly: CertifiedPolynomial,
        lse: Tensor,
    ):
        self.head, self.keys = head, keys
        self.features = FeatureMap(head.dim, poly.degree)
        self.rank = self.features.count
        self.query_norm, self.key_norm = (
            largest_norm(norms if index is None else norms[index])
            for norms, index in ((head.query_norms, rows), (head.key_norms, keys))
        )
        reach = abs(head.scale) * self.query_norm * self.key_norm
        coefficients, log_unit = rescaled(poly, reach)
        by_degree = torch.tensor(coefficients, dtype=torch.float64)
        weights = self.features.multiplicity * by_degree[self.features.degrees]
        self.weights = weights.to(head.dtype).to(head.query.device)
        self.share = (log_unit - lse).exp().unsqueeze(1)

    def left(self, rows: Tensor) -> Tensor:
        features = self.features(self.head.query[rows] / self.query_norm)
        return features.mul_(self.weights).mul_(self.share[rows])

    def right(self, keys: Tensor) -> Tensor:
        return self.features(self.head.key[keys] / self.key_norm)


class SvdFactors(Factors):
    """L D Wᵀ over all keys: u_i = D l_i."""

    keys = None

    def __init__(self, left: Tensor, values: Tensor, right: Tensor):
        self.rank, self._left, self._right = len(values), left * values, right

    def left(self, rows: Tensor) -> Tensor:
        return self._left[rows]

    def right(self, keys: Tensor) -> Tensor:
        return self._right[keys]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows with the same disjoint parts: polynomial weights, and exact ones over some keys."""

    rows: Tensor
    polynomial: PolynomialFactors | None
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
    factors = PolynomialFactors(head, small_rows, small_keys, plan.polynomial, lse)
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
