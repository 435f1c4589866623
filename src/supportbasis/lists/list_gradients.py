"""Gradients of the list component: three softmaxes, and the softmax that each tilt is.

Tables and lists are constants. With weights p = exp(score - lse) of a row's softmax and dz =
p (<g, v> + h), where g and h are the cotangents of the row's sums, a closed leaf has

    dvt = sum_i p_i g_i    dlt = sum_i dz_i    dkt = scale sum_i dz_i (q_i - m)

and its keys, w being the weights of its tilt,

    level = <dkt, kt> + <dvt, vt>    dt_j = w_j (<dkt, k_j> + <dvt, v_j> + dlt - level)
    dk_j = w_j dkt + scale dt_j m    dv_j = w_j dvt    db_j = dt_j
    dm = scale sum_j (dt_j - w_j dlt) k_j

of which every member of the cell gets its share. Through log(1 + s / 2) dlt also reaches the
variances of the cell's queries and of the leaf's keys. Open leaves have the gradients of exact
attention. The forward pass is repeated for some windows at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..components.cotangent import Cotangent, Gradients
from ..components.exact_sum import ExactSum
from ..problem.problem import Head
from .list_sum import Group, groups, open_leaves
from .tables import ListSettings, Tables, deviations, rows_of, tables


class Leaves(NamedTuple):
    """Gradients of sorted keys."""

    key: Tensor  # [leaves, L, d]
    value: Tensor  # [leaves, L, dv]
    weight: Tensor  # [leaves, L]
    spread: Tensor  # [leaves]: of the variance of the keys of a leaf


def add_gradients(
    settings: ListSettings, total: Gradients, cotangent: Cotangent, head: Head
) -> None:
    """Add the gradients of the tokens from those of the rows' sums."""
    made = tables(head, settings)
    if settings.window:
        tokens = (torch.arange(x, device=head.query.device) for x in (head.n, head.m))
        windows = (x.split(settings.window) for x in tokens)
        for rows, keys in zip(*windows, strict=False):  # the last ones may have no rows or no keys
            ExactSum(keys).add_gradients(total, cotangent[rows], head, rows)
    slots, weight = made.slots, made.key.new_zeros(made.slots.shape)
    leaves = Leaves(*(torch.zeros_like(x) for x in (made.key, made.value, weight, made.spread)))
    for group in groups(head, made, settings):
        _add_group(total, leaves, cotangent, head, made, group)
    leaves.key.add_(variance_gradients(made.key, slots, leaves.spread))
    real = slots >= 0
    for whole, part in zip((total.key, total.value, total.key_log_weight), leaves[:3], strict=True):
        if whole is not None:
            whole.index_add_(0, slots[real], part[real])


def attention_gradients(
    query: Tensor, sums: Cotangent, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries [batch, rows, d], with gradients of their ``sums``, of the keys and
    values [batch, keys, ...] that they attend to, and of log-weights [batch, 1, keys]."""
    score = scale * (query @ key.mT)
    score = score if bias is None else score + bias
    weight = (score + sums.log_scale.unsqueeze(2)).exp_()
    slope = weight * (sums.num @ value.mT + sums.den.unsqueeze(2))
    of_query, of_key = scale * (slope @ key), scale * (slope.mT @ query)
    return of_query, of_key, weight.mT @ sums.num, slope.sum(1)


def _add_group(
    total: Gradients, leaves: Leaves, cotangent: Cotangent, head: Head, made: Tables, group: Group
) -> None:
    """Add the gradients of the rows of some windows attending to tilted keys and open leaves."""
    rows, none = rows_of(head, group.rows), group.rows < 0
    sums = cotangent[group.rows.clamp(min=0)].without(none)
    (key, value, log_weight, _), opened = group.of_tiles()
    closed = log_weight.masked_fill(opened, -math.inf).unsqueeze(1)
    query, *parts = attention_gradients(rows, sums, key, value, closed, head.scale)
    of_tilts = [
        x.new_zeros(len(group.open), *x.shape[1:]).index_add_(0, group.cell, x) for x in parts
    ]
    _add_tilts(total, leaves, of_tilts, head, made, group)
    for some, listed, keys in open_leaves(made, opened):
        of_query, *exact = attention_gradients(rows[some], sums[some], *keys, head.scale)
        query[some] += of_query
        for whole, part in zip(leaves[:3], exact, strict=True):
            whole.index_add_(0, listed.flatten(), part.reshape(-1, *whole.shape[1:]))
    total.query.index_add_(0, group.rows[~none], query[~none])


def _add_tilts(
    total: Gradients, leaves: Leaves, of_tilts: list[Tensor], head: Head, made: Tables, group: Group
) -> None:
    """Add the gradients of keys and queries from those of tilted keys: to the keys of their leaves,
    and to the cells' members through the mean query. A tilt is the softmax attention of mean
    queries to the keys of a leaf, whose values are the keys and the values."""
    (of_key, of_value, of_weight), tilts = of_tilts, group.tilts
    cells, scale = group.cells, head.scale
    variance, mean = tilts.variance, made.mean[cells]
    count = variance.shape[1]
    lam = tilts.log_weight - (variance / 2).log1p()  # [cells, leaves]: lse of the tilt
    lam = lam + scale * (tilts.key * mean.unsqueeze(1)).sum(2)
    lam = torch.where(lam > -math.inf, lam, math.inf)
    of_key = of_key - scale * of_weight.unsqueeze(2) * mean.unsqueeze(1)
    level = (of_key * tilts.key).sum(2) + (of_value * tilts.value).sum(2) - of_weight
    num = torch.cat([of_key, of_value], 2).transpose(0, 1)  # [leaves, cells, d + dv]
    sums = Cotangent(num, -level.T, -lam.T)
    key, value = made.key[:count], made.value[:count]
    bias = None if made.weight is None else made.weight[:count].unsqueeze(1)
    tokens, means = torch.cat([key, value], 2), mean.expand(count, -1, -1)
    means, keys, tokens, weights = attention_gradients(means, sums, key, tokens, bias, scale)
    of_keys, of_values = tokens.split([head.dim, head.value_dim], 2)
    for whole, part in zip(leaves[:3], (keys + of_keys, of_values, weights), strict=True):
        whole[:count] += part
    of_mean = means.sum(0) - scale * (of_weight.unsqueeze(1) @ tilts.key).squeeze(1)
    slope = scale**2 / 2 * of_weight / (1 + variance / 2)
    leaves.spread[:count] += made.variance[cells] @ slope
    of_variance = slope @ made.spread[:count] / head.dim
    members = made.members[cells]
    real = members >= 0
    shared = (of_mean / real.sum(1, keepdim=True).clamp(min=1)).unsqueeze(1)
    shared = shared + variance_gradients(rows_of(head, members), members, of_variance)
    total.query.index_add_(0, members[real], shared[real])


def variance_gradients(tokens: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """Gradients of sets of tokens [sets, size, d] from those of their variances, the sums over
    coordinates, [sets]; an index of -1 is no token."""
    away, count = deviations(tokens, index)
    return 2 * grad.view(-1, 1, 1) / count * away
