"""The backward pass of fitted polynomials on the device, all heads in one captured CUDA graph.

Far tokens are found again, failed rows are saved by the forward pass, and the preallocated capacity
is that of the forward pass. Gradients of near rows and keys flow through the sums of their features
and the balancing transforms; those of far keys and exact rows through rectangles; all rows are
exact where the capacity was exceeded. A log-sum of +inf excludes a row from a part. All sums are
float32, and nothing synchronises with the host.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ...components.cotangent import SavedForward
from ...plans import Plan
from ...problem.problem import Problem
from ..exact.exact_heads import precision
from ..exact.rectangle import Totals, add_gradients, slopes
from ..runtime.capacity import Sizes, all_unless, enough
from ..runtime.replayed_call import split_given
from . import fitted_chunks, fitted_sums
from .fitted_heads import Built, Constants, build, over_far_keys, replayed_call
from .fitted_sums import Rows
from .transformed import shift_factor, token_gradients


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, for each head of the queries."""
    grad_lse = () if saved.grad_lse is None else (saved.grad_lse,)
    tensors = (saved.output, saved.lse, saved.fallback, saved.grad, *grad_lse)
    work = partial(_all_heads, Constants.of(problem, plan), len(tensors))
    return replayed_call(problem, plan).backward("fitted backward", work, *tensors)


def _all_heads(
    call: Constants, count: int, sizes: Sizes, guarded: bool, *given: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, one for each head of the queries, and the
    needed capacity. The first ``count`` tensors are those that the forward pass saved, and the
    cotangents."""
    output, lse, fallback, grad, *more = given[:count]
    query, key, value, *rest = given[count:]
    tokens, grad_lse = (query, key, value), more[0] if more else None
    built, failed = build(call, *tokens, *rest), fallback.flatten(0, 1)
    needed = built.needed(failed)
    fits = enough(needed, sizes)
    slope = slopes(grad, grad_lse, output)
    known = torch.where(fits, lse, math.inf)
    near = torch.where((built.exact_rows | failed).view(lse.shape), math.inf, known)
    balanced = _balanced_gradients(call, built, failed, grad, slope, near)
    factor = _shift_gradients(built, sizes, tokens, grad, slope, near, grad_lse)
    parts = token_gradients(split_given(tuple(rest))[0], balanced, factor)
    total = Totals(*(x.unflatten(0, query.shape[:2]).contiguous() for x in parts))
    if sizes[0]:
        add_gradients(total, grad, slope, near, *tokens, built.key_rectangle(sizes[0]))
    if sizes[1]:
        add_gradients(total, grad, slope, known, *tokens, built.row_rectangle(failed, sizes[1]))
    if guarded:
        how = (call.scale, built.weight, precision(), call.causal)
        add_gradients(total, grad, slope, lse, *tokens, all_unless(fits, query, key, *how))
    return total.query, total.key, total.value, total.weight, needed


def _balanced_gradients(
    call: Constants, built: Built, failed: Tensor, grad: Tensor, slope: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of transformed queries and keys, values and log-weights, [heads, tokens, ...]."""
    module = fitted_chunks if call.causal else fitted_sums
    real = lse.isfinite().flatten(0, 1)
    both = torch.cat([grad.float(), slope.unsqueeze(3)], 3).flatten(0, 1)
    both = torch.where(real.unsqueeze(2), both, 0.0)
    log_factor = torch.where(real, built.balanced.shift - lse.flatten(0, 1), -math.inf)
    parts = [
        module.gradients(kernel, built.near(i, failed), Rows(both[i], log_factor[i]))
        for i, kernel in enumerate(call.kernels)
    ]
    query, key, value, weight = (torch.stack(x) for x in zip(*parts, strict=True))
    return query, key, value, weight


def _shift_gradients(
    built: Built,
    sizes: Sizes,
    tokens: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    slope: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
) -> Tensor | None:
    """Gradients of the rows' shifts, to which the scores of all near keys add: those of all scores
    (which sum to that of lse) less those of far keys; None: zero."""
    factor = None
    if sizes[0]:
        factor = shift_factor(over_far_keys(built, sizes[0], tokens), grad, lse, slope)
        factor = factor.view(built.exact_rows.shape)
    if grad_lse is not None:
        own = torch.where(lse.isfinite(), grad_lse.float(), 0.0).flatten(0, 1)
        factor = own if factor is None else factor + own
    return factor
