"""Exact attention of all heads in one call to PyTorch's own kernel: the baseline and fall-back."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..components import flash
from ..components.exact_sum import softmax_rounding
from ..plans import Plan
from ..problem.checks import first_order, is_tracing
from ..problem.problem import Outcome, Problem
from ..problem.rounding import unit_roundoff
from . import dispatch
from .execute import check_output, execute

ORDINARY = 1e6  # entries and scales below this: nothing overflows
SDPA = torch.ops.aten.scaled_dot_product_attention.default  # F.'s may be overridden


def can_run(problem: Problem, plan: Plan, need_lse: bool, implementation: str) -> bool:
    """Whether SDPA computes this call: exact, normalised, not empty, with a bias that it takes."""
    sizes = (problem.batch, problem.heads, problem.n, problem.m, problem.value_dim)
    if not plan.is_exact or implementation == "triton" or not problem.normalise or 0 in sizes:
        return False
    if problem.dropout_p > 0:
        return True
    bias = problem.key_log_weight
    if is_tracing() and (bias is not None or (problem.query.is_cpu and problem.mask is None)):
        return False  # entries of a bias choose a kernel, others are checked: operators do both
    if problem.requires_grad and (need_lse or (bias is not None and bias.requires_grad)):
        return False  # its kernels have no gradients of lse or of a bias
    if bias is not None and problem.is_causal and not is_fused(problem):
        return False
    if implementation == "eager" or not problem.query.is_cuda or not (need_lse or bias is not None):
        return True
    # PyTorch's CUDA kernels give no lse, and `attend` has to read the entries of a bias
    return dispatch.groups(problem, plan, implementation)[0].kind is None


def is_fused(problem: Problem) -> bool:
    """Whether PyTorch takes the CPU kernel that takes causal masks and biases together."""
    same_dim = problem.dim == problem.value_dim
    return flash.AVAILABLE and problem.query.is_cpu and same_dim and problem.dropout_p == 0


def attend(problem: Problem, plan: Plan, need_lse: bool) -> Outcome:
    """All heads of an exact plan; the output is differentiable."""
    query, key, value, mask, causal = _operands(problem)
    zero = query.new_zeros(problem.batch, problem.heads, dtype=problem.dtype)
    lse, noise = zero.new_empty(*zero.shape, 0), sdpa_noise(problem) if need_lse else zero
    if need_lse and is_fused(problem):
        if problem.group > 1:
            key, value = (x.repeat_interleave(problem.group, 1) for x in (key, value))
        output, lse = flash.attend(query, key, value, mask, problem.scale, causal)
        lse = lse.to(problem.dtype)
    else:
        if need_lse:
            with torch.no_grad():  # no value has a part in it, nor can overflow it
                plain = replace(problem, value=torch.zeros_like(problem.value[..., :1]))
                lse = execute(plain, plan).lse
        output = SDPA(
            query, key, value, mask, problem.dropout_p, causal, scale=problem.scale,
            enable_gqa=problem.group > 1,
        )  # fmt: skip
        if mask is not None:
            dead = flash.dead_rows(mask, problem.n, causal)
            output = output.masked_fill(dead.unsqueeze(-1), 0.0)
    output, none = output.to(problem.query.dtype), torch.zeros_like(lse, dtype=torch.bool)
    if not is_tracing():
        check_output(problem, output)
    return Outcome(output, lse, zero, zero, noise, none)


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """Query, key, value and mask in one dtype: the input's, unless it cannot hold the mask. The
    mask [batch, heads, 1 or n, m] is causal itself where kernels take only one of the two; else the
    last result says whether the call is."""
    mask, causal = problem.mask, problem.is_causal
    if mask is None and problem.key_log_weight is not None:
        mask = problem.key_log_weight.unsqueeze(2)
    if mask is not None and causal and (problem.mask is not None or not is_fused(problem)):
        later = torch.ones(problem.n, problem.m, dtype=torch.bool, device=mask.device).triu_(1)
        mask = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -math.inf)
        causal = False
    query, key, value = first_order(problem.query, problem.key, problem.value)
    bias = None if mask is None or mask.dtype == torch.bool else mask
    if bias is not None and not torch.equal(bias.to(query.dtype).to(bias.dtype), bias):
        query, key, value = (x.to(problem.dtype) for x in (query, key, value))
    return query, key, value, mask if bias is None else bias.to(query.dtype), causal


def sdpa_noise(problem: Problem) -> Tensor:
    """Relative rounding error of a row's sums in SDPA, [batch, heads], worst row.

    Weights are rounded to the input dtype before they multiply the values."""
    tokens = (problem.query, problem.key)
    query, key = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in tokens)
    key = key.repeat_interleave(problem.group, 1)
    if problem.key_log_weight is not None:
        key = key.masked_fill(problem.key_log_weight == -math.inf, 0.0)
    reach = abs(problem.scale) * query.amax(-1) * key.amax(-1)
    narrow = unit_roundoff(problem.query.dtype) if problem.query.dtype != problem.dtype else 0.0
    relative = softmax_rounding(problem, reach, problem.m) + 2 * narrow
    return relative.clamp(max=1.0).to(problem.dtype)


def plainly(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:  # fmt: skip
    """Output of an exact plan for plain 4-dim tensors on a CPU, by SDPA itself; None where a check
    fails, finite entries among them, or PyTorch refuses.

    A short call should take no longer than PyTorch's own, which leaves time for a few questions
    only, and all of them before its kernel runs: after it, nothing is in the caches."""
    tensors = (query, key, value)
    if not all(type(x) is Tensor and x.is_cpu and x.dim() == 4 for x in tensors):
        return None
    try:
        (batch, heads, _, dim), (key_batch, key_heads) = query.shape, key.shape[:2]
        fits = (
            type(is_causal) is type(enable_gqa) is bool
            and (scale is None or (type(scale) is float and 1 / ORDINARY < scale < ORDINARY))
            and key.shape == value.shape
            and batch == key_batch  # PyTorch broadcasts only in its kernel that keeps all scores
            and (heads == key_heads or enable_gqa)
            and (heads, dim) == (plan.num_heads, plan.dim)
            and not torch.is_autocast_enabled("cpu")
            and all(
                low.item() > -ORDINARY and high.item() < ORDINARY
                for low, high in (x.detach().aminmax() for x in tensors)
            )
        )
        if not fits:
            return None
        query, key, value = first_order(*tensors)
        return SDPA(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=heads != key_heads
        )
    except (RuntimeError, IndexError):  # an IndexError: no entries, inside of a vmap
        return None
