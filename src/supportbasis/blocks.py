"""Blocks of queries and trees of keys: the data of a block support, built once for a head.

Queries are ordered by a tree too, into equal blocks whose members want nearly the same keys. With
causal attention time comes first. Positions are cut into chunks, whose queries and keys meet
exactly; and for every width of 1, 4, 16, ... chunks there is a layer, in which the queries of a
window of that width meet the windows before it within the same window of the next layer. So far
keys are seen by large windows, in which blocks are compact, and every pair meets once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .forest import Forest, build, joined
from .frame import Frame
from .problem import Head
from .selection import Blocks, Lists, Pairs, View, add_views, descend, look, select
from .tree import leading, leaf_layout, order

BASE = 4  # windows of one layer that make a window of the next
START_NODES = 64  # that a block looks at before it opens any


@dataclass(frozen=True)
class BlockSettings:
    """What a block support is made with."""

    price: float  # squared error for which a block takes one more key
    block_size: int
    leaf_size: int
    chunk: int  # positions that are exact among themselves, in causal attention


@dataclass(frozen=True, eq=False)
class Layer:
    """Blocks of queries and where their selection starts. Rows of -1 fill blocks up."""

    rows: Tensor  # [blocks, size]
    query: Tensor  # [blocks, size, d], in the frame
    blocks: Blocks
    window: Tensor  # [blocks]: the window that the rows of a block lie in
    start: Pairs

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, members: Tensor) -> Layer:
        """Some of the blocks, in ascending order."""
        block, node = self.start
        place = torch.searchsorted(members, block).clamp(max=len(members) - 1)
        kept = members[place] == block
        blocks = Blocks(self.blocks.mean[members], self.blocks.variance[members])
        start = (place[kept], node[kept])
        return Layer(self.rows[members], self.query[members], blocks, self.window[members], start)


@dataclass(frozen=True, eq=False)
class Structure:
    """A head in its frame, its trees, its layers, and what each block knows before selection."""

    head: Head
    forest: Forest
    layers: tuple[Layer, ...]
    views: tuple[View, ...]
    chunk_keys: Tensor | None  # [chunks, size]: keys of each chunk, -1 for none; None: not causal
    axes: int  # coordinates that trees split along
    levels: int  # of splits that a token goes through in all trees, as a query and as a key

    def select(self, price: float) -> list[Lists]:
        """The lists of all blocks of each layer."""
        pairs = zip(self.layers, self.views, strict=True)
        return [
            select(self.forest, layer.blocks, view, layer.start, price) for layer, view in pairs
        ]

    def sample(self, count: int, seed: int) -> Structure:
        """At most ``count`` blocks of each layer."""
        generator = torch.Generator().manual_seed(seed)
        layers, views = [], []
        for layer, view in zip(self.layers, self.views, strict=True):
            order = torch.randperm(len(layer), generator=generator)[:count]
            members = order.sort().values.to(layer.rows.device)
            layers.append(layer.sample(members))
            views.append(view.sample(members))
        return replace(self, layers=tuple(layers), views=tuple(views))

    def around(self, rows: Tensor) -> Structure:
        """The blocks that hold the given rows."""
        layers, views = [], []
        wanted = torch.zeros(self.head.n, dtype=torch.bool, device=rows.device)
        wanted[rows] = True
        for layer, view in zip(self.layers, self.views, strict=True):
            held = wanted[layer.rows.clamp(min=0)] & (layer.rows >= 0)
            members = held.any(1).nonzero().squeeze(1)
            layers.append(layer.sample(members))
            views.append(view.sample(members))
        return replace(self, layers=tuple(layers), views=tuple(views))


def remembered(head: Head, frame: Frame, settings: BlockSettings) -> Structure:
    """Trees and blocks of a head, built once: the planner's serve the execution too."""
    at = (frame, settings.block_size, settings.leaf_size, settings.chunk)
    if at not in head.memory:
        build_it = _causal if head.is_causal else _whole
        head.memory[at] = build_it(frame.apply(head), frame.spectrum, settings)
    made = head.memory[at]
    assert isinstance(made, Structure)
    return made


