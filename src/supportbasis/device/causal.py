"""Causal lists on the device, all heads at once: the layers of `supportbasis.blocks`.

Windows of all heads lie one after the other, and so do their trees. Which nodes a cell starts with
depends on shapes alone, and they lie together in memory. Rows that fall into one cell are packed
into blocks, for which there is room whatever falls where. So no entry decides about a shape but
how long lists are (`room`), and nothing waits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arrangement import repeated
from ..blocks import BASE, START_NODES, BlockSettings
from ..forest import Forest, joined
from ..kernels import selection
from ..kernels.language import cdiv
from ..kernels.placing import add_means, measured, taken
from ..kernels.rectangle import Rectangle, Tokens, exact_rows
from ..kernels.summary import summarised
from ..plans import Plan
from ..problem import Problem
from ..selection import Blocks, Column
from ..tree import assign, leaf_layout, order, positions
from .dispatch import Forward
from .exact import precision
from .framed import Inside, prices_of, settings_of
from .granules import Listed, Placed, attended, largest_entry, none_unless, token_dtype
from .room import Sizes, enough, exact_unless
from .run import Run, parted


class Level(NamedTuple):
    """Windows of one width, of all heads."""

    width: int  # tokens
    windows: int  # of a head
    trees: int  # levels of nodes below the root of a window of keys
    nodes: int  # before the first one, in the forest of all levels
    last: bool

    def before(self, window: Tensor) -> Tensor:
        """The first window that a row sees here; the last one is that before its own."""
        return torch.zeros_like(window) if self.last else window // BASE * BASE


@lru_cache(maxsize=64)
def levels_of(heads: int, tokens: int, settings: BlockSettings) -> tuple[Level, ...]:
    """From windows of a chunk to those of which there are at most `BASE`."""
    chunks, width, nodes = cdiv(tokens, settings.chunk), 1, 0
    made: list[Level] = []
    while True:
        windows, last = cdiv(chunks, width), width * BASE >= chunks
        trees, size = leaf_layout(width * settings.chunk, settings.leaf_size)
        assert size << trees == width * settings.chunk and size % 2 == 0
        made.append(Level(width * settings.chunk, windows, trees, nodes, last))
        if last:
            return tuple(made)
        nodes += heads * windows * ((2 << trees) - 1)
        width *= BASE


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output in the input dtype and lse in float32."""
    settings, first = settings_of(plan.heads[0]), min(plan.heads[0].exact_rows, problem.n)
    work = partial(_all_heads, settings, first, problem.scale)
    output, lse = run_of(problem, plan).there("causal", work)
    return output, lse, None


def run_of(problem: Problem, plan: Plan) -> Run:
    """A call for causal heads, there or back."""
    settings, first = settings_of(plan.heads[0]), plan.heads[0].exact_rows
    usual = _usual(len(plan.heads), problem.n, settings)
    return Run.of(problem, plan, (replace(settings, price=0.0), first), usual, prices_of)


def _usual(heads: int, tokens: int, settings: BlockSettings) -> Sizes:
    """Granules of coarse keys and entries of lists in each layer, as a rule."""
    sizes: list[int] = []
    for level in levels_of(heads, tokens, settings):
        if level.windows > 1:
            blocks = heads * level.windows * cdiv(level.width, settings.block_size)
            sizes += [8 * blocks, 32 * blocks]
    return tuple(sizes)


