"""Run a plan: by SDPA itself where every head is exact, by operators where gradients or a trace
are recorded, by the engine otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..plans import ExactHead, Plan
from ..problem.checks import is_tracing
from ..problem.problem import Problem
from ..problem.result import Outcome
from . import autograd, sdpa
from .call_checks import check_output
from .dispatch import groups
from .execute import execute


def run(problem: Problem, plan: Plan, need_lse: bool, implementation: str = "auto") -> Outcome:
    """Run a plan: by SDPA if every head is exact, as an operator if the call is differentiated or
    traced, else directly."""
    with torch.autocast(problem.query.device.type, enabled=False):
        if is_sdpa(problem, plan, need_lse, implementation):
            outcome = _run_sdpa(problem, plan, need_lse)
            if not is_tracing():
                check_output(problem, outcome.output)
            return outcome
        if problem.requires_grad or is_tracing():
            return autograd.run(problem, plan, implementation)
        return autograd.compute(problem, plan, implementation)


def is_sdpa(problem: Problem, plan: Plan, need_lse: bool, implementation: str) -> bool:
    if not plan.is_exact or implementation == "triton" or not sdpa.can_run(problem, need_lse):
        return False
    if is_tracing() and problem.query.is_cpu and problem.needs_exact is None:
        return False  # entries are checked, which only operators can do here
    if implementation == "eager" or not problem.query.is_cuda:
        return True
    if not need_lse and problem.key_log_weight is None:
        return True
    # PyTorch's CUDA kernels give no lse, and `sdpa` has to read the entries of a bias
    return groups(problem, plan, implementation)[0].kind is None


def _run_sdpa(problem: Problem, plan: Plan, need_lse: bool) -> Outcome:
    outcome = autograd.exact_outcome(problem) if need_lse else None
    if outcome is not None:
        return outcome
    shape = (problem.batch, problem.heads)
    zero = problem.query.new_zeros(shape, dtype=problem.dtype)
    empty = problem.query.new_zeros((*shape, 0), dtype=problem.dtype)
    if not need_lse:
        return Outcome(sdpa.sdpa(problem), empty, zero, zero, zero, zero, empty.bool())
    with torch.no_grad():  # no value has a part in it, nor can overflow it
        plain = replace(problem, value=torch.zeros_like(problem.value[..., :1]))
        heads = tuple(ExactHead(n=problem.n, m=problem.m) for _ in range(problem.heads))
        lse = execute(plain, replace(plan, heads=heads)).lse
    noise = sdpa.sdpa_noise(problem)
    return Outcome(sdpa.sdpa(problem), lse, zero, zero, zero, noise, empty.bool())


def merged(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs over disjoint sets of keys, joined by their log-sum-exps: output [..., n, dv] and lse
    [..., n] over the keys of both, in the dtype of the lse."""
    share = torch.sigmoid(first_lse - second_lse).nan_to_num(0.0).unsqueeze(-1)  # -inf: no keys
    output = torch.lerp(second.to(share.dtype), first.to(share.dtype), share)
    return output, torch.logaddexp(first_lse, second_lse)
