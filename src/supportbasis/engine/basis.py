"""The support basis of a head: disjoint components that together cover the score matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..components import Component, ExactSum, FittedSum, PolynomialSum, PowerSum, SketchSum
from ..components.polynomial_sum import LARGEST_REACH
from ..lists.list_sum import ListSum
from ..paper.buckets import bucket_of
from ..plans.plan import BucketPair, HeadPlan
from ..polynomials.balancing import framed
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head


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
    multi-threshold      row bucket x key bucket, a power of a polynomial (sketched
                         or not) or exact, for every pair of buckets
    power                all rows x all keys, a power of the score
    lists                all rows x all keys, by lists of exact and tilted keys
    fitted               far rows x all keys, exact; near rows x far keys, exact;
                         near rows x near keys, a polynomial fitted to their scores
    ===================  ==========================================================
    """
    live = head.live_keys
    if plan.kind == "exact":
        return [RowGroup(None, [ExactSum(live)])]
    if plan.kind == "power":
        assert plan.kernel is not None
        return [RowGroup(None, [power_component(plan.kernel, live)])]
    if plan.kind == "multi-threshold":
        return _bucket_groups(plan, head)
    if plan.kind == "lists":
        assert plan.lists is not None
        return [RowGroup(None, [ListSum(plan.lists)])]
    if plan.kind == "polynomial":
        return [RowGroup(None, [_smooth_component(plan, live)])]
    rows, keys = split_of(plan, head)
    groups = []
    if rows.large is not None:
        groups.append(RowGroup(rows.large, [ExactSum(live)]))
    if rows.small is None or len(rows.small):
        components: list[Component] = []
        if keys.small is None or len(keys.small):
            components.append(_smooth_component(plan, keys.small))
        if keys.large is not None:
            components.append(ExactSum(keys.large))
        groups.append(RowGroup(rows.small, components or [ExactSum(live)]))
    return groups


def exact_component(plan: HeadPlan, head: Head) -> Component:
    """What the plan approximates: softmax weights, or the power itself in polynomial attention."""
    if plan.kernel is None:
        return ExactSum(head.live_keys)
    return PowerSum(head.live_keys, kernel=plan.kernel)


def power_component(kernel: PowerKernel, keys: Tensor | None) -> Component:
    """A power kernel over some keys, sketched if it says so."""
    return PowerSum(keys, kernel=kernel) if kernel.sketch_size is None else SketchSum(kernel, keys)


def _smooth_component(plan: HeadPlan, keys: Tensor | None) -> Component:
    """The polynomial of a plan over some keys."""
    if plan.fitted is not None:
        assert plan.frame is not None
        return FittedSum(plan.fitted, plan.frame, keys)
    assert plan.polynomial is not None
    return PolynomialSum(plan.polynomial, keys)


def _bucket_groups(plan: HeadPlan, head: Head) -> list[RowGroup]:
    row_sets, key_sets = buckets_of(plan, head)
    groups = []
    for row, rows in enumerate(row_sets):
        pairs = [pair for pair in plan.pairs if pair.row == row]
        if rows is None or len(rows):
            groups.append(RowGroup(rows, _pair_components(pairs, key_sets)))
    return groups


def _pair_components(
    pairs: Sequence[BucketPair], key_sets: Sequence[Tensor | None]
) -> list[Component]:
    """The components of one row bucket; all its exact keys make one of them."""
    components: list[Component] = []
    exact = [key_sets[pair.key] for pair in pairs if pair.kernel is None]
    indices = [keys for keys in exact if keys is not None]
    if len(indices) < len(exact):  # None is the only bucket: every key
        components.append(ExactSum(None))
    elif indices:
        components.append(ExactSum(torch.cat(indices).sort().values))
    for pair in pairs:
        keys = key_sets[pair.key]
        if pair.kernel is not None and (keys is None or len(keys)):
            components.append(power_component(pair.kernel, keys))
    return components


def buckets_of(plan: HeadPlan, head: Head) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Rows and live keys of each bucket of a plan, sorted; None where one bucket holds all."""
    rows = _members(head.query_maxima, plan.row_edges, None)
    return rows, _members(head.key_maxima, plan.key_edges, head.live_keys)


def _members(maxima: Tensor, edges: Sequence[float], live: Tensor | None) -> list[Tensor | None]:
    if len(edges) == 1:
        return [live]
    position = bucket_of(maxima if live is None else maxima[live], edges)
    members = [(position == i).nonzero().squeeze(1) for i in range(len(edges))]
    return [index if live is None else live[index] for index in members]


@dataclass(frozen=True, eq=False)
class Side:
    """One side split in two: large indices (None: there are none), small ones (None: all)."""

    large: Tensor | None
    small: Tensor | None

    def count(self, total: int) -> tuple[int, int]:
        large = 0 if self.large is None else len(self.large)
        return large, total - large if self.small is None else len(self.small)


def split_of(plan: HeadPlan, head: Head) -> tuple[Side, Side]:
    """Rows and keys of a plan, by its threshold; of a fitted one by its radius."""
    if plan.fitted is not None:
        return sides(head, *_far_tokens(plan, head))
    assert plan.threshold is not None
    return sides(head, *large_tokens(head, plan.threshold))


def sides(head: Head, rows: Tensor, keys: Tensor) -> tuple[Side, Side]:
    """Rows and live keys, given those that are large."""
    return _side(rows, head.n, None), _side(keys, head.m, head.live_keys)


def large_tokens(head: Head, threshold: float) -> tuple[Tensor, Tensor]:
    """Rows of the query and live keys with an entry beyond the threshold (Definition B.3)."""
    rows = (head.query_maxima > threshold).nonzero().squeeze(1)
    large = head.key_maxima > threshold
    if head.key_log_weight is not None:
        large &= head.key_log_weight > -math.inf
    return rows, large.nonzero().squeeze(1)


def _far_tokens(plan: HeadPlan, head: Head) -> tuple[Tensor, Tensor]:
    """Rows and live keys that lie beyond the radius of a fitted polynomial, in its frame."""
    assert plan.fitted is not None and plan.frame is not None
    inside = framed(head, plan.frame)
    rows = (inside.query.norm(dim=1) > plan.fitted.query_radius).nonzero().squeeze(1)
    first = torch.arange(min(head.n, plan.exact_rows), device=rows.device)
    rows = torch.cat([first, rows]).unique()
    far = inside.key.norm(dim=1) > plan.fitted.key_radius
    if head.key_log_weight is not None:
        far &= head.key_log_weight > -math.inf
    return rows, far.nonzero().squeeze(1)


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
