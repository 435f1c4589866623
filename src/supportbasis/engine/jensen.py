"""A lower bound on every row's true sum of weights, for the cost of a few means.

Weights are convex functions of the score (exp, even powers), so by Jensen's inequality
``sum_j w_j f(z_ij) >= W f(<q_i, kbar> scale)`` with W the sum of the key weights and kbar the
weighted mean key; for causal rows, those of the keys so far. A row whose sketched sum falls far
below it has provably failed.

Sums of fitted polynomials have no noise and need not fall far: one that is half of the bound is
wrong. Scores that spread make a bound by one mean loose, so keys are split by the signs of their
leading coordinates, and the bounds of the groups are added up; not those of causal heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..components.exact_sum import take, take_index
from ..plans import FittedHead, HeadPlan, PowerHead
from ..polynomials.balancing import transformed
from ..problem.problem import Head

BLOCK = 4096  # tokens in float64 at a time
SKETCHED_SHARE = 1 / 64  # of the bound: a row whose sketched sum is below that has failed
FITTED_SHARE = 1 / 2  # the same for a fitted polynomial
SIGNS = 4  # coordinates that split keys into groups
PRODUCTS = 128  # at most, that one sum over tokens is made of
ENTRIES = 2**26  # of rows or keys and groups in memory at a time


def least_lse(
    plan: HeadPlan, head: Head, rows: Tensor | None, keys: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Log of the smallest sum of the given rows (None: all) that has not failed. For fitted heads
    that are not causal ``keys``, transformed, and their log-weights may stand for those of the
    head."""
    if isinstance(plan, FittedHead) and not head.is_causal:
        balanced = transformed(head, plan.transform)
        key, log_weight = keys or (balanced.key, balanced.log_weights(head.dtype))
        if len(key):
            least = grouped_lse(take(balanced.query, rows)[None], key[None], log_weight[None])[0]
            shift = plan.transform.row_shift(head, rows)
            return (least + shift).double() + math.log(FITTED_SHARE)
    share = FITTED_SHARE if isinstance(plan, FittedHead) else SKETCHED_SHARE
    return lower_lse(plan, head, rows) + math.log(share)


def grouped_lse(query: Tensor, key: Tensor, log_weight: Tensor) -> Tensor:
    """Log of the bound [heads, n] for transformed queries [heads, n, d] and keys [heads, m, d]. A
    group whose weight vanishes is left out."""
    step = max(1, ENTRIES // (2**SIGNS * max(query.shape[1], key.shape[1])))  # heads at a time
    if len(query) > step:
        parts = (x.split(step) for x in (query, key, log_weight))
        return torch.cat([grouped_lse(*part) for part in zip(*parts, strict=True)])
    top = log_weight.amax(1, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    member = membership(key) * (log_weight - top).exp().unsqueeze(1)
    mass = member.sum(2, keepdim=True)
    mean = long_product(member, key) / torch.where(mass > 0, mass, 1.0)
    score = torch.baddbmm(mass.log() + top.unsqueeze(2), mean, query.mT)  # [heads, groups, n]
    least = score.logsumexp(1)
    return torch.where(least.isnan(), math.inf, least)  # scores that overflow: nothing is known


def long_product(left: Tensor, right: Tensor) -> Tensor:
    """Left [..., rows, tokens] times right [..., tokens, columns]. One product so long and thin
    would keep few units of a GPU busy."""
    parts = math.gcd(right.shape[-2], PRODUCTS)
    split = left.unflatten(-1, (parts, -1)).transpose(-3, -2)
    return (split @ right.unflatten(-2, (parts, -1))).sum(-3)


def membership(key: Tensor) -> Tensor:
    """Whether each key [..., m, d] is in each group, [..., groups, m]: a group has the same signs
    in its leading coordinates."""
    signs = min(SIGNS, key.shape[-1])
    label = ((key[..., :signs] > 0) * 2 ** torch.arange(signs, device=key.device)).sum(-1)
    return label.unsqueeze(-2) == torch.arange(2**signs, device=key.device).unsqueeze(-1)


def lower_lse(plan: HeadPlan, head: Head, rows: Tensor | None) -> Tensor:
    """Log of the lower bound for the given ascending rows (None: all); -inf for rows without keys.
    ln W and kbar are running sums in float64; a row reads them at the last key it attends to."""
    row_at = take_index(rows, 0, head.n, head.query)
    last = row_at.clamp(max=head.m - 1) if head.is_causal else torch.full_like(row_at, head.m - 1)
    least = head.query.new_full((len(last),), -math.inf, dtype=torch.float64)
    log_weight = head.log_weights(torch.float64).detach()
    top = float(log_weight.max()) if head.m else 0.0
    top = top if math.isfinite(top) else 0.0
    mass, total = least.new_zeros(1), least.new_zeros(head.dim)
    for start in range(0, head.m, BLOCK):
        keys = slice(start, start + BLOCK)
        weight = (log_weight[keys] - top).exp()
        masses = mass + weight.cumsum(0)
        totals = total + (head.key[keys].double() * weight.unsqueeze(1)).cumsum(0)
        mass, total = masses[-1], totals[-1]
        first, end = torch.searchsorted(last, last.new_tensor([start, start + BLOCK])).tolist()
        for begin in range(first, end, BLOCK):
            stop = min(end, begin + BLOCK)
            at = last[begin:stop] - start
            mean = totals[at] / torch.where(masses[at] > 0, masses[at], 1.0).unsqueeze(1)
            query = take(head.query, rows, begin, stop).double()
            score = (query * mean).sum(-1) * head.scale
            if isinstance(plan, PowerHead):
                score = plan.kernel.log(score)
            least[begin:stop] = masses[at].log() + top + score
    return least
