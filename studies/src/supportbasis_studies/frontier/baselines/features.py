"""Performer: positive orthogonal random features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import Answer, Case

ENTRIES = 2**23  # features formed at once


def performer(case: Case, budget: float, seed: int) -> Answer | None:
    """exp(<q, k>) as the mean of exp(<w, q> - |q|²/2) exp(<w, k> - |k|²/2) over random w.

    FAVOR+ of Performer (Choromanski et al., 2021): the w are orthogonal in groups of d, with the
    lengths of Gaussian vectors. Every feature is kept in units of its largest key so far, so that
    nothing overflows or vanishes that matters. Causal: sums over the keys up to the query's.
    """
    head = case.head
    each = (head.n + head.m) * (head.d + head.dv + 1)
    count = int(budget * case.exact_work / each)
    if count < 1:
        return None
    w = _orthogonal(count, head.d, torch.Generator().manual_seed(seed)).to(head.key.device)
    root = math.sqrt(head.scale)
    logs = _logs(case.query * root, w)
    unit = torch.full((count,), -math.inf, device=w.device)
    state, mass = head.value.new_zeros(count, head.dv), head.value.new_zeros(count)
    output = head.value.new_zeros(len(logs), head.dv)
    step = max(1, ENTRIES // count)
    for start in range(0, head.m, step):
        part = slice(start, start + step)
        value, feature = head.value[part], _logs(head.key[part] * root, w)
        larger = torch.maximum(unit, feature.amax(0))
        state.mul_((unit - larger).exp().unsqueeze(1))
        mass.mul_((unit - larger).exp())
        unit, feature = larger, (feature - larger).exp_()
        if head.is_causal:
            mine = (case.rows >= start) & (case.rows < start + step)
            weight = (logs[mine] + unit).softmax(1)
            later = case.at[part] > case.rows[mine].unsqueeze(1)
            inside = (weight @ feature.T).masked_fill_(later, 0.0)
            whole = (weight @ mass + inside.sum(1)).unsqueeze(1)
            output[mine] = (weight @ state + inside @ value) / whole.clamp(min=1e-30)
        state.addmm_(feature.T, value)
        mass += feature.sum(0)
    if not head.is_causal:
        weight = (logs + unit).softmax(1)
        output = weight @ state / (weight @ mass).unsqueeze(1)
    return Answer(output, count * each / case.exact_work, f"{count} features")


def _logs(x: Tensor, w: Tensor) -> Tensor:
    """Logarithms of the features of x."""
    return (x @ w.T).sub_(x.square().sum(1, keepdim=True) / 2)


def _orthogonal(count: int, dim: int, generator: torch.Generator) -> Tensor:
    groups = math.ceil(count / dim)
    q = torch.linalg.qr(torch.randn(groups, dim, dim, generator=generator, device="cpu"))[0]
    length = torch.randn(groups * dim, dim, generator=generator, device="cpu")
    length = length.norm(dim=1, keepdim=True)
    return (q.mT.reshape(-1, dim) * length)[:count]