def _all_heads(
    settings: BlockSettings,
    first: int,
    scale: float,
    sizes: Sizes,
    sure: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prices: Tensor,
    *frames: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and the sizes that were needed (see `_usual`). Nothing here waits."""
    tokens = (query, key, value)
    made = seen(settings, sizes, *tokens, prices, *frames)
    output, lse = Chunks.of(query, settings).attended(*tokens, scale, made.weight)
    results = attended(made.forest, made.found, made.lengths, value.dtype)
    for (part, _), (more, size) in zip(made.found, results, strict=True):
        add_means(output, lse, part.rows.flatten(), more, size, made.inside.shift.flatten())
    output, lse = (x.view(*query.shape[:3], *x.shape[1:]) for x in (output, lse))
    output = output.to(value.dtype)
    exact_rows(*tokens, first_rows(first, *tokens[:2], scale, made.weight), output, lse)
    if sure:
        whole = (*tokens, scale, made.weight, precision())
        exact_unless(made.fits, *whole, output, lse, causal=True)
    return output, lse, made.needed


def first_rows(
    first: int, query: Tensor, key: Tensor, scale: float, log_weight: Tensor | None
) -> Rectangle:
    """The rows that frames were made from: they are exact."""
    heads = query.shape[0] * query.shape[1]
    rows = torch.arange(first, dtype=torch.int32, device=query.device)
    count = torch.full((heads,), first, dtype=torch.int32, device=query.device)
    known = Tokens(first, rows.expand(heads, -1).contiguous(), count)
    return Rectangle(known, Tokens(key.shape[2]), scale, True, log_weight, None, precision())


class Seen(NamedTuple):
    """What cells see: the same on the way back as on the way there."""

    inside: Inside
    weight: Tensor | None  # log-weights of the keys that were given
    trees: list[tuple[Forest, Tensor]]  # of each level, with the keys of leaves, -1 for none
    forest: Forest  # of all levels
    members: list[Tensor]  # [cells, size]: rows that the cells of each layer were made of
    found: list[tuple[Listed, Placed]]  # lists of layers, all of them empty where they do not fit
    lengths: list[tuple[int, int]]  # the room of lists
    needed: Tensor
    fits: Tensor


def seen(
    settings: BlockSettings,
    sizes: Sizes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prices: Tensor,
    *frames: Tensor,
) -> Seen:
    """The trees and lists of all layers of all heads, as far as there is room for them."""
    stack, weight = parted(frames)
    inside = Inside.made(query, key, value, *stack).weighted(weight)
    heads, n, _ = inside.query.shape
    levels = levels_of(heads, n, settings)
    trees = _trees(inside, levels, settings)
    forest = joined([tree for tree, _ in trees])
    members, found = [], []
    for number, level in enumerate(levels):
        if level.windows > 1:
            part, rows = _layer(inside, forest, levels, number, prices, settings)
            members.append(rows)
            found.append((part, Placed.of(part, value.shape[3], value.dtype)))
    needed = torch.zeros(0, dtype=torch.long, device=query.device)
    fits = torch.ones((), dtype=torch.bool, device=query.device)
    if found:
        needed = torch.cat([placed.sizes for _, placed in found])
        fits = enough(needed, sizes)
        found = [none_unless(fits, *part) for part in found]
    lengths = list(zip(sizes[::2], sizes[1::2], strict=True))
    return Seen(inside, weight, trees, forest, members, found, lengths, needed, fits)


def _trees(
    inside: Inside, levels: tuple[Level, ...], settings: BlockSettings
) -> list[tuple[Forest, Tensor]]:
    """The trees of all windows of all heads, level by level, and the keys of their leaves."""
    (heads, m, _), flat = inside.key.shape, inside.flat()
    keys = _places(inside.query.shape[1], m, heads, settings.chunk, inside.key.device)
    hidden = inside.log_weight.flatten() == -math.inf if inside.masked else None
    placed, dtype = inside.placed_key.flatten(0, 1), token_dtype(inside.value.dtype)
    trees = []
    for level in levels:
        windows = _windows(keys, level.width).flatten(0, 1)
        within = positions(placed[repeated(windows)], level.trees + 1)
        position = windows.gather(1, within).view(len(windows) << level.trees, -1)
        if hidden is not None:
            position = position.masked_fill(hidden[position.clamp(min=0)], -1)
        made = (flat, position, len(windows), level.trees, dtype, largest_entry(dtype))
        trees.append((summarised(*made), position))
    return trees


def _layer(
    inside: Inside,
    forest: Forest,
    levels: tuple[Level, ...],
    number: int,
    prices: Tensor,
    settings: BlockSettings,
) -> tuple[Listed, Tensor]:
    """Cells of each window but the first, made of the queries of the window before it, and blocks
    of the rows that fall into them; and the rows that cells were made of. A cell more, of no rows,
    has an empty list."""
    (heads, n, _), level = inside.query.shape, levels[number]
    placed, query = inside.placed_query.flatten(0, 1), inside.query.flatten(0, 1)
    rows = _windows(_places(n, n, heads, settings.chunk, query.device), level.width)
    after = _seeing(level, query.device)
    depth, size = leaf_layout(level.width, settings.block_size)
    assert size << depth == level.width
    before, own = (rows[:, x].flatten(0, 1) for x in (after - 1, after))
    at, splits = order(placed[before], depth)
    former = before.gather(1, at).view(-1, size)
    fallen = assign(placed[own.clamp(min=0)], splits)
    count = len(own) << depth
    cell = (torch.arange(len(own), device=at.device).unsqueeze(1) << depth) + fallen
    held, owner = _packed(own.flatten(), torch.where(own >= 0, cell, count).flatten(), count, size)
    cells = Blocks(*(F.pad(x, (0, 0, 0, 1)) for x in measured(query, former)))
    start, seen = _starts(heads, levels, number, depth, query.device)
    view = selection.look(forest, cells, seen)
    price = F.pad(prices.repeat_interleave(count // heads), (0, 1))
    longest = min(max(selection.LONGEST, START_NODES * 4), len(forest.key))
    coarse, exact = selection.select(forest, cells, view, start, price, longest)
    dtype = token_dtype(inside.value.dtype)
    tokens = taken(query, held, dtype, largest_entry(dtype))
    return Listed(tokens, held, cells.mean, owner, coarse, exact), former


def _places(rows: int, tokens: int, heads: int, chunk: int, device: torch.device) -> Tensor:
    """Tokens of all heads, [heads, places of whole chunks of rows]; -1 where there is none."""
    place = torch.arange(cdiv(rows, chunk) * chunk, device=device)
    first = torch.arange(heads, device=device).unsqueeze(1) * tokens
    return torch.where(place < tokens, place + first, -1)


def _windows(places: Tensor, width: int) -> Tensor:
    """Places [heads, tokens] as windows [heads, windows, width], filled up with -1."""
    places = F.pad(places, (0, -places.shape[1] % width), value=-1)
    return places.view(len(places), -1, width)


@lru_cache(maxsize=256)
def _seeing(level: Level, device: torch.device) -> Tensor:
    """The windows of a head whose rows see others of this level."""
    window = torch.arange(1, level.windows)
    return window[level.before(window) < window].to(device)


def _packed(rows: Tensor, cell: Tensor, cells: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows of each cell in blocks [blocks, size] filled up with -1, and the cell of each block, as
    many as there may be; ``cells`` is that of rows and blocks which are none."""
    narrow, at = cell.int().sort(stable=True)  # half the passes
    cell = narrow.long()
    edges = torch.searchsorted(cell, torch.arange(cells + 1, device=cell.device))
    last = ((edges.diff() + (size - 1)) // size).cumsum(0)  # block after those of each cell
    most = cdiv(len(rows), size) + cells
    real = cell < cells
    which = cell.clamp(max=cells - 1)
    rank = torch.arange(len(rows), device=rows.device) - edges[which]
    block = F.pad(last, (1, 0))[which] + rank // size
    place = torch.where(real, block * size + rank % size, most * size)
    packed = rows.new_full((most * size + 1,), -1).scatter_(0, place, rows[at])
    owner = torch.searchsorted(last, torch.arange(most, device=rows.device), right=True)
    return packed[:-1].view(most, size), owner


@lru_cache(maxsize=256)
def _starts(
    heads: int, levels: tuple[Level, ...], number: int, depth: int, device: torch.device
) -> tuple[Column, Column]:
    """For every cell of a layer, and one that sees nothing: the nodes it starts with, and the
    roots of all windows before its own, on this level and above, which it looks at first."""
    level = levels[number]
    window = _seeing(level, torch.device("cpu"))
    down = min(level.trees, int(math.log2(START_NODES / BASE)))
    above = level.nodes + heads * level.windows * ((1 << down) - 1)
    item = torch.arange(above, above + (heads * level.windows << down))
    head = torch.arange(heads).unsqueeze(1)
    first = (head * level.windows + level.before(window)) << down
    count = ((window - level.before(window)) << down).expand(heads, -1)
    roots, seen = [], []
    for i, other in enumerate(levels[number:]):
        ancestor = window // BASE**i
        step = other.before(ancestor).unsqueeze(1) + torch.arange(BASE)
        seen.append((step < ancestor.unsqueeze(1)).expand(heads, -1, -1))
        roots.append(other.nodes + head.unsqueeze(2) * other.windows + step)
    known, node = torch.cat(seen, 2), torch.cat(roots, 2)
    many = known.sum(2)
    after = many.flatten().cumsum(0).view(heads, -1)
    made = []
    for items, begin, length in ((item, first, count), (node[known], after - many, many)):
        begin, length = (
            F.pad(x.flatten().repeat_interleave(1 << depth), (0, 1)) for x in (begin, length)
        )
        made.append(Column(items.to(device), begin.to(device), length.to(device)))
    return made[0], made[1]


class Chunks(NamedTuple):
    """Chunks that rows share with their own keys, as batches."""

    batch: int
    rows: int
    number: int
    size: int

    @staticmethod
    def of(query: Tensor, settings: BlockSettings) -> Chunks:
        rows = query.shape[2]
        return Chunks(query.shape[0], rows, cdiv(rows, settings.chunk), settings.chunk)

    def cut(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Tokens [batch, heads, tokens, ...] as [batch * chunks, heads, chunk, ...]."""
        x = x[:, :, : self.number * self.size]
        missing = self.number * self.size - x.shape[2]
        if missing:
            x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing), value=fill)
        return x.unflatten(2, (self.number, self.size)).transpose(1, 2).flatten(0, 1)

    def joined(self, x: Tensor) -> Tensor:
        """Chunks as tokens again, as many as there are places."""
        return x.unflatten(0, (self.batch, self.number)).transpose(1, 2).flatten(2, 3)

    def rectangle(
        self, query: Tensor, key: Tensor, scale: float, weight: Tensor | None
    ) -> Rectangle:
        """Of every chunk: keys that do not lie ahead."""
        if weight is None and key.shape[2] < self.rows:
            weight = torch.zeros(*query.shape[:2], key.shape[2], device=query.device)
        weight = None if weight is None else self.cut(weight, -math.inf)
        whole = Tokens(self.size)
        return Rectangle(whole, whole, scale, True, weight, precision=precision())

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, log_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of all rows over their chunks, one head after the other, in float32."""
        shape = (self.batch * self.number, query.shape[1], self.size)
        output = torch.empty(*shape, value.shape[3], device=query.device)
        lse, tokens = torch.empty(shape, device=query.device), [*map(self.cut, (query, key, value))]
        rectangle = self.rectangle(query, key, scale, log_weight)
        exact_rows(tokens[0], tokens[1], tokens[2], rectangle, output, lse)
        output, lse = (
            self.joined(x)[:, :, : self.rows].flatten(0, 2).contiguous() for x in (output, lse)
        )
        return output, lse
