"""The backward pass of `execute`: gradients of output and lse to those of query, key and value.

The function that is differentiated is the one that ran: supports, thresholds, polynomials and
sketches are constants, and rows that fell back to exact sums are exact here too. Of the forward
pass its output, its lse and which rows these are is saved, and, outside of graphs, the components
with the sums of features over keys; weights and features are formed again in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..components.cotangent import Cotangent, Gradients, SavedForward
from ..plans import HeadPlan, Plan
from ..plans.supports import RowGroup
from ..problem.problem import Head, Problem


def backward(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients [batch, heads or key heads, ...] in the dtype of the sums; those of the key
    log-weights, [batch, heads, m], if they are asked for."""
    query, key, value = (
        x.new_zeros(x.shape, dtype=problem.dtype)
        for x in (problem.query, problem.key, problem.value)
    )
    weights = (problem.batch, problem.heads, problem.m)
    weight = query.new_zeros(weights) if saved.for_weights else None
    total = Gradients(query, key, value, weight)
    for b, h, head in problem.each_head():
        at, key_at = (b, h), (b, h // problem.group)
        part = Gradients(
            query[at], key[key_at], value[key_at], None if weight is None else weight[at]
        )
        if problem.kept:
            head, basis = problem.kept[at]
        else:
            basis = plan.heads[h].basis(head)
        backward_head(head, plan.heads[h], basis, saved.cotangent(at), saved.fallback[at], part)
    return total


def backward_head(
    head: Head,
    plan: HeadPlan,
    basis: Sequence[RowGroup],
    cotangent: Cotangent,
    fallback: Tensor,
    total: Gradients,
) -> None:
    """One head: every component adds its part to ``total``."""
    for group in basis:
        rows, part, lost = group.rows, cotangent, fallback
        if rows is not None:
            part, lost = cotangent[rows], fallback[rows]
        if bool(lost.any()):
            where = lost.nonzero().squeeze(1)
            exact = where if rows is None else rows[where]
            plan.exact(head).add_gradients(total, part[where], head, exact)
            part = part.without(lost)
        for component in group.components:
            component.add_gradients(total, part, head, rows)
