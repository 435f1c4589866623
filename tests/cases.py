"""Inputs and references shared by the tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from supportbasis.lists.tables import ListSettings
from supportbasis.plans import ListHead
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

quiet = pytest.mark.filterwarnings("ignore:supportbasis. .* has a measured error")

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


def in_turn(rows: Iterable, columns: Iterable, other: Sequence) -> list[tuple]:
    """Every row with every column, and one of the others in turn: all of them meet in pairs."""
    return [
        (row, column, other[(i + j) % len(other)])
        for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))
    ]


def gaussian(
    *shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def clustered(
    *leading: int,
    n: int = 2048,
    d: int = 8,
    clusters: int = 12,
    size: float = 3.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys around common centres, values that follow the keys: heads as trained models
    have them, in small. Scores have a standard deviation of ``size``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = []
    for _ in range(math.prod(leading)):
        centres = normal(clusters, d)
        q, k = (
            centres[torch.randint(clusters, (n,), generator=generator)] + 0.15 * normal(n, d)
            for _ in range(2)
        )
        factor = math.sqrt(size * math.sqrt(d) / float((q[:400] @ k[:400].T).std()))
        heads.append((q * factor, k * factor, torch.tanh(k @ normal(d, d))))
    q, k, v = (torch.stack(x).view(*leading, n, d).to(dtype) for x in zip(*heads, strict=True))
    return q, k, v


def centred_head(
    n: int = 200, m: int | None = None, d: int = 6, dv: int | None = None, *,
    seed: int = 0, size: float = 1.5, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys of one head around nine shared centres, and Gaussian values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    m, centres = n if m is None else m, size * normal(9, d)
    q = centres[torch.randint(9, (n,), generator=generator)] + 0.4 * normal(n, d)
    k = centres[torch.randint(9, (m,), generator=generator)] + 0.4 * normal(m, d)
    return q.to(dtype), k.to(dtype), normal(m, d if dv is None else dv).to(dtype)


def key_weights(kind: str, m: int, seed: int = 1) -> Tensor | None:
    """Log-weights of keys: "none", a "bias", or one that hides some ("mask")."""
    if kind == "none":
        return None
    bias = torch.randn(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return bias if kind == "bias" else bias.masked_fill(bias > 0.5, -math.inf)


def list_plan(q: Tensor, settings: ListSettings) -> sb.Plan:
    """Lists of these settings for all heads, whatever they cost."""
    head = ListHead(n=q.shape[-2], m=q.shape[-2], cost=0.5, speedup=1.0, lists=settings)
    return sb.Plan(
        sb.BlockSupport(), q.shape[-1], (head,) * q.shape[-3],
        is_causal=settings.window > 0,
    )  # fmt: skip


def small_lists(causal: bool = False, strict: bool | None = None, price: float = 1e-4):
    """Settings of lists short enough for a few hundred tokens."""
    return ListSettings(price, 16, 8, 32 if causal else 0, strict if causal else False)


def fitted_problem(n, m=None, d=8, dv=5, sigma=0.5, causal=False, bias=None, dtype=torch.float64):
    """One head of Gaussian tokens whose scores have the standard deviation ``sigma``."""
    generator = torch.Generator().manual_seed(n + d)
    size = math.sqrt(sigma / math.sqrt(d)) * d**0.25
    query, key = (
        torch.randn(1, 1, count, d, generator=generator, dtype=dtype) * size
        for count in (n, m or n)
    )
    value = torch.randn(1, 1, m or n, dv, generator=generator, dtype=dtype)
    return attention_problem(query, key, value, bias, 0.0, causal, None, False)


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
    """A method's result, and what the dense float64 reference says of the same plan."""
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


def relative(given: Tensor, exact: Tensor) -> float:
    """|given - exact| / |exact|, in the norm."""
    return float((given.double() - exact).norm() / exact.norm())


def beyond(plan: sb.Plan) -> sb.Plan:
    """The same plan for scores of any range: what it does beyond its own is tested too."""
    heads = tuple(replace(head, scores=None) for head in plan.heads)
    return plan.with_heads(heads)
