"""Carry out a plan: evaluate each head's components, add the partial sums, divide once; and the
backward pass, from gradients of output and lse to those of query, key and value.

The function that is differentiated is the one that ran: supports, polynomials and sketches are
constants, and failed rows are exact here too. Of the forward pass output, lse and which rows failed
are saved, and, outside of graphs, the components with the sums of features over keys.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..components import evaluate
from ..components.cotangent import Gradients, SavedForward
from ..components.partial import Partial
from ..errors import InputError
from ..plans import HeadPlan, Plan, PolynomialHead, ThresholdHead
from ..plans.supports import RowGroup
from ..polynomials.balancing import transformed_heads
from ..problem.problem import FAILED_SHARE, Head, Outcome, Problem
from ..problem.rounding import unit_roundoff
from .jensen import least_lse

At = tuple[int, int]  # batch element and head


def execute(problem: Problem, plan: Plan) -> Outcome:
    """Run every head of the plan through the component engine."""
    outcome = Outcome.empty(problem)
    for b, h, head in problem.each_head():
        basis = plan.heads[h].basis(head)
        run_head(head, plan.heads[h], basis, outcome, (b, h))
        if problem.kept is not None:
            problem.kept[b, h] = (head, basis)
            transformed_heads.drop(head)  # only tokens are saved for the backward pass
    return outcome


def run_head(
    head: Head, plan: HeadPlan, basis: Sequence[RowGroup], outcome: Outcome, at: At
) -> None:
    """One head: evaluate, check, fall back to exact sums where rows failed, divide."""
    total = Partial.empty(head.n, head.value_dim, head.query, head.dtype)
    for group in basis:
        total.put_(group.rows, evaluate(group.components, head, group.rows))
    valid = total.has_keys & usable_rows(plan, head, None, total)
    failed = total.has_keys & ~valid
    if bool(failed.any()):
        outcome.invalid_rows[at] += failed.sum()
        if falls_back(plan):
            rows = failed.nonzero().squeeze(1)
            total.put_(rows, evaluate([plan.exact(head)], head, rows))
            valid = total.has_keys & (total.usable if head.normalise else total.finite)
            outcome.fallback[at] = failed & valid
    if type(plan) is not PolynomialHead and bool((total.has_keys & ~total.finite).any()):
        check_values(head)
    if bool(valid.any()):
        relative = (total.noise / total.den.abs())[valid].max()
        unknown = 1.0 if head.normalise else math.inf
        outcome.rounding[at] = relative.nan_to_num(unknown, posinf=math.inf)
    if not head.normalise:
        _write_sums(head, total, valid, outcome, at)
        return
    output, lse = total.divide_(valid)
    outcome.output[at], outcome.lse[at] = output.to(outcome.output.dtype), lse


def falls_back(plan: HeadPlan) -> bool:
    """Whether failed rows are computed exactly."""
    return isinstance(plan, ThresholdHead) or plan.may_fail


def warn_about(problem: Problem, plan: Plan, outcome: Outcome) -> None:
    """Warn about failed rows, and raise if the output is not finite."""
    texts = []
    if int(outcome.invalid_rows.sum() - outcome.fallback_rows.sum()):
        texts.append(
            "rows had no usable denominator (their weights cancel or vanish) and return zeros; "
            "sb.attention(..., return_result=True) counts them by head"
        )
    may_fail = any(head.may_fail for head in plan.heads)
    if may_fail and float(outcome.fallback_rows.max()) > FAILED_SHARE * problem.n:
        advice = "a larger sketch_size" if plan.heads[0].is_sketched else "a new plan"
        texts.append(
            "a sketch or fitted polynomial failed on more than 1 % of a head's rows, which were "
            f"computed exactly; use {advice} or another method"
        )
    for text in texts:
        warnings.warn(f"supportbasis: {text}", UserWarning, stacklevel=4)
    check_output(problem, outcome.output)


def check_output(problem: Problem, output: Tensor) -> None:
    """Raise if the output is not finite: finite inputs may overflow in a score or in a sum."""
    if output.is_cuda or math.isfinite(output.detach().sum(dtype=problem.dtype).item()):
        return
    if not bool(output.isfinite().all()):
        tokens = (problem.query, problem.key, problem.value)
        query, key, value = (float(x.detach().abs().max()) for x in tokens)
        raise InputError(
            f"the output overflows {problem.dtype}: the largest entries of query, key and value "
            f"are {query:.3g}, {key:.3g} and {value:.3g}; scale them down or use float64"
        )


def check_values(head: Head) -> None:
    """Raise if sums may have overflowed because of their values: weights are about 1 at most."""
    largest = float(head.value.abs().max())
    if not 4 * head.m * largest < torch.finfo(head.dtype).max:
        raise InputError(
            f"a sum overflows {head.dtype}: the largest value is {largest:.3g}; scale values down "
            "or use float64"
        )


def usable_rows(
    plan: HeadPlan, head: Head, rows: Tensor | None, total: Partial, least: Tensor | None = None
) -> Tensor:
    """Rows that have not failed: sums are finite, above their rounding error, and, for sketches and
    fitted polynomials, above the lower bound of Jensen's inequality (``least``, unless its keys
    are those of the head)."""
    usable = total.usable if head.normalise else total.finite
    if plan.may_fail:
        log_sum = total.den.double().log() + total.log_scale
        usable &= log_sum >= (least_lse(plan, head, rows) if least is None else least)
    if isinstance(plan, PolynomialHead) and head.normalise and head.value_dim:
        # over a sum that nearly vanishes values may leave the dtype of the output
        largest = torch.finfo(head.query.dtype).max
        usable &= total.num.abs().amax(-1) <= largest * total.den
    return usable


def _write_sums(head: Head, total: Partial, valid: Tensor, outcome: Outcome, at: At) -> None:
    """Unnormalised sums of all rows in one common unit, exp(log_scale), so that none overflows.

    The unit is that of the largest sum, but not so small that a factor overflows; one that does
    belongs to sums of zero. A factor e^x has the rounding of x, and a few of exp; it is applied in
    halves, since it may vanish where its product with a huge value does not."""
    least, log_scale = -math.log(torch.finfo(head.dtype).max) / 2, total.log_scale
    if head.query_log_weight is not None:
        log_scale = log_scale + head.query_log_weight
    largest = total.num.abs().amax(-1) if head.value_dim else torch.ones_like(total.den)
    size = largest.log().clamp(min=least) + log_scale
    size = size[valid & (largest > 0) & (log_scale > -math.inf)]
    outcome.log_scale[at] = size.max() if len(size) else 0.0
    exponent = log_scale - float(outcome.log_scale[at])
    half = torch.where(valid & (exponent < -least * 2), (exponent / 2).exp(), 0.0)
    kept = exponent[half > 0].abs()
    longest = float(kept.max()) if len(kept) else 0.0
    sums = total.num.nan_to_num(0.0).mul_(half.unsqueeze(1)).mul_(half.unsqueeze(1))
    outcome.output[at] = sums.to(outcome.output.dtype)
    den = torch.where(valid & (total.den > 0), total.den.log() + log_scale, -math.inf)
    outcome.lse[at] = den.to(outcome.lse.dtype)
    outcome.rounding[at] += math.expm1((longest + 8) * unit_roundoff(head.dtype))


def backward(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients [batch, heads or key heads, ...] in the dtype of the sums; those of the key
    log-weights, [batch, heads, m], if they are asked for."""
    tokens = (problem.query, problem.key, problem.value)
    query, key, value = (x.new_zeros(x.shape, dtype=problem.dtype) for x in tokens)
    shape = (problem.batch, problem.heads, problem.m)
    weight = query.new_zeros(shape) if saved.for_weights else None
    for b, h, head in problem.each_head():
        at, key_at = (b, h), (b, h // problem.group)
        own_weight = None if weight is None else weight[at]
        total = Gradients(query[at], key[key_at], value[key_at], own_weight)
        cotangent, failed = saved.cotangent(at), saved.fallback[at]
        if bool(failed.any()):
            exact = failed.nonzero().squeeze(1)
            plan.heads[h].exact(head).add_gradients(total, cotangent[exact], head, exact)
            cotangent = cotangent.without(failed)
        head, basis = problem.kept[at] if problem.kept else (head, plan.heads[h].basis(head))
        for group in basis:
            part = cotangent if group.rows is None else cotangent[group.rows]
            for component in group.components:
                component.add_gradients(total, part, head, group.rows)
    return Gradients(query, key, value, weight)
