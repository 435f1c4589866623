"""Which nodes a block of queries sees coarsely, and which leaves exactly.

From the roots down, a node is opened when the error it would cause as one coarse key is worth more
than the keys it takes to avoid it: when its squared error, in units of the squared output, exceeds
a price times the number of keys that opening adds. A tree's nodes are visited only below nodes
that were opened, so the work is proportional to the lists that come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .forest import Forest, taken

EXPONENT = 6.0  # score variances beyond are as bad as they get
LARGEST_DRIFT = 1.0  # variance over the queries of a block: beyond, it says nothing more
PAIRS = 2**13  # at a time, on a CPU
HARDLY = 8.0  # halves of neighbours err nearly as much as the whole: only exact leaves do not

Pairs = tuple[Tensor, Tensor]  # block and node of each pair, sorted by block


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of queries: their mean and the variance of their members, [blocks, d]."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, eq=False)
class Lists:
    """Pairs of a block with a node that it sees coarsely, and with a leaf that it sees exactly;
    how many pairs were visited to find them, and the error that is left by the estimate."""

    coarse: Pairs
    exact: Pairs
    visited: int
    error: Tensor  # [blocks]: squared, over the squared size of the output

    def lengths(self, leaf_size: int) -> tuple[Tensor, Tensor]:
        """Coarse and exact keys in the list of each block."""
        count = len(self.error)
        coarse, exact = (
            torch.bincount(pairs[0], minlength=count) for pairs in (self.coarse, self.exact)
        )
        return coarse, leaf_size * exact


@dataclass(frozen=True, eq=False)
class Column:
    """Items of all lists, and where the list of each block begins."""

    item: Tensor
    first: Tensor  # [blocks]
    count: Tensor  # [blocks]

    @staticmethod
    def of(pairs: Pairs, blocks: int) -> Column:
        block, item = pairs
        edges = torch.searchsorted(block, torch.arange(blocks + 1, device=block.device))
        return Column(item, edges[:-1], edges.diff())

    def of_members(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Items of some blocks: the item, which member it belongs to, its place in the list."""
        count = self.count[members]
        owner = torch.arange(len(members), device=members.device).repeat_interleave(count)
        begin = taken(count.cumsum(0) - count, owner)
        place = torch.arange(len(owner), device=members.device) - begin
        return taken(self.item, taken(self.first[members], owner) + place), owner, place


