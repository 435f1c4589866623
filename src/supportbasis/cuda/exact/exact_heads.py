"""Exact heads on the device: PyTorch's fused kernels where they take the call (16 bits, no key
weights, no gradient of lse), or one rectangle of all rows and all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward, by_key_head
from ...plans import HeadPlan, Plan
from ...problem.problem import Problem
from . import fused
from .rectangle import Rectangle, Tokens, Totals, add_gradients, exact_rows, slopes


def refusal(head: HeadPlan) -> str | None:
    return None


def family(head: HeadPlan) -> object:
    return "exact"


def forward(problem: Problem, plan: Plan) -> Forward:
    made = fused.attention(problem)
    if made is not None:
        return (*made, None)
    output, lse = empty_results(problem)
    exact_rows(whole(problem), output, lse)
    return output, lse, None


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    if saved.grad_lse is None:
        made = fused.gradients(problem, saved.output, saved.lse, saved.grad)
        if made is not None:
            return Gradients(*made, None)
    total, slope = empty_totals(problem), slopes(saved.grad, saved.grad_lse, saved.output)
    add_gradients(total, saved.grad, slope, saved.lse, whole(problem))
    return finished(total, problem, saved.for_weights)


def whole(problem: Problem) -> Rectangle:
    """All rows and all keys."""
    return Rectangle(problem, Tokens(problem.n), Tokens(problem.m), precision())


def precision() -> str:
    """Precision of float32 products, by PyTorch's global setting."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def empty_results(problem: Problem, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Memory for output (None: in the dtype of the query) and lse."""
    shape, new = (problem.batch, problem.heads, problem.n), problem.query.new_empty
    return new(*shape, problem.value.shape[-1], dtype=dtype), new(shape, dtype=torch.float32)


def empty_totals(problem: Problem) -> Totals:
    """Zero gradients for each head of the queries, in float32."""
    shape, tokens = (problem.batch, problem.heads), (problem.query, problem.key, problem.value)
    sizes = (*(x.shape[2:] for x in tokens), (problem.m,))
    new = problem.query.new_zeros
    return Totals(*(new((*shape, *size), dtype=torch.float32) for size in sizes))


def finished(total: Totals, problem: Problem, for_weights: bool) -> Gradients:
    """Gradients of the call from those added up for each head of the queries."""
    key, value = (by_key_head(x, problem) for x in (total.key, total.value))
    return Gradients(total.query, key, value, total.weight if for_weights else None)
