"""Lists of exact and coarse keys on the device, all heads at once.

Heads lie one after the other: their trees are one forest, their blocks one set of blocks, and each
block starts at the nodes of its own head. Then everything is one launch for all heads: orders,
selection, coarse keys, lists and the attention over them. No entry decides about a shape: there is
room for lists of some length (`room`), so all this is replayed and the host waits for nothing.

Causal heads are in `causal`. Scores are products of tokens in the frame of their head, which are
float16 whatever 16-bit type the input has: tokens of a frame are of moderate size, and three more
bits keep what framing gained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..arrangement import repeated
from ..blocks import (
    PARTS,
    PLACES,
    START_NODES,
    BlockSettings,
    levels_above,
)
from ..cost import KERNEL_ORDERS
from ..cotangent import Gradients
from ..forest import Forest
from ..kernels import selection
from ..kernels.cells import Gathered, gathered
from ..kernels.summary import summarised
from ..plans import HeadPlan, Plan
from ..problem import Problem
from ..selection import Blocks, Column
from ..tree import leaf_layout, positions
from . import causal
from .dispatch import Forward, by_key_head
from .exact import precision
from .framed import Inside, prices_of, settings_of
from .granules import Listed, Placed, attended, largest_entry, none_unless, token_dtype
from .room import Sizes, enough, exact_unless
from .run import Run, parted

LEAVES = 4  # of a segment


def refusal(head: HeadPlan) -> str | None:
    order = settings_of(head).order
    if order in KERNEL_ORDERS or (head.exact_rows and order != PLACES):  # causal: ordered by trees
        return None
    return f"its order is {order!r}: such blocks are made by PyTorch"


def family(head: HeadPlan) -> object:
    return replace(settings_of(head), price=0.0), head.exact_rows


def gradients(
    problem: Problem,
    plan: Plan,
    output: Tensor,
    lse: Tensor,
    rescued: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    """Gradients of query, key, value and key log-weights, as `supportbasis.backward`."""
    from . import causal_backward, lists_backward

    back = (output, lse, grad, *(() if grad_lse is None else (grad_lse,)))
    way = causal_backward if problem.is_causal else lists_backward
    query, key, value, weight = way.gradients(problem, plan, *back)
    key, value = (by_key_head(x, problem) for x in (key, value))
    return Gradients(query, key, value, weight if for_weights else None)


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output in the input dtype and lse in float32."""
    if problem.is_causal:
        return causal.forward(problem, plan)
    settings = settings_of(plan.heads[0])
    work = partial(_all_heads, settings, problem.scale)
    output, lse = run_of(problem, plan).there("lists", work)
    return output, lse, None


def run_of(problem: Problem, plan: Plan) -> Run:
    """A call for heads that are not causal, there or back."""
    settings = settings_of(plan.heads[0])
    kind, usual = replace(settings, price=0.0), _usual(problem, settings)
    return Run.of(problem, plan, kind, usual, prices_of)


def _usual(problem: Problem, settings: BlockSettings) -> Sizes:
    """How many blocks are too wide and how many rows alone, as a rule; and granules of coarse keys
    and entries of lists, of whole blocks, of parts and of rows alone."""
    rows = problem.batch * problem.heads * problem.n
    blocks = rows // settings.block_size
    wide, alone = 1 + blocks // 64, 16 + rows // 1024
    lists = [(8 * count, 32 * count) for count in (blocks + 1, PARTS * wide, alone)]
    return wide, alone, *(size for sizes in lists for size in sizes)