@dataclass(frozen=True, eq=False)
class View:
    """What a block believes before it has looked closely: total mass, output, size of it."""

    log_mass: Tensor  # [blocks]
    key: Tensor  # [blocks, d]: mean of the keys that it attends to
    output: Tensor  # [blocks, dv]
    size: Tensor  # [blocks]: squared length of the output

    def sample(self, members: Tensor) -> View:
        fields = (self.log_mass, self.key, self.output, self.size)
        return View(*(field[members] for field in fields))

    def judge(
        self, forest: Forest, blocks: Blocks, block: Tensor, node: Tensor, settled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log masses of nodes, and their squared errors as coarse keys over the squared size of
        the output; ``settled`` is the log mass of what each block has decided on."""
        pieces = _pieces((block, node))
        masses = [_masses(forest, blocks, *piece) for piece in pieces]
        least = torch.cat([mass.least for mass in masses])
        total = torch.logaddexp(settled, _log_sums(least, block, len(settled)))
        total = torch.maximum(total, self.log_mass)
        errors = [
            _error(forest, blocks, self, *piece, mass, total)
            for piece, mass in zip(pieces, masses, strict=True)
        ]
        return least, torch.cat(errors)


@dataclass(frozen=True, eq=False)
class Glance:
    """What blocks of consecutive queries know of nodes of consecutive keys: how large and how far
    apart both are, in no direction in particular, and which places have been attended to.

    One product of mean query and mean key judges a pair; all else are single numbers.
    """

    strength: Tensor  # [blocks]: squared length of the mean query
    width: Tensor  # [blocks]: sum of the variances of the queries
    place: Tensor  # [blocks]: leaf at which the block is
    spread: Tensor  # [nodes]: mean of the variances of the keys
    away: Tensor  # [nodes]: mean squared length of the values, over that of all values
    scatter: Tensor  # [nodes]: variance of the values over the number of keys, over the same
    first: Tensor  # [nodes]: its first leaf
    leaves: Tensor  # [nodes]: how many it has
    start: Tensor  # [nodes]: share of attention of such places
    near: Tensor  # [2 all leaves]: sums of such shares by distance, the furthest before it first

    def sample(self, members: Tensor) -> Glance:
        fields = {name: getattr(self, name)[members] for name in ("strength", "width", "place")}
        return replace(self, **fields)

    def judge(
        self, forest: Forest, blocks: Blocks, block: Tensor, node: Tensor, settled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `View.judge`, over the squared size of the values."""
        spread, leaves = taken(self.spread, node), taken(self.leaves, node)
        inner = taken(self.strength, block) * spread
        mass = _products(blocks.mean, block, forest.key, node) + taken(forest.log_mass, node)
        mass = mass + torch.minimum(inner / 2, (inner * taken(forest.others, node)).sqrt())
        total = torch.logaddexp(settled, _log_sums(mass, block, len(settled)))
        begin = taken(self.first, node) - taken(self.place, block) + (len(self.near) // 2 - 1)
        begin, end = (x.clamp(0, len(self.near) - 1) for x in (begin, begin + leaves))
        usual = taken(self.near, end) - taken(self.near, begin) + taken(self.start, node)
        share = (mass - taken(total, block)).exp() + torch.where(mass > -math.inf, usual, 0.0)
        outer = taken(self.width, block) * spread
        both = (inner + outer).clamp(max=EXPONENT)
        off = (both.pow(1.5) / 6 + outer).clamp(max=2)
        error = torch.expm1(both) * taken(self.scatter, node)
        error = error + off.square() * taken(self.away, node)
        gained = torch.where(leaves > 1, 1 / HARDLY, 1.0)
        return mass, share.square() * error * gained


@torch.no_grad()
def select(
    forest: Forest, blocks: Blocks, view: View | Glance, start: Pairs, price: float
) -> Lists:
    """The lists of all blocks, opened from the pairs of ``start``, which cover what they see."""
    block, node = start
    coarse, exact, visited = [], [], 0
    error_left = blocks.mean.new_zeros(len(blocks.mean))
    settled = torch.full_like(error_left, -math.inf)  # log mass of what is decided
    while True:
        visited += len(node)
        mass, error = view.judge(forest, blocks, block, node, settled)
        leaf = taken(forest.child, node) < 0
        added = torch.where(leaf, float(forest.leaf_size - 1), 1.0)
        opened = error > price * added
        coarse.append((block[~opened], node[~opened]))
        error_left.index_add_(0, block[~opened], error[~opened])
        seen = opened & leaf
        exact.append((block[seen], forest.leaf[node[seen]]))
        inner = opened & ~leaf
        if not bool(inner.any()):
            break
        decided = _log_sums(mass[~inner], block[~inner], len(settled))
        settled = torch.logaddexp(settled, decided)
        block, node = children(forest, (block[inner], node[inner]))
    return Lists(_sorted(coarse), _sorted(exact), visited, error_left)


def _products(left: Tensor, row: Tensor, right: Tensor, column: Tensor) -> Tensor:
    """Inner products of pairs of rows."""
    pieces = _pieces((row, column))
    return torch.cat([(taken(left, i) * taken(right, j)).sum(1) for i, j in pieces])


def _pieces(pairs: Pairs) -> list[Pairs]:
    """Some pairs at a time, so that copies stay in the caches; a GPU takes all at once."""
    block, node = pairs
    step = PAIRS if block.device.type == "cpu" else max(1, len(block))
    return list(zip(block.split(step), node.split(step), strict=True))


def children(forest: Forest, pairs: Pairs) -> Pairs:
    """Both children of every node, which must have them."""
    block, node = pairs
    first = taken(forest.child, node)
    return block.repeat_interleave(2), torch.stack([first, first + 1], 1).flatten()


def descend(forest: Forest, pairs: Pairs, levels: int) -> Pairs:
    """The same keys some levels down; leaves stay."""
    for _ in range(levels):
        block, node = pairs
        inner = taken(forest.child, node) >= 0
        below = children(forest, (block[inner], node[inner]))
        pairs = _sorted([(block[~inner], node[~inner]), below])
    return pairs


def _sorted(parts: list[Pairs]) -> Pairs:
    block, item = (torch.cat(column) for column in zip(*parts, strict=True))
    order = block.argsort(stable=True)
    return taken(block, order), taken(item, order)


@torch.no_grad()
def look(forest: Forest, blocks: Blocks, start: Pairs) -> View:
    """Every block with its first nodes: a softmax over coarse keys."""
    block, node = start
    count, value = len(blocks.mean), taken(forest.value, node)
    log_mass = torch.cat([_masses(forest, blocks, *piece).least for piece in _pieces(start)])
    total = _log_sums(log_mass, block, count)
    share = (log_mass - taken(total, block)).exp().nan_to_num(0.0)
    tiny = torch.finfo(share.dtype).tiny
    output = value.new_zeros(count, value.shape[1]).index_add_(0, block, share.unsqueeze(1) * value)
    key = taken(forest.key, node)
    mean_key = key.new_zeros(count, key.shape[1]).index_add_(0, block, share.unsqueeze(1) * key)
    size = output.square().sum(1)
    size = size.index_add_(0, block, share.square() * taken(forest.scatter, node))
    return View(total, mean_key, output, size.clamp(min=tiny))


def _log_sums(log_mass: Tensor, block: Tensor, count: int) -> Tensor:
    """Log-sum-exp of the pairs of each block; -inf where there are none."""
    top = log_mass.new_full((count,), -math.inf).scatter_reduce_(0, block, log_mass, "amax")
    unit = torch.where(top > -math.inf, top, 0.0)
    weight = (log_mass - taken(unit, block)).exp()
    return weight.new_zeros(count).index_add_(0, block, weight).log() + unit


class _Masses(NamedTuple):
    """Nodes as blocks see them, for the mean query of the block."""

    least: Tensor  # lower bound of the log mass: that of the mean key, by Jensen's inequality
    likely: Tensor  # estimate of the log mass
    inner: Tensor  # variance of the scores over the keys of the node
    outer: Tensor  # the same over the queries of the block too
    across: Tensor  # the part of the first between the halves of the node
    wide: Tensor  # and that of the second


def _masses(forest: Forest, blocks: Blocks, block: Tensor, node: Tensor) -> _Masses:
    """The mean of exp over Gaussian scores of variance t is exp(t/2); over N scores of any kind it
    is below the largest, and none of N numbers is more than sqrt((N - 1) t) above their mean."""
    mean, apart = taken(blocks.mean, block), taken(blocks.variance, block)
    variance, gap = taken(forest.variance, node), taken(forest.gap, node)
    across = (mean * gap).sum(1).square()
    inner = (mean.square() * variance).sum(1) + across
    wide = (apart * gap.square()).sum(1)
    outer = (apart * variance).sum(1) + wide
    least = (mean * taken(forest.key, node)).sum(1) + taken(forest.log_mass, node)
    above = torch.minimum(inner / 2, (inner * taken(forest.others, node)).sqrt())
    return _Masses(least, least + above, inner, outer, across, wide)


def _error(
    forest: Forest,
    blocks: Blocks,
    view: View,
    block: Tensor,
    node: Tensor,
    mass: _Masses,
    total: Tensor,
) -> Tensor:
    """Estimated squared error of nodes as coarse keys, over the squared size of the output.

    With t the variance of a node's scores, three things go wrong: values that know nothing of
    their keys are weighed alike (t times their scatter); the covariance is right only for the
    mean query, and to first order; and the mass is right to second order. All count with the
    squared share of the node in the attention, whose mean over the queries of the block is larger
    than that of the mean query where the node lies far from what the block attends to.
    """
    both = (mass.inner + mass.outer).clamp(max=EXPONENT)
    linked = taken(forest.linked, node)
    known = linked.shape[1]
    error = torch.expm1(both) * taken(forest.scatter, node)
    stride, variance = taken(forest.stride, node), taken(blocks.variance, block)
    error += (variance[:, :known] * linked).sum(1) + mass.wide * stride
    second = (both.square() / 4).clamp(max=1)
    mean = taken(blocks.mean[:, :known], block)
    bent = (mean.square() * linked).sum(1) + mass.across * stride
    error += second * bent
    off = (both.pow(1.5) / 6 + mass.outer).clamp(max=2)
    error += off.square() * (taken(forest.value, node) - taken(view.output, block)).square().sum(1)
    away = (taken(forest.key, node) - taken(view.key, block)).square()
    drift = (variance * away).sum(1).clamp(max=LARGEST_DRIFT)
    share = (mass.likely + drift - taken(total, block)).clamp(max=0).mul(2).exp()
    return share * error / taken(view.size, block)
