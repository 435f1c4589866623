"""The way back through fitted polynomials on the device, all heads in one recording.

Which tokens are far is found once more, which rows were lost is told, and there is the room that
the way there had. Near rows and keys go back through the sums of their features, out of the frames;
far keys and exact rows through rectangles; and all rows exactly where there was too little room. A
log-sum of +inf leaves a row out of a part. All sums are float32, and nothing waits.
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
from ..runtime.replayed_call import parted
from ..runtime.room import Sizes, all_unless, enough
from . import fitted_chunks, fitted_sums
from .fitted_heads import Call, Seen, over_far_keys, run_of, seen
from .fitted_sums import Rows
from .framed import out_of, shift_factor


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> tuple[Tensor, ...]:
    """Of query, key, value and log-weights, for each head of the queries."""
    grad_lse = () if saved.grad_lse is None else (saved.grad_lse,)
    back = (saved.output, saved.lse, saved.fallback, saved.grad, *grad_lse)
    work = partial(_all_heads, Call.of(problem, plan), len(back))
    return run_of(problem, plan).back("fitted back", work, *back)


def _all_heads(
    call: Call, count: int, sizes: Sizes, sure: bool, *given: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, one for each head of the queries, and the
    sizes that were needed. Nothing here waits."""
    output, lse, fallback, grad, *more = given[:count]
    query, key, value, *frames = given[count:]
    tokens, grad_lse = (query, key, value), more[0] if more else None
    made, lost = seen(call, *tokens, *frames), fallback.flatten(0, 1)
    needed = made.needed(lost)
    fits = enough(needed, sizes)
    slope = slopes(grad, grad_lse, output)
    known = torch.where(fits, lse, math.inf)
    left = torch.where((made.exact_rows | lost).view(lse.shape), math.inf, known)
    inside = _inside(call, made, lost, grad, slope, left)
    factor = _shifts(made, sizes, tokens, grad, slope, left, grad_lse)
    moved = out_of(parted(tuple(frames))[0], inside, factor)
    total = Totals(*(x.unflatten(0, query.shape[:2]).contiguous() for x in moved))
    if sizes[0]:
        add_gradients(total, grad, slope, left, *tokens, made.keys_alone(sizes[0]))
    if sizes[1]:
        add_gradients(total, grad, slope, known, *tokens, made.rows_alone(lost, sizes[1]))
    if sure:
        how = (call.scale, made.weight, precision(), call.causal)
        add_gradients(total, grad, slope, lse, *tokens, all_unless(fits, query, key, *how))
    return total.query, total.key, total.value, total.weight, needed


def _inside(
    call: Call, made: Seen, lost: Tensor, grad: Tensor, slope: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights in their frames, [heads, tokens, ...]."""
    way = fitted_chunks if call.causal else fitted_sums
    real = lse.isfinite().flatten(0, 1)
    both = torch.cat([grad.float(), slope.unsqueeze(3)], 3).flatten(0, 1)
    both = torch.where(real.unsqueeze(2), both, 0.0)
    log_factor = torch.where(real, made.inside.shift - lse.flatten(0, 1), -math.inf)
    parts = [
        way.gradients(kernel, made.near(i, lost), Rows(both[i], log_factor[i]))
        for i, kernel in enumerate(call.kernels)
    ]
    query, key, value, weight = (torch.stack(x) for x in zip(*parts, strict=True))
    return query, key, value, weight


def _shifts(
    made: Seen,
    sizes: Sizes,
    tokens: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    slope: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
) -> Tensor | None:
    """Gradients of the rows' shifts, which all keys in the frame know: what scores get in all, less
    what those of far keys get."""
    factor = None
    if sizes[0]:
        factor = shift_factor(over_far_keys(made, sizes[0], tokens), grad, lse, slope)
        factor = factor.view(made.exact_rows.shape)
    if grad_lse is not None:
        own = torch.where(lse.isfinite(), grad_lse.float(), 0.0).flatten(0, 1)
        factor = own if factor is None else factor + own
    return factor
