"""Slow, obvious float64 references: the whole weight matrix, written down. For small inputs.

Autograd runs through them, which makes them references of the backward pass too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from supportbasis.components.sketch_sum import SketchSum
from supportbasis.engine.jensen import least_lse
from supportbasis.lists.tables import SCORED_MEMBERS, ListSettings, Tables, tables
from supportbasis.plans import (
    BucketHead,
    ExactHead,
    FittedHead,
    HeadPlan,
    ListHead,
    Plan,
    PolynomialHead,
    PowerHead,
    ThresholdHead,
)
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import Head, Problem


def execute(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor]:
    """What `execute.execute` computes: (output, lse), [batch, heads, ...], in float64.

    For a kernel sum the output is the sum itself, in linear units.
    """
    found = [run_head(head, plan.heads[h]) for _, h, head in problem.each_head()]
    output, lse = (torch.stack(x) for x in zip(*found, strict=True))
    shape = (problem.batch, problem.heads)
    return output.unflatten(0, shape), lse.unflatten(0, shape)


def run_head(head: Head, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """One head, quadratic time and memory. Failed rows are exact, as in `execute`."""
    if isinstance(plan, ListHead) and head.n and head.m:
        return list_attention(head, plan.lists, tables(head, plan.lists))
    weight, top = weights(head, plan)
    den = weight.sum(1)
    if plan.may_fail:
        exact_plan: HeadPlan = ExactHead(n=head.n, m=head.m)
        if isinstance(plan, PowerHead):
            exact_plan = replace(plan, kernel=replace(plan.kernel, sketch_size=None))
        exact, exact_top = weights(head, exact_plan)
        failed = ~(den.log() + top >= least_lse(plan, head, None)) | (den == 0)
        weight = torch.where(failed.unsqueeze(1), exact, weight)
        top, den = torch.where(failed, exact_top, top), weight.sum(1)
    num = weight @ head.value.double()
    if not head.normalise:
        factor = top if head.query_log_weight is None else top + head.query_log_weight.double()
        return num * factor.exp().unsqueeze(1), den.log() + factor
    positive = den > 0
    den = torch.where(positive, den, 1.0)
    output = torch.where(positive.unsqueeze(1), num / den.unsqueeze(1), 0.0)
    return output, torch.where(positive, den.log() + top, -math.inf)


def weights(head: Head, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """The weights of all pairs in units of exp(top) of each row, as the plan defines them."""
    score = head.query.double() @ head.key.double().T * head.scale
    log_weight = _log_weight(head, score)
    if isinstance(plan, PowerHead):
        score = _log_kernel(head, plan.kernel, score)
    elif isinstance(plan, BucketHead):
        score = _log_kernels(head, plan, score)
    top = (score + log_weight).amax(1) if head.m else score.new_zeros(head.n)
    top = torch.where(top > -math.inf, top, 0.0).detach()  # a unit, which cancels
    exact = (score + log_weight - top.unsqueeze(1)).exp()
    if isinstance(plan, FittedHead):
        row, key, log_fitted_unit = _balanced(head, plan)
        unit = (log_weight + log_fitted_unit - top.unsqueeze(1)).exp()
        return torch.where(_is_near(plan, row, key), plan.fitted(row, key) * unit, exact), top
    if not isinstance(plan, PolynomialHead):
        return exact, top
    unit = (log_weight + plan.polynomial.bound - top.unsqueeze(1)).exp()
    return torch.where(_is_small(head, plan), plan.polynomial(score) * unit, exact), top


def _log_kernels(head: Head, plan: BucketHead, score: Tensor) -> Tensor:
    """Log-weights of all pairs: of the power of each bucket pair, or the exact score."""
    row_sets, key_sets = plan.buckets(head)
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
    sketched = SketchSum(kernel).task(wide, None)
    query, log_query = sketched.unit("query", head.query)
    key, log_key = sketched.unit("key", head.key)
    return (query @ key.T).square().log() + log_query.unsqueeze(1) + log_key


def _log_weight(head: Head, score: Tensor) -> Tensor:
    weight = torch.zeros_like(score) + head.log_weights(torch.float64)
    if head.mask is not None:
        mask = head.mask
        weight = weight.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else weight + mask
    if head.is_causal:
        weight = weight.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -math.inf)
    return weight


def _balanced(head: Head, plan: FittedHead) -> tuple[Tensor, Tensor, Tensor]:
    """Transformed queries x and keys y, and the scores less <x, y> [n, m]."""
    transform = plan.transform
    query, key = head.query.double(), head.key.double()
    away = key - transform.key_centre
    shift = (query @ transform.key_centre).unsqueeze(1) + away @ transform.query_centre
    root = math.sqrt(head.scale)
    row = (query - transform.query_centre) @ transform.query_map * root
    return row, away @ transform.key_map * root, shift * head.scale


def _is_near(plan: FittedHead, row: Tensor, key: Tensor) -> Tensor:
    """Pairs within the radius of a fitted polynomial."""
    near = row.norm(dim=1) <= plan.fitted.query_radius
    near[: plan.exact_rows] = False
    return near.unsqueeze(1) & (key.norm(dim=1) <= plan.fitted.key_radius)


def _is_small(head: Head, plan: PolynomialHead) -> Tensor:
    """Pairs of a small row and a small key (all pairs where nothing is split)."""
    if not isinstance(plan, ThresholdHead):
        return torch.ones(head.n, head.m, dtype=torch.bool, device=head.query.device)
    row, key = (x.double().abs().amax(1) <= plan.threshold for x in (head.query, head.key))
    return row.unsqueeze(1) & key


def list_attention(head: Head, settings: ListSettings, made: Tables) -> tuple[Tensor, Tensor]:
    """Attention by lists of exact and tilted keys, pair by pair: output and lse.

    The sorting (`Tables`) is given; tilts, lists and sums are made here, each from its definition.
    """
    query, key, value = (x.double() for x in (head.query, head.key, head.value))
    bias = head.log_weights(torch.float64)
    score, live = head.scale * query @ key.T + bias, bias > -math.inf
    output = torch.zeros(head.n, head.value_dim, dtype=torch.float64)
    lse = torch.full((head.n,), -math.inf, dtype=torch.float64)
    if settings.window:
        row, column = torch.arange(head.n).unsqueeze(1), torch.arange(head.m)
        own = (row // settings.window == column // settings.window) & (row >= column) & live
        some = own.any(1).nonzero().squeeze(1)
        masked = score.masked_fill(~own, -math.inf)[some]
        lse = lse.index_copy(0, some, masked.logsumexp(1))
        output = output.index_copy(0, some, masked.softmax(1) @ value)
    own_lse = lse
    leaves = [leaf[leaf >= 0] for leaf in made.slots]
    for cell, members in enumerate(made.members):
        rows, members = made.tiles[made.cell == cell].flatten(), members[members >= 0]
        rows, visible = rows[rows >= 0], leaves[: int(made.visible[cell])]
        visible = [leaf for leaf in visible if bool(live[leaf].any())]
        if not len(rows) or not len(members) or not visible:
            continue
        mean = query[members].mean(0)
        tilts = [_tilted(head.scale * key[j] @ mean + bias[j], key[j], value[j]) for j in visible]
        keys, values, masses, spreads = map(torch.stack, zip(*tilts, strict=True))
        variance = (query[members] - mean).square().sum(1).mean() / max(1, head.dim)
        variance = head.scale**2 * variance * spreads
        weight = masses - head.scale * keys @ mean + (variance / 2).log1p()
        scored = query[members[:: max(1, settings.block // SCORED_MEMBERS)]]
        share = (head.scale * scored @ keys.T + weight).softmax(1)
        opened = share.square().mean(0) * variance > settings.price
        exact = [leaf[live[leaf]] for leaf, is_open in zip(visible, opened, strict=True) if is_open]
        listed = torch.cat([rows[:0], *exact])
        closed = head.scale * query[rows] @ keys[~opened].T + weight[~opened]
        scores = torch.cat([closed, score[rows][:, listed], own_lse[rows, None]], 1)
        weights = scores.softmax(1)
        far = weights[:, :-1] @ torch.cat([values[~opened], value[listed]])
        output = output.index_copy(0, rows, far + weights[:, -1:] * output[rows])
        lse = lse.index_copy(0, rows, scores.logsumexp(1))
    return output, lse


def _tilted(score: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Tilted key and value of a leaf, its log-mass, and the variance of its keys."""
    weight, spread = score.softmax(0), (key - key.mean(0)).square().sum(1).mean()
    return weight @ key, weight @ value, score.logsumexp(0), spread
