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
from ..kernels.adding import add_means
from ..kernels.language import cdiv
from ..kernels.rectangle import Rectangle, Tokens, exact_rows
from ..kernels.summary import summarised
from ..plans import Plan
from ..problem import Problem
from ..selection import Blocks, Column
from ..tree import assign, leaf_layout, order, positions
from .dispatch import Forward
from .exact import precision
from .framed import Inside, Stack, frames_of, prices_of, settings_of
from .granules import Listed, Placed, attended, largest_entry, none_unless, short, token_dtype
from .replay import replayed
from .room import Room, Sizes, exact_unless


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
    settings, weight = settings_of(plan.heads[0]), problem.key_log_weight
    usual = _usual(len(plan.heads), problem.n, settings)
    room = Room.of(plan, problem, usual)
    first = min(plan.heads[0].exact_rows, problem.n)
    given = [problem.query, problem.key, problem.value, prices_of(plan, problem.query.device)]
    given += frames_of(problem, plan)
    if weight is not None:
        given.append(weight.float())
    call = (replace(settings, price=0.0), first, problem.group, problem.scale, precision())

    def work(sizes: Sizes, sure: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        made = partial(_all_heads, settings, first, problem.scale, sizes, sure)
        key = ("causal", call, sizes)
        output, lse, needed = replayed(key, made, *given) if sure else made(*given)
        return (output, lse), needed

    return (*room.run(work), None)


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
    count = len(Stack._fields)
    weight = frames[count] if len(frames) > count else None
    inside = Inside.made(query, key, value, *frames[:count]).weighted(weight)
    tokens = (query, key, value)
    output, lse = _own_chunks(query, key, value, scale, weight, settings)
    forest, found = _found(inside, prices, settings)
    needed = torch.zeros(0, dtype=torch.long, device=query.device)
    fits = torch.ones((), dtype=torch.bool, device=query.device)
    if found:
        needed = torch.cat([placed.sizes for _, placed in found])
        pairs = zip(needed.unbind(), sizes, strict=True)
        fits = torch.stack([need <= size for need, size in pairs]).all()
        found = [none_unless(fits, *part) for part in found]
        lengths = list(zip(sizes[::2], sizes[1::2], strict=True))
        results = attended(forest, found, lengths, value.dtype)
        for (part, _), (more, size) in zip(found, results, strict=True):
            add_means(output, lse, part.rows.flatten(), more, size, inside.shift.flatten())
    output, lse = (x.view(*query.shape[:3], *x.shape[1:]) for x in (output, lse))
    output = output.to(value.dtype)
    rows = torch.arange(first, dtype=torch.int32, device=query.device)
    rows = rows.expand(len(prices), -1).contiguous()
    known = Tokens(first, rows, torch.full_like(prices, first, dtype=torch.int32))
    keys = Tokens(key.shape[2])
    exact_rows(*tokens, Rectangle(known, keys, scale, True, weight, None, precision()), output, lse)
    if sure:
        exact_unless(fits, *tokens, scale, weight, precision(), output, lse, causal=True)
    return output, lse, needed


def _found(
    inside: Inside, prices: Tensor, settings: BlockSettings
) -> tuple[Forest, list[tuple[Listed, Placed]]]:
    """The trees of all heads, and the lists of all layers."""
    heads, n, _ = inside.query.shape
    levels, found = levels_of(heads, n, settings), []
    forest = _forest(inside, levels, settings)
    for number, level in enumerate(levels):
        if level.windows > 1:
            part = _layer(inside, forest, levels, number, prices, settings)
            found.append((part, Placed.of(part, inside.value.shape[2], inside.value.dtype)))
    return forest, found


def _forest(inside: Inside, levels: tuple[Level, ...], settings: BlockSettings) -> Forest:
    """The trees of all windows of all heads, level by level."""
    (heads, m, _), flat = inside.key.shape, inside.flat()
    keys = _places(inside.query.shape[1], m, heads, settings.chunk, inside.key.device)
    hidden = inside.log_weight.flatten() == -math.inf if inside.masked else None
    placed, dtype = inside.placed_key.flatten(0, 1), token_dtype(inside.value.dtype)
    forests = []
    for level in levels:
        windows = _windows(keys, level.width).flatten(0, 1)
        within = positions(placed[repeated(windows)], level.trees + 1)
        position = windows.gather(1, within).view(len(windows) << level.trees, -1)
        if hidden is not None:
            position = position.masked_fill(hidden[position.clamp(min=0)], -1)
        made = (flat, position, len(windows), level.trees, dtype, largest_entry(dtype))
        forests.append(summarised(*made))
    return joined(forests)


def _layer(
    inside: Inside,
    forest: Forest,
    levels: tuple[Level, ...],
    number: int,
    prices: Tensor,
    settings: BlockSettings,
) -> Listed:
    """Cells of each window but the first, made of the queries of the window before it, and blocks
    of the rows that fall into them. A cell more, of no rows, has an empty list."""
    (heads, n, d), level = inside.query.shape, levels[number]
    placed, query = inside.placed_query.flatten(0, 1), inside.query.flatten(0, 1)
    rows = _windows(_places(n, n, heads, settings.chunk, query.device), level.width)
    after = _seeing(level, query.device)
    depth, size = leaf_layout(level.width, settings.block_size)
    assert size << depth == level.width
    before, own = (rows[:, x].flatten(0, 1) for x in (after - 1, after))
    at, splits = order(placed[before], depth)
    members = query[before.gather(1, at)].view(-1, size, d)
    fallen = assign(placed[own.clamp(min=0)], splits)
    count = len(own) << depth
    cell = (torch.arange(len(own), device=at.device).unsqueeze(1) << depth) + fallen
    held, owner = _packed(own.flatten(), torch.where(own >= 0, cell, count).flatten(), count, size)
    cells = Blocks(
        F.pad(members.mean(1), (0, 0, 0, 1)), F.pad(members.var(1, unbiased=False), (0, 0, 0, 1))
    )
    start, seen = _starts(heads, levels, number, depth, query.device)
    view = selection.look(forest, cells, seen)
    price = F.pad(prices.repeat_interleave(count // heads), (0, 1))
    longest = min(max(selection.LONGEST, START_NODES * 4), len(forest.key))
    coarse, exact = selection.select(forest, cells, view, start, price, longest)
    tokens = short(query, token_dtype(inside.value.dtype))[held.clamp(min=0)]
    return Listed(tokens, held, cells.mean, owner, coarse, exact)


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
    cell, at = cell.sort(stable=True)
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


def _own_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    log_weight: Tensor | None,
    settings: BlockSettings,
) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows, one head after the other, over the keys of their own chunk that
    do not lie ahead; in float32."""
    (batch, heads, n, _), chunk = query.shape, settings.chunk
    count = cdiv(n, chunk)

    def cut(x: Tensor, fill: float = 0.0) -> Tensor:
        """Tokens [batch, heads, tokens, ...] as [batch * chunks, heads, chunk, ...]."""
        x = x[:, :, : count * chunk]
        missing = count * chunk - x.shape[2]
        if missing:
            x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing), value=fill)
        return x.unflatten(2, (count, chunk)).transpose(1, 2).flatten(0, 1)

    if log_weight is None and key.shape[2] < n:
        log_weight = torch.zeros(batch, heads, key.shape[2], device=query.device)
    weight = None if log_weight is None else cut(log_weight, -math.inf)
    output = torch.empty(batch * count, heads, chunk, value.shape[3], device=query.device)
    lse = torch.empty(output.shape[:3], device=query.device)
    rows = Tokens(chunk)
    rectangle = Rectangle(rows, rows, scale, True, weight, precision=precision())
    exact_rows(cut(query), cut(key), cut(value), rectangle, output, lse)

    def whole(x: Tensor) -> Tensor:
        x = x.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)
        return x[:, :, :n].flatten(0, 2).contiguous()

    return whole(output), whole(lse)
