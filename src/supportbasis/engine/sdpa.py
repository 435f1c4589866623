"""Exact attention of all heads in one call to PyTorch's own kernel: the baseline and fall-back."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..components import flash
from ..components.exact_sum import SUM_BLOCK
from ..plans import Plan
from ..problem.checks import is_tracing
from ..problem.problem import Problem
from ..problem.rounding import gamma, product_roundoff, sum_depth, unit_roundoff
from ..problem.tracing import first_order


def can_run(problem: Problem, need_lse: bool) -> bool:
    """Whether SDPA computes this problem: attention, something to do, and a bias it can hold."""
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
    """Whether PyTorch takes the CPU kernel that knows causal masks and biases together."""
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
    scores may overflow in it unseen."""
    mask = _mask(problem)
    query, key, value = first_order(problem.query, problem.key, problem.value)
    bias = None if mask is None or mask.dtype == torch.bool else mask
    if _may_hide(problem) or (bias is not None and not _fits(bias, query.dtype)):
        query, key, value = (x.to(problem.dtype) for x in (query, key, value))
    return query, key, value, mask if bias is None else bias.to(query.dtype)


def _fits(bias: Tensor, dtype: torch.dtype) -> bool:
    return bool((bias.to(dtype).to(bias.dtype) == bias).all())


def _may_hide(problem: Problem) -> bool:
    """Whether scores may overflow where the kernel would not show it: of rows in bfloat16, which a
    CPU answers with zeros."""
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
    """Whether `_mask` already hides what lies ahead, for kernels that take only one of the two."""
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
    if problem.mask is not None or _mask_is_causal(problem):
        return ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)
    assert bias is not None
    if not problem.is_causal:
        return (bias == -math.inf).all(-1, keepdim=True).expand(-1, -1, problem.n)
    before = bias.cummax(-1).values == -math.inf  # nothing up to and including key j
    if problem.n > problem.m:
        before = torch.cat([before, before[..., -1:].expand(-1, -1, problem.n - problem.m)], -1)
    return before[..., : problem.n]


def sdpa_noise(problem: Problem) -> Tensor:
    """Relative rounding error of a row's sums in SDPA, [batch, heads], worst row.

    Scores carry the rounding of an inner product; weights are rounded to the input dtype before
    they meet the values; the kernel sums over keys block by block in float32 or wider.
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
    """The output of a plan that is exact in every head, used again for plain tensors of four dims
    on a CPU; None where anything is out of the ordinary, an entry that is not finite included.

    A short call should take no longer than PyTorch's own, which leaves time for a few questions
    only, and all of them before its kernel runs: after it, nothing is in the caches. Dtypes,
    devices and layouts that do not agree are left to PyTorch, whose refusal is answered by None.
    """
    if not (type(query) is type(key) is type(value) is Tensor and query.is_cpu):
        return None
    try:
        shape, keys, dtype = query.shape, key.shape, query.dtype
        if keys != value.shape or not (shape == keys or _fit(shape, keys, enable_gqa)):
            return None
        if len(shape) != 4 or 0 in shape or dtype not in KNOWN:
            return None
        if not (key.dtype is value.dtype is dtype and type(is_causal) is type(enable_gqa) is bool):
            return None
        if shape[1] != plan.num_heads or shape[3] != plan.dim:
            return None
        if scale is not None and not (type(scale) is float and 1 / ORDINARY < scale < ORDINARY):
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        if not _are_ordinary(query, key, value, dtype):
            return None
        if query.requires_grad or key.requires_grad or value.requires_grad:
            query, key, value = first_order(query, key, value)
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=shape[1] != keys[1]
        )
    except RuntimeError:
        return None
    return output


PLAIN = (torch.float32, torch.float64)
KNOWN = (*PLAIN, torch.bfloat16, torch.float16)
ORDINARY = 1e15  # squares of lengths, and scales, below this: scores are below 1e30
SHORT = 1e6  # the same of entries


def _fit(shape: torch.Size, keys: torch.Size, enable_gqa: bool) -> bool:
    """Whether there are keys, of the heads of the queries or each of a group of them."""
    if len(shape) != 4 or len(keys) != 4 or 0 in keys:
        return False
    alike = shape[1] == keys[1] or (enable_gqa and shape[1] % keys[1] == 0)
    return alike and shape[0] == keys[0] and shape[3] == keys[3]


def _are_ordinary(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Whether all entries are finite, and none of them large enough for anything to overflow.

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
