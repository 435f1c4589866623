"""Selection on a device: lists of every block, its coarse keys and its granules.

The same as `supportbasis.selection` and `supportbasis.forest.tilted`, in one launch each and
without waiting for the device. Node ids are those of a `Forest`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..forest import LARGEST_TILT, Forest
from ..selection import EXPONENT, LARGEST_DRIFT, Blocks, Column, View
from . import selection_kernels as kernels
from .blocklist import GRANULE
from .language import cdiv, power_of_two

LONGEST = 8192  # entries of a list; what would be opened beyond stays coarse
NODES = 32  # looked at a time
GROUP, JUDGED = 16, 64  # blocks of a program that selects, and nodes that it judges at a time
MOST_STARTS = 256  # nodes that a block starts with
PRECISIONS = ("tf32x3", "tf32")  # of masses, and of what is only compared with a price


def look(forest: Forest, blocks: Blocks, start: Column) -> View:
    """Every block with its first nodes: a softmax over coarse keys."""
    mean, (d, dv) = blocks.mean, (forest.key.shape[1], forest.value.shape[1])
    count = len(mean)
    view = View(
        mean.new_empty(count), mean.new_empty(count, d), mean.new_empty(count, dv),
        mean.new_empty(count),
    )  # fmt: skip
    kernels.look[(count,)](
        mean, forest.key, forest.value, forest.log_mass, forest.scatter,
        start.item, start.first, start.count,
        view.log_mass, view.key, view.output, view.size, d, dv,
        power_of_two(d), power_of_two(dv), NODES,
    )  # fmt: skip
    return view


def select(
    forest: Forest, blocks: Blocks, view: View, start: Column, price: Tensor, longest: int = LONGEST
) -> tuple[Column, Column]:
    """Nodes that each block sees coarsely and leaves that it sees exactly, for a price of each
    block; ``longest`` is at least the number of nodes that a block starts with.

    Products and sums are not fused: threads that hold the same sum would round it differently,
    and a node near the price could be opened by one and kept by another.
    """
    mean, (d, dv) = blocks.mean, (forest.key.shape[1], forest.value.shape[1])
    count, known = len(mean), forest.linked.shape[1]

    def places(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=mean.device)

    groups, room = cdiv(count, GROUP), max(2 * longest, GROUP * MOST_STARTS)
    waiting = places(groups, 2, 2, room)
    coarse, exact = places(count, longest), places(count, longest)
    coarse_count, exact_count = places(count), places(count)
    kernels.select[(groups,)](
        mean, blocks.variance, price, view.log_mass, view.key, view.output, view.size,
        forest.key, forest.value, forest.log_mass, forest.gap, forest.variance, forest.stride,
        forest.linked, forest.scatter, forest.others, forest.child, forest.leaf,
        start.item, start.first, start.count,
        waiting, coarse, exact, coarse_count, exact_count,
        count, d, dv, known, float(forest.leaf_size - 1), longest, room,
        power_of_two(d), power_of_two(dv), power_of_two(known), JUDGED, GROUP,
        EXPONENT, LARGEST_DRIFT, *PRECISIONS, enable_fp_fusion=False,
    )  # fmt: skip
    first = torch.arange(count, device=mean.device) * longest
    return (
        Column(coarse.view(-1), first, coarse_count),
        Column(exact.view(-1), first, exact_count),
    )


def write_tilted(
    forest: Forest,
    mean: Tensor,
    coarse: Column,
    base: Tensor,
    table: tuple[Tensor, ...],
    largest: float,
) -> None:
    """Coarse keys of every cell, from granule ``base`` of the cell on, into a table of keys,
    values and log-weights [granules, 16, ...]; what fills up a granule has no weight. No entry of
    a key is beyond ``largest``."""
    key, value, weight = table
    d, dv = key.shape[-1], value.shape[-1]
    kernels.tilt[(len(mean),)](
        mean, forest.key, forest.value, forest.log_mass, forest.gap, forest.step, forest.variance,
        forest.covariance, coarse.item, coarse.first, coarse.count, base, key, value, weight,
        d, dv, forest.covariance.shape[1], LARGEST_TILT, largest,
        power_of_two(d), power_of_two(dv), GRANULE,
    )  # fmt: skip


def write_lists(
    owner: Tensor, granules: Tensor, base: Tensor, exact: Column, offsets: Tensor, indices: Tensor
) -> None:
    """The granules of every block: those of its cell's coarse keys, then its leaves."""
    kernels.fill[(len(owner),)](
        owner, granules, base, exact.item, exact.first, exact.count, offsets, indices, 128
    )
