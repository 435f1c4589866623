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
    lengths of Gaussian vectors. Every feature is kept in units of its largest key, so that
    nothing overflows or vanishes that matters.
    """
    head = case.head
    each = (head.n + head.m) * (head.d + head.dv + 1)
    count = int(budget * case.exact_work / each)
    if count < 1:
        return None
    generator = torch.Generator().manual_seed(seed)
    w = _orthogonal(count, head.d, generator)
    root = math.sqrt(head.scale)
    unit = torch.full((count,), -math.inf)
    step = max(1, ENTRIES // count)
    for key in (head.key * root).split(step):
        unit = torch.maximum(unit, _logs(key, w).amax(0))
    state = head.value.new_zeros(count, head.dv)
    mass = head.value.new_zeros(count)
    parts = zip((head.key * root).split(step), head.value.split(step), strict=True)
    for key, value in parts:
        feature = (_logs(key, w) - unit).exp_()
        state.addmm_(feature.T, value)
        mass += feature.sum(0)
    weight = (_logs(case.query * root, w) + unit).softmax(1)
    output = weight @ state / (weight @ mass).unsqueeze(1)
    return Answer(output, count * each / case.exact_work, count, f"{count} features")


def _logs(x: Tensor, w: Tensor) -> Tensor:
    """Logarithms of the features of x."""
    return (x @ w.T).sub_(x.square().sum(1, keepdim=True) / 2)


def _orthogonal(count: int, dim: int, generator: torch.Generator) -> Tensor:
    groups = math.ceil(count / dim)
    q = torch.linalg.qr(torch.randn(groups, dim, dim, generator=generator))[0]
    length = torch.randn(groups * dim, dim, generator=generator).norm(dim=1, keepdim=True)
    return (q.mT.reshape(-1, dim) * length)[:count]
