"""The support basis of a head: disjoint components that together cover the score matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .components import Component, ExactSum, PolynomialSum
from .plans import HeadPlan
from .problem import Head

LARGEST_REACH = 1e300  # stands for every range that float64 cannot hold


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Query rows (None: all) and the components whose disjoint keys cover all live keys."""

    rows: Tensor | None
    components: Sequence[Component]


def support_basis(plan: HeadPlan, head: Head) -> list[RowGroup]:
    """The components of one head: the only place where a plan becomes work.

    ===================  ==========================================================
    exact                all rows x all keys, exact
    polynomial           all rows x all keys, polynomial
    single-threshold     large rows x all keys, exact (Case 1 of the paper);
                         small rows x large keys, exact (Case 2);
                         small rows x small keys, polynomial
    ===================  ==========================================================
    """
    live = head.live_keys
    if plan.kind == "exact":
        return [RowGroup(None, [ExactSum(live)])]
    assert plan.polynomial is not None
    if plan.kind == "polynomial":
        return [RowGroup(None, [PolynomialSum(plan.polynomial, live)])]
    rows, keys = split_of(plan, head)
    groups = []
    if rows.large is not None:
        groups.append(RowGroup(rows.large, [ExactSum(live)]))
    if rows.small is None or len(rows.small):
        components: list[Component] = []
        if keys.small is None or len(keys.small):
            components.append(PolynomialSum(plan.polynomial, keys.small))
        if keys.large is not None:
            components.append(ExactSum(keys.large))
        groups.append(RowGroup(rows.small, components or [ExactSum(live)]))
    return groups


@dataclass(frozen=True, eq=False)
class Side:
    """One side split in two: large indices (None: there are none), small ones (None: all)."""

    large: Tensor | None
    small: Tensor | None

    def count(self, total: int) -> tuple[int, int]:
        large = 0 if self.large is None else len(self.large)
        return large, total - large if self.small is None else len(self.small)


def split_of(plan: HeadPlan, head: Head) -> tuple[Side, Side]:
    """Rows and keys of a plan; a loaded plan has no index sets and splits by its threshold."""
    rows, keys = plan.large_rows, plan.large_keys
    if rows is None or keys is None:
        assert plan.threshold is not None
        rows, keys = large_tokens(head, plan.threshold)
    return _side(rows, head.n, None), _side(keys, head.m, head.live_keys)


def large_tokens(head: Head, threshold: float) -> tuple[Tensor, Tensor]:
    """Rows of the query and live keys with an entry beyond the threshold (Definition B.3)."""
    rows = (head.query_maxima > threshold).nonzero().squeeze(1)
    large = head.key_maxima > threshold
    if head.key_log_weight is not None:
        large &= head.key_log_weight > -math.inf
    return rows, large.nonzero().squeeze(1)


def _side(large: Tensor, total: int, live: Tensor | None) -> Side:
    if not len(large):
        return Side(None, live)
    small = torch.ones(total, dtype=torch.bool, device=large.device)
    if live is not None:
        small.zero_()
        small[live] = True
    small[large] = False
    return Side(large, small.nonzero().squeeze(1))


def score_reach(head: Head, rows: Tensor | None, keys: Tensor | None) -> float:
    """Largest possible |score| of these rows and keys: |scale| max|q| max|k|."""
    query = head.query_norms if rows is None else head.query_norms[rows]
    key = head.key_norms if keys is None else head.key_norms[keys]
    if not query.numel() or not key.numel():
        return 0.0
    return min(abs(head.scale) * float(query.max()) * float(key.max()), LARGEST_REACH)


def entry_reach(head: Head, threshold: float) -> float:
    """The same from the threshold alone: |scale| d T^2 (Lemma B.8 has scale = 1/d)."""
    return abs(head.scale) * head.dim * threshold**2
