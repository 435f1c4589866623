"""Forests: every node of a tree of keys is a coarse key, with all that is needed to judge it.

A node stands for its keys by their weighted mean key, mean value and log mass. To second order
around a query x the sum over a node of weights w_j exp(<x, y_j>) is that of one key

    y + V x    with value    v + C^T x    and log mass    ln W - <x, V x> / 2,

V the variances of its keys (coordinates are nearly independent in a balanced frame) and C the
covariance of keys and values. `tilted` makes such keys for the mean query of a block, and so a
node costs no more than a key in the attention that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .problem import Head
from .tree import leading, leaf_layout, order

DIRECTIONS = 8  # leading coordinates in which the covariance of keys and values is kept
LARGEST_TILT = 1.0  # of <x, V x>: beyond, second order says nothing and the tilt is limited


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes of all trees, root first within each; ``child`` is the first of two, -1 for a leaf."""

    key: Tensor  # [nodes, d]
    value: Tensor  # [nodes, dv]
    log_mass: Tensor  # [nodes]
    variance: Tensor  # [nodes, d]
    covariance: Tensor  # [nodes, directions, dv]
    linked: Tensor  # [nodes, directions]: squared covariance with all values
    scatter: Tensor  # [nodes]: variance of the values over the number of keys
    others: Tensor  # [nodes]: effective number of keys, less one
    child: Tensor  # [nodes]
    leaf: Tensor  # [nodes]: row of the tables below, for a leaf
    leaf_key: Tensor  # [leaves, size, d]
    leaf_value: Tensor  # [leaves, size, dv]
    leaf_weight: Tensor  # [leaves, size]: log-weights, -inf for what fills up a leaf
    roots: Tensor  # [segments]

    @property
    def leaf_size(self) -> int:
        return self.leaf_key.shape[1]


@dataclass
class _Sums:
    """Weighted sums over the keys of each node, in units of exp(top)."""

    top: Tensor  # [nodes]
    mass: Tensor
    square: Tensor  # of the weights
    key: Tensor  # [nodes, d]
    key_square: Tensor
    value: Tensor  # [nodes, dv]
    value_square: Tensor  # [nodes]
    product: Tensor  # [nodes, directions, dv]

    def parents(self) -> _Sums:
        """Pairs of neighbours added up."""
        top = self.top.view(-1, 2).amax(1)
        unit = torch.where(top > -math.inf, top, 0.0)
        share = (self.top.view(-1, 2) - unit.unsqueeze(1)).exp()

        def added(x: Tensor, weight: Tensor) -> Tensor:
            pairs = x.view(-1, 2, *x.shape[1:])
            return (pairs * weight.view(-1, 2, *(1 for _ in x.shape[1:]))).sum(1)

        names = ("mass", "key", "key_square", "value", "value_square", "product")
        sums = {name: added(getattr(self, name), share) for name in names}
        return _Sums(top=top, square=added(self.square, share.square()), **sums)


def build(head: Head, spectrum: Tensor, positions: Tensor, leaf: int) -> Forest:
    """Trees over segments of keys: ``positions`` [segments, tokens] into the keys of ``head``.

    A position of -1 fills a segment up and has no weight. ``head`` is in its frame.
    """
    segments, tokens = positions.shape
    depth, size = leaf_layout(tokens, leaf)
    missing = (size << depth) - tokens
    if missing:
        filler = positions.new_full((segments, missing), -1)
        positions = torch.cat([positions, filler], 1)
    real = positions.clamp(min=0)
    metric = spectrum.to(head.key).clamp(min=0).sqrt()[: leading(spectrum)]
    placed = head.key[:, : len(metric)][real] * metric
    position = positions.gather(1, order(placed, depth)[0]).view(-1, size)
    sums, tables = _leaf_sums(head, position)
    return _assemble(sums, tables, segments, depth)


Tables = tuple[Tensor, Tensor, Tensor]


