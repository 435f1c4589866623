"""Blocks and trees in the order of the sequence, for heads that look at places.

Where neighbours are alike, as in text, nothing need be sorted: blocks are consecutive queries,
leaves consecutive keys, and the nodes above them halves of halves of the sequence. There is no
frame either. So nearly all of the budget is left for keys, and blocks can be small.

In causal attention a block sees the largest nodes that end before it begins, and its own keys
exactly. It is judged by half as many queries as it has, the last of which is its own first: so
neither its list nor its coarse keys depend on anything that comes later.

Many heads look at what is near or at the beginning, whatever stands there, and the mean of a few
keys hardly shows it. So a few rows are computed exactly beforehand, and their attention, averaged
by distance, is a part of the plan: the `Profile`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .forest import Forest, contiguous
from .problem import Head
from .selection import Blocks, Glance, Pairs

PROFILE_ROWS = 32  # whose attention is computed to learn which places matter
START_NODES = 16  # that a block looks at before it opens any
BEYOND = 2.0  # times the mean share that places at the beginning must have to be known
CERTAIN = 4  # pairs of a row and a leaf at a distance: with so many its mean counts half


class Trees(NamedTuple):
    """A forest over consecutive keys."""

    forest: Forest
    depth: int  # levels below the roots
    leaves: int


def trees(head: Head, leaf: int) -> Trees:
    """Consecutive keys as leaves, joined until at most `START_NODES` roots are left."""
    leaves = max(1, math.ceil(head.m / leaf))
    depth = max(0, math.ceil(math.log2(leaves / START_NODES)))
    leaves = math.ceil(leaves / (1 << depth)) << depth
    position = torch.arange(leaves * leaf, device=head.key.device)
    hidden = position >= head.m
    if head.key_log_weight is not None:
        hidden |= head.key_log_weight[position.clamp(max=head.m - 1)] == -math.inf
    position = position.masked_fill(hidden, -1)
    return Trees(contiguous(head, position.view(-1, leaf // 2), depth), depth, leaves)


def members_before(query: Tensor, size: int) -> Tensor:
    """For every block but the first half as many queries as it has, the last of which is its own
    first: [blocks - 1, members, d]."""
    blocks = math.ceil(len(query) / size)
    last = torch.arange(1, blocks, device=query.device) * size
    return query[last.unsqueeze(1) + torch.arange(1 - max(1, size // 2), 1, device=query.device)]


def all_roots(made: Trees, blocks: int) -> Pairs:
    """Every block with every root."""
    roots = made.forest.roots
    block = torch.arange(blocks, device=roots.device)
    return block.repeat_interleave(len(roots)), roots.repeat(blocks)


def roots_before(made: Trees, seen: Tensor) -> Pairs:
    """Every block with the largest nodes that make up its first ``seen`` [blocks] leaves."""
    roots, device = len(made.forest.roots), seen.device
    seen = seen.clamp(max=made.leaves)
    everyone, place = torch.arange(len(seen), device=device), torch.arange(roots, device=device)
    block, root = (place < (seen >> made.depth).unsqueeze(1)).nonzero(as_tuple=True)
    blocks, nodes = [block], [made.forest.roots[root]]
    for level in range(1, made.depth + 1):
        end = seen >> (made.depth - level)
        odd = (end & 1) > 0
        blocks.append(everyone[odd])
        nodes.append(roots * ((1 << level) - 1) + end[odd] - 1)
    block, node = torch.cat(blocks), torch.cat(nodes)
    at = block.argsort(stable=True)
    return block[at], node[at]


def glance(made: Trees, cells: Blocks, place: Tensor, profile: tuple[float, ...]) -> Glance:
    """What the blocks at ``place``, counted in leaves, know of all nodes."""
    forest, device = made.forest, place.device
    level = torch.arange(made.depth + 1, device=device)
    counts = len(forest.roots) << level
    level = level.repeat_interleave(counts)
    width = 1 << (made.depth - level)
    first = (torch.arange(len(level), device=device) - (counts.cumsum(0) - counts)[level]) * width
    known = Profile.of_plan(profile)
    near, start = known.sums(made.leaves, forest.key)
    spread = (forest.variance + forest.gap.square()).mean(1)
    apart = forest.scatter / known.size
    away = forest.value.square().sum(1) / known.size + apart * (forest.others + 1)
    numbers = (cells.mean.square().sum(1), cells.variance.sum(1), spread, away, apart)
    strength, wide, spread, away, apart = (x.detach() for x in numbers)
    usual = start[first + width] - start[first]
    return Glance(strength, wide, place, spread, away, apart, first, width, usual, near)


class Profile(NamedTuple):
    """Mean share of attention of a leaf: by how many leaves it lies before or behind the row, and,
    beyond what is usual, by how many it is from the beginning. Distances are 0, 1, 2, 3, 4-5, 6-7,
    8-11, 12-15, ..."""

    size: float  # mean squared length of the values, the unit of errors
    before: tuple[float, ...]
    behind: tuple[float, ...]
    start: tuple[float, ...]

    @staticmethod
    def of_plan(numbers: tuple[float, ...]) -> Profile:
        size, third = numbers[0], len(numbers) // 3
        parts = (numbers[1 + i * third : 1 + (i + 1) * third] for i in range(3))
        return Profile(size, *parts)

    @staticmethod
    @torch.no_grad()
    def of(head: Head, leaf: int, looks: bool) -> tuple[float, ...]:
        """In numbers as a plan holds them, from evenly spaced rows; or the size alone."""
        size = float(head.value.double().square().sum(1).mean()) or 1.0
        if not looks:
            return (size,)
        step = max(1, head.n // PROFILE_ROWS)
        rows = torch.arange(step // 2, head.n, step, device=head.query.device)
        score = head.query[rows].float() @ head.key.float().T * head.scale
        if head.key_log_weight is not None:
            score += head.key_log_weight.float()
        place = torch.arange(head.m, device=rows.device)
        if head.is_causal:
            score.masked_fill_(place > rows.unsqueeze(1), -math.inf)
        share = (score - score.logsumexp(1, keepdim=True)).exp().nan_to_num(0.0)
        leaves = math.ceil(head.m / leaf)
        share = share.new_zeros(len(rows), leaves).index_add_(1, place // leaf, share)
        number = torch.arange(leaves, device=rows.device)
        away = number - (rows // leaf).unsqueeze(1)
        count = bins(max(leaves, math.ceil(head.n / leaf)))
        seen = away <= 0 if head.is_causal else torch.ones_like(away, dtype=torch.bool)

        def mean(distance: Tensor, kept: Tensor) -> tuple[float, ...]:
            at, part = bin_of(distance[kept]), share[kept]
            total = share.new_zeros(count).index_add_(0, at, part)
            many = share.new_zeros(count).index_add_(0, at, torch.ones_like(part))
            return tuple((total / (many + CERTAIN)).tolist())

        before, behind = seen & (away <= 0), seen & (away >= 0)
        usual = BEYOND * float(share.sum() / seen.sum().clamp(min=1))
        start = (max(0.0, x - usual) for x in mean(number.expand_as(away), seen))
        return (size, *mean(-away, before), *mean(away, behind), *start)

    def sums(self, leaves: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of shares, by distance from -``leaves`` up to ``leaves`` and from the beginning."""
        distance = torch.arange(leaves, device=like.device)

        def spread(part: tuple[float, ...]) -> Tensor:
            if not part:
                return like.new_zeros(leaves)
            return like.new_tensor(part)[bin_of(distance).clamp(max=len(part) - 1)]

        before, behind, start = (spread(part) for part in self[1:])
        near = torch.cat([before[1:].flip(0), behind])
        pad = torch.nn.functional.pad
        return pad(near.cumsum(0), (1, 0)), pad(start.cumsum(0), (1, 0))


def bin_of(distance: Tensor) -> Tensor:
    """0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, ...: 0, 1, 2, 3, 4, 5, 6, 7, 8, ..."""
    power = distance.clamp(min=2).double().log2().floor().long()
    second = (distance >> (power - 1).clamp(min=0)) & 1
    return torch.where(distance < 2, distance, 2 * power + second)


def bins(leaves: int) -> int:
    return int(bin_of(torch.tensor([max(1, leaves) - 1]))) + 1
