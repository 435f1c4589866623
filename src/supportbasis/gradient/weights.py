"""The weights Â of a plan as row groups: each a low-rank part and an exact part, disjoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plans import ExactHead, HeadPlan, PolynomialHead, ThresholdHead
from ..polynomials.features import odd_rows
from ..problem.problem import Head
from .factors import Factors, PolynomialFactors

TILE = 2**21  # exact weights at a time
LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows with the same parts. Without any part the rows have no weights: output 0."""

    rows: Tensor
    polynomial: PolynomialFactors | None
    exact: Tensor | None  # keys whose weights are exact; None: none

    def blocks(self, tokens: Tensor) -> Iterator[Tensor]:
        """The rows, in blocks for which tiles and features stay small."""
        size = max(LEAST_ROWS, TILE // max(1, tokens.shape[1] ** 2))
        if self.exact is not None and len(self.exact):
            size = min(size, max(LEAST_ROWS, TILE // len(self.exact)))
        if self.polynomial is not None:
            size = min(size, self.polynomial.block(tokens))
        return iter(self.rows.split(odd_rows(size)) if len(self.rows) else ())


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Â of some rows: left factors [rows, rank] of low-rank parts, and a tile of exact keys."""

    lefts: dict[Factors, Tensor]
    keys: Tensor | None = None
    tile: Tensor | None = None  # [rows, keys]
    share: Tensor | None = None  # [rows]: what multiplies the left factor of the polynomial


def row_groups(head: Head, plan: HeadPlan) -> tuple[list[RowGroup], Tensor]:
    """The groups of a plan, and the rows that the polynomial lost.

    A single-threshold basis computes such rows exactly; a polynomial alone has nothing for them.
    """
    rows = keys = torch.arange(head.n, device=head.query.device)
    if isinstance(plan, ExactHead):
        return [RowGroup(rows, None, keys)], rows[:0]
    assert isinstance(plan, PolynomialHead)
    if not isinstance(plan, ThresholdHead):
        factors = PolynomialFactors(head, None, None, plan.polynomial)
        lost = factors.lost(rows)
        return [RowGroup(_without(rows, lost), factors, None), RowGroup(lost, None, None)], lost
    split_rows, split_keys = plan.split(head)
    small = rows if split_rows.small is None else split_rows.small
    large = rows[:0] if split_rows.large is None else split_rows.large
    factors = PolynomialFactors(head, split_rows.small, split_keys.small, plan.polynomial)
    lost = factors.lost(small)
    large = torch.cat([large, lost]).sort().values
    rest = RowGroup(_without(small, lost), factors, split_keys.large)
    return [RowGroup(large, None, keys), rest], lost


def block_weights(head: Head, group: RowGroup, rows: Tensor) -> BlockWeights:
    """Â of a block of a group's rows: both parts in common units, divided by the row's sum."""
    factors, score = group.polynomial, None
    if group.exact is not None:
        score = head.query[rows] @ (head.key[group.exact] * head.scale).T
    if factors is None:
        return BlockWeights({}, group.exact, None if score is None else score.softmax(1))
    left = factors.left(rows)
    sums = left @ factors.mass
    if score is None:
        share = sums.reciprocal()
        return BlockWeights({factors: left.mul_(share.unsqueeze(1))}, share=share)
    top = score.amax(1).clamp(min=factors.log_unit)
    tile = score.sub_(top.unsqueeze(1)).exp_()
    share = (factors.log_unit - top).exp_()
    total = tile.sum(1).addcmul_(share, sums)
    share = share / total
    tile.div_(total.unsqueeze(1))
    return BlockWeights({factors: left.mul_(share.unsqueeze(1))}, group.exact, tile, share)


def sparse_part(head: Head, groups: list[RowGroup], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The exact weights as a sparse matrix, and the polynomial's share in every row [n]."""
    index, values = [], []
    shares = tokens.new_zeros(head.n)
    for group in groups:
        for rows in group.blocks(tokens):
            weights = block_weights(head, group, rows)
            if weights.share is not None:
                shares[rows] = weights.share
            if weights.tile is not None and weights.keys is not None:
                at = torch.stack(torch.meshgrid(rows, weights.keys, indexing="ij"))
                index.append(at.flatten(1))
                values.append(weights.tile.flatten())
    empty = torch.zeros(2, 0, dtype=torch.long, device=tokens.device)
    matrix = torch.sparse_coo_tensor(
        torch.cat([empty, *index], 1),
        torch.cat([tokens.new_zeros(0), *values]),
        (head.n, head.m),
        check_invariants=False,
    )
    return matrix, shares


def _without(rows: Tensor, removed: Tensor) -> Tensor:
    return rows[~torch.isin(rows, removed)] if len(removed) else rows
