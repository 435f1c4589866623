"""Exact attention of all heads in one call to PyTorch's own kernel: the baseline and fall-back."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..components import flash
from ..components.exact_sum import SUM_BLOCK
from ..plans import Plan
from ..problem.checks import first_order, is_tracing
from ..problem.problem import Problem
from ..problem.rounding import gamma, product_roundoff, sum_depth, unit_roundoff


def can_run(problem: Problem, need_lse: bool) -> bool:
    """Whether SDPA computes this problem: normalised, not empty, with a bias that it takes."""
    sizes = (problem.batch, problem.heads, problem.n, problem.m, problem.value.shape[-1])
    if not problem.normalise or 0 in sizes:
        return False
    if problem.dropout_p > 0:
        return True
    bias = problem.key_log_weight
    if bias is not None and is_tracing():
        return False  # which kernel takes it depends on its entries
    if problem.requires_grad and (need_lse or (bias is not None and bias.requires_grad)):
        return False  # its kernels have no gradients of lse or of a bias
    return bias is None or not problem.is_causal or _is_fused(problem)


def _is_fused(problem: Problem) -> bool:
    """Whether PyTorch takes the CPU kernel that takes causal masks and biases together."""
    same_dim = problem.query.shape[-1] == problem.value.shape[-1]
    return problem.query.device.type == "cpu" and same_dim and problem.dropout_p == 0


def sdpa(problem: Problem) -> Tensor:
    """Output [batch, heads, n, dv] in the input dtype; differentiable."""
    query, key, value, mask = _operands(problem)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=problem.dropout_p,
        is_causal=problem.is_causal and not _mask_is_causal(problem),
        scale=problem.scale,
        enable_gqa=problem.group > 1,
    )
    dead = _dead_rows(problem)
    output = output if dead is None else output.masked_fill(dead.unsqueeze(-1), 0.0)
    return output.to(problem.query.dtype)


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask in one dtype: the input's, unless it cannot hold the mask, or
    scores may overflow in it undetected."""
    mask = _mask(problem)
    query, key, value = first_order(problem.query, problem.key, problem.value)
    bias = None if mask is None or mask.dtype == torch.bool else mask
    is_rounded = bias is not None and not torch.equal(bias.to(query.dtype).to(bias.dtype), bias)
    if is_rounded or _may_hide(problem):
        query, key, value = (x.to(problem.dtype) for x in (query, key, value))
    return query, key, value, mask if bias is None else bias.to(query.dtype)


def _may_hide(problem: Problem) -> bool:
    """Whether scores may overflow without a trace in the output: in bfloat16 a CPU returns
    zeros."""
    if problem.query.dtype != torch.bfloat16 or not problem.query.is_cpu or is_tracing():
        return False
    query, key = (float(x.detach().abs().max()) for x in (problem.query, problem.key))
    reach = abs(problem.scale) * problem.query.shape[-1] * query * key
    return not reach < torch.finfo(torch.float32).max


