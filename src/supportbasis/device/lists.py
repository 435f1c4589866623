"""Lists of exact and coarse keys on the device, all heads at once.

Heads lie one after the other: their trees are one forest, their blocks one set of blocks, and each
block starts at the nodes of its own head. Then everything is one launch for all heads: orders,
selection, coarse keys, lists and the attention over them. The host waits twice: for whether some
blocks are too wide or some rows alone, and for how long the lists are. What comes before that is
replayed.

Causal heads and heads with hidden keys run one by one. Scores are products of tokens in the frame
of their head, which are float16 whatever 16-bit type the input has: tokens of a frame are of
moderate size, and three more bits keep what framing gained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from ..problem import Problem
from ..selection import Blocks, Column
from ..tree import leaf_layout, positions
from .framed import Inside, frames_of
from .replay import replayed

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
    if not problem.is_causal and problem.key_log_weight is None:
        settings, prices = _settings(plan.heads[0]), _prices(plan, problem.query.device)
        frames = frames_of(problem, plan)
        given = (problem.query, problem.key, problem.value, prices, *frames)
        key = ("lists", family(plan.heads[0]), problem.group)
        prepared = replayed(key, partial(_prepare, settings, problem.group), *given)
        output, lse = _finish(prepared, problem.value.dtype)
        shift = prepared.inside.shift
    else:
        inside = Inside.of(problem, plan)
        run = _causal if problem.is_causal else _masked
        parts = [run(inside.one(i), head) for i, head in enumerate(plan.heads)]
        output, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        shift = inside.shift
    shape = (problem.batch, problem.heads, problem.n)
    return output.view(*shape, -1), (lse.view(shape) + shift.view(shape)), None


def _prices(plan: Plan, device: torch.device) -> Tensor:
    key = ("prices", device)
    if key not in plan.memory:
        plan.memory[key] = torch.tensor([_settings(x).price for x in plan.heads]).to(device)
    found = plan.memory[key]
    assert isinstance(found, Tensor)
    return found


class Prepared(NamedTuple):
    """Heads with their trees, and blocks with their lists: all that no entry decides about."""

    inside: Inside
    forest: Forest
    nodes: Tensor  # that blocks start with, the same number for each head
    prices: Tensor  # [heads]
    rows: Tensor  # [blocks, size], as numbers of the rows of all heads, -1 for none
    blocks: Gathered
    listed: Listed


def _prepare(
    settings: BlockSettings,
    group: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prices: Tensor,
    *frames: Tensor,
) -> Prepared:
    return _prepared(Inside.made(group, query, key, value, *frames), prices, settings)


def _prepared(inside: Inside, prices: Tensor, settings: BlockSettings) -> Prepared:
    forest, nodes = _forest(inside, settings)
    rows = _rows(inside, settings)
    count = len(inside.query)
    head = torch.arange(len(rows), device=rows.device) // (len(rows) // count)
    blocks = _gathered(inside, rows, head, splits=True)
    lists = _listed(forest, nodes, prices, blocks)
    return Prepared(inside, forest, nodes, prices, rows, blocks, lists)


def _listed(forest: Forest, nodes: Tensor, prices: Tensor, blocks: Gathered) -> Listed:
    each = len(nodes) // len(prices)
    first = blocks.head * each
    start = Column(nodes, first, torch.full_like(first, each))
    cells = Blocks(blocks.mean, blocks.variance)
    view = selection.look(forest, cells, start)
    longest = max(each, min(selection.LONGEST, len(forest.leaf_key) // len(prices)))
    price = prices[blocks.head].masked_fill(blocks.wide, math.inf)
    coarse, exact = selection.select(forest, cells, view, start, price, longest)
    return Listed(blocks.query, blocks.rows, cells.mean, None, coarse, exact)


def _finish(prepared: Prepared, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows, one head after the other."""
    count, n = prepared.inside.query.shape[:2]
    device = prepared.rows.device
    found = [prepared.listed, *_left(prepared)]
    output = torch.empty(count * n + 1, prepared.inside.value.shape[2], dtype=dtype, device=device)
    lse = torch.empty(count * n + 1, device=device)
    results = attended(prepared.forest, found, dtype)
    for listed, (part, part_lse) in zip(found, results, strict=True):
        at = torch.where(listed.rows >= 0, listed.rows, count * n).flatten()
        output.index_copy_(0, at, part)
        lse.index_copy_(0, at, part_lse)
    return output[:-1], lse[:-1]


def _left(prepared: Prepared) -> Iterator[Listed]:
    """What is not taken as it is: blocks whose queries are far apart in parts, and rows that are
    far from the rest of their block alone."""
    inside, rows, blocks = prepared.inside, prepared.rows, prepared.blocks
    if not bool(blocks.wide.any() | (blocks.alone >= 0).any()):
        return
    alone = [blocks.alone]
    if bool(blocks.wide.any()):
        parts = rows[blocks.wide]
        placed = inside.placed_query.flatten(0, 1)[repeated(parts)]
        parts = parts.gather(1, positions(placed, int(math.log2(PARTS))))
        parts = parts.view(-1, rows.shape[1] // PARTS)
        head = blocks.head[blocks.wide].repeat_interleave(PARTS)
        made = _gathered(inside, parts, head)
        alone.append(made.alone)
        yield _listed(prepared.forest, prepared.nodes, prepared.prices, made)
    left = torch.cat([some[some >= 0] for some in alone]).unsqueeze(1)
    if len(left):
        made = _gathered(inside, left, left.squeeze(1) // inside.query.shape[1])
        yield _listed(prepared.forest, prepared.nodes, prepared.prices, made)


def _gathered(inside: Inside, rows: Tensor, head: Tensor, *, splits: bool = False) -> Gathered:
    dtype = token_dtype(inside.value.dtype)
    query = inside.query.flatten(0, 1)
    return gathered(query, rows, head, inside.spectrum, dtype, _largest(dtype), splits)


def _masked(inside: Inside, head: HeadPlan) -> tuple[Tensor, Tensor]:
    """One head of which some keys are hidden."""
    prices = torch.full((1,), _settings(head).price, device=inside.query.device)
    return _finish(_prepared(inside, prices, _settings(head)), inside.value.dtype)


def _causal(inside: Inside, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    """One causal head: its layers by lists, its chunks and first rows exactly."""
    flat = replace(inside.flat(), is_causal=True)
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


def _forest(inside: Inside, settings: BlockSettings) -> tuple[Forest, Tensor]:
    """The trees of all heads, and the nodes that their blocks start with."""
    (count, m), flat = inside.key.shape[:2], inside.flat()
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
    down = min(levels + above, int(math.log2(START_NODES * count / trees)))
    first = trees * ((1 << down) - 1)  # nodes of a level lie together, those of a head too
    return forest, torch.arange(first, first + (trees << down), device=placed.device)


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
