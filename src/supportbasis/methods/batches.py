"""One plan for a head of several batch elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..accuracy.certificate import certify
from ..engine.execute import execute
from ..engine.ranges import leaves, score_range, with_range
from ..plans import BucketHead, ExactHead, HeadPlan, ListHead, Plan, PolynomialHead
from ..problem.problem import Head, Problem
from .base import Method, exact_plan


def plan_heads(method: Method, heads: Sequence[Head]) -> HeadPlan:
    """What a method plans for one head of all batch elements, with the range of their scores.

    Each element is planned for itself. Of these plans the most careful is taken, if it serves the
    other elements too: their scores are in its range, and where a tolerance was asked for its error
    on them is within it. Otherwise the head is exact.
    """
    if not heads:
        return ExactHead(reason="the batch is empty", n=0, m=0)
    plans = method.plan_batch(heads)
    return with_range(_joined(method, plans, heads), heads)


def _joined(method: Method, plans: Sequence[HeadPlan], heads: Sequence[Head]) -> HeadPlan:
    if len(plans) == 1:
        return plans[0]
    for plan in plans:
        if isinstance(plan, ExactHead):
            return plan
    own = max(range(len(plans)), key=lambda number: _care(plans[number]))
    plan = plans[own]
    for number, head in enumerate(heads):
        if number != own and not _serves(method, plan, heads[own], head, plans[number]):
            return exact_plan(head, "no plan of one batch element serves the others")
    errors = [each.measured for each in plans if each.measured is not None]
    return replace(
        plan,
        cost=max(each.cost for each in plans),
        speedup=min(each.speedup for each in plans),
        measured=max(errors, default=None),
    )


def _care(plan: HeadPlan) -> tuple[float, float]:
    """Lists of the lowest price, polynomials for the widest range, and what costs most."""
    if isinstance(plan, ListHead):
        return -plan.lists.price, plan.cost
    if isinstance(plan, BucketHead):
        return max(pair.reach for pair in plan.pairs), plan.cost
    return (plan.bound if isinstance(plan, PolynomialHead) else 0.0), plan.cost


def _serves(method: Method, plan: HeadPlan, own: Head, head: Head, instead: HeadPlan) -> bool:
    """Whether a plan that was made for its own batch element serves another one."""
    if isinstance(plan, ListHead) and isinstance(instead, ListHead):
        return replace(plan.lists, price=0.0) == replace(instead.lists, price=0.0)
    if leaves(with_range(plan, [own]), score_range(plan, head)) is not None:
        return False
    tolerance = getattr(method, "tolerance", None)
    return tolerance is None or _error(method, plan, head) <= tolerance


def _error(method: Method, plan: HeadPlan, head: Head) -> float:
    """Upper limit of the measured error of a plan on a head."""
    problem = Problem(
        head.query[None, None],
        head.key[None, None],
        head.value[None, None],
        None if head.key_log_weight is None else head.key_log_weight[None, None],
        None if head.query_log_weight is None else head.query_log_weight[None, None],
        None,
        0.0,
        head.is_causal,
        head.scale,
        head.normalise,
        (1, 1),
    )
    whole = Plan(method, head.dim, (plan,)).resolved(head.requires_grad)
    return float(certify(problem, whole, execute(problem, whole)).limit)
