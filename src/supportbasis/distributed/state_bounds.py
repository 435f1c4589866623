"""Lower bounds of row sums (`engine.jensen`) where keys are on other ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..engine.jensen import least_lse, membership
from ..plans import FittedHead
from ..polynomials.balancing import transformed
from ..problem.problem import Head


def group_sums(plan: FittedHead, head: Head) -> tuple[Tensor, float]:
    """Weights and weighted sums of the keys of a head in units of exp(top), and top: [1, 1 + d] of
    a causal head, else [groups, 1 + d] of its transformed keys. They add up over devices."""
    if head.is_causal:
        key, log_weight = head.key.to(head.dtype), head.log_weights(head.dtype)
        member = key.new_ones(1, len(key))
    else:
        balanced = transformed(head, plan.transform)
        key, log_weight = balanced.key, balanced.log_weights(head.dtype)
        member = membership(key).to(key.dtype)
    top = float(log_weight.max()) if len(key) else -math.inf
    weight = (log_weight - top).exp() if top > -math.inf else torch.zeros_like(log_weight)
    member = member * weight
    return torch.cat([member.sum(1, keepdim=True), member @ key], 1), top


def least_lse_with(
    plan: FittedHead, head: Head, rows: Tensor | None, sums: Tensor, top: float
) -> Tensor:
    """`least_lse` where keys are on other devices: ``sums`` are the `group_sums` of all keys, or in
    causal attention of those before the own ones. A group stands for itself as one key, its mean:
    it has the signs, and so the label, of its members."""
    mass = sums[:, 0]
    some = mass > 0
    mean, log_mass = sums[some, 1:] / mass[some].unsqueeze(1), mass[some].log() + top
    if not head.is_causal:
        return least_lse(plan, head, rows, (mean, log_mass))
    if not len(mean):
        return least_lse(plan, head, rows)
    first = head.query.new_zeros(1, head.dim)
    joined = replace(
        head,
        query=torch.cat([first, head.query]),
        key=torch.cat([mean, head.key.to(mean.dtype)]),
        key_log_weight=torch.cat([log_mass, head.log_weights(mass.dtype)]),
    )
    after = torch.arange(head.n, device=mass.device) if rows is None else rows
    return least_lse(plan, joined, after + 1)
