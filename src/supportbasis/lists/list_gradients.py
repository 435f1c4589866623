"""Gradients of the list component: three softmaxes, and the softmax that each tilt is.

The forward pass is repeated for some windows at a time. Tables and lists are constants. With
p = exp(score - lse) and dz = p (<g, v> + h), where g and h are the cotangents of a row's sums, a
row adds p g to the gradient of a value, dz to that of a log-weight, and scale dz q to that of a
key, which may be a tilted key; gradients of a tilted key flow to the keys of its leaf and to the
mean query, and those of its log-weight also through the variances of the leaf's keys and of the
cell's queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..components.cotangent import Cotangent, Gradients
from ..problem.problem import Head
from .list_sum import (
    Group,
    causal_bias,
    entries,
    equal_lists,
    gathered,
    groups,
    head_tables,
    rows_of,
    tile_cells,
    window_tokens,
)
from .tables import ListSettings, Tables, Tilts, score_variances


class Rows(NamedTuple):
    """Rows [batch, rows] with their cotangents; a slot without a row has log-scale -inf."""

    query: Tensor  # [batch, rows, d]
    num: Tensor  # [batch, rows, dv]
    den: Tensor  # [batch, rows]
    log_scale: Tensor  # [batch, rows]

    def of(self, some: Tensor) -> Rows:
        """Some of the batch."""
        return Rows(*(x[some] for x in self))


class Leaves(NamedTuple):
    """Gradients of sorted keys."""

    key: Tensor  # [leaves, L, d]
    value: Tensor  # [leaves, L, dv]
    weight: Tensor  # [leaves, L]
    spread: Tensor  # [leaves]: of the variance of the keys of a leaf


def add_gradients(
    settings: ListSettings,
    total: Gradients,
    cotangent: Cotangent,
    head: Head,
    rows: Tensor | None,
) -> None:
    """Add the gradients of the tokens from those of the rows' sums."""
    made, cotangent = head_tables(head, settings), _of_all_rows(cotangent, head, rows)
    if settings.window:
        _add_own_windows(total, cotangent, head, settings.window)
    shape = made.key.shape[1:3]
    new = total.key.new_zeros
    leaves = Leaves(new(*shape, head.dim), new(*shape, head.value_dim), new(shape), new(shape[:1]))
    for group in groups(head, made, settings):
        _add_group(total, leaves, cotangent, head, made, group, settings)
    slots = made.slots[0]
    leaves.key.add_(variance_gradients(made.key[0], slots.view(shape), leaves.spread))
    real = slots >= 0
    total.key.index_add_(0, slots[real], leaves.key.flatten(0, 1)[real])
    total.value.index_add_(0, slots[real], leaves.value.flatten(0, 1)[real])
    if total.key_log_weight is not None:
        total.key_log_weight.index_add_(0, slots[real], leaves.weight.flatten()[real])


def _of_all_rows(cotangent: Cotangent, head: Head, rows: Tensor | None) -> Cotangent:
    if rows is None:
        return cotangent
    num = cotangent.num.new_zeros(head.n, cotangent.num.shape[1])
    den, log_scale = num.new_zeros(head.n), num.new_full((head.n,), -math.inf)
    num[rows], den[rows], log_scale[rows] = cotangent.num, cotangent.den, cotangent.log_scale
    return Cotangent(num, den, log_scale)


def _taken(cotangent: Cotangent, head: Head, rows: Tensor) -> Rows:
    at = rows.clamp(min=0)
    log_scale = cotangent.log_scale[at].masked_fill(rows < 0, -math.inf)
    return Rows(rows_of(head, rows), cotangent.num[at], cotangent.den[at], log_scale)


class Parts(NamedTuple):
    """Gradients of rows, keys, values and log-weights of one softmax."""

    query: Tensor  # [batch, rows, d]
    key: Tensor  # [batch, keys, d]
    value: Tensor  # [batch, keys, dv]
    weight: Tensor  # [batch, keys]: of log-weights


