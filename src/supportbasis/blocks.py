"""Cells of queries and trees of keys: the data of a block support, built once for a head.

Queries are ordered by a tree too; a cell of it holds queries that want nearly the same keys, and
selection is done once for a cell. With causal attention time comes first. Positions are cut into
chunks, whose queries and keys meet exactly; and for every width of 1, 4, 16, ... chunks there is a
layer, in which the queries of a window of that width meet the windows before it within the same
window of the next layer. So far keys are seen by large windows, and every pair meets once. The
cells of a window are those of the window before it, into which its queries fall one by one: so
neither the cells nor what is selected for them depend on anything that comes later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import places
from .arrangement import arranged, repeated
from .forest import Forest, build, joined
from .frame import Frame, framed
from .problem import Head
from .selection import Blocks, Glance, Lists, Pairs, View, descend, look, select
from .tree import assign, leading, leaf_layout, order, positions

BASE = 4  # windows of one layer that make a window of the next
START_NODES = 64  # that a cell looks at before it opens any
FAR, UNUSUAL = 2.0, 8.0  # score variance, and times the usual one, of a row that is left alone
PARTS = 4  # that a block falls into when its queries are far apart
PLACES = "places"  # the order of blocks and trees that stay as they come


@dataclass(frozen=True)
class BlockSettings:
    """What a block support is made with."""

    price: float  # squared error for which a cell takes one more key
    block_size: int
    leaf_size: int
    chunk: int  # positions that are exact among themselves, in causal attention
    order: str = "auto"  # of queries and keys, one of `arrangement.ORDERS`, or `PLACES`
    profile: tuple[float, ...] = ()  # of the attention, by places


@dataclass(frozen=True, eq=False)
class Layer:
    """Cells of queries, and blocks of rows that each share the list of one cell."""

    cells: Blocks
    start: Pairs  # cells and the nodes where their selection starts
    view: View | Glance  # what each cell knows before selection; the latter in places
    rows: Tensor  # [blocks, size], -1 for none
    query: Tensor  # [blocks, size, d], in the frame
    owner: Tensor  # [blocks]: the cell of each block

    def sample(self, members: Tensor) -> Layer:
        """Some of the cells, in ascending order, and their blocks."""
        cells = Blocks(self.cells.mean[members], self.cells.variance[members])
        start, kept = _renumbered(self.start[0], members)
        owner, held = _renumbered(self.owner, members)
        return Layer(
            cells,
            (start, self.start[1][kept]),
            self.view.sample(members),
            self.rows[held],
            self.query[held],
            owner,
        )


def _renumbered(cell: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """New numbers of the cells that are members, and which ones those are."""
    if not len(members):
        return cell[:0], torch.zeros_like(cell, dtype=torch.bool)
    place = torch.searchsorted(members, cell).clamp(max=len(members) - 1)
    kept = members[place] == cell
    return place[kept], kept


@dataclass(frozen=True, eq=False)
class Structure:
    """A head in its frame, its trees and its layers."""

    head: Head
    forest: Forest
    layers: tuple[Layer, ...]
    chunks: Tensor | None  # causal: which chunks meet themselves; None: not causal
    axes: int  # coordinates that trees split along
    levels: int  # of splits that a token goes through in all trees, as a query and as a key
    compared: int = 0  # leaders of groups that it was compared with, likewise
    order: str = "tree"  # what "auto" came to; "auto" where queries and keys differ

    def select(self, price: float) -> list[Lists]:
        """The lists of all cells of each layer."""
        return [
            select(self.forest, layer.cells, layer.view, layer.start, price)
            for layer in self.layers
        ]

    def sample(self, count: int, seed: int) -> Structure:
        """At most ``count`` cells of each layer."""
        generator = torch.Generator().manual_seed(seed)
        layers = []
        for layer in self.layers:
            chosen = torch.randperm(len(layer.cells.mean), generator=generator)[:count]
            layers.append(layer.sample(chosen.sort().values.to(layer.rows.device)))
        return replace(self, layers=tuple(layers))

    def around(self, rows: Tensor, chunk: int) -> Structure:
        """The cells and chunks that hold the given rows."""
        wanted = torch.zeros(self.head.n, dtype=torch.bool, device=rows.device)
        wanted[rows] = True
        layers = []
        for layer in self.layers:
            held = (wanted[layer.rows.clamp(min=0)] & (layer.rows >= 0)).any(1)
            layers.append(layer.sample(layer.owner[held].unique()))
        chunks = None if self.chunks is None else (rows // chunk).unique()
        return replace(self, layers=tuple(layers), chunks=chunks)


def remembered(head: Head, frame: Frame, settings: BlockSettings) -> Structure:
    """Trees and cells of a head, built once: the planner's serve the execution too."""
    at = (frame, replace(settings, price=0.0))
    if at not in head.memory:
        head.memory[at] = structure(framed(head, frame), frame.spectrum, settings)
    made = head.memory[at]
    assert isinstance(made, Structure)
    return made


