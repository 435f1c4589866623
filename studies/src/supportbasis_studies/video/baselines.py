"""Sparse attention of denoisers: each group of queries attends to some groups of keys exactly, and
the rest is dropped.

===============  ===========================================================================
`CLUSTERS`       queries and keys in the library's blocks and leaves; the leaves in which the
                 mean query of a block has the most weight
`TILES`          the same with tiles of neighbouring tokens in time and space
`SLIDING`        tiles near the tile of the queries, whatever they hold
`SAME_TIME`      `CLUSTERS` with as many keys as the library's kernels attend to in the time of
                 the plan if they drop the rest: the time of tilted keys goes to exact ones
`IDEAL`          `CLUSTERS` with as many keys as PyTorch's kernel, without any time for grouping
                 and selection, attends to in the time of the plan
===============  ===========================================================================

The mean query's weight is computed from all keys, and neither that nor the grouping is counted, so
these baselines are better than any kernel for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from supportbasis import ModelPlan
from supportbasis.integrations.calls import Call
from supportbasis.lists.tables import ListSettings, tables
from supportbasis.methods.list_search import SIZES
from supportbasis.plans import ExactHead, HeadPlan, ListHead
from supportbasis.plans.cost import LIST_PAIR, TILT_PAIR
from supportbasis.problem.problem import Head

CLUSTERS, TILES, SLIDING = "drop, clusters", "drop, tiles", "sliding tiles"
SAME_TIME, IDEAL = "drop, equal time", "drop, ideal kernel"  # in place of equal cost
TILE = 4  # tokens of a tile in each direction
GATHERED = 2**26  # entries of keys that are gathered at a time
Grid = tuple[int, int, int]  # tokens in time, height and width


class Groups(NamedTuple):
    """Which queries and keys lie together."""

    rows: Tensor  # [heads, groups, queries of a group]
    keys: Tensor  # [heads, groups, keys of a group]


def tiles(grid: Grid, heads: int, device: torch.device) -> Groups:
    """Tiles of neighbours, of at most 4 x 4 x 4 tokens."""
    index = torch.arange(math.prod(grid), device=device).view(grid)
    for dim, size in enumerate(grid):
        side = math.gcd(TILE, size)
        index = index.unflatten(2 * dim, (size // side, side))
    index = index.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
    index = index.expand(heads, -1, -1)
    return Groups(index, index)


def clusters(query: Tensor, key: Tensor) -> Groups:
    """The library's blocks and leaves of tokens [heads, tokens, dim]."""
    block, leaf = SIZES[max(least for least in SIZES if least <= key.shape[1])]
    heads = (Head(q, k, k, None, None, 1.0, False, True) for q, k in zip(query, key, strict=True))
    found = [tables(head, ListSettings(0.0, block, leaf)) for head in heads]
    slots = [each.slots for each in found]
    return Groups(torch.stack([each.members for each in found]), torch.stack(slots))


def masses(query: Tensor, key: Tensor, groups: Groups, scale: float) -> Tensor:
    """Log-weight of each group of keys for the mean query of each group: [heads, groups, groups]"""
    rows, keys = (x.clamp(min=0) for x in groups)
    found = []
    for head in range(len(query)):
        real = (groups.rows[head] >= 0).unsqueeze(2)
        mean = (query[head].float()[rows[head]] * real).sum(1) / real.sum(1).clamp(min=1)
        score = scale * (mean @ key[head].float()[keys[head]].flatten(0, 1).T)
        score = score.unflatten(1, keys[head].shape)
        score = score.masked_fill(groups.keys[head] < 0, -math.inf)
        found.append(score.logsumexp(2))
    return torch.stack(found)


