"""The block component: every block of queries attends to a list of keys and coarse keys.

A coarse key is a key: exact keys and tree nodes go through one attention with log-weights, and
cost is the length of the list. Blocks with lists of similar length are attended together, filled
up with keys of weight zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import flash
from ..blocks import BlockSettings, Layer, Structure, remembered
from ..cotangent import Cotangent, Gradients
from ..forest import Forest, Nodes, taken, tilted
from ..frame import Frame
from ..partial import Partial
from ..problem import Head
from ..rounding import gamma, product_roundoff, sum_depth
from ..selection import Column, Lists
from .exact import SUM_BLOCK

GROUP_ENTRIES = 2**22  # of keys and values in one attention call: more leave the caches
UNEVEN = 1.25  # longest list of a group over its shortest


@dataclass(frozen=True, eq=False)
class BlockSum:
    """All rows with all keys, by lists."""

    settings: BlockSettings
    frame: Frame

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        """Add the sums over all keys to ``total``, which holds the given rows."""
        if not head.n or not head.m:
            return
        made = remembered(head, self.frame, self.settings)
        part = block_sums(made, made.select(self.settings.price), self.settings.chunk)
        part.log_scale += self.frame.row_shift(head, None)
        part.noise = part.den * _relative_noise(made.head)
        total.add_(part if rows is None else part[rows])

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        """Add what flows back from the sums of these rows, through summaries and frame."""
        from .blocks_backward import add_gradients

        if head.n and head.m:
            add_gradients(self.settings, self.frame, total, cotangent, head, rows)


def _relative_noise(head: Head) -> Tensor:
    """Relative rounding error of the sums: of the scores in the frame, then of the sum."""
    reach = head.query_norms.max() * head.key_norms.max() if head.n and head.m else 0.0
    unit = product_roundoff(head.dtype)
    score = torch.as_tensor(reach * gamma(head.dim + 6, unit), dtype=head.dtype)
    return torch.expm1(2 * score).clamp(max=1.0) + gamma(sum_depth(head.m, SUM_BLOCK) + 16, unit)


def block_sums(made: Structure, lists: Sequence[Lists], chunk: int) -> Partial:
    """Sums of all rows over their lists in every layer, and over their own chunk."""
    head, limit = made.head, _group_keys(made.head)
    total = Partial.empty(head.n, head.value_dim, head.query, head.dtype)
    for layer, items in zip(made.layers, lists, strict=True):
        for members, places in grouped(made.forest, layer, items, limit):
            pieces = Pieces.of(made.forest, layer, places)
            key, value, bias = pieces.joined(places)
            query, rows = layer.query[members], layer.rows[members]
            _add_attention(total, rows, query, key, value, bias.unsqueeze(1))
    if made.chunks is not None:
        add_chunks(made, chunk, total)
    return total


def grouped(
    forest: Forest, layer: Layer, items: Lists, limit: int
) -> Iterator[tuple[Tensor, Places]]:
    """Blocks of a layer that are attended together, and where their keys are."""
    cells = len(layer.cells.mean)
    coarse, exact = (Column.of(pairs, cells) for pairs in (items.coarse, items.exact))
    length = (coarse.count + exact.count * forest.leaf_size)[layer.owner]
    for members in _groups(length, limit):
        yield members, Places.of(forest, coarse, exact, layer.owner[members])


def _groups(length: Tensor, most: int) -> Iterator[Tensor]:
    """Blocks of similar length, ascending, with few keys in all; blocks without a list are left
    out."""
    ranked = length.argsort()
    lengths = length[ranked].tolist()
    start = sum(1 for x in lengths if x == 0)
    while start < len(lengths):
        stop = start + 1
        limit = UNEVEN * lengths[start] + 16
        while (
            stop < len(lengths)
            and lengths[stop] <= limit
            and lengths[stop] * (stop + 1 - start) <= most
        ):
            stop += 1
        yield ranked[start:stop]
        start = stop


def _add_attention(
    total: Partial, rows: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor
) -> None:
    """Add the sums of some blocks of rows (-1 for none) over the keys given for each block."""
    output, lse = _attention(query, key, value, bias)
    at = rows.flatten()
    real = at >= 0
    at, lse, num = at[real], lse.flatten()[real], output.flatten(0, 1)[real]
    seen = lse > -math.inf
    num = num.masked_fill(~seen.unsqueeze(1), 0.0)
    part = Partial(num, seen.to(lse.dtype), lse, torch.zeros_like(lse))
    total.put_(at, total[at].add_(part))


class Places(NamedTuple):
    """Which nodes and leaves the lists of some cells hold, and where in the lists they are."""

    cell: Tensor  # [cells]
    width: int  # of the longest list
    node: Tensor
    node_owner: Tensor  # which of the cells
    node_at: Tensor  # place in the lists of all cells, one after the other
    leaf: Tensor
    leaf_at: Tensor  # [leaves * leaf size]
    empty_at: Tensor  # where a list is shorter than the longest

    @staticmethod
    def of(forest: Forest, coarse: Column, exact: Column, cell: Tensor) -> Places:
        size = forest.leaf_size
        length = coarse.count[cell] + exact.count[cell] * size
        width = int(length.max())
        node, node_owner, place = coarse.of_members(cell)
        node_at = node_owner * width + place
        leaf, owner, place = exact.of_members(cell)
        at = owner * width + taken(coarse.count[cell], owner) + place * size
        at = (at.unsqueeze(1) + torch.arange(size, device=at.device)).flatten()
        beyond = torch.arange(width, device=at.device) >= length.unsqueeze(1)
        empty_at = beyond.flatten().nonzero().squeeze(1)
        return Places(cell, width, node, node_owner, node_at, leaf, at, empty_at)


class Pieces(NamedTuple):
    """Copies of what the lists of some cells are made of."""

    nodes: Nodes
    mean: Tensor  # [cells, d]: mean queries
    leaf_key: Tensor
    leaf_value: Tensor
    leaf_weight: Tensor

    @staticmethod
    def of(forest: Forest, layer: Layer, places: Places) -> Pieces:
        nodes = Nodes(*(taken(field, places.node) for field in forest.nodes))
        tables = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
        mean = taken(layer.cells.mean, places.cell)
        return Pieces(nodes, mean, *(taken(x, places.leaf) for x in tables))

    def joined(self, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and log-weights of the lists, [cells, longest, ...]."""
        shape = (len(places.cell), places.width)
        coarse = tilted(self.nodes, taken(self.mean, places.node_owner))
        exact = (self.leaf_key, self.leaf_value, self.leaf_weight)
        lists = []
        for part, leaves, empty in zip(coarse, exact, (0.0, 0.0, -math.inf), strict=True):
            table = part.new_empty(shape[0] * shape[1], *part.shape[1:])
            table.index_fill_(0, places.empty_at, empty)
            table.index_copy_(0, places.node_at, part)
            table.index_copy_(0, places.leaf_at, leaves.flatten(0, 1))
            lists.append(table.view(*shape, *part.shape[1:]))
        key, value, bias = lists
        return key, value, bias


