"""Forests: every node of a tree of keys is a coarse key, with all that is needed to judge it.

A node stands for its keys by their weighted mean key, mean value and log mass. To second order
around a query x the sum over a node of weights w_j exp(<x, y_j>) is that of one key

    y + V x    with value    v + C^T x    and log mass    ln W - <x, V x> / 2,

V the covariance of its keys and C that of keys and values. Both have a part between the two halves
of the node, which is of rank one and kept whole: g g^T and g s^T with the gap g between the mean
keys of the halves and the step s between their mean values, times the root of the product of
their shares. Of the part within the halves V is kept as variances (coordinates are nearly
independent in a balanced frame) and C in the leading coordinates. `tilted` makes such keys for
the mean query of a block, and so a node costs no more than a key in the attention that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .arrangement import repeated
from .problem import Head
from .tree import leaf_layout
from .tree import positions as tree_positions

DIRECTIONS = 8  # leading coordinates in which the covariance of keys and values is kept
LARGEST_TILT = 1.0  # of <x, V x>: beyond, second order says nothing and the tilt is limited


class Nodes(NamedTuple):
    """What makes coarse keys of some nodes; see `Forest`."""

    key: Tensor
    value: Tensor
    log_mass: Tensor
    gap: Tensor
    step: Tensor
    variance: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes of all trees, root first within each; ``child`` is the first of two, -1 for a leaf."""

    key: Tensor  # [nodes, d]
    value: Tensor  # [nodes, dv]
    log_mass: Tensor  # [nodes]
    gap: Tensor  # [nodes, d]: between the mean keys of its halves
    step: Tensor  # [nodes, dv]: between their mean values
    variance: Tensor  # [nodes, d], within the halves
    covariance: Tensor  # [nodes, directions, dv], within the halves
    stride: Tensor  # [nodes]: squared step
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

    @property
    def nodes(self) -> Nodes:
        return Nodes(*(getattr(self, name) for name in Nodes._fields))


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
            pairs = x.view(len(x) // 2, 2, *x.shape[1:])
            return (pairs * weight.view(-1, 2, *(1 for _ in x.shape[1:]))).sum(1)

        names = ("mass", "key", "key_square", "value", "value_square", "product")
        sums = {name: added(getattr(self, name), share) for name in names}
        return _Sums(top=top, square=added(self.square, share.square()), **sums)


def build(head: Head, placed: Tensor, positions: Tensor, leaf: int, above: int = 0) -> Forest:
    """Trees over segments of keys: ``positions`` [segments, tokens] into the keys of ``head``, and
    ``above`` levels of nodes that join neighbouring segments.

    A position of -1 fills a segment up and has no weight. ``head`` is in its frame; ``placed`` are
    the coordinates of its keys that trees split along. Leaves are split once more, into the halves
    of which their gaps are known.
    """
    segments, tokens = positions.shape
    depth, size = leaf_layout(tokens, leaf)
    assert size << depth == tokens and size % 2 == 0
    within = tree_positions(placed[repeated(positions)], depth + 1)
    position = positions.gather(1, within).view(-1, size // 2)
    sums, tables = _half_sums(head, position)
    return _assemble(sums, tables, segments >> above, depth + above)


def contiguous(head: Head, position: Tensor, depth: int) -> Forest:
    """Trees over halves of leaves [halves, size], as they come, with so many levels below the
    roots. Nothing is known of their coordinates: the covariance of keys and values is left out,
    all but the part between halves."""
    sums, tables = _half_sums(head, position, 0)
    return _assemble(sums, tables, len(position) >> (depth + 1), depth)


def taken(table: Tensor, at: Tensor) -> Tensor:
    """Some rows of a table; brackets would take three times as long."""
    return table.index_select(0, at)


Tables = tuple[Tensor, Tensor, Tensor]


def _half_sums(head: Head, position: Tensor, directions: int = DIRECTIONS) -> tuple[_Sums, Tables]:
    """Sums over the halves of leaves [halves, size], and the tokens of the leaves."""
    real, dtype = position.clamp(min=0), head.dtype
    key, value = (
        taken(x, real.flatten()).view(*real.shape, -1).to(dtype) for x in (head.key, head.value)
    )
    log_weight = key.new_zeros(position.shape)
    if head.key_log_weight is not None:
        log_weight = head.key_log_weight[real].to(dtype)
    log_weight = log_weight.masked_fill(position < 0, -math.inf)
    top = log_weight.detach().amax(1)  # units are constants of the sums
    unit = torch.where(top > -math.inf, top, 0.0)
    weight = (log_weight - unit.unsqueeze(1)).exp()
    column, weighted = weight.unsqueeze(2), key[..., :directions] * weight.unsqueeze(2)
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
    leaves = len(position) // 2
    tables = (x.reshape(leaves, -1, *x.shape[2:]) for x in (key, value, log_weight))
    leaf_key, leaf_value, leaf_weight = tables
    return sums, (leaf_key, leaf_value, leaf_weight)


def _assemble(halves: _Sums, tables: Tables, segments: int, depth: int) -> Forest:
    levels = [halves]
    for _ in range(depth + 1):
        levels.append(levels[-1].parents())
    levels.reverse()  # roots first
    counts = [segments << level for level in range(depth + 1)]
    starts = [sum(counts[:level]) for level in range(depth + 1)]
    nodes = [_node_fields(level, below) for level, below in pairwise(levels)]
    device = halves.mass.device
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


def _node_fields(sums: _Sums, below: _Sums) -> tuple[Tensor, ...]:
    """The fields of a forest that say what each node holds, from the sums over it and those over
    its halves."""
    tiny = torch.finfo(sums.mass.dtype).tiny
    mass = sums.mass.clamp(min=tiny)
    column = mass.unsqueeze(1)
    key, value = sums.key / column, sums.value / column
    gap, step = _between(below)
    variance = (sums.key_square / column - key.square() - gap.square()).clamp_(min=0)
    covariance = sums.product / column.unsqueeze(2)
    known = covariance.shape[1]
    covariance -= key[:, :known].unsqueeze(2) * value.unsqueeze(1)
    covariance -= gap[:, :known].unsqueeze(2) * step.unsqueeze(1)
    spread = (sums.value_square / mass - value.square().sum(1)).clamp_(min=0)
    per_key = sums.square / mass.square().clamp(min=tiny)
    scatter, others = spread * per_key, (1 / per_key.clamp(min=tiny, max=1.0) - 1).clamp(max=1e12)
    linked = covariance.square().sum(2)
    log_mass = torch.where(sums.mass > 0, mass.log() + sums.top, -math.inf)
    stride = step.square().sum(1)
    return (
        key, value, log_mass, gap, step, variance, covariance, stride, linked, scatter, others,
    )  # fmt: skip


def _between(halves: _Sums) -> tuple[Tensor, Tensor]:
    """Gap and step of each pair of neighbours."""
    tiny = torch.finfo(halves.mass.dtype).tiny
    top = halves.top.view(-1, 2)
    highest = top.amax(1, keepdim=True)
    mass = halves.mass.view(-1, 2) * (top - torch.where(highest > -math.inf, highest, 0.0)).exp()
    share = mass / mass.sum(1, keepdim=True).clamp(min=tiny)
    weight = share.prod(1, keepdim=True).clamp(min=tiny).sqrt()

    def difference(x: Tensor) -> Tensor:
        mean = (x / halves.mass.clamp(min=tiny).unsqueeze(1)).view(-1, 2, x.shape[1])
        return (mean[:, 0] - mean[:, 1]) * weight

    return difference(halves.key), difference(halves.value)


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


def tilted(nodes: Nodes, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coarse keys, values and log-weights of nodes [k] for mean queries [k, d]."""
    along = (nodes.gap * query).sum(1, keepdim=True)
    shift = nodes.variance * query + nodes.gap * along
    tilt = (shift * query).sum(1)
    limit = (LARGEST_TILT / tilt.clamp(min=LARGEST_TILT)).unsqueeze(1)
    shift = shift * limit
    lead = (query[:, : nodes.covariance.shape[1]] * limit).unsqueeze(1)
    value = nodes.value + (lead @ nodes.covariance).squeeze(1)
    value += nodes.step * (along * limit)
    return nodes.key + shift, value, nodes.log_mass - (shift * query).sum(1) / 2
