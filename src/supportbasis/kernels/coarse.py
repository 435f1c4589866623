"""The way back through coarse keys: from the granules that `selection.write_tilted` fills to the
nodes and the mean queries that they are made of.

A node is coarse for many cells. Its gradient is a sum over its slots in the table, in their order,
so the result is the same in every run. No call waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..forest import LARGEST_TILT, Forest, Nodes
from ..selection import Column
from . import coarse_kernels as kernels
from .blocklist import GRANULE
from .language import power_of_two

PRECISION = "tf32x3"


Grads = tuple[Tensor, ...]  # of keys, values and log-weights of slots


def no_gradients(forest: Forest) -> Nodes:
    """Zeros for the gradients of all nodes."""
    return Nodes(*(torch.zeros_like(x, dtype=torch.float32) for x in forest.nodes))


def add_to_nodes(
    total: Nodes, forest: Forest, mean: Tensor, coarse: Column, base: Tensor, grads: Grads
) -> None:
    """Add to the gradients of nodes those of the coarse keys of some cells, whose slots begin at
    granule ``base`` of each."""
    (nodes, d), dv, known = forest.key.shape, forest.value.shape[1], forest.covariance.shape[1]
    node, cell = _slots(coarse, base, len(grads[0]) // GRANULE, nodes)
    node, slots = node.sort(stable=True)
    bounds = torch.searchsorted(node, torch.arange(nodes + 1, dtype=node.dtype, device=node.device))
    widths = (power_of_two(d), power_of_two(dv))
    kernels.to_nodes[(nodes,)](
        mean, forest.gap, forest.step, forest.variance, forest.covariance,
        slots, cell, bounds, *grads, *total, d, dv, known, LARGEST_TILT,
        *widths, power_of_two(known), GRANULE, PRECISION, num_warps=1 if max(widths) <= 64 else 4,
    )  # fmt: skip


def _slots(coarse: Column, base: Tensor, granules: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Node of every slot of so many granules (``nodes`` for none), and its cell."""
    granule = torch.arange(granules, device=base.device)
    cell = torch.searchsorted(base, granule, right=True) - 1
    near = torch.arange(GRANULE, device=base.device)
    place = ((granule - base[cell]) * GRANULE).unsqueeze(1) + near
    real = place < coarse.count[cell].unsqueeze(1)
    at = torch.where(real, coarse.first[cell].unsqueeze(1) + place, 0)
    node = torch.where(real, coarse.item[at], nodes).int()
    return node.flatten(), cell.repeat_interleave(GRANULE)


def mean_gradients(
    forest: Forest, mean: Tensor, coarse: Column, base: Tensor, grads: Grads
) -> Tensor:
    """Gradients of the mean queries of the same cells."""
    (cells, d), dv = mean.shape, forest.value.shape[1]
    made = torch.empty_like(mean)
    kernels.to_means[(cells,)](
        mean, forest.gap, forest.step, forest.variance, forest.covariance,
        coarse.item, coarse.first, coarse.count, base, *grads, made,
        d, dv, forest.covariance.shape[1], LARGEST_TILT,
        power_of_two(d), power_of_two(dv), GRANULE,
    )  # fmt: skip
    return made