def _whole(head: Head, spectrum: Tensor, settings: BlockSettings) -> Structure:
    """Every row sees every key: one tree, one layer."""
    live, device = head.live_keys, head.query.device
    keys = torch.arange(head.m, device=device) if live is None else live
    forest = build(head, spectrum, keys.unsqueeze(0), settings.leaf_size)
    down = int(math.log2(START_NODES))
    _, nodes = descend(forest, (torch.zeros_like(forest.roots), forest.roots), down)
    rows = torch.arange(head.n, device=device).unsqueeze(0)
    rows, query, window = _query_blocks(head, spectrum, rows, settings.block_size)
    block = torch.arange(len(rows), device=device).repeat_interleave(len(nodes))
    blocks = Blocks(query.mean(1), query.var(1, unbiased=False))
    layer = Layer(rows, query, blocks, window, (block, nodes.repeat(len(rows))))
    view = look(forest, blocks, layer.start)
    depth = leaf_layout(len(keys), settings.leaf_size)[0]
    levels = depth + leaf_layout(head.n, settings.block_size)[0]
    return Structure(head, forest, (layer,), (view,), None, leading(spectrum), levels)


def _query_blocks(
    head: Head, spectrum: Tensor, rows: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens and window of blocks within windows of rows [windows, tokens]."""
    windows, tokens = rows.shape
    depth, size = leaf_layout(tokens, size)
    missing = (size << depth) - tokens
    if missing:
        rows = torch.cat([rows, rows.new_full((windows, missing), -1)], 1)
    real = torch.where(rows >= 0, rows, rows[:, :1].clamp(min=0))  # fillers repeat the first row
    metric = spectrum.to(head.dtype).clamp(min=0).sqrt()[: leading(spectrum)]
    placed = (head.query[:, : len(metric)] * metric)[real]
    at = order(placed, depth)
    rows, real = (x.gather(1, at).view(-1, size) for x in (rows, real))
    window = torch.arange(windows, device=rows.device).repeat_interleave(1 << depth)
    used = (rows >= 0).any(1)
    return rows[used], head.query[real[used]], window[used]


def _causal(head: Head, spectrum: Tensor, settings: BlockSettings) -> Structure:
    """Layers of windows; the first chunk sees nothing but itself."""
    device, chunk = head.query.device, settings.chunk
    count = math.ceil(head.n / chunk)
    place = torch.arange(count * chunk, device=device)
    keys = torch.where(place < head.m, place, -1)
    if head.key_log_weight is not None:
        hidden = head.key_log_weight[keys.clamp(min=0)] == -math.inf
        keys = keys.masked_fill(hidden, -1)
    rows = torch.where(place < head.n, place, -1)
    widths = [1]
    while widths[-1] * BASE < count:
        widths.append(widths[-1] * BASE)
    forests = [
        build(head, spectrum, _windows(keys, width * chunk), settings.leaf_size) for width in widths
    ]
    forest, first, layers = joined(forests), 0, []
    for width, tree in zip(widths, forests, strict=True):
        windows = _windows(rows, width * chunk)
        layers.append(_layer(head, spectrum, windows, settings, forest, first, width == widths[-1]))
        first += len(tree.roots)
    views = [look(forest, layer.blocks, layer.start) for layer in layers]
    chunks = torch.arange(len(layers[0]), device=device), forest.roots[layers[0].window]
    own = look(forest, layers[0].blocks, chunks)
    together = add_views([layer.rows for layer in layers], [*views, own], head.n)
    sizes = (settings.leaf_size, settings.block_size)
    splits = sum(leaf_layout(width * chunk, size)[0] for width in widths for size in sizes)
    own_keys = keys.view(count, chunk)
    return Structure(
        head, forest, tuple(layers), tuple(together), own_keys, leading(spectrum), splits
    )


def _windows(positions: Tensor, width: int) -> Tensor:
    """Positions as windows [windows, width], the last one filled up with -1."""
    missing = -len(positions) % width
    filler = positions.new_full((missing,), -1)
    return torch.cat([positions, filler]).view(-1, width)


def _layer(
    head: Head,
    spectrum: Tensor,
    windows: Tensor,
    settings: BlockSettings,
    forest: Forest,
    first: int,
    last: bool,
) -> Layer:
    """Blocks of each window, which start at the windows before theirs that share a parent."""
    rows, query, window = _query_blocks(head, spectrum, windows, settings.block_size)
    parent = torch.zeros_like(window) if last else window // BASE * BASE
    block, root = [], []
    everyone = torch.arange(len(rows), device=rows.device)
    for step in range(int((window - parent).max())):
        seen = parent + step < window
        block.append(everyone[seen])
        root.append(forest.roots[first + (parent + step)[seen]])
    pairs = (torch.cat(block), torch.cat(root)) if block else (everyone[:0], everyone[:0])
    at = pairs[0].argsort(stable=True)
    levels = int(math.log2(START_NODES / BASE))
    start = descend(forest, (pairs[0][at], pairs[1][at]), levels)
    blocks = Blocks(query.mean(1), query.var(1, unbiased=False))
    return Layer(rows, query, blocks, window, start)
