"""Plans of a call: one made by a method, with one entry for each head and any batch, or the
caller's, checked against the call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..accuracy.certificate import certify
from ..engine.execute import execute
from ..engine.ranges import check_plan, check_scores, checked, leaves, score_range, with_range
from ..errors import InputError
from ..plans import BucketHead, ExactHead, HeadPlan, ListHead, Plan, PolynomialHead
from ..problem.checks import is_tracing
from ..problem.problem import Head, Problem
from .auto import Auto
from .base import Exact, Method, check_is_method, exact_plan
from .polynomial import Polynomial
from .power import PowerAttention

LARGE_ERROR = 0.05  # measured, of a head's output: warned about where no tolerance was given


def plan_of(
    problem: Problem, method: Method | None, plan: Plan | None, implementation: str = "auto"
) -> Plan:
    """The caller's plan, checked against the call, or a new one."""
    check_is_method(method)
    if plan is None:
        method = method or Auto()
        _check_call(problem, method)
        if problem.needs_exact or not isinstance(method, Polynomial):
            check_scores(problem)
        return make_plan(problem, method)
    if not isinstance(plan, Plan):
        raise InputError(f"plan must be an sb.Plan, got {type(plan).__name__}")
    if method is not None and method != plan.method:
        raise InputError(f"method is {method} but the plan was made with {plan.method}")
    _check_call(problem, plan.method)
    if problem.needs_exact:
        if not is_tracing():
            check_scores(problem)
        return make_plan(problem, plan.method)
    check_plan(problem, plan)
    if is_tracing():  # the operator checks entries
        return plan
    with torch.autocast(problem.query.device.type, enabled=False):  # ranges are in full precision
        return checked(problem, plan, implementation)


def make_plan(problem: Problem, method: Method) -> Plan:
    reason = problem.needs_exact
    if reason and not isinstance(method, Exact):
        text = f"supportbasis: {method} runs exactly because {reason}"
        warnings.warn(text, UserWarning, stacklevel=4)
    with torch.no_grad(), torch.autocast(problem.query.device.type, enabled=False):
        heads = tuple(
            method.plan_exactly(problem.head(0, number), reason)
            if reason and problem.batch
            else plan_heads(method, [problem.head(b, number) for b in range(problem.batch)])
            for number in range(problem.heads)
        )
    errors = [(head.measured or 0.0, number) for number, head in enumerate(heads)]
    count = sum(error > LARGE_ERROR for error, _ in errors)
    if count and not method.promises_error:
        error, number = max(errors)
        others = f" (and more than {LARGE_ERROR:.0%} on {count - 1} more)" if count > 1 else ""
        text = f"{method} has a measured error of {error:.2g} on head {number}{others}"
        text = f"supportbasis: {text}; give a tolerance to limit it"
        warnings.warn(text, UserWarning, stacklevel=4)
    return Plan(method, problem.dim, heads, problem.given_scale, problem.is_causal)


def _check_call(problem: Problem, method: Method) -> None:
    """Raise for gradients of kernel sums, and for dropout and densities of polynomial attention."""
    if problem.requires_grad and not problem.normalise:
        raise InputError(
            "an input requires grad, but kernel sums have no gradients so far; use "
            "torch.no_grad() or detach the inputs"
        )
    if not isinstance(method, PowerAttention):
        return
    if problem.dropout_p > 0:
        raise InputError(f"dropout_p is {problem.dropout_p:g}, but {method} has no dropout; use 0")
    if problem.query_log_weight is not None:
        raise InputError(f"method is {method}, whose kernel is not Gaussian; use another method")


def plan_heads(method: Method, heads: Sequence[Head]) -> HeadPlan:
    """The plan of one head for all batch elements, with the range of their scores.

    Each element is planned separately, and the most accurate of these plans (`_accuracy_rank`) is
    taken, if the scores of the other elements are in its range and its error on them is within the
    tolerance, if there is one. Otherwise the head is exact."""
    if not heads:
        return ExactHead(reason="the batch is empty", n=0, m=0)
    plans: Sequence[HeadPlan] = [method.plan_head(head) for head in heads]
    if len(heads) > 1 and not any(isinstance(plan, ExactHead) for plan in plans):
        plans = method.shared(heads, plans)
    for plan in plans:
        if isinstance(plan, ExactHead):
            return plan
    own = max(range(len(plans)), key=lambda number: _accuracy_rank(plans[number]))
    plan = plans[own]
    for number, head in enumerate(heads):
        if number != own and not _serves(method, plan, heads[own], head, plans[number]):
            return exact_plan(head, "no plan of one batch element serves the others")
    cost, speedup = max(each.cost for each in plans), min(each.speedup for each in plans)
    errors = [each.measured for each in plans if each.measured is not None]
    plan = replace(plan, cost=cost, speedup=speedup, measured=max(errors, default=None))
    return with_range(plan, heads)


def _accuracy_rank(plan: HeadPlan) -> tuple[float, float]:
    """Sort key of plans by accuracy: lists by the lowest price, polynomials by the widest range,
    then by the highest cost."""
    if isinstance(plan, ListHead):
        return -plan.lists.price, plan.cost
    if isinstance(plan, BucketHead):
        return max(pair.reach for pair in plan.pairs), plan.cost
    return (plan.bound if isinstance(plan, PolynomialHead) else 0.0), plan.cost


def _serves(method: Method, plan: HeadPlan, own: Head, head: Head, instead: HeadPlan) -> bool:
    """Whether the plan of one batch element is accurate enough for another one."""
    if isinstance(plan, ListHead) and isinstance(instead, ListHead):
        return replace(plan.lists, price=0.0) == replace(instead.lists, price=0.0)
    if leaves(with_range(plan, [own]), score_range(plan, head)) is not None:
        return False
    tolerance = getattr(method, "tolerance", None)
    return tolerance is None or _error(method, plan, head) <= tolerance


def _error(method: Method, plan: HeadPlan, head: Head) -> float:
    """Upper limit of the measured error of a plan on a head."""
    query, key, value = (x[None, None] for x in (head.query, head.key, head.value))
    log_weights = (head.key_log_weight, head.query_log_weight)
    keys, rows = (None if x is None else x[None, None] for x in log_weights)
    flags = (head.scale, head.is_causal, head.normalise)
    problem = Problem(query, key, value, keys, rows, *flags)
    whole = Plan(method, head.dim, (plan,)).resolved(head.requires_grad)
    return float(certify(problem, whole, execute(problem, whole)).limit)
