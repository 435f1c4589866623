"""The way back through lists on the device: autograd walks one attention for each layer.

The table of leaves and coarse keys is built once more, as a function of the tokens that autograd
knows, and the attention over it has a gradient of its own (`kernels.blocklist`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import Structure
from ..components.blocks_backward import Flow
from ..cotangent import Cotangent
from ..forest import Forest, Nodes, tilted
from ..kernels.blocklist import GRANULE
from .granules import Filled, Listed, Placed, attend
from .lists import listed


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
