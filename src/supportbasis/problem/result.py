"""`Outcome` of running a plan, and `Result` of a call with ``return_result=True``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..accuracy.certificate import Certificate
    from ..plans import Plan
    from .problem import Problem


FAILED_SHARE = 0.01  # of a head's rows: a plan on which more rows fail is reported


@dataclass
class Outcome:
    """Result of running a plan, [batch, heads, ...]."""

    output: Tensor  # [batch, heads, n, dv], input dtype
    lse: Tensor  # [batch, heads, n]
    log_scale: Tensor  # [batch, heads]: units of the output of a kernel sum, 0 for attention
    invalid_rows: Tensor  # [batch, heads]: rows without a usable denominator
    rounding: Tensor  # [batch, heads]: largest relative rounding error of a row's sums
    fallback: Tensor  # [batch, heads, n]: failed rows that were computed exactly

    @staticmethod
    def empty(problem: Problem) -> Outcome:
        """Memory for output and lse of all heads; the rest is zero."""
        query, rows = problem.query, (problem.batch, problem.heads, problem.n)
        output = query.new_empty(*rows, problem.value_dim)
        lse = query.new_empty(rows, dtype=problem.dtype)
        failed = query.new_zeros(rows, dtype=torch.bool)
        units, invalid, rounding = lse.new_zeros(3, *rows[:2]).unbind(0)
        return Outcome(output, lse, units, invalid, rounding, failed)

    @property
    def fallback_rows(self) -> Tensor:
        """How many failed rows were computed exactly, [batch, heads]."""
        return self.fallback.sum(-1)


@dataclass(frozen=True, eq=False)
class Result:
    """Output, lse, plan and certificate of a call.

    ``output`` is what the plain call returns, ``lse`` the natural log of each row's sum of
    weights. A kernel sum is ``output * exp(log_scale)``: a number for each (batch, head) in the
    caller's leading dims, 0 for attention. ``implementation`` says what ran: "sdpa" (PyTorch's own
    attention, for exact plans), "eager", "triton" (which has exact heads run by PyTorch's fused
    kernels where these take them), or how many heads each of the two took."""

    output: Tensor
    lse: Tensor
    log_scale: Tensor
    plan: Plan
    certificate: Certificate
    implementation: str = "eager"

    def __repr__(self) -> str:
        said = f"output {list(self.output.shape)}, computed by {self.implementation}"
        return f"Result: {said}\n{self.certificate}\n{self.plan}"