def _leaf_sums(head: Head, position: Tensor) -> tuple[_Sums, Tables]:
    """Sums over the leaves [leaves, size], and the tokens they hold."""
    real, dtype = position.clamp(min=0), head.dtype
    key, value = head.key[real].to(dtype), head.value[real].to(dtype)
    log_weight = key.new_zeros(position.shape)
    if head.key_log_weight is not None:
        log_weight = head.key_log_weight[real].to(dtype)
    log_weight = log_weight.masked_fill(position < 0, -math.inf)
    top = log_weight.amax(1)
    unit = torch.where(top > -math.inf, top, 0.0)
    weight = (log_weight - unit.unsqueeze(1)).exp()
    column, weighted = weight.unsqueeze(2), key[..., :DIRECTIONS] * weight.unsqueeze(2)
    sums = _Sums(
        top,
        weight.sum(1),
        weight.square().sum(1),
        (key * column).sum(1),
        (key.square() * column).sum(1),
        (value * column).sum(1),
        (value.square().sum(2) * weight).sum(1),
        weighted.transpose(1, 2) @ value,
    )
    return sums, (key, value, log_weight)


def _assemble(sums: _Sums, tables: Tables, segments: int, depth: int) -> Forest:
    levels = [sums]
    for _ in range(depth):
        levels.append(levels[-1].parents())
    levels.reverse()  # roots first
    counts = [segments << level for level in range(depth + 1)]
    starts = [sum(counts[:level]) for level in range(depth + 1)]
    nodes = [_node_fields(level) for level in levels]
    device = sums.mass.device
    child = [
        torch.arange(count, device=device) * 2 + (start + count)
        for start, count in zip(starts[:-1], counts[:-1], strict=True)
    ]
    child.append(torch.full((counts[-1],), -1, device=device))
    leaf = torch.full((starts[-1],), -1, device=device)
    leaf = torch.cat([leaf, torch.arange(counts[-1], device=device)])
    fields = [torch.cat(parts) for parts in zip(*nodes, strict=True)]
    fields += [torch.cat(child), leaf, *tables, torch.arange(segments, device=device)]
    return Forest(*fields)


def _node_fields(sums: _Sums) -> tuple[Tensor, ...]:
    """The fields of a forest that say what each node holds."""
    tiny = torch.finfo(sums.mass.dtype).tiny
    mass = sums.mass.clamp(min=tiny)
    column = mass.unsqueeze(1)
    key, value = sums.key / column, sums.value / column
    variance = (sums.key_square / column - key.square()).clamp_(min=0)
    covariance = sums.product / column.unsqueeze(2)
    covariance -= key[:, : covariance.shape[1]].unsqueeze(2) * value.unsqueeze(1)
    spread = (sums.value_square / mass - value.square().sum(1)).clamp_(min=0)
    per_key = sums.square / mass.square().clamp(min=tiny)
    scatter, others = spread * per_key, (1 / per_key.clamp(min=tiny, max=1.0) - 1).clamp(max=1e12)
    linked = covariance.square().sum(2)
    log_mass = sums.mass.log() + sums.top
    return key, value, log_mass, variance, covariance, linked, scatter, others


def joined(forests: Sequence[Forest]) -> Forest:
    """Several forests with leaves of one size as one."""
    nodes = leaves = 0
    fields: list[list[Tensor]] = []
    for forest in forests:
        moved = replace(
            forest,
            child=torch.where(forest.child >= 0, forest.child + nodes, -1),
            leaf=torch.where(forest.leaf >= 0, forest.leaf + leaves, -1),
            roots=forest.roots + nodes,
        )
        fields.append([getattr(moved, name) for name in Forest.__dataclass_fields__])
        nodes, leaves = nodes + len(forest.key), leaves + len(forest.leaf_key)
    return Forest(*(torch.cat(parts) for parts in zip(*fields, strict=True)))


def tilted(forest: Forest, node: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coarse keys, values and log-weights of nodes [k] for mean queries [k, d]."""
    shift = forest.variance[node] * query
    tilt = (shift * query).sum(1)
    limit = (LARGEST_TILT / tilt.clamp(min=LARGEST_TILT)).unsqueeze(1)
    shift = shift * limit
    key = forest.key[node] + shift
    lead = (query[:, : forest.covariance.shape[1]] * limit).unsqueeze(1)
    value = forest.value[node] + (lead @ forest.covariance[node]).squeeze(1)
    return key, value, forest.log_mass[node] - (shift * query).sum(1) / 2
