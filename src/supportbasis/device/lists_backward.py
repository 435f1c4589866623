"""The way back through lists on the device.

`all_heads` goes back through what `lists.seen` finds once more, for all heads at once and with the
shapes that the way there had: from rows to the queries and granules of lists (`kernels.blocklist`),
from granules of coarse keys to nodes and mean queries (`kernels.coarse`), from nodes and leaves to
keys (`nodes_backward`), and out of the frames. Output and lse are those of the way there, and
nothing waits. Scores are products of the same float16 tokens as there; what carries gradients has
the dtype of the values in products, and is float32 in between.

Causal heads go back one by one: the table of leaves and coarse keys is built as a function of the
tokens that autograd knows, and the attention over it has a gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..basis import support_basis
from ..blocks import BlockSettings, Structure
from ..components import BlockSum
from ..components.blocks_backward import Flow, add_gradients
from ..cotangent import Cotangent, Gradients
from ..forest import Forest, Nodes, tilted
from ..kernels import coarse, rectangle
from ..kernels.blocklist import GRANULE
from ..kernels.cells import Gathered
from ..plans import Plan
from ..problem import Problem
from .dispatch import by_key_head
from .exact import precision
from .framed import Stack
from .granules import Filled, Listed, Placed, attend, pulled_back
from .lists import Run, Seen, listed, seen
from .nodes_backward import token_gradients
from .replay import replayed
from .room import Sizes, all_unless

# ---- all heads at once -----------------------------------------------------------------------


def all_heads(
    problem: Problem,
    plan: Plan,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    """Gradients of heads that are not causal."""
    run, back = Run.of(problem, plan), [output, lse, grad]
    if grad_lse is not None:
        back.append(grad_lse)

    def work(sizes: Sizes, sure: bool) -> tuple[tuple[Tensor, ...], Tensor]:
        made = partial(_all_heads, run.settings, problem.scale, sizes, sure, len(back))
        call, given = ("lists back", run.call, sizes, len(back)), (*back, *run.given)
        *parts, needed = replayed(call, made, *given) if sure else made(*given)
        return tuple(parts), needed

    query, key, value, weight = run.room.again(work)
    key, value = (by_key_head(x, problem) for x in (key, value))
    return Gradients(query, key, value, weight if for_weights else None)


def _all_heads(
    settings: BlockSettings, scale: float, sizes: Sizes, sure: bool, count: int, *given: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, one for each head of the queries, and the
    sizes that were needed. Nothing here waits."""
    (output, lse, grad, *more), (query, key, value, prices, *frames) = given[:count], given[count:]
    made = seen(settings, sizes, query, key, value, prices, *frames)
    slope = rectangle.slopes(grad, more[0] if more else None, output)
    inside = _inside(made, grad, lse, slope)
    factor = None
    if more:  # of the rows, which is all that lse knows of their shifts
        factor = torch.where((lse > -math.inf) & made.fits, more[0].float(), 0.0).flatten(0, 1)
    moved = _out_of(Stack(*frames[: len(Stack._fields)]), inside, factor)
    total = rectangle.Totals(*(x.unflatten(0, query.shape[:2]) for x in moved))
    if sure:
        whole = all_unless(made.fits, query, key, scale, made.weight, precision())
        rectangle.add_gradients(total, grad, slope, lse, query, key, value, whole)
    return total.query, total.key, total.value, total.weight, made.needed