def nearness(grid: Grid, heads: int, device: torch.device) -> Tensor:
    """Minus the distance of tiles: [heads, tiles, tiles], of the largest direction."""
    sides = [size // math.gcd(TILE, size) for size in grid]
    place = torch.meshgrid(*(torch.arange(side, device=device) for side in sides), indexing="ij")
    at = torch.stack([x.flatten().float() for x in place], 1)
    away = (at.unsqueeze(1) - at).abs()
    found = -(away.amax(2) + 1e-3 * away.sum(2))  # among equals the nearer ones
    return found.expand(heads, -1, -1)


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """One head [tokens, dim]: rows [groups, queries] over keys [groups, keys], -1 for none."""
    output = torch.zeros_like(query)
    step = max(1, GATHERED // (keys.shape[1] * key.shape[1]))
    for some, theirs in zip(rows.split(step), keys.split(step), strict=True):
        mask = None
        if bool((theirs < 0).any()):
            mask = (theirs >= 0)[None, :, None]
        mine, theirs = some.clamp(min=0), theirs.clamp(min=0)
        q, k, v = (x.unsqueeze(0) for x in (query[mine], key[theirs], value[theirs]))
        part = F.scaled_dot_product_attention(q, k, v, mask)[0]  # groups as heads
        output[some[some >= 0]] = part[some >= 0]
    return output


class Sparse:
    """A handler of calls: of each head a share of the groups of keys, all where ``shares`` is None.

    ``shares`` [layers][heads] may be changed from step to step.
    """

    def __init__(self, kind: str, grid: Grid) -> None:
        self.kind, self.grid = kind, grid
        self.shares: list[list[float]] | None = None

    def __call__(self, call: Call) -> Tensor:
        if self.shares is None or all(share >= 1 for share in self.shares[call.site]):
            return call.exact()
        query, key, value = (x.flatten(0, 1) for x in (call.query, call.key, call.value))
        heads, scale = len(query), query.shape[-1] ** -0.5
        if self.kind in (CLUSTERS, SAME_TIME, IDEAL):
            groups = clusters(query, key)
        else:
            groups = tiles(self.grid, heads, query.device)
        if self.kind == SLIDING:
            score = nearness(self.grid, heads, query.device)
        else:
            score = masses(query, key, groups, scale)
        output = torch.empty_like(query)
        for head in range(heads):
            share = self.shares[call.site][head % call.query.shape[1]]
            kept = min(score.shape[2], max(1, round(share * score.shape[2])))
            top = score[head].topk(kept, 1).indices
            keys = groups.keys[head][top].flatten(1)
            output[head] = attend(query[head], key[head], value[head], groups.rows[head], keys)
        return output.view_as(call.query)


def equal_cost(plan: ModelPlan) -> list[list[float]]:
    """The share of keys of each head that costs as many multiply-adds as the plan of the head."""
    return [[min(1.0, head.cost) for head in layer.heads] for layer in plan.layers]


def without_tilts(plan: ModelPlan) -> list[list[float]]:
    """The share of keys of each head that the library's kernels attend to in the time of the plan,
    by its model of their time, if no key is tilted: one for each tilted key, and what tilting it
    for a block of queries takes."""

    def share(head: HeadPlan) -> float:
        if not isinstance(head, ListHead):
            return min(1.0, head.cost)
        tilted = 1 / head.lists.leaf + TILT_PAIR / LIST_PAIR / head.lists.block
        return min(1.0, head.keys / max(1, head.m) + tilted)

    return [[share(head) for head in layer.heads] for layer in plan.layers]


def ideal(plan: ModelPlan, share: float) -> list[list[float]]:
    """The share of keys of each head with which an ideal kernel takes ``share`` of the time of
    exact attention: exact heads of the plan stay exact, the others share the rest as in the plan.
    """
    heads = [layer.heads for layer in plan.layers]
    exact = sum(isinstance(head, ExactHead) for layer in heads for head in layer)
    total = sum(len(layer) for layer in heads)
    predicted = sum(1 / head.speedup for layer in heads for head in layer) - exact
    rest = max(0.0, share * total - exact)
    factor = rest / predicted if predicted > 0 else 0.0
    return [
        [1.0 if isinstance(head, ExactHead) else min(1.0, factor / head.speedup) for head in layer]
        for layer in heads
    ]