def _all_heads(
    settings: BlockSettings,
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
    made = seen(settings, sizes, query, key, value, prices, *frames)
    output, lse = _written(made)
    output, lse = output.view(*query.shape[:3], -1), lse.view(query.shape[:3])
    if sure:
        whole = (query, key, value, scale, made.weight, precision())
        exact_unless(made.fits, *whole, output, lse)
    return output, lse, made.needed


class Seen(NamedTuple):
    """What blocks see: the same on the way back as on the way there."""

    inside: Inside
    weight: Tensor | None  # log-weights of the keys that were given
    forest: Forest
    position: Tensor  # [leaves, size]: the keys of leaves, -1 for none
    blocks: list[Gathered]
    found: list[tuple[Listed, Placed]]  # their lists, all of them empty where they do not fit
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
    """The lists of all blocks of all heads, as far as there is room for them."""
    stack, weight = parted(frames)
    inside = Inside.made(query, key, value, *stack).weighted(weight)
    forest, position, nodes = _forest(inside, settings)
    wide, alone, *lengths = sizes
    blocks, needed = _blocks(inside, settings, wide, alone)
    found = []
    for part in blocks:
        lists = _listed(forest, nodes, prices, part)
        found.append((lists, Placed.of(lists, value.shape[3], value.dtype)))
    needed = torch.cat([needed, *(placed.sizes for _, placed in found)])
    fits = enough(needed, sizes)
    found = [none_unless(fits, *part) for part in found]
    rooms = list(zip(*[iter(lengths)] * 2, strict=True))
    return Seen(inside, weight, forest, position, blocks, found, rooms, needed, fits)


def _written(made: Seen) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows, one head after the other."""
    inside = made.inside
    count, n, _ = inside.query.shape
    device, dtype = inside.query.device, inside.value.dtype
    output = torch.empty(count * n + 1, inside.value.shape[2], dtype=dtype, device=device)
    lse = torch.empty(count * n + 1, device=device)
    results = attended(made.forest, made.found, made.lengths, dtype)
    for (listed, _), (part, part_lse) in zip(made.found, results, strict=True):
        at = torch.where(listed.rows >= 0, listed.rows, count * n).flatten()
        output.index_copy_(0, at, part)
        lse.index_copy_(0, at, part_lse)
    return output[:-1], lse[:-1] + inside.shift.flatten()


def _blocks(
    inside: Inside, settings: BlockSettings, most_wide: int, most_alone: int
) -> tuple[list[Gathered], Tensor]:
    """Blocks of queries that are close together; those that are not, in parts; and rows that are
    far from what is left of their block, alone: some of both. Also how many of both there are."""
    dtype, n = token_dtype(inside.value.dtype), inside.query.shape[1]
    query = inside.query.flatten(0, 1)

    def taken(rows: Tensor, head: Tensor, *, splits: bool = False) -> Gathered:
        return gathered(query, rows, head, inside.spectrum, dtype, largest_entry(dtype), splits)

    rows = _rows(inside, settings)
    head = torch.arange(len(rows), device=rows.device) // (len(rows) // len(inside.query))
    whole = taken(rows, head, splits=True)
    which = _first(whole.wide, most_wide)
    parts = rows[which.clamp(min=0)].masked_fill((which < 0).unsqueeze(1), -1)
    placed = inside.placed_query.flatten(0, 1)[repeated(parts)]
    parts = parts.gather(1, positions(placed, int(math.log2(PARTS))))
    parts = parts.view(-1, rows.shape[1] // PARTS).sort(1, descending=True).values
    split = taken(parts, head[which.clamp(min=0)].repeat_interleave(PARTS))
    left = torch.cat([whole.alone.flatten(), split.alone.flatten()])
    which = _first(left >= 0, most_alone)
    alone = torch.where(which < 0, -1, left[which.clamp(min=0)])
    single = taken(alone.unsqueeze(1), alone.clamp(min=0) // n)
    return [whole, split, single], torch.stack([whole.wide.sum(), (left >= 0).sum()])


def _first(flags: Tensor, room: int) -> Tensor:
    """Where the first flags are that are set, [room]; -1 for none."""
    at = flags.cumsum(0) - 1
    at = torch.where(flags & (at < room), at, room)
    place = torch.arange(len(flags), device=flags.device)
    return place.new_full((room + 1,), -1).scatter_(0, at, place)[:room]


def _listed(forest: Forest, nodes: Tensor, prices: Tensor, blocks: Gathered) -> Listed:
    each = len(nodes) // len(prices)
    first = blocks.head * each
    start = Column(nodes, first, each * (blocks.rows >= 0).any(1))
    cells = Blocks(blocks.mean, blocks.variance)
    view = selection.look(forest, cells, start)
    longest = max(each, min(selection.LONGEST, len(forest.leaf_key) // len(prices)))
    price = prices[blocks.head]
    coarse, exact = selection.select(forest, cells, view, start, price, longest)
    return Listed(blocks.query, blocks.rows, cells.mean, None, coarse, exact)


def _forest(inside: Inside, settings: BlockSettings) -> tuple[Forest, Tensor, Tensor]:
    """The trees of all heads, the keys of their leaves, and the nodes that blocks start with."""
    (count, m), flat = inside.key.shape[:2], inside.flat()
    placed, hidden = inside.placed_key, None
    if inside.masked:
        hidden = inside.log_weight == -math.inf
        placed = _aside(placed, hidden)
    segments = _segments(placed, LEAVES * settings.leaf_size, 2 * LEAVES, settings.order)
    above = levels_above(segments.shape[1])
    missing = -segments.shape[1] % (1 << above)
    if missing:
        filler = segments.new_full((count, missing, segments.shape[2]), -1)
        segments = torch.cat([segments, filler], 1)
    flattened = _counted_on(segments, m).flatten(0, 1)
    levels = int(math.log2(LEAVES))
    within = positions(placed.flatten(0, 1)[repeated(flattened)], levels + 1)
    position = flattened.gather(1, within).view(-1, segments.shape[2] // LEAVES)
    if hidden is not None:
        position = position.masked_fill(hidden.flatten()[position.clamp(min=0)], -1)
    dtype = token_dtype(flat.value.dtype)
    trees = len(flattened) >> above
    forest = summarised(flat, position, trees, levels + above, dtype, largest_entry(dtype))
    down = min(levels + above, int(math.log2(START_NODES * count / trees)))
    first = trees * ((1 << down) - 1)  # nodes of a level lie together, those of a head too
    return forest, position, torch.arange(first, first + (trees << down), device=placed.device)


def _aside(placed: Tensor, hidden: Tensor) -> Tensor:
    """Keys [heads, keys, axes] with the hidden ones far from all others: few leaves hold both."""
    far = torch.zeros_like(placed)
    far[..., :1] = 4 * placed.abs().amax((1, 2), keepdim=True)
    return torch.where(hidden.unsqueeze(2), far, placed)


def _rows(inside: Inside, settings: BlockSettings) -> Tensor:
    """Rows of all blocks [blocks, size], as numbers of the rows of all heads, -1 for none."""
    placed = inside.placed_query
    rows = _segments(placed, settings.block_size, PARTS, settings.order)
    return _counted_on(rows, placed.shape[1]).flatten(0, 1)


def _segments(placed: Tensor, size: int, multiple: int, how: str) -> Tensor:
    """Positions [heads, segments, length] within each head of tokens [heads, tokens, axes]."""
    heads, tokens = placed.shape[:2]
    depth, length = leaf_layout(tokens, size)
    length += -length % multiple
    place = torch.arange(length << depth, device=placed.device)
    token = place % tokens
    place = torch.where(place < tokens, place, -1)
    if how == "sequence":
        return place.view(1, -1, length).expand(heads, -1, -1)
    whole = len(place) == tokens
    at = positions(placed if whole else placed[:, token], depth)
    if whole:
        return at.view(heads, -1, length)
    return place[at].view(heads, -1, length).sort(2, descending=True).values


def _counted_on(segments: Tensor, tokens: int) -> Tensor:
    """Positions within each head as positions among the tokens of all heads."""
    head = torch.arange(len(segments), device=segments.device).view(-1, 1, 1)
    return torch.where(segments >= 0, segments + head * tokens, -1)
