"""Lists of exact and coarse keys on the device, all heads at once.

Heads lie one after the other: their trees are one forest, their blocks one set of blocks, and each
block starts at the nodes of its own head. Then everything is one launch for all heads: orders,
selection, coarse keys, lists and the attention over them. The host waits for three numbers: how
many blocks are too wide, how many rows are alone, how long the lists are.

Causal heads and heads with hidden keys run one by one. Scores are products of tokens in the frame
of their head, which are float16 whatever 16-bit type the input has: tokens of a frame are of
moderate size, and three more bits keep what framing gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arrangement import arranged, repeated
from ..basis import support_basis
from ..blocks import (
    PARTS,
    START_NODES,
    BlockSettings,
    Layer,
    levels_above,
    structure,
)
from ..components import BlockSum, ExactSum, evaluate
from ..components.blocks import add_chunks
from ..components.blocks_backward import add_gradients
from ..cotangent import Cotangent, Gradients
from ..forest import Forest
from ..kernels import selection
from ..kernels.blocklist import GRANULE, block_list_attention
from ..kernels.cells import Gathered, gathered
from ..kernels.language import power_of_two
from ..kernels.summary import summarised
from ..partial import Partial
from ..plans import HeadPlan, Plan
from ..problem import Head, Problem
from ..selection import Blocks, Column, descend
from ..tree import leaf_layout, positions
from .framed import Inside

WIDEST_BLOCK = 128  # queries that one program attends for
LARGEST = 6e4  # entry of a token in 16 bits: beyond, it is alone whatever its scores are exactly
LEAVES = 4  # of a segment
TOGETHER = ("tree", "sequence")  # orders that are the same work for every head


def refusal(head: HeadPlan) -> str | None:
    order = _settings(head).order
    if head.exact_rows or order in TOGETHER:  # rows are exact in causal attention only
        return None
    return f"its order is {order!r}: tokens in groups are arranged by PyTorch"


def family(head: HeadPlan) -> object:
    return replace(_settings(head), price=0.0)


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
    from .lists_backward import ListFlow

    query, key, value = (
        x.new_zeros(x.shape, dtype=torch.float32)
        for x in (problem.query, problem.key, problem.value)
    )
    shape = (problem.batch, problem.heads, problem.m)
    weight = query.new_zeros(shape) if for_weights else None
    for b, h, head in problem.each_head():
        at, key_at = (b, h), (b, h // problem.group)
        part = Gradients(
            query[at], key[key_at], value[key_at], None if weight is None else weight[at]
        )
        from_lse = None if grad_lse is None else grad_lse[at]
        cotangent = Cotangent.of(output[at], lse[at], grad[at], from_lse)
        for group in support_basis(plan.head(b, h), head):
            given = cotangent if group.rows is None else cotangent[group.rows]
            for component in group.components:
                if isinstance(component, BlockSum):
                    made = (component.settings, component.frame, part, given, head, group.rows)
                    add_gradients(*made, partial(ListFlow, problem.query.dtype))
                else:
                    component.add_gradients(part, given, head, group.rows)
    return Gradients(query, key, value, weight)


def _settings(head: HeadPlan) -> BlockSettings:
    assert head.blocks is not None
    return head.blocks


def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, None]:
    """Output in the input dtype and lse in float32."""
    inside = Inside.of(problem, plan)
    if not problem.is_causal and not inside.masked:
        output, lse = _whole(inside, plan.heads)
    else:
        run = _causal if problem.is_causal else _whole
        parts = [run(inside.one(i), [head]) for i, head in enumerate(plan.heads)]
        output, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    shape = (problem.batch, problem.heads, problem.n)
    return output.view(*shape, -1), (lse.view(shape) + inside.shift.view(shape)), None


def _whole(inside: Inside, heads: Sequence[HeadPlan]) -> tuple[Tensor, Tensor]:
    """Heads whose rows see every key: output and lse of all rows, one head after the other."""
    settings = _settings(heads[0])
    count, n = inside.query.shape[:2]
    flat = inside.flat()
    forest, nodes = _forest(inside, flat, settings)
    rows = _rows(inside, settings)
    head = torch.arange(len(rows), device=rows.device) // (len(rows) // count)
    price = torch.tensor([_settings(head).price for head in heads]).to(rows.device)
    dtype = inside.value.dtype
    output = torch.zeros(count * n + 1, inside.value.shape[2], dtype=dtype, device=rows.device)
    lse = torch.full((count * n + 1,), -math.inf, device=rows.device)
    found = []
    for group in _groups(inside, flat.query, rows, head):
        each = len(nodes) // count
        first = group.head * each
        start = Column(nodes, first, torch.full_like(first, each))
        cells = Blocks(group.mean, group.variance)
        view = selection.look(forest, cells, start)
        longest = max(each, min(selection.LONGEST, len(forest.leaf_key) // count))
        prices = price[group.head].masked_fill(group.wide, math.inf)
        coarse, exact = selection.select(forest, cells, view, start, prices, longest)
        found.append(Listed(group.query, group.rows, cells.mean, None, coarse, exact))
    for listed, (part, part_lse) in zip(found, attended(forest, found, dtype), strict=True):
        at = torch.where(listed.rows >= 0, listed.rows, count * n).flatten()
        output.index_copy_(0, at, part)
        lse.index_copy_(0, at, part_lse)
    return output[:-1], lse[:-1]


def _causal(inside: Inside, heads: Sequence[HeadPlan]) -> tuple[Tensor, Tensor]:
    """One causal head: its layers by lists, its chunks and first rows exactly."""
    plan, flat = heads[0], replace(inside.flat(), is_causal=True)
    settings, rows = _settings(plan), flat.n
    made = structure(flat, inside.spectrum[0], settings)
    found = [listed(made.forest, layer, settings.price) for layer in made.layers]
    total = Partial.empty(rows + 1, flat.value_dim, flat.query, flat.dtype)
    for part, (output, lse) in zip(
        found, attended(made.forest, found, inside.value.dtype), strict=True
    ):
        at = torch.where(part.rows >= 0, part.rows, rows).flatten()
        seen = (lse > -math.inf).to(lse.dtype)
        total.put_(at, total[at].add_(Partial(output.float(), seen, lse, torch.zeros_like(lse))))
    total = total[:rows]
    add_chunks(made, settings.chunk, total)
    if plan.exact_rows:
        first = torch.arange(min(rows, plan.exact_rows), device=flat.query.device)
        total.put_(first, evaluate([ExactSum(flat.live_keys)], flat, first))
    output, lse = total.divide_(total.seen)
    return output.to(inside.value.dtype), lse


def listed(forest: Forest, layer: Layer, price: float) -> Listed:
    """The lists of a layer whose cells know what they see."""
    start = Column.of(layer.start, len(layer.cells.mean))
    prices = torch.full_like(layer.view.size, price)
    longest = max(selection.LONGEST, START_NODES * 4)
    coarse, exact = selection.select(
        forest, layer.cells, layer.view, start, prices, min(longest, len(forest.key))
    )
    return Listed(layer.query, layer.rows, layer.cells.mean, layer.owner, coarse, exact)


def _forest(inside: Inside, flat: Head, settings: BlockSettings) -> tuple[Forest, Tensor]:
    """The trees of all heads, and the nodes that their blocks start with."""
    count, m = inside.key.shape[:2]
    placed = inside.placed_key
    live = flat.live_keys if inside.masked else None
    segments = _segments(placed, live, LEAVES * settings.leaf_size, 2 * LEAVES, settings.order)
    above = levels_above(segments.shape[1])
    missing = -segments.shape[1] % (1 << above)
    if missing:
        filler = segments.new_full((count, missing, segments.shape[2]), -1)
        segments = torch.cat([segments, filler], 1)
    flattened = _counted_on(segments, m).flatten(0, 1)
    levels = int(math.log2(LEAVES))
    within = positions(placed.flatten(0, 1)[repeated(flattened)], levels + 1)
    position = flattened.gather(1, within).view(-1, segments.shape[2] // LEAVES)
    dtype = token_dtype(flat.value.dtype)
    trees = len(flattened) >> above
    forest = summarised(flat, position, trees, levels + above, dtype, _largest(dtype))
    roots = len(forest.roots) // count
    head = torch.arange(len(forest.roots), device=placed.device) // roots
    down = int(math.log2(START_NODES / roots))
    return forest, descend(forest, (head, forest.roots), down)[1]


def _rows(inside: Inside, settings: BlockSettings) -> Tensor:
    """Rows of all blocks [blocks, size], as numbers of the rows of all heads, -1 for none."""
    placed = inside.placed_query
    rows = _segments(placed, None, settings.block_size, PARTS, settings.order)
    return _counted_on(rows, placed.shape[1]).flatten(0, 1)


def _segments(placed: Tensor, live: Tensor | None, size: int, multiple: int, how: str) -> Tensor:
    """Positions [heads, segments, length] within each head of tokens [heads, tokens, axes]; all of
    them, or some that are live."""
    heads, tokens = placed.shape[:2]
    if live is not None:
        assert heads == 1
        segments = arranged(placed[0][live], size, multiple, how).segments
        return torch.where(segments >= 0, live[segments], -1).unsqueeze(0)
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


def _groups(inside: Inside, query: Tensor, rows: Tensor, head: Tensor) -> list[Gathered]:
    """Blocks whose queries are close together, those that are not in parts, and rows that are far
    from what is left of their block alone."""
    dtype = token_dtype(inside.value.dtype)

    def taken(rows: Tensor, head: Tensor, splits: bool = False) -> Gathered:
        return gathered(query, rows, head, inside.spectrum, dtype, _largest(dtype), splits)

    made = [taken(rows, head, splits=True)]
    wide, alone = made[0].wide, made[0].alone >= 0
    if bool(wide.any() | alone.any()):
        if bool(wide.any()):
            parts = rows[wide]
            placed = inside.placed_query.flatten(0, 1)[repeated(parts)]
            parts = parts.gather(1, positions(placed, int(math.log2(PARTS))))
            parts = parts.view(-1, rows.shape[1] // PARTS)
            made.append(taken(parts, head[wide].repeat_interleave(PARTS)))
        left = torch.cat([group.alone[group.alone >= 0] for group in made]).unsqueeze(1)
        if len(left):
            made.append(taken(left, left.squeeze(1) // inside.query.shape[1]))
    return made


class Listed(NamedTuple):
    """Blocks with the lists of their cells."""

    query: Tensor  # [blocks, size, d]
    rows: Tensor  # [blocks, size]
    mean: Tensor  # [cells, d]
    owner: Tensor | None  # [blocks]: cell of each block; None: blocks are their own cells
    coarse: Column  # of cells
    exact: Column


def attended(
    forest: Forest, found: Sequence[Listed], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Output [rows, dv] and lse [rows] of all places of all blocks."""
    tokens = token_dtype(dtype)
    lists = Placed.of(found, forest, dtype)
    if not lists:
        return []
    table = _table(forest, lists[-1].last, tokens, dtype)
    results = []
    for listed, placed in zip(found, lists, strict=True):
        selection.write_tilted(
            forest, listed.mean, listed.coarse, placed.base, table, _largest(tokens)
        )
        query = short(listed.query, tokens)
        results.append(attend(query, table, placed.offsets, placed.indices))
    return results


