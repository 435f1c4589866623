"""The block component: every block of queries attends to a list of keys and coarse keys.

A coarse key is a key: exact keys and tree nodes go through one attention with log-weights, and
cost is the length of the list. Blocks with lists of similar length are attended together, filled
up with keys of weight zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import BlockSettings, Layer, Structure, remembered
from ..cotangent import Cotangent, Gradients
from ..forest import Forest, tilted
from ..frame import Frame
from ..partial import Partial
from ..problem import Head
from ..rounding import gamma, product_roundoff, sum_depth
from ..selection import Lists, Pairs
from .exact import KERNEL, SUM_BLOCK

GROUP_KEYS = 2**18  # in one attention call, over all of its blocks
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
        """Lists have no gradients so far; a forward pass that needs them says so."""
        raise NotImplementedError


def _relative_noise(head: Head) -> Tensor:
    """Relative rounding error of the sums: of the scores in the frame, then of the sum."""
    reach = head.query_norms.max() * head.key_norms.max() if head.n and head.m else 0.0
    unit = product_roundoff(head.dtype)
    score = torch.as_tensor(reach * gamma(head.dim + 6, unit), dtype=head.dtype)
    return torch.expm1(2 * score).clamp(max=1.0) + gamma(sum_depth(head.m, SUM_BLOCK) + 16, unit)


def block_sums(made: Structure, lists: Sequence[Lists], chunk: int) -> Partial:
    """Sums of all rows over their lists in every layer, and over their own chunk."""
    head = made.head
    total = Partial.empty(head.n, head.value_dim, head.query, head.dtype)
    for layer, items in zip(made.layers, lists, strict=True):
        cells = len(layer.cells.mean)
        coarse, exact = (_Column.of(pairs, cells) for pairs in (items.coarse, items.exact))
        length = (coarse.count + exact.count * made.forest.leaf_size)[layer.owner]
        for members in _groups(length):
            key, value, bias = _gathered(made.forest, layer, coarse, exact, layer.owner[members])
            query, rows = layer.query[members], layer.rows[members]
            _add_attention(total, rows, query, key, value, bias.unsqueeze(1))
    if made.chunks is not None:
        _add_chunks(made, chunk, total)
    return total


def _groups(length: Tensor) -> Iterator[Tensor]:
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
            and lengths[stop] * (stop + 1 - start) <= GROUP_KEYS
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


@dataclass(frozen=True, eq=False)
class _Column:
    """Items of all lists, and where the list of each block begins."""

    item: Tensor
    first: Tensor  # [blocks]
    count: Tensor  # [blocks]

    @staticmethod
    def of(pairs: Pairs, blocks: int) -> _Column:
        block, item = pairs
        edges = torch.searchsorted(block, torch.arange(blocks + 1, device=block.device))
        return _Column(item, edges[:-1], edges.diff())

    def of_members(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Items of some blocks: the item, which member it belongs to, its place in the list."""
        count = self.count[members]
        owner = torch.arange(len(members), device=members.device).repeat_interleave(count)
        place = torch.arange(len(owner), device=members.device) - (count.cumsum(0) - count)[owner]
        return self.item[self.first[members][owner] + place], owner, place


def _gathered(
    forest: Forest, layer: Layer, coarse: _Column, exact: _Column, members: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log-weights of the lists of some cells, [members, longest, ...]."""
    size = forest.leaf_size
    width = int((coarse.count[members] + exact.count[members] * size).max())
    new = layer.query.new_zeros
    key = new(len(members) * width, forest.key.shape[1])
    value = new(len(members) * width, forest.value.shape[1])
    bias = new(len(members) * width).fill_(-math.inf)
    node, owner, place = coarse.of_members(members)
    at = owner * width + place
    parts = tilted(forest, node, layer.cells.mean[members][owner])
    for table, part in zip((key, value, bias), parts, strict=True):
        table.index_copy_(0, at, part)
    leaf, owner, place = exact.of_members(members)
    at = owner * width + coarse.count[members][owner] + place * size
    at = (at.unsqueeze(1) + torch.arange(size, device=at.device)).flatten()
    sources = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
    for table, source in zip((key, value, bias), sources, strict=True):
        table.index_copy_(0, at, source[leaf].flatten(0, 1))
    shape = (len(members), width)
    return key.view(*shape, -1), value.view(*shape, -1), bias.view(shape)


def _add_chunks(made: Structure, chunk: int, total: Partial) -> None:
    """Causal: the keys of each row's own chunk, exactly, none of which may lie ahead."""
    assert made.chunks is not None
    head, within = made.head, torch.arange(chunk, device=made.head.query.device)
    ahead = within > within.unsqueeze(1)
    step = max(1, GROUP_KEYS // chunk)
    for start in range(0, len(made.chunks), step):
        place = made.chunks[start : start + step].unsqueeze(1) * chunk + within
        row, key = place.clamp(max=head.n - 1), place.clamp(max=head.m - 1)
        bias = head.query.new_zeros(place.shape)
        if head.key_log_weight is not None:
            bias = bias + head.key_log_weight[key]
        bias = bias.masked_fill(place >= head.m, -math.inf)
        bias = bias.unsqueeze(1).masked_fill(ahead, -math.inf)
        rows = torch.where(place < head.n, place, -1)
        value = head.value[key].to(head.dtype)
        _add_attention(total, rows, head.query[row], head.key[key], value, bias)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each block with its own keys and log-weights [blocks, rows or 1, keys]: output
    [blocks, rows, dv] and lse [blocks, rows]; a row that sees nothing has lse -inf."""
    kernel = getattr(torch.ops.aten, KERNEL, None)
    same = query.shape[2] == value.shape[2]
    if kernel is not None and same and query.device.type == "cpu":
        mask = bias.expand(-1, query.shape[1], -1)
        tensors = (x.unsqueeze(0) for x in (query, key, value))
        output, lse = kernel(*tensors, attn_mask=mask.unsqueeze(0), scale=1.0)
        nothing = (bias == -math.inf).all(2).expand(-1, query.shape[1])
        return output[0], lse[0].to(query.dtype).masked_fill(nothing, -math.inf)
    score = query @ key.transpose(1, 2) + bias
    lse = score.logsumexp(2)
    weight = (score - torch.where(lse > -math.inf, lse, 0.0).unsqueeze(2)).exp()
    return weight @ value, lse
