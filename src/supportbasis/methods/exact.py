"""Exact attention (Definition 1.1)."""

from __future__ import annotations

from dataclasses import dataclass

from ..plans import HeadPlan
from ..problem.problem import Head
from .base import Method, exact_plan


@dataclass(frozen=True)
class Exact(Method):
    """Every pair is computed: D^-1 A V with A = exp(scale Q K^T).

    ``scale = 1/d`` gives the paper's Definition 1.1; the default is 1/sqrt(d), as in SDPA.

    >>> import torch, supportbasis as sb
    >>> q = torch.zeros(1, 2, 4); v = torch.arange(2.0).reshape(1, 2, 1)
    >>> sb.attention(q, q, v, method=sb.Exact())
    tensor([[[0.5000],
             [0.5000]]])
    """

    def plan_head(self, head: Head) -> HeadPlan:
        return exact_plan(head, "")
