"""Slow, obvious float64 twins: the whole weight matrix, written down. For small inputs.

Autograd runs through them, which makes them the twins of the backward pass too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .basis import buckets_of
from .components.sketched import Sketched
from .jensen import least_lse
from .plans import HeadPlan, Plan
from .powers import PowerKernel
from .problem import Head, Problem


def execute(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor]:
    """What `execute.execute` computes: (output, lse), [batch, heads, ...], in float64.

    For a kernel sum the output is the sum itself, in linear units.
    """
    outputs, sums = [], []
    for b, h, head in problem.each_head():
        output, lse = run_head(head, plan.head(b, h))
        outputs.append(output)
        sums.append(lse)
    shape = (problem.batch, problem.heads)
    return (
        torch.stack(outputs).unflatten(0, shape),
        torch.stack(sums).unflatten(0, shape),
    )


def run_head(head: Head, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """One head, quadratic time and memory. Rows that a sketch lost are exact, as in `execute`."""
    weight, top = weights(head, plan)
    den = weight.sum(1)
    if plan.may_lose_rows:
        kernel = None if plan.kernel is None else replace(plan.kernel, sketch_size=None)
        exact_plan = replace(plan, pairs=(), kernel=kernel, fitted=None)
        exact, exact_top = weights(head, exact_plan)
        lost = ~(den.log() + top >= least_lse(plan, head, None)) | (den == 0)
        weight = torch.where(lost.unsqueeze(1), exact, weight)
        top, den = torch.where(lost, exact_top, top), weight.sum(1)
    num = weight @ head.value.double()
    if not head.normalise:
        factor = top if head.query_log_weight is None else top + head.query_log_weight.double()
        return num * factor.exp().unsqueeze(1), den.log() + factor
    seen = den > 0
    den = torch.where(seen, den, 1.0)
    output = torch.where(seen.unsqueeze(1), num / den.unsqueeze(1), 0.0)
    return output, torch.where(seen, den.log() + top, -math.inf)


def weights(head: Head, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """The matrix of weights in units of exp(top) for each row: exp, or what the plan puts there."""
    score = head.query.double() @ head.key.double().T * head.scale
    log_weight = _log_weight(head, score)
    if plan.kernels:
        score = _log_kernels(head, plan, score)
    top = (score + log_weight).amax(1) if head.m else score.new_zeros(head.n)
    top = torch.where(top > -math.inf, top, 0.0).detach()  # a unit, which cancels
    exact = (score + log_weight - top.unsqueeze(1)).exp()
    if plan.fitted is not None:
        row, key, log_fitted_unit = _framed(head, plan)
        unit = (log_weight + log_fitted_unit - top.unsqueeze(1)).exp()
        return torch.where(_is_near(plan, row, key), plan.fitted(row, key) * unit, exact), top
    if plan.polynomial is None:
        return exact, top
    unit = (log_weight + plan.polynomial.bound - top.unsqueeze(1)).exp()
    return torch.where(_is_small(head, plan), plan.polynomial(score) * unit, exact), top


def _log_kernels(head: Head, plan: HeadPlan, score: Tensor) -> Tensor:
    """Log-weights of all pairs where powers stand in for exp: the score itself where none does."""
    if plan.kernel is not None:
        return _log_kernel(head, plan.kernel, score)
    row_sets, key_sets = buckets_of(plan, head)
    score = score.clone()
    for pair in plan.pairs:
        rows, keys = row_sets[pair.row], key_sets[pair.key]
        if pair.kernel is not None:
            row_at = torch.arange(head.n) if rows is None else rows
            key_at = torch.arange(head.m) if keys is None else keys
            where = torch.meshgrid(row_at, key_at, indexing="ij")
            score[where] = _log_kernel(head, pair.kernel, score)[where]
    return score


def _log_kernel(head: Head, kernel: PowerKernel, score: Tensor) -> Tensor:
    """Log-weights of a power kernel for all pairs, as if every one of them were in this piece."""
    if kernel.sketch_size is None:
        return kernel.log(score)
    wide = replace(head, precision=torch.float64)
    sketched = Sketched(wide, kernel)
    query, log_query = sketched.query(head.query)
    key, log_key = sketched.key(head.key)
    return (query @ key.T).square().log() + log_query.unsqueeze(1) + log_key


def _log_weight(head: Head, score: Tensor) -> Tensor:
    weight = torch.zeros_like(score)
    if head.key_log_weight is not None:
        weight = weight + head.key_log_weight.double()
    if head.mask is not None:
        mask = head.mask
        weight = weight.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else weight + mask
    if head.is_causal:
        weight = weight.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -math.inf)
    return weight


def _framed(head: Head, plan: HeadPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys in the plan's frame, and what the scores have more than their products."""
    frame = plan.frame
    assert frame is not None
    query, key = head.query.double(), head.key.double()
    away = key - frame.key_centre
    shift = (query @ frame.key_centre).unsqueeze(1) + away @ frame.query_centre
    root = math.sqrt(head.scale)
    row = (query - frame.query_centre) @ frame.query_map * root
    return row, away @ frame.key_map * root, shift * head.scale


def _is_near(plan: HeadPlan, row: Tensor, key: Tensor) -> Tensor:
    """Pairs within the radius of a fitted polynomial."""
    assert plan.fitted is not None
    near = row.norm(dim=1) <= plan.fitted.query_radius
    near[: plan.exact_rows] = False
    return near.unsqueeze(1) & (key.norm(dim=1) <= plan.fitted.key_radius)


def _is_small(head: Head, plan: HeadPlan) -> Tensor:
    """Pairs of a small row and a small key (all pairs where nothing is split)."""
    if plan.kind == "polynomial":
        return _all(head.n, head).unsqueeze(1) & _all(head.m, head)
    assert plan.threshold is not None
    row = head.query.double().abs().amax(1) <= plan.threshold
    key = head.key.double().abs().amax(1) <= plan.threshold
    return row.unsqueeze(1) & key


def _all(count: int, head: Head) -> Tensor:
    return torch.ones(count, dtype=torch.bool, device=head.query.device)