def _out_of(
    stack: Stack, inside: tuple[Tensor, Tensor, Tensor, Tensor], factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights [heads, tokens, ...] from those in the
    frames of the heads; ``factor`` are those of the rows' shifts."""
    query, key, value, weight = inside
    query = query @ stack.query_map.transpose(1, 2)
    if factor is not None:
        query += factor.unsqueeze(2) * stack.shift_map.transpose(1, 2)
    key = key @ stack.key_map.transpose(1, 2)
    key += weight.unsqueeze(2) * stack.weight_map.transpose(1, 2)
    return query, key, value, weight


def _inside(
    made: Seen, grad: Tensor, lse: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights in their frames, [heads, tokens, ...]."""
    forest, inside = made.forest, made.inside
    (heads, n, d), (leaves, size) = inside.query.shape, forest.leaf_weight.shape
    rows = (grad.flatten(0, 2), lse.flatten() - inside.shift.flatten(), -slope.flatten())
    query, nodes = inside.query.new_zeros(heads * n + 1, d), coarse.no_gradients(forest)
    exact: list[Tensor] = []
    parts = zip(made.blocks, made.found, made.lengths, strict=True)
    for blocks, (part, placed), length in parts:
        (filled,) = Filled.of(leaves, [(part, placed)], [length])
        to_query, *tables = pulled_back(forest, part, filled, rows, inside.value.dtype)
        leaf = [x[:leaves, :size] for x in tables]
        exact = [x + y for x, y in zip(leaf, exact, strict=True)] if exact else leaf
        slots = tuple(x[leaves:].flatten(0, 1) for x in tables)
        base = filled.base - leaves
        coarse.add_to_nodes(nodes, forest, part.mean, part.coarse, base, slots)
        to_mean = coarse.mean_gradients(forest, part.mean, part.coarse, base, slots)
        _add_to_rows(query, blocks, to_query, to_mean)
    flat = inside.flat()
    to_key, to_value, to_weight = token_gradients(forest, flat, made.position, nodes, exact)
    key, value, weight = (x.unflatten(0, (heads, -1)) for x in (to_key, to_value, to_weight))
    return query[:-1].view(heads, n, d), key, value, weight


def _add_to_rows(query: Tensor, blocks: Gathered, to_query: Tensor, to_mean: Tensor) -> None:
    """Add gradients of the queries of blocks and of their means to those of all rows; the last is
    that of no row.

    The mean is over all places of a block: empty ones repeat its rows, and those that are left
    alone count as the mean of all.
    """
    rows = torch.maximum(blocks.rows, blocks.alone)  # none of a wide block: nothing comes from it
    size = rows.shape[1]
    here, far = rows >= 0, (blocks.alone >= 0).float()
    count = here.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(size, device=rows.device)
    times = here * (size // count + (place < size % count))
    part = times * (1 - far + (times * far).sum(1, keepdim=True) / size) / size
    change = part.unsqueeze(2) * to_mean.unsqueeze(1)
    change += torch.where((blocks.rows >= 0).unsqueeze(2), to_query, 0.0)
    at = torch.where(here, rows, len(query) - 1)
    query.index_add_(0, at.flatten(), change.flatten(0, 1))


# ---- causal heads ----------------------------------------------------------------------------


def one_by_one(
    problem: Problem,
    plan: Plan,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    """Gradients of causal heads; the host waits for them."""
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


class ListFlow(Flow):
    """The same gradients as `Flow`, by kernels with operands of a dtype."""

    def __init__(self, dtype: torch.dtype, made: Structure, cotangent: Cotangent, shift: Tensor):
        super().__init__(made, cotangent, shift)
        self.dtype, self.losses = dtype, [shift.new_zeros((), requires_grad=True)]

    def add_layers(self, price: float) -> None:
        for layer in self.made.layers:
            part = listed(self.made.forest, layer, price)
            forest = self.made.forest
            placed = Placed.of(part, forest.leaf_value.shape[2], self.dtype)
            sizes = [placed.sizes.tolist()]
            (filled,) = Filled.of(len(forest.leaf_key), [(part, placed)], sizes)
            with torch.enable_grad():
                self.losses.append(self._loss_of(part, filled))

    def _loss_of(self, part: Listed, placed: Filled) -> Tensor:
        """The sums of a layer times their gradients; those of the rows' factors are added."""
        table = _table(self.made.forest, part, placed, self.dtype)
        output, lse = attend(part.query.to(self.dtype), table, placed.offsets, placed.indices)
        rows = part.rows.flatten()
        real = rows.clamp(min=0)
        log_scale = (self.cotangent.log_scale + self.shift)[real].masked_fill(rows < 0, -math.inf)
        seen = lse > -math.inf
        factor = torch.where(seen, lse, 0.0).add(log_scale).exp() * seen
        terms = factor * ((self.cotangent.num[real] * output).sum(1) + self.cotangent.den[real])
        self.row_factor.index_add_(0, real, terms.detach())
        return terms.sum()

    def to_tokens(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        parts = torch.autograd.grad(self.losses, leaves, allow_unused=True, materialize_grads=True)
        return list(parts)


def _table(
    forest: Forest, part: Listed, placed: Filled, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log-weights in granules: the leaves, and the coarse keys of one layer."""
    leaves, size = forest.leaf_weight.shape
    members = torch.arange(len(part.mean), device=part.mean.device)
    node, owner, place = part.coarse.of_members(members)
    node = node.long()
    coarse = tilted(Nodes(*(field[node] for field in forest.nodes)), part.mean[owner])
    at = (placed.base[owner] - leaves) * GRANULE + place
    count = (placed.last - leaves) * GRANULE
    tables = []
    exact = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
    for leaf, few, empty in zip(exact, coarse, (0.0, 0.0, -math.inf), strict=True):
        filled = F.pad(leaf, (*(0, 0) * (leaf.dim() - 2), 0, GRANULE - size), value=empty)
        new = leaf.new_full((count, *leaf.shape[2:]), empty).index_copy(0, at, few)
        tables.append(torch.cat([filled, new.view(-1, GRANULE, *leaf.shape[2:])]))
    key, value, weight = tables
    return key.to(dtype), value.to(dtype), weight
