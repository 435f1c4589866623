"""A lower bound on every row's true sum of weights, at the price of one mean.

Weights are convex functions of the score (exp, even powers), so by Jensen's inequality
``sum_j w_j f(z_ij) >= W f(<q_i, kbar> scale)`` with W the sum of the key weights and kbar the
weighted mean key; for causal rows, those of the keys so far. A sketched sum that falls far below
it has provably lost its row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .plans import HeadPlan
from .problem import Head


def lower_lse(plan: HeadPlan, head: Head, rows: Tensor | None) -> Tensor:
    """Log of the lower bound for the given rows (None: all); -inf where it says nothing."""
    log_mass, mean = _means(head)
    query = (head.query if rows is None else head.query[rows]).double()
    if head.is_causal:
        at = torch.arange(head.n, device=query.device) if rows is None else rows
        at = at.clamp(max=head.m - 1)
        log_mass, mean = log_mass[at], mean[at]
    score = (query * mean).sum(-1) * head.scale
    return log_mass + (score if plan.kernel is None else plan.kernel.log(score))


def _means(head: Head) -> tuple[Tensor, Tensor]:
    """The pair ln W, kbar over all keys, or over the keys up to each position."""
    key = head.key.double()
    weight, top = key.new_ones(head.m), 0.0
    if head.key_log_weight is not None:
        log_weight = head.key_log_weight.double()
        top = float(log_weight.max())
        weight = (log_weight - top).exp() if math.isfinite(top) else weight * 0.0
    weighted = key * weight.unsqueeze(1)
    if head.is_causal:
        mass, total = weight.cumsum(0), weighted.cumsum(0)
    else:
        mass, total = weight.sum(), weighted.sum(0)
    mean = total / torch.where(mass > 0, mass, 1.0).unsqueeze(-1)
    return mass.log() + top, mean
