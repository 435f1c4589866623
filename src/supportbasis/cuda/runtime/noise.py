"""Failed rows and rounding errors of an outcome of kernels, for its certificate.

A call does not compute them, since that would synchronise with the host; a certificate does.

In a feature sum every term passes through few roundings to 16 bits: two of features, one of the
state, one of a weighted value, and one of each entry where the input is not bfloat16. Terms are at
most sum |c_k| in the units in which the smallest weight is exp(low - 2B), low being the logarithm
of the smallest ratio of polynomial and exponential. Exact scores and weights round as SDPA's do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...accuracy.certificate import recertified
from ...components.flash import dead_rows
from ...engine import sdpa
from ...engine.dispatch import Group
from ...plans import HeadPlan, PolynomialHead
from ...problem.problem import Head, Outcome, Problem
from ...problem.rounding import gamma, product_roundoff, sum_depth, unit_roundoff

ROUNDINGS = {torch.bfloat16: 4, torch.float16: 9, torch.float32: 9}
SUMMED = 1024  # terms added up at a time


def with_noise(problem: Problem, found: Sequence[Group], outcome: Outcome) -> Outcome:
    """The outcome with its failed rows counted and its rounding bounded."""
    with torch.no_grad():
        failed = outcome.lse == -math.inf
        weight = problem.key_log_weight
        if weight is not None:  # a row without keys has not failed
            failed &= ~dead_rows(weight.unsqueeze(2), problem.n, problem.is_causal)
        exact = sdpa.sdpa_noise(problem)
        rounding, invalid = outcome.rounding.clone(), outcome.invalid_rows.clone()
        for group in found:
            if group.kind is None:  # whose failed rows and rounding are known
                continue
            for number, plan in zip(group.heads, group.plan.heads, strict=True):
                invalid[:, number] += failed[:, number].sum(-1)
                for b in range(problem.batch):
                    noise = _feature_noise(problem.head(b, number), plan)
                    rounding[b, number] = torch.clamp(exact[b, number] + noise, max=1.0)
    return replace(outcome, invalid_rows=invalid, rounding=rounding)


def _feature_noise(head: Head, plan: HeadPlan) -> float:
    """Relative rounding of a row's feature sums, worst row."""
    if not isinstance(plan, PolynomialHead):
        return 0.0
    polynomial, _ = recertified(head, plan)
    if not polynomial.positive:
        return 1.0
    exponent = 2 * polynomial.bound - polynomial.log_ratio[0]
    spread = sum(map(abs, polynomial.coefficients)) * math.exp(min(exponent, 700.0))
    narrow = head.query.dtype != torch.float32
    unit = unit_roundoff(torch.bfloat16) if narrow else max(2.0**-20, product_roundoff(head.dtype))
    depth = sum_depth(max(head.n, head.m), SUMMED) + head.dim + 16
    relative = ROUNDINGS[head.query.dtype] * unit + gamma(depth, unit_roundoff(torch.float32))
    return min(1.0, spread * relative)