def attention_gradients(
    rows: Rows, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Parts:
    """Gradients of rows attending to keys [batch, keys, d] with log-weights [batch, 1 or rows,
    keys]."""
    score = scale * (rows.query @ key.mT)
    score = score if bias is None else score + bias
    weight = (score + rows.log_scale.unsqueeze(2)).exp_()
    slope = weight * (rows.num @ value.mT + rows.den.unsqueeze(2))
    return Parts(
        scale * (slope @ key), scale * (slope.mT @ rows.query), weight.mT @ rows.num, slope.sum(1)
    )


def _add_own_windows(total: Gradients, cotangent: Cotangent, head: Head, width: int) -> None:
    """Add the gradients of each window attending to itself."""
    _, key, value, bias = window_tokens(head, width)
    ahead = causal_bias(key.new_empty(width, width))
    windows, keys = len(key), min(head.n, head.m)
    step = max(1, entries(head) // width**2)
    for first in range(0, windows, step):
        last = min(windows, first + step)
        at = torch.arange(first * width, last * width, device=key.device)
        rows = _taken(cotangent, head, torch.where(at < head.n, at, -1).view(-1, width))
        some = slice(first, last)
        mask = ahead if bias is None else ahead + bias[some]
        part = attention_gradients(rows, key[some], value[some], mask, head.scale)
        row, key_at = slice(first * width, last * width), slice(first * width, last * width)
        total.query[row] += part.query.flatten(0, 1)[: head.n - first * width]
        count = max(0, keys - first * width)
        if count:
            total.key[:keys][key_at] += part.key.flatten(0, 1)[:count]
            total.value[:keys][key_at] += part.value.flatten(0, 1)[:count]
            if total.key_log_weight is not None:
                total.key_log_weight[:keys][key_at] += part.weight.flatten()[:count]


def _add_group(
    total: Gradients,
    leaves: Leaves,
    cotangent: Cotangent,
    head: Head,
    made: Tables,
    group: Group,
    settings: ListSettings,
) -> None:
    """Add the gradients of the rows of some windows attending to tilted keys and open leaves."""
    tiles, cell = made.tiles[0, group.tiles], tile_cells(made, group)
    rows, opened = _taken(cotangent, head, tiles), group.open[cell]
    closed = group.tilts.log_weight.masked_fill(group.open, -math.inf)
    key, value, bias = (x[cell] for x in (group.tilts.key, group.tilts.value, closed))
    part = attention_gradients(rows, key, value, bias.unsqueeze(1), head.scale)
    query = part.query
    of_tilts = Tilts(
        *(
            x.new_zeros(len(closed), *x.shape[1:]).index_add_(0, cell, x)
            for x in (part.key, part.value, part.weight)
        )
    )
    _add_tilts(total, leaves, of_tilts, head, made, group)
    for some, listed in equal_lists(opened, settings.leaf * max(head.dim, head.value_dim)):
        exact = attention_gradients(rows.of(some), *gathered(head, made, listed), head.scale)
        query[some] += exact.query
        at, size = listed.flatten(), settings.leaf
        leaves.key.index_add_(0, at, exact.key.reshape(len(at), size, -1))
        leaves.value.index_add_(0, at, exact.value.reshape(len(at), size, -1))
        leaves.weight.index_add_(0, at, exact.weight.reshape(len(at), size))
    real = tiles >= 0
    total.query.index_add_(0, tiles[real], query[real])


def _add_tilts(
    total: Gradients, leaves: Leaves, grads: Tilts, head: Head, made: Tables, group: Group
) -> None:
    """Add the gradients of keys and queries from those of tilted keys: to the keys of their leaves,
    and to the cells' members through the mean query."""
    count, scale = group.open.shape[1], head.scale
    mean = made.mean[0, group.cells]  # [cells, d]
    key, value = (x[0, :count].to(head.dtype) for x in (made.key, made.value))
    tilts = group.tilts
    score = scale * (key @ mean.T)  # [leaves, L, cells]
    if made.weight is not None:
        score = score + made.weight[0, :count].to(head.dtype).unsqueeze(2)
    variance = score_variances(made, group.cells, scale)[0, :, :count]
    lam = tilts.log_weight - (variance / 2).log1p()  # [cells, leaves]
    lam = lam + scale * (tilts.key * mean.unsqueeze(1)).sum(2)
    lam = torch.where(lam > -math.inf, lam, math.inf)
    weight = (score - lam.T.unsqueeze(1)).exp_()
    of_key = grads.key - scale * grads.log_weight.unsqueeze(2) * mean.unsqueeze(1)
    of_mean = -scale * (grads.log_weight.unsqueeze(1) @ tilts.key).squeeze(1)
    level = (of_key * tilts.key).sum(2) + (grads.value * tilts.value).sum(2) - grads.log_weight
    of_key, of_value = (x.transpose(0, 1) for x in (of_key, grads.value))  # [leaves, cells, ...]
    slope = key @ of_key.mT + value @ of_value.mT - level.T.unsqueeze(1)
    slope = slope * weight
    leaves.key[:count] += weight @ of_key + scale * (slope @ mean)
    leaves.value[:count] += weight @ of_value
    leaves.weight[:count] += slope.sum(2)
    of_mean += scale * (slope.flatten(0, 1).T @ key.flatten(0, 1))
    slope = scale**2 / 2 * grads.log_weight / (1 + variance / 2)
    leaves.spread[:count] += made.variance[0, group.cells] @ slope
    of_variance = slope @ made.spread[0, :count].to(slope) / max(1, head.dim)
    members = made.members[0, group.cells]
    real = members >= 0
    shared = (of_mean / real.sum(1, keepdim=True).clamp(min=1)).unsqueeze(1)
    shared = shared + variance_gradients(rows_of(head, members), members, of_variance)
    total.query.index_add_(0, members[real], shared[real])


def variance_gradients(tokens: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """Gradients of sets of tokens [sets, size, d] from those of their variances, the sums over
    coordinates, [sets]; an index of -1 is no token."""
    real = (index >= 0).to(tokens)
    factor = 2 * grad / real.sum(1).clamp(min=1)
    mean = (tokens * real.unsqueeze(2)).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
    return (tokens - mean.unsqueeze(1)) * (factor.unsqueeze(1) * real).unsqueeze(2)
