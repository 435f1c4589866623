"""Queries that continue a cache: earlier keys without a mask and own keys causally, joined by their
log-sum-exps."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..api import autocast
from ..components.partial import merged
from ..engine.autograd import run
from ..methods import Method
from ..methods.planning import plan_of
from ..plans import ListHead, Plan
from ..problem.validation import attention_problem
from .calls import Call


def continued(call: Call, method: Method | None, plan: Plan | None) -> Tensor:
    """The output of a causal call with earlier keys."""
    past = call.offset
    mask = call.attn_mask
    sides = [slice(0, past), slice(past, past + call.n)]
    found = []
    for keys, causal in zip(sides, (False, True), strict=True):
        part = None if mask is None else mask[..., keys]
        given = plan if causal or plan is None else without_windows(plan)
        found.append(with_lse(call, keys, part, causal, method, given))
    output, _ = merged(*found[0], *found[1])
    return output.to(autocast(call.query)[0].dtype)


def with_lse(
    call: Call,
    keys: slice,
    mask: Tensor | None,
    causal: bool,
    method: Method | None,
    plan: Plan | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over some keys of a call."""
    query, key, value = autocast(call.query, call.key[:, :, keys], call.value[:, :, keys])
    problem = attention_problem(query, key, value, mask, 0.0, causal, call.scale, call.group > 1)
    made = plan_of(problem, method, plan).resolved(problem.requires_grad)
    outcome = run(problem, made, True)
    return outcome.output, outcome.lse


def without_windows(plan: Plan) -> Plan:
    """The plan of the same heads over keys that all rows attend to."""
    heads = (
        replace(head, lists=replace(head.lists, window=0, strict=False))
        if isinstance(head, ListHead)
        else head
        for head in plan.heads
    )
    return replace(plan.with_heads(heads), is_causal=False)
