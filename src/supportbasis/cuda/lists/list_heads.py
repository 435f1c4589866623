"""Lists of exact and tilted keys on the device, all heads at once: `lists`, by kernels.

Tilts are made for some windows at a time, within a workspace of fixed size, so that memory grows
with the tokens alone. No call synchronises with the host. Calls so short that their launches take
longer than their work are captured as CUDA graphs, which synchronises once a shape, and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward
from ...errors import InputError
from ...lists.sorting import SORTED
from ...lists.tables import ListSettings, tiles_by_centre, visible_leaves, window_ranges
from ...plans import HeadPlan, ListHead, Plan
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact import exact_heads as exact
from ..exact.rectangle import slopes
from ..runtime.language import cdiv
from ..runtime.replay import joined, replayed
from . import list_attention as kernels
from . import list_backward as backward
from . import window_sorting as sorting

WORKSPACE = 2 * 2**30  # bytes of tilts and lists at a time
SHORT = 2**26  # entries of tokens up to which a call is replayed: some 2 ms of work
LEAST = 16  # tokens of a cell, a tile or a leaf that kernels take


def refusal(head: HeadPlan) -> str | None:
    settings = _settings_of(head)
    if min(settings.leaf, settings.tile) < LEAST:
        return f"{settings}: kernels take leaves and tiles of {LEAST} tokens or more"
    if settings.window > sorting.WIDEST:
        return f"{settings}: kernels sort windows of {sorting.WIDEST} positions at most"
    return None


def family(head: HeadPlan) -> object:
    """The settings that heads of one call must share: all but the price."""
    return replace(_settings_of(head), price=0.0)


def _settings_of(head: HeadPlan) -> ListSettings:
    return cast(ListHead, head).lists  # the only kind that `engine.dispatch` sends here


def forward(problem: Problem, plan: Plan) -> Forward:
    tokens, weight = (problem.query, problem.key, problem.value), problem.key_log_weight
    given = (*tokens, _prices(plan, problem), *(() if weight is None else (weight.float(),)))
    run = partial(_forward, problem, _settings_of(plan.heads[0]))
    key = ("lists", family(plan.heads[0]), problem.scale, exact.precision())
    is_short = sum(x.numel() for x in tokens) <= SHORT
    output, lse = replayed(key, run, *given) if is_short else run(*given)
    return output, lse, None


def _forward(problem: Problem, settings: ListSettings, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows, ``given`` query, key, value, prices and log-weights, if any."""
    query, key, value, price, *weight = given
    weights = weight[0] if weight else None
    problem = replace(problem, query=query, key=key, value=value, key_log_weight=weights)
    tables = _tables(problem, settings)
    if settings.window:
        own = output, lse = own_windows(problem, settings.window)
    else:
        own, (output, lse) = None, (x.flatten(0, 1) for x in exact.empty_results(problem))
    for tilts, lists in groups(tables, settings, price):
        kernels.attend(tables, tilts, lists, own, output, lse)
    shape = problem.query.shape[:3]
    return output.view(*shape, -1), lse.view(shape)


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients of the call; tables, tilts and lists are made again, bit by bit the same."""
    settings, group = _settings_of(plan.heads[0]), problem.group
    tables, total = _tables(problem, settings), exact.empty_totals(problem)
    slope = -slopes(saved.grad, saved.grad_lse, saved.output)
    rows = backward.Rows(*(x.flatten(0, 1).contiguous() for x in (saved.grad, slope, saved.lse)))
    alike = (tables.ks, tables.vs, tables.spread, tables.ks[..., 0])
    sums = [total.query.new_zeros(tables.heads, *x.shape[1:]) for x in alike]
    sorted_total = backward.Totals(total.query.flatten(0, 1), *sums)
    for tilts, lists in groups(tables, settings, _prices(plan, problem)):
        backward.gradients(tables, tilts, lists, rows, sorted_total)
    backward.add_spreads(tables, sorted_total)
    slots = tables.slots.repeat_interleave(group, 0)
    empty, token = slots < 0, slots.clamp(min=0).long()
    for whole, part in ((total.key, sums[0]), (total.value, sums[1]), (total.weight, sums[3])):
        shape = (*slots.shape, *[1] * (part.dim() - 2))  # an index of every entry would be as large
        part.masked_fill_(empty.view(shape), 0.0)  # a slot without a key has no gradient
        whole.flatten(0, 1).scatter_add_(1, token.view(shape).expand_as(part), part)
    found = exact.finished(total, problem, saved.for_weights)
    if settings.window:
        _add_own_windows(found, problem, settings.window, saved)
    return found


def _add_own_windows(total: Gradients, problem: Problem, width: int, saved: SavedForward) -> None:
    """Gradients of exact attention within windows, given the whole output and lse of the rows."""
    own = saved.map(lambda x: _cut(x, problem, width).contiguous())
    part = exact.gradients(_windows(problem, width), _EXACT, own)
    for whole, piece in zip(vars(total).values(), vars(part).values(), strict=True):
        if piece is not None:
            piece = _by_head(piece, problem, whole.shape[1])
            tokens = min(whole.shape[2], piece.shape[1])
            whole[:, :, :tokens] += piece[:, :tokens].unflatten(0, whole.shape[:2])


_kept: WeakCache[Plan, tuple[torch.device, int], Tensor] = WeakCache()


def _prices(plan: Plan, problem: Problem) -> Tensor:
    """The price of each head of all batch elements."""
    device, batch = problem.query.device, problem.batch
    prices = [_settings_of(head).price for head in plan.heads] * batch
    make = partial(torch.tensor, prices, dtype=torch.float32, device=device)
    return _kept.get(plan, (device, batch), make)


def _tables(problem: Problem, settings: ListSettings) -> kernels.Tables:
    """The tables of a call."""
    keys = min(problem.n, problem.m) if settings.window else problem.m  # that a row attends to
    tokens = (problem.query, problem.key[:, :, :keys], problem.value[:, :, :keys])
    query, key, value = (x.flatten(0, 1).contiguous() for x in tokens)
    weight = problem.key_log_weight
    weight = None if weight is None else weight.flatten(0, 1).float()
    slots, members = _sorted(query, key, weight, settings)
    members = members.view(len(query), -1, settings.block)
    if settings.strict:  # the cells of a window are made of the queries before it
        members = pad(members, (0, 0, settings.cells, -settings.cells), value=-1)
    mean, variance = kernels.cell_means(query, members)
    tiles: tuple[Tensor, ...] = (members,)
    if settings.strict:
        tiles = tuple(x.int().contiguous() for x in tiles_by_centre(query, mean, settings))
    ks, vs, spread = kernels.gather_leaves(key, value, slots, settings.leaf)
    bs = None
    if weight is not None or slots.shape[1] != keys:
        at = slots.repeat_interleave(problem.group, 0)
        if weight is None:
            weight = ks.new_zeros((), dtype=torch.float32).expand(len(at), keys)
        bs = weight.gather(1, at.clamp(min=0).long()).masked_fill_(at < 0, -torch.inf)
    cells = torch.arange(members.shape[1], dtype=torch.int32, device=query.device)
    visible = visible_leaves(cells, slots.shape[1] // settings.leaf, settings)
    return kernels.Tables(
        query, ks, vs, bs, slots, members, visible, mean, variance, spread, settings.leaf,
        problem.scale, exact.precision(), *tiles,
    )  # fmt: skip


def groups(
    tables: kernels.Tables, settings: ListSettings, price: Tensor
) -> Iterator[tuple[kernels.Tilts, kernels.Lists]]:
    """Tilted keys and lists of the cells of consecutive windows, as many as the workspace allows,
    that attend to any leaf. Raises if those of one window do not fit."""
    each, heads, width = settings.cells, tables.heads, sum(tables.widths[:2])
    cells = torch.arange(0, tables.cells, each, device="cpu")
    visible = visible_leaves(cells, tables.spread.shape[1], settings).tolist()
    pair = (width * tables.query.element_size() + 12) * heads
    needed = each * visible[-1] * pair  # by the last window, which sees the most
    if needed > 4 * WORKSPACE:
        raise InputError(
            f"query: lists of {visible[-1]} leaves for {heads} heads need a workspace of {needed} "
            f"bytes, more than {4 * WORKSPACE}; use fewer heads in a call, or a larger block_size"
        )
    for first, last in window_ranges(visible, each, WORKSPACE // pair):
        tilts = kernels.tilt(tables, first * each, last * each, visible[last - 1])
        yield tilts, kernels.select(tables, tilts, price)


def _sorted(
    query: Tensor, key: Tensor, weight: Tensor | None, settings: ListSettings
) -> tuple[Tensor, Tensor]:
    """Keys and queries of all heads in their sorted slots.

    As many keys as queries are sorted together with them, as heads of one tensor: short calls do
    not fill the device.
    """
    n, leaf, block, hidden = query.shape[1], settings.leaf, settings.block, None
    sort = partial(sorting.head_permutation, window=settings.window)
    if weight is not None and not settings.window:  # hidden by all heads that share a key
        hidden = (weight == -torch.inf).unflatten(0, (len(key), -1)).all(1)
    elif n == key.shape[1] and (settings.window or n > SORTED):
        slots = sort(joined(query, key), block, others=(len(query), leaf))
        return slots[len(query) :], slots[: len(query)]
    return sort(key, leaf, hidden), sort(query, block)


def own_windows(problem: Problem, width: int) -> tuple[Tensor, Tensor]:
    """Output [heads, n, dv] and lse [heads, n] of all rows over their own windows."""
    parts = exact.forward(_windows(problem, width), _EXACT)[:2]
    output, lse = (_by_head(x, problem, problem.heads)[:, : problem.n] for x in parts)
    return output.contiguous(), lse.contiguous()


_EXACT = cast(Plan, None)  # of exact heads, which need none


def _windows(problem: Problem, width: int) -> Problem:
    """A problem whose batch elements are windows attending to themselves."""
    weight, tokens = problem.key_log_weight, (problem.query, problem.key, problem.value)
    if weight is None and problem.m < problem.n:
        shape = (problem.batch, problem.heads, problem.m)
        weight = problem.query.new_zeros(shape, dtype=torch.float32)
    if weight is not None:
        weight = _cut(weight.float(), problem, width, -torch.inf)
    query, key, value = (_cut(x, problem, width) for x in tokens)
    return replace(
        problem, query=query, key=key, value=value, key_log_weight=weight,
        leading=tuple(query.shape[:2]), kept=None,
    )  # fmt: skip


def _cut(x: Tensor, problem: Problem, width: int, fill: float = 0.0) -> Tensor:
    """The tokens of all heads [batch, heads, tokens, ...] as windows of one head each, or [windows,
    heads, W, ...] where heads share keys; cut and filled up to whole windows of the queries."""
    x = x[:, :, : problem.n]
    extra = cdiv(problem.n, width) * width - x.shape[2]
    x = pad(x, (*[0, 0] * (x.dim() - 3), 0, extra), value=fill) if extra else x
    x = x.unflatten(2, (-1, width))
    return x.flatten(0, 2).unsqueeze(1) if problem.group == 1 else x.transpose(1, 2).flatten(0, 1)


def _by_head(x: Tensor, problem: Problem, heads: int) -> Tensor:
    """Tensors of windows as [batch * heads, tokens, ...]."""
    shape = (problem.batch * heads, -1, *x.shape[3:])
    if problem.group > 1:
        x = x.unflatten(0, (problem.batch, -1)).transpose(1, 2)
    return x.reshape(shape)