def token_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of queries and keys, for inputs of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


class Placed(NamedTuple):
    """Where the coarse keys of every cell are, and the list of every block that a program takes."""

    granules: Tensor  # [cells]: of coarse keys
    base: Tensor  # [cells]: the first of them
    last: int  # granules before those of the next lists
    offsets: Tensor
    indices: Tensor

    @staticmethod
    def of(found: Sequence[Listed], forest: Forest, dtype: torch.dtype) -> list[Placed]:
        """Granules of leaves come first, then those of coarse keys; the host waits once."""
        granules = [-(-listed.coarse.count.long() // GRANULE) for listed in found]
        leaves, width = len(forest.leaf_key), forest.leaf_value.shape[2]
        owners, ends = [], []
        for listed, many in zip(found, granules, strict=True):
            owners.append(_owners(listed, width, dtype))
            ends.append((many + listed.exact.count)[owners[-1]].cumsum(0))
        if not found:
            return []
        pairs = zip(granules, ends, strict=True)
        sizes = torch.stack([x for many, end in pairs for x in (many.sum(), end[-1])]).tolist()
        placed = []
        for i, listed in enumerate(found):
            base = granules[i].cumsum(0) - granules[i] + leaves
            leaves += sizes[2 * i]
            offsets = F.pad(ends[i], (1, 0)).int()
            indices = torch.empty(sizes[2 * i + 1], dtype=torch.int32, device=offsets.device)
            selection.write_lists(owners[i], granules[i], base, listed.exact, offsets, indices)
            placed.append(Placed(granules[i], base, leaves, offsets, indices))
        return placed


def _owners(listed: Listed, width: int, dtype: torch.dtype) -> Tensor:
    """The cell of every block that a program takes; values have ``width`` entries."""
    blocks, size, dim = listed.query.shape
    owner = listed.owner
    if owner is None:
        owner = torch.arange(blocks, device=listed.rows.device)
    parts = -(-size // _block_of(size, max(width, dim), dtype))
    return owner.repeat_interleave(parts) if parts > 1 else owner


def _block_of(size: int, width: int, dtype: torch.dtype) -> int:
    """Queries of a program for blocks of so many; a longer block is several programs."""
    most = WIDEST_BLOCK
    if dtype == torch.float32:
        most = min(most, 64, 64 * 128 // power_of_two(width))
    return min(power_of_two(size), most)


def _table(forest: Forest, granules: int, *dtypes: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log-weights in granules, the leaves first; room for coarse keys."""
    leaves, size, d = forest.leaf_key.shape
    device, dv = forest.leaf_key.device, forest.leaf_value.shape[2]
    key = torch.empty(granules, GRANULE, d, dtype=dtypes[0], device=device)
    value = torch.empty(granules, GRANULE, dv, dtype=dtypes[1], device=device)
    weight = torch.empty(granules, GRANULE, device=device)
    key[:leaves, :size] = short(forest.leaf_key, dtypes[0])
    value[:leaves, :size] = forest.leaf_value
    weight[:leaves, :size] = forest.leaf_weight
    if size < GRANULE:
        key[:leaves, size:], value[:leaves, size:] = 0.0, 0.0
        weight[:leaves, size:] = -math.inf
    return key, value, weight


def short(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens in a dtype, with no entry that it cannot hold."""
    if tokens.dtype == dtype:
        return tokens
    largest = _largest(dtype)
    return (tokens if largest == math.inf else tokens.clamp(-largest, largest)).to(dtype)


def _largest(dtype: torch.dtype) -> float:
    return LARGEST if dtype == torch.float16 else math.inf


def attend(
    query: Tensor, table: tuple[Tensor, ...], offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of blocks [blocks, size, d] over their lists, in blocks that a program takes."""
    blocks, size, d = query.shape
    block = _block_of(size, max(d, table[1].shape[2]), query.dtype)
    missing = -size % block
    query = F.pad(query, (0, 0, 0, missing))
    key, value, weight = (x.flatten(0, 1)[None, None] for x in table)
    output, lse = block_list_attention(
        query.reshape(1, 1, -1, d), key, value, offsets, indices,
        log_weight=weight, scale=1.0, block=block,
    )  # fmt: skip
    output, lse = (x[0, 0].view(blocks, size + missing, *x.shape[3:]) for x in (output, lse))
    return output[:, :size].flatten(0, 1), lse[:, :size].flatten()