def structure(head: Head, spectrum: Tensor, settings: BlockSettings) -> Structure:
    """Trees and cells of a head in its frame. Summaries are differentiable functions of its
    tokens; orders, cells and what is selected are constants."""
    if settings.order == PLACES:
        return _placed(head, settings)
    return (_causal if head.is_causal else _whole)(head, spectrum, settings)


def _placed(head: Head, settings: BlockSettings) -> Structure:
    """Consecutive queries and keys. With causal attention a block shares its chunk with its own
    keys, which are exact, and the first block sees no others."""
    size, chunk, leaf = settings.block_size, settings.chunk, settings.leaf_size
    made = places.trees(head, leaf)
    rows = _windows(torch.arange(head.n, device=head.query.device), size)
    members = query = head.query[repeated(rows)]
    begin = torch.arange(len(rows), device=rows.device) * size
    chunks = None
    if head.is_causal:
        chunks = torch.arange(math.ceil(head.n / chunk), device=rows.device)
        rows, query, begin = rows[1:], query[1:], begin[1:]
        if not len(rows):
            return Structure(head, made.forest, (), chunks, 0, 0, order=PLACES)
        members = places.members_before(head.query, size)
        start = places.roots_before(made, begin // chunk * (chunk // leaf))
    else:
        start = places.all_roots(made, len(rows))
    cells = Blocks(members.mean(1), members.var(1, unbiased=False))
    view = places.glance(made, cells, begin // leaf, settings.profile)
    layer = Layer(cells, start, view, rows, query, torch.arange(len(rows), device=rows.device))
    return Structure(head, made.forest, (layer,), chunks, 0, 0, order=PLACES)


def _whole(head: Head, spectrum: Tensor, settings: BlockSettings) -> Structure:
    """Every row sees every key: one tree, one layer, and blocks that are their own cells."""
    forest, compared, how = _tree_of_keys(head, spectrum, settings)
    down = int(math.log2(START_NODES / len(forest.roots)))
    _, nodes = descend(forest, (torch.zeros_like(forest.roots), forest.roots), down)
    placed = placed_tokens(head.query, spectrum)
    rows, leaders, how_rows = arranged(placed, settings.block_size, PARTS, settings.order)
    real = repeated(rows)
    at = positions(placed[real], int(math.log2(PARTS)))
    rows, real = rows.gather(1, at), real.gather(1, at)
    layers = _fitting(forest, nodes, rows, head.query[real], spectrum)
    rows_split = settings.block_size if how_rows == "sequence" else head.n
    keys_split = 4 * settings.leaf_size if how == "sequence" else head.m
    sizes = ((rows_split, settings.block_size // PARTS), (keys_split, settings.leaf_size // 2))
    levels = sum(leaf_layout(tokens, max(1, size))[0] for tokens, size in sizes)
    how = how if how == how_rows else "auto"
    axes, compared = leading(spectrum), compared + leaders
    return Structure(head, forest, tuple(layers), None, axes, levels, compared, how)


def _tree_of_keys(head: Head, spectrum: Tensor, settings: BlockSettings) -> tuple[Forest, int, str]:
    """Segments of alike keys as small trees, and joined until at most `START_NODES` are left;
    leaders that keys were compared with, and how keys came into segments."""
    placed, live = placed_tokens(head.key, spectrum), head.live_keys
    leaf = settings.leaf_size
    tokens = placed if live is None else placed[live]
    segments, compared, how = arranged(tokens, 4 * leaf, 8, settings.order, aligned=True)
    if live is not None:
        segments = torch.where(segments >= 0, live[segments], -1)
    above = levels_above(len(segments))
    missing = -len(segments) % (1 << above)
    segments = torch.cat([segments, segments.new_full((missing, segments.shape[1]), -1)])
    return build(head, placed, segments, segments.shape[1] // 4, above), compared, how


def levels_above(segments: int) -> int:
    """Levels of nodes above segments, so that at most `START_NODES` roots are left."""
    return max(0, math.ceil(math.log2(segments / START_NODES)))


def _fitting(
    forest: Forest, nodes: Tensor, rows: Tensor, query: Tensor, spectrum: Tensor
) -> list[Layer]:
    """Blocks [blocks, size] as layers: those whose queries are close together, those that are not
    in parts, and rows that are far from what is left of their block alone."""
    wide = apart(query, spectrum).mean(1) > FAR
    groups = [(rows[~wide], query[~wide])]
    groups.append((rows[wide].view(-1, rows.shape[1] // PARTS), query[wide].flatten(0, 1)))
    layers, alone, alone_query = [], [], []
    for part, tokens in groups:
        if not len(part):
            continue
        tokens = tokens.reshape(*part.shape, -1)
        far = strangers(apart(tokens, spectrum))
        alone.append(part[far & (part >= 0)])
        alone_query.append(tokens[far & (part >= 0)])
        tokens = torch.where(far.unsqueeze(2), tokens.mean(1, keepdim=True), tokens)
        layers.append(_seeing(forest, nodes, part.masked_fill(far, -1), tokens))
    left = torch.cat(alone).unsqueeze(1)
    if len(left):
        layers.append(_seeing(forest, nodes, left, torch.cat(alone_query).unsqueeze(1)))
    return layers


def apart(query: Tensor, spectrum: Tensor) -> Tensor:
    """How far queries [blocks, size] are from the mean of their block: the variance, over the
    keys, of the scores that lie between them."""
    return ((query - query.mean(1, keepdim=True)).square() * spectrum.to(query)).sum(2)


def strangers(distance: Tensor) -> Tensor:
    """Which queries are far from the mean of their block, given how far all are [blocks, size]."""
    return (distance > FAR) & (distance > UNUSUAL * distance.median(1, keepdim=True).values)


def _seeing(forest: Forest, nodes: Tensor, rows: Tensor, query: Tensor) -> Layer:
    """Blocks that are their own cells and start at the given nodes."""
    cells = Blocks(query.mean(1), query.var(1, unbiased=False))
    owner = torch.arange(len(rows), device=rows.device)
    start = (owner.repeat_interleave(len(nodes)), nodes.repeat(len(rows)))
    return Layer(cells, start, look(forest, cells, start), rows, query, owner)


def placed_tokens(tokens: Tensor, spectrum: Tensor) -> Tensor:
    """Queries or keys in the leading coordinates, in the metric of the other side."""
    metric = spectrum.to(tokens).clamp(min=0).sqrt()[: leading(spectrum)]
    return tokens[:, : len(metric)] * metric


def _causal(head: Head, spectrum: Tensor, settings: BlockSettings) -> Structure:
    """Layers of windows, from the chunk up to the last that has a window before it."""
    device, chunk = head.query.device, settings.chunk
    count = math.ceil(head.n / chunk)
    place = torch.arange(count * chunk, device=device)
    keys = torch.where(place < head.m, place, -1)
    if head.key_log_weight is not None:
        hidden = head.key_log_weight[keys.clamp(min=0)] == -math.inf
        keys = keys.masked_fill(hidden, -1)
    widths = [1]
    while widths[-1] * BASE < count:
        widths.append(widths[-1] * BASE)
    placed = placed_tokens(head.key, spectrum)
    forests = [
        build(head, placed, _windows(keys, width * chunk), settings.leaf_size) for width in widths
    ]
    forest, first = joined(forests), [0]
    for tree in forests:
        first.append(first[-1] + len(tree.roots))
    rows, placed = torch.where(place < head.n, place, -1), placed_tokens(head.query, spectrum)
    layers = [
        _layer(head, placed, _windows(rows, width * chunk), settings, forest, first, level)
        for level, width in enumerate(widths)
        if math.ceil(count / width) > 1
    ]
    sizes = (settings.leaf_size, settings.block_size)
    splits = sum(leaf_layout(width * chunk, size)[0] for width in widths for size in sizes)
    chunks = torch.arange(count, device=device)
    return Structure(head, forest, tuple(layers), chunks, leading(spectrum), splits)


def _windows(places: Tensor, width: int) -> Tensor:
    """Positions as windows [windows, width], the last one filled up with -1."""
    missing = -len(places) % width
    filler = places.new_full((missing,), -1)
    return torch.cat([places, filler]).view(-1, width)


def _layer(
    head: Head,
    placed: Tensor,
    windows: Tensor,
    settings: BlockSettings,
    forest: Forest,
    first: list[int],
    level: int,
) -> Layer:
    """Cells of each window but the first, made of the queries of the window before it."""
    depth, size = leaf_layout(windows.shape[1], settings.block_size)
    assert size << depth == windows.shape[1]
    before, after = windows[:-1], windows[1:]
    at, splits = order(placed[before], depth)
    members = head.query[before.gather(1, at)].view(-1, size, head.dim)
    cells = Blocks(members.mean(1), members.var(1, unbiased=False))
    fallen = assign(placed[after.clamp(min=0)], splits)
    cell = (torch.arange(len(after), device=at.device).unsqueeze(1) << depth) + fallen
    window = torch.arange(1, len(windows), device=at.device).repeat_interleave(1 << depth)
    last = level == len(first) - 2
    start = _before(window, forest, first[level], last)
    further = [start]
    for above in range(level + 1, len(first) - 1):
        ancestor = window // BASE ** (above - level)
        further.append(_before(ancestor, forest, first[above], above == len(first) - 2))
    view = look(forest, cells, _together(further))
    kept = (after >= 0).flatten()
    if not last:
        kept &= ((torch.arange(1, len(windows), device=at.device) % BASE) > 0).repeat_interleave(
            windows.shape[1]
        )
    rows, owner = _packed(after.flatten()[kept], cell.flatten()[kept], settings.block_size)
    query = head.query[torch.where(rows >= 0, rows, rows[:, :1])]
    levels = int(math.log2(START_NODES / BASE))
    return Layer(cells, descend(forest, start, levels), view, rows, query, owner)


def _before(window: Tensor, forest: Forest, first: int, last: bool) -> Pairs:
    """Cells in these windows, each with the roots of the windows before its own that share a
    parent (all of them in the last layer)."""
    parent = torch.zeros_like(window) if last else window // BASE * BASE
    cells, roots = [], []
    everyone = torch.arange(len(window), device=window.device)
    for step in range(int((window - parent).max()) if len(window) else 0):
        seen = parent + step < window
        cells.append(everyone[seen])
        roots.append(forest.roots[first + (parent + step)[seen]])
    if not cells:
        return everyone[:0], everyone[:0]
    return _together(list(zip(cells, roots, strict=True)))


def _together(parts: list[Pairs]) -> Pairs:
    cell, node = (torch.cat(column) for column in zip(*parts, strict=True))
    at = cell.argsort(stable=True)
    return cell[at], node[at]


def _packed(rows: Tensor, cell: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows of each cell in blocks [blocks, size] filled up with -1, and the cell of each block."""
    cell, at = cell.sort(stable=True)
    rows = rows[at]
    used, count = cell.unique_consecutive(return_counts=True)
    blocks = (count + size - 1) // size
    first = count.cumsum(0) - count
    which = torch.arange(len(used), device=rows.device).repeat_interleave(count)
    rank = torch.arange(len(rows), device=rows.device) - first[which]
    block = (blocks.cumsum(0) - blocks)[which] + rank // size
    packed = rows.new_full((int(blocks.sum()), size), -1)
    packed[block, rank % size] = rows
    return packed, used.repeat_interleave(blocks)