def sdpa_with_lse(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The same with the log-sum-exp of each row, where PyTorch has a kernel that returns it."""
    if not flash.AVAILABLE or not _is_fused(problem):
        return None
    query, key, value, mask = _operands(problem)
    if problem.group > 1:
        key, value = (x.repeat_interleave(problem.group, 1) for x in (key, value))
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        mask = mask.expand(-1, -1, problem.n, -1)
    causal = problem.is_causal and not _mask_is_causal(problem)
    output, lse = flash.attention(query, key, value, mask, scale=problem.scale, is_causal=causal)
    output, lse = output.to(problem.query.dtype), lse.to(problem.dtype)
    dead = _dead_rows(problem)
    if dead is not None:
        output = output.masked_fill(dead.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(dead, -math.inf)
    return output, lse


def _mask_is_causal(problem: Problem) -> bool:
    """Whether `_mask` contains the causal mask, for kernels that take only one of the two."""
    biased = problem.key_log_weight is not None and not _is_fused(problem)
    return problem.is_causal and (problem.mask is not None or biased)


def _mask(problem: Problem) -> Tensor | None:
    """Key weights and any other mask as one argument of SDPA, in a form it takes."""
    mask, bias = problem.mask, problem.key_log_weight
    if mask is None and bias is not None:
        padding = bool(((bias == 0) | (bias == -math.inf)).all())
        mask = ((bias == 0) if padding else bias).unsqueeze(2)
    if mask is None:
        return None
    if _mask_is_causal(problem):
        later = torch.ones(problem.n, problem.m, dtype=torch.bool, device=mask.device).triu_(1)
        mask = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -math.inf)
    return mask


def _dead_rows(problem: Problem) -> Tensor | None:
    """Rows that may attend to nothing, [batch, heads, n]; None when there is no mask."""
    mask, bias = _mask(problem), problem.key_log_weight
    if mask is None:
        return None
    if problem.mask is not None or bias is None or _mask_is_causal(problem):
        return ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)
    if not problem.is_causal:
        return (bias == -math.inf).all(-1, keepdim=True).expand(-1, -1, problem.n)
    before = bias.cummax(-1).values == -math.inf  # nothing up to and including key j
    if problem.n > problem.m:
        before = torch.cat([before, before[..., -1:].expand(-1, -1, problem.n - problem.m)], -1)
    return before[..., : problem.n]


def sdpa_noise(problem: Problem) -> Tensor:
    """Relative rounding error of a row's sums in SDPA, [batch, heads], worst row.

    Scores carry the rounding of an inner product; weights are rounded to the input dtype before
    they multiply the values; the kernel sums over keys block by block in float32 or wider.
    """
    wide = product_roundoff(problem.dtype)
    query, key = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        for x in (problem.query, problem.key)
    )
    key = key.repeat_interleave(problem.group, 1)
    if problem.key_log_weight is not None:
        key = key.masked_fill(problem.key_log_weight == -math.inf, 0.0)
    reach = abs(problem.scale) * query.amax(-1) * key.amax(-1)
    score = reach * gamma(problem.query.shape[-1] + 6, wide)
    for bias in (problem.key_log_weight, problem.mask):
        if bias is not None and bias.dtype != torch.bool:
            finite = bias.masked_fill(bias == -math.inf, 0.0).abs()
            score = score + 4 * unit_roundoff(problem.dtype) * finite.flatten(2).amax(-1)
    total = gamma(sum_depth(problem.m, SUM_BLOCK) + 16, wide)
    narrow = unit_roundoff(problem.query.dtype) if problem.query.dtype != problem.dtype else 0.0
    return (torch.expm1(2 * score) + total + 2 * narrow).clamp(max=1.0).to(problem.dtype)


def plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    plan: Plan,
) -> Tensor | None:
    """Output of an exact plan for plain 4-dim tensors on a CPU, by SDPA itself; None where a check
    fails, finite entries among them.

    A short call should take no longer than PyTorch's own, which leaves time for a few questions
    only, and all of them before its kernel runs: after it, nothing is in the caches. Dtypes,
    devices and layouts that do not agree are left to PyTorch, whose refusal is answered by None.
    """
    if not (type(query) is type(key) is type(value) is Tensor and query.is_cpu):
        return None
    try:
        shape, keys, dtype = query.shape, key.shape, query.dtype
        if (
            not (type(is_causal) is type(enable_gqa) is bool and key.dtype is value.dtype is dtype)
            or (
                scale is not None and not (type(scale) is float and 1 / ORDINARY < scale < ORDINARY)
            )
            or dtype not in KNOWN
            or not len(shape) == len(keys) == 4
            or keys != value.shape
            or 0 in (*shape, *keys)
            or (shape[0], shape[3]) != (keys[0], keys[3])
            or not (shape[1] == keys[1] or (enable_gqa and shape[1] % keys[1] == 0))
            or (shape[1], shape[3]) != (plan.num_heads, plan.dim)
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        if not _are_ordinary(query, key, value, dtype):
            return None
        if query.requires_grad or key.requires_grad or value.requires_grad:
            query, key, value = first_order(query, key, value)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=shape[1] != keys[1]
        )
    except RuntimeError:
        return None


PLAIN = (torch.float32, torch.float64)
KNOWN = (*PLAIN, torch.bfloat16, torch.float16)
ORDINARY = 1e15  # squares of lengths, and scales, below this: scores are below 1e30
SHORT = 1e6  # the same of entries


def _are_ordinary(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Whether all entries are finite and small enough that nothing overflows.

    A tensor's product with itself is not finite if one of its entries is not, and nothing in it
    cancels. Products of 16 bits are slow, or overflow.
    """
    if dtype not in PLAIN:
        ends = [end.item() for x in (query, key, value) for end in x.aminmax()]
        return all(-SHORT < end < SHORT for end in ends)
    if query.is_contiguous() and key.is_contiguous() and value.is_contiguous():
        flat = [x.view(-1) for x in (query, key, value)]
    else:
        flat = [x.detach().transpose(1, 2).reshape(-1) for x in (query, key, value)]
    return all(torch.dot(x, x).item() < ORDINARY for x in flat)
