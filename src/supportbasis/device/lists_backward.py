"""The way back through lists on the device.

It goes back through what `lists.seen` finds once more, for all heads at once and with the
shapes that the way there had: from rows to the queries and granules of lists (`kernels.blocklist`),
from granules of coarse keys to nodes and mean queries (`kernels.coarse`), from nodes and leaves to
keys (`nodes_backward`), and out of the frames. Output and lse are those of the way there, and
nothing waits. Scores are products of the same float16 tokens as there; what carries gradients has
the dtype of the values in products, and is float32 in between.

Causal heads are in `causal_backward`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import BlockSettings
from ..forest import Forest, Nodes
from ..kernels import coarse, rectangle
from ..kernels.cells import Gathered
from ..kernels.placing import add_rows
from ..plans import Plan
from ..problem import Problem
from .exact import precision
from .framed import out_of, settings_of
from .granules import Filled, Listed, Placed, pulled_back
from .lists import Seen, run_of, seen
from .nodes_backward import token_gradients
from .room import Sizes, all_unless
from .run import parted


def gradients(problem: Problem, plan: Plan, *back: Tensor) -> tuple[Tensor, ...]:
    """Of query, key, value and log-weights, for each head of the queries; given are output, lse,
    the gradient of the output and, if there is one, that of lse."""
    work = partial(_all_heads, settings_of(plan.heads[0]), problem.scale, len(back))
    return run_of(problem, plan).back("lists back", work, *back)


def _all_heads(
    settings: BlockSettings, scale: float, count: int, sizes: Sizes, sure: bool, *given: Tensor
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
    moved = out_of(parted(tuple(frames))[0], inside, factor)
    total = rectangle.Totals(*(x.unflatten(0, query.shape[:2]) for x in moved))
    if sure:
        whole = all_unless(made.fits, query, key, scale, made.weight, precision())
        rectangle.add_gradients(total, grad, slope, lse, query, key, value, whole)
    return total.query, total.key, total.value, total.weight, made.needed


def _inside(
    made: Seen, grad: Tensor, lse: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and log-weights in their frames, [heads, tokens, ...]."""
    forest, inside = made.forest, made.inside
    heads, n, d = inside.query.shape
    rows = (grad.flatten(0, 2), lse.flatten() - inside.shift.flatten(), -slope.flatten())
    query, total = inside.query.new_zeros(heads * n, d), InForest.none(forest)
    for blocks, part, length in zip(made.blocks, made.found, made.lengths, strict=True):
        to_query, to_mean = total.add(forest, *part, length, rows, inside.value.dtype)
        _add_to_rows(query, blocks, to_query, to_mean)
    flat = inside.flat()
    to_key, to_value, to_weight = token_gradients(forest, flat, made.position, *total)
    key, value, weight = (x.unflatten(0, (heads, -1)) for x in (to_key, to_value, to_weight))
    return query.view(heads, n, d), key, value, weight


class InForest(NamedTuple):
    """Gradients of all nodes, and of keys, values and log-weights of leaves."""

    nodes: Nodes
    leaves: list[Tensor]

    @staticmethod
    def none(forest: Forest) -> InForest:
        tables = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
        zeros = [torch.zeros_like(x, dtype=torch.float32) for x in tables]
        return InForest(coarse.no_gradients(forest), zeros)

    def add(
        self,
        forest: Forest,
        part: Listed,
        placed: Placed,
        length: tuple[int, int],
        rows: tuple[Tensor, Tensor, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Add what flows back through some lists (see `pulled_back`); the gradients of their
        queries, and of the mean queries of their cells."""
        leaves, size = forest.leaf_weight.shape
        (filled,) = Filled.of(leaves, [(part, placed)], [length])
        to_query, *granules = pulled_back(forest, part, filled, rows, dtype)
        for table, more in zip(self.leaves, granules, strict=True):
            table += more[:leaves, :size]
        slots, base = tuple(x[leaves:].flatten(0, 1) for x in granules), filled.base - leaves
        coarse.add_to_nodes(self.nodes, forest, part.mean, part.coarse, base, slots)
        return to_query, coarse.mean_gradients(forest, part.mean, part.coarse, base, slots)


def _add_to_rows(query: Tensor, blocks: Gathered, to_query: Tensor, to_mean: Tensor) -> None:
    """Add gradients of the queries of blocks and of their means to those of all rows.

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
    add_rows(query, rows.flatten(), change.flatten(0, 1))