def add_chunks(made: Structure, chunk: int, total: Partial) -> None:
    """Causal: the keys of each row's own chunk, exactly, none of which may lie ahead."""
    for rows, query, key, value, bias in chunked(made, chunk, _group_keys(made.head)):
        _add_attention(total, rows, query, key, value, bias)


def _group_keys(head: Head) -> int:
    """Keys in one attention call, over all of its blocks."""
    return max(1, GROUP_ENTRIES // (head.dim + head.value_dim))


def chunked(made: Structure, chunk: int, most: int) -> Iterator[tuple[Tensor, ...]]:
    """Rows [chunks, chunk] (-1 for none), queries, keys, values and log-weights of some chunks."""
    assert made.chunks is not None
    head, within = made.head, torch.arange(chunk, device=made.head.query.device)
    ahead = within > within.unsqueeze(1)
    step = max(1, most // chunk)
    for start in range(0, len(made.chunks), step):
        place = made.chunks[start : start + step].unsqueeze(1) * chunk + within
        row, key = place.clamp(max=head.n - 1), place.clamp(max=head.m - 1)
        bias = head.query.new_zeros(place.shape)
        if head.key_log_weight is not None:
            bias = bias + head.key_log_weight[key]
        bias = bias.masked_fill(place >= head.m, -math.inf)
        bias = bias.unsqueeze(1).masked_fill(ahead, -math.inf)
        rows = torch.where(place < head.n, place, -1)
        yield rows, head.query[row], head.key[key], head.value[key].to(head.dtype), bias


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each block with its own keys and log-weights [blocks, rows or 1, keys]: output
    [blocks, rows, dv] and lse [blocks, rows]; a row that sees nothing has lse -inf."""
    same = query.shape[2] == value.shape[2]
    if flash.AVAILABLE and same and query.device.type == "cpu":
        mask = bias.expand(-1, query.shape[1], -1)
        q, k, v, mask = (x.unsqueeze(0) for x in (query, key, value, mask))
        output, lse = flash.attention(q, k, v, mask, scale=1.0)
        nothing = (bias == -math.inf).all(2).expand(-1, query.shape[1])
        return output[0], lse[0].to(query.dtype).masked_fill(nothing, -math.inf)
    score = query @ key.transpose(1, 2) + bias
    lse = score.logsumexp(2)
    weight = (score - torch.where(lse > -math.inf, lse, 0.0).unsqueeze(2)).exp()
    return weight @ value, lse
