"""Weights of low rank, and what their entrywise product with another low-rank matrix sums to.

For weights U₁U₂ᵀ and the matrix t xᵀ of the gradient, with rows u_i, w_j, t_i and x_j,

    (U₁U₂ᵀ) ∘ (t xᵀ) = (U₁ ⊙ t)(U₂ ⊙ x)ᵀ,    row i of U₁ ⊙ t being u_i ⊗ t_i:

low rank again. Its product with x needs (U₂ ⊙ x)ᵀ x = Σ_j w_j ⊗ x_j ⊗ x_j, symmetric in the last
two, so half of it is summed (`Factors.moments`); u_i reads Σ_j a_ij x_j x_jᵀ from it, and that is
applied to t_i. The transposed product needs Σ_i u_i ⊗ t_i ⊗ x_i (`Adjoint`); nothing there is
symmetric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..components.polynomial_sum import largest_norm, rescaled
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import FeatureMap, block_rows
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff, sum_depth


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
        for keys in self.key_blocks(tokens):
            state.addmm_(self.right(keys).T, _powers(tokens[keys]))
        return state

    def key_blocks(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The keys, in blocks whose features and powers stay small."""
        keys = torch.arange(len(tokens), device=tokens.device) if self.keys is None else self.keys
        return keys.split(self.block(tokens)) if len(keys) else ()

    def block(self, tokens: Tensor) -> int:
        """Tokens at a time."""
        return block_rows(max(self.rank, tokens.shape[1] ** 2), tokens.dtype)


class PolynomialFactors(Factors):
    """p(scores) e^-B through packed features: u_i = W φ(q_i), w_j = φ(k_j)."""

    def __init__(
        self, head: Head, rows: Tensor | None, keys: Tensor | None, poly: CertifiedPolynomial
    ):
        self.head, self.keys = head, keys
        self.features = FeatureMap(head.dim, poly.degree)
        self.rank = self.features.count
        self.query_norm, self.key_norm = (
            largest_norm(norms if index is None else norms[index])
            for norms, index in ((head.query_norms, rows), (head.key_norms, keys))
        )
        reach = abs(head.scale) * self.query_norm * self.key_norm
        self.coefficients, self.log_unit = rescaled(poly, reach)
        by_degree = torch.tensor(self.coefficients, dtype=torch.float64)
        weights = self.features.multiplicity * by_degree[self.features.degrees]
        self.weights = weights.to(head.dtype).to(head.query.device)

    def left(self, rows: Tensor) -> Tensor:
        return self.features(self.head.query[rows] / self.query_norm).mul_(self.weights)

    def right(self, keys: Tensor) -> Tensor:
        return self.features(self.head.key[keys] / self.key_norm)

    @cached_property
    def mass(self) -> Tensor:
        """The sum of all w_j, with which u_i gives the sum of row i's weights, [rank]."""
        index = torch.arange(self.head.m, device=self.weights.device)
        index = index if self.keys is None else self.keys
        mass = torch.zeros_like(self.weights)
        for keys in index.split(block_rows(self.rank, self.head.dtype)):
            mass += self.right(keys).sum(0)
        return mass

    def failed(self, rows: Tensor) -> Tensor:
        """Those of the rows whose sum of weights does not exceed its rounding error.

        The rounding is the depth of the sum times the magnitude of its terms, as in attention;
        errors of independent sign are far smaller, hence the sixteenth.
        """
        keys = self.head.m if self.keys is None else len(self.keys)
        block = block_rows(self.rank, self.head.dtype)
        depth = sum_depth(keys, block) + self.rank + 2 * self.features.degree + self.head.dim + 16
        unit = gamma(depth, product_roundoff(self.head.dtype)) * keys / 16
        found = []
        for part in rows.split(block):
            norm = (self.head.query_norms[part] / self.query_norm).to(self.weights.dtype)
            magnitude = torch.zeros_like(norm)
            for coefficient in reversed(self.coefficients):
                magnitude.mul_(norm).add_(abs(coefficient))
            found.append(part[~(self.left(part) @ self.mass > unit * magnitude)])
        return torch.cat(found) if found else rows


class SvdFactors(Factors):
    """L D Wᵀ over all keys: u_i = D l_i."""

    keys = None

    def __init__(self, left: Tensor, values: Tensor, right: Tensor):
        self.rank, self._left, self._right = len(values), left * values, right

    def left(self, rows: Tensor) -> Tensor:
        return self._left[rows]

    def right(self, keys: Tensor) -> Tensor:
        return self._right[keys]


class Adjoint:
    """Σ_i u_i ⊗ (x_i ⊗ t_i, ρ_i x_i, t_i) over rows, read by the w_j of keys."""

    def __init__(self, factors: Factors, tokens: Tensor):
        self.factors, self.dim = factors, tokens.shape[1]
        self.state = tokens.new_zeros(factors.rank, self.dim**2 + 2 * self.dim)

    def add(self, left: Tensor, tokens: Tensor, t: Tensor, rho: Tensor) -> None:
        outer = (tokens.unsqueeze(2) * t.unsqueeze(1)).flatten(1)
        self.state.addmm_(left.T, torch.cat([outer, rho * tokens, t], 1))

    def read(self, keys: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i a_ij (t_i · x_j - ρ_i) x_i and Σ_i a_ij t_i of some keys; ``near`` are their x_j."""
        sums = self.factors.right(keys) @ self.state
        square, shift, value = sums.split([self.dim**2, self.dim, self.dim], 1)
        turned = square.view(-1, self.dim, self.dim) @ near.unsqueeze(2)
        return turned.squeeze(2) - shift, value


def moment_columns(dim: int) -> int:
    """Numbers in x and the upper triangle of x xᵀ."""
    return dim + dim * (dim + 1) // 2


def times_second(second: Tensor, t: Tensor) -> Tensor:
    """H_i t_i, H_i symmetric from its upper triangle [rows, d(d+1)/2]."""
    dim = t.shape[1]
    matrix = second.index_select(1, _triangle(dim, t.device)[2]).view(-1, dim, dim)
    return (matrix @ t.unsqueeze(2)).squeeze(2)


def _powers(x: Tensor) -> Tensor:
    row, column, _ = _triangle(x.shape[1], x.device)
    return torch.cat([x, x.index_select(1, row).mul_(x.index_select(1, column))], 1)


@lru_cache(maxsize=16)
def _triangle(dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle, and the index of each of the d² entries in it."""
    row, column = torch.triu_indices(dim, dim, device=device).unbind(0)
    index = torch.empty(dim, dim, dtype=torch.long, device=device)
    index[row, column] = index[column, row] = torch.arange(len(row), device=device)
    return row, column, index.flatten()
