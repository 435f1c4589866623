"""Inputs and references shared by the tests."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis import reference
from supportbasis.inputs import attention_problem

METHODS = {
    "exact": sb.Exact(),
    "poly0": sb.Polynomial(0),
    "poly1": sb.Polynomial(1),
    "poly2": sb.Polynomial(2),
    "poly3": sb.Polynomial(3),
    "single1": sb.SingleThreshold(1.8, 1),
    "single2": sb.SingleThreshold(1.5, 2),
    "single-auto": sb.SingleThreshold(None, 2),
    "multi1": sb.MultiThreshold(2.0, 1),
    "multi2": sb.MultiThreshold(1.4, 2),
    "one-power": sb.MultiThreshold(math.inf, 2),
    "sketch1": sb.MultiThreshold(2.0, 1, sketch_size=16),
    "sketch2": sb.MultiThreshold(1.6, 2, sketch_size=9, seed=5),
    "power4": sb.PowerAttention(4),
    "power2-sketch": sb.PowerAttention(2, sketch_size=11),
    "power6-sketch": sb.PowerAttention(6, sketch_size=20, seed=1),
}


def qkv(
    *leading: int,
    n: int = 33,
    m: int | None = None,
    d: int = 5,
    dv: int | None = None,
    key_heads: int | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian query, key and value from a private generator."""
    generator = torch.Generator().manual_seed(seed)
    m, dv = n if m is None else m, d if dv is None else dv
    key_leading = leading if key_heads is None else (*leading[:-1], key_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = normal(*leading, n, d) * scale
    k = normal(*key_leading, m, d) * scale
    return q.to(dtype), k.to(dtype), normal(*key_leading, m, dv).to(dtype)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention as one would write it on a blackboard, float64: (output, lse)."""
    q, k, v = q.double(), k.double(), v.double()
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    score = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        if bias.dtype == torch.bool:
            score = score.masked_fill(~bias, -math.inf)
        else:
            score = score + bias.double()
    if is_causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -math.inf)
    lse = score.logsumexp(-1) if k.shape[-2] else torch.full(q.shape[:-1], -math.inf).double()
    weight = torch.where(lse.unsqueeze(-1) > -math.inf, (score - lse.unsqueeze(-1)).exp(), 0.0)
    return weight @ v, lse


def run_both(
    q: Tensor, k: Tensor, v: Tensor, method: sb.methods.Method, **call: object
) -> tuple[sb.Result, Tensor, Tensor]:
    """A method's result, and what the dense float64 twin says of the same plan."""
    result = sb.attention(q, k, v, method=method, return_result=True, **call)
    arguments = [
        call.get(name, default)
        for name, default in (
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
    problem = attention_problem(q, k, v, *arguments)
    output, lse = reference.execute(problem, result.plan)
    return result, problem.restore(output), problem.restore(lse)


def max_error(given: Tensor, exact: Tensor, v: Tensor) -> float:
    """max|given - exact| / max|V|, the error that `certificate.bound` bounds."""
    if not given.numel():
        return 0.0
    return float((given.double() - exact).abs().max() / v.double().abs().max())


def beyond(plan: sb.Plan) -> sb.Plan:
    """The same plan for scores of any range: what it does beyond its own is tested too."""
    heads = tuple(replace(head, scores=None) for head in plan.heads)
    return plan.of_heads(heads, (plan.batch, plan.num_heads))
