"""The way back through causal lists on the device, all heads at once.

The same parts as for heads that are not causal (`lists_backward`), layer by layer, and the exact
ones: chunks that rows share with their own keys, and the first rows. A log-sum of +inf leaves a row
out of a part. Of the keys before its chunk a row also knows the shift of its frame: what flows
there is what scores get in all, less what those of the row's own chunk get.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..blocks import BlockSettings
from ..forest import Nodes
from ..kernels.placing import add_rows
from ..kernels.rectangle import Totals, add_gradients, slopes
from ..plans import Plan
from ..problem import Problem
from .causal import Chunks, Seen, first_rows, run_of, seen
from .exact import precision
from .framed import out_of, settings_of, shift_factor
from .lists_backward import InForest
from .nodes_backward import token_gradients
from .room import Sizes, all_unless
from .run import parted


def gradients(problem: Problem, plan: Plan, *back: Tensor) -> tuple[Tensor, ...]:
    """As those of `lists_backward`."""
    settings, first = settings_of(plan.heads[0]), min(plan.heads[0].exact_rows, problem.n)
    work = partial(_all_heads, settings, first, problem.scale, len(back))
    return run_of(problem, plan).back("causal back", work, *back)


def _all_heads(
    settings: BlockSettings,
    first: int,
    scale: float,
    count: int,
    sizes: Sizes,
    sure: bool,
    *given: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, one for each head of the queries, and the
    sizes that were needed. Nothing here waits."""
    (output, lse, grad, *more), (query, key, value, prices, *frames) = given[:count], given[count:]
    tokens, grad_lse = (query, key, value), more[0] if more else None
    made = seen(settings, sizes, *tokens, prices, *frames)
    slope = slopes(grad, grad_lse, output)
    late = torch.arange(query.shape[2], device=query.device) >= first
    left = torch.where(late & made.fits, lse, math.inf)
    chunks = Chunks.of(query, settings)
    inside = _inside(made, grad, left, slope)
    factor = shift_factor(chunks.attended(*tokens, scale, made.weight), grad, left, slope)
    if grad_lse is not None:
        factor = factor + torch.where(left.isfinite(), grad_lse.float(), 0.0).flatten()
    moved = out_of(parted(tuple(frames))[0], inside, factor.view(inside[0].shape[:2]))
    total = Totals(*(x.unflatten(0, query.shape[:2]).contiguous() for x in moved))
    _add_chunks(total, chunks, grad, slope, left, tokens, scale, made.weight)
    known = torch.where(made.fits, lse, math.inf)
    add_gradients(
        total, grad, slope, known, *tokens, first_rows(first, query, key, scale, made.weight)
    )
    if sure:
        whole = all_unless(made.fits, query, key, scale, made.weight, precision(), causal=True)
        add_gradients(total, grad, slope, lse, *tokens, whole)
    return total.query, total.key, total.value, total.weight, made.needed


def _inside(
    made: Seen, grad: Tensor, lse: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients through lists of queries, keys, values and log-weights in their frames, [heads,
    tokens, ...]."""
    forest, inside = made.forest, made.inside
    heads, n, d = inside.query.shape
    rows = (grad.flatten(0, 2), lse.flatten() - inside.shift.flatten(), -slope.flatten())
    query, total = inside.query.new_zeros(heads * n, d), InForest.none(forest)
    for members, part, length in zip(made.members, made.found, made.lengths, strict=True):
        to_query, to_mean = total.add(forest, *part, length, rows, inside.value.dtype)
        add_rows(query, part[0].rows.flatten(), to_query.flatten(0, 1))
        add_rows(query, members, to_mean[:-1] / members.shape[1])
    key, value, weight = _to_keys(made, total)
    return query.view(heads, n, d), key, value, weight


def _to_keys(made: Seen, total: InForest) -> tuple[Tensor, ...]:
    """From nodes and leaves of all levels to the tokens of all heads."""
    flat, heads, node, leaf = made.inside.flat(), len(made.inside.key), 0, 0
    found: list[Tensor] = []
    for tree, position in made.trees:
        after, last = node + len(tree.key), leaf + len(position)
        own = Nodes(*(x[node:after] for x in total.nodes))
        part = token_gradients(tree, flat, position, own, [x[leaf:last] for x in total.leaves])
        found = [x + y for x, y in zip(found, part, strict=True)] if found else list(part)
        node, leaf = after, last
    return tuple(x.unflatten(0, (heads, -1)) for x in found)


def _add_chunks(
    total: Totals,
    chunks: Chunks,
    grad: Tensor,
    slope: Tensor,
    lse: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    scale: float,
    log_weight: Tensor | None,
) -> None:
    """Add what flows back through the chunks that rows share with their own keys."""
    query, key, _ = tokens
    rectangle = chunks.rectangle(query, key, scale, log_weight)
    made = Totals(*(chunks.cut(torch.zeros_like(x)).contiguous() for x in vars(total).values()))
    parts = [chunks.cut(x) for x in tokens]
    slope, lse = chunks.cut(slope).contiguous(), chunks.cut(lse, math.inf).contiguous()
    add_gradients(made, chunks.cut(grad), slope, lse, parts[0], parts[1], parts[2], rectangle)
    for whole, part in zip(vars(total).values(), vars(made).values(), strict=True):
        more = chunks.joined(part)[:, :, : whole.shape[2]]
        whole[:, :, : more.shape[2]] += more
