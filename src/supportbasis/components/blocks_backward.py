"""The way back through lists of keys: to leaves, to summaries, and through these to the tokens.

Orders, cells and lists are constants. The summaries of nodes and cells are built once more, as
functions that autograd knows. Then, some blocks at a time, the lists are gathered again and the
gradients of what they are made of are added up in tables of the size of the trees; at last autograd
takes the tables back to the tokens. So memory is that of the trees and of one group of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..blocks import BlockSettings, Layer, Structure, structure
from ..cotangent import Cotangent, Gradients
from ..forest import Forest
from ..frame import Frame, framed
from ..problem import Head
from ..selection import Lists
from ..transforms import recording
from .blocks import Pieces, Places, chunked, grouped

GROUP_KEYS = 2**15  # in one group, whose scores are written down


@recording()
def add_gradients(
    settings: BlockSettings,
    frame: Frame,
    total: Gradients,
    cotangent: Cotangent,
    head: Head,
    rows: Tensor | None,
) -> None:
    """Add what flows back from the sums of the given rows of a block support."""
    inside = framed(head, frame)
    assert inside.key_log_weight is not None
    tokens = (inside.query, inside.key, inside.value.to(head.dtype), inside.key_log_weight)
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in tokens)
        query, key, value, weight = leaves
        live = replace(inside, query=query, key=key, value=value, key_log_weight=weight)
        made = structure(live, frame.spectrum, settings)
    cotangent = _of_all_rows(cotangent, head, rows)
    flow = Flow(made, cotangent, frame.row_shift(head, None))
    flow.add_layers(settings.price)
    parts = flow.to_tokens(leaves)
    if made.chunks is not None:
        flow.add_chunks(settings.chunk, leaves, parts)
    total.value += parts[2]
    own = Gradients(parts[0], parts[1], parts[2], parts[3], flow.row_factor)
    frame.pull_back(own, total, head.scale)


def _of_all_rows(cotangent: Cotangent, head: Head, rows: Tensor | None) -> Cotangent:
    """The same for every row of the head, without weight on those that are not given."""
    if rows is None:
        return cotangent
    num = cotangent.num.new_zeros(head.n, cotangent.num.shape[1])
    den, log_scale = num.new_zeros(head.n), num.new_full((head.n,), -math.inf)
    pairs = ((num, cotangent.num), (den, cotangent.den), (log_scale, cotangent.log_scale))
    for whole, part in pairs:
        whole.index_copy_(0, rows, part)
    return Cotangent(num, den, log_scale)


class Flow:
    """Gradients of the tables of a structure, as they come in."""

    def __init__(self, made: Structure, cotangent: Cotangent, shift: Tensor):
        self.made, self.cotangent, self.shift = made, cotangent, shift
        forest = made.forest
        leaves = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
        self.nodes = [torch.zeros_like(x) for x in forest.nodes]
        self.leaves = [torch.zeros_like(x) for x in leaves]
        self.tables = [*forest.nodes, *leaves]
        self.sums = [*self.nodes, *self.leaves]
        self.row_factor = torch.zeros_like(shift)

    def add_layers(self, price: float) -> None:
        """Add what flows back from the lists of all layers."""
        for layer, items in zip(self.made.layers, self.made.select(price), strict=True):
            self.add_layer(layer, items)

    def add_layer(self, layer: Layer, items: Lists) -> None:
        query, mean = torch.zeros_like(layer.query), torch.zeros_like(layer.cells.mean)
        for members, places in grouped(self.made.forest, layer, items, GROUP_KEYS):
            parts = self._group(layer, members, places)
            query[members] = parts[0]
            mean.index_add_(0, places.cell, parts[1])
            first_leaf = 2 + len(self.nodes)
            for table, part in zip(self.nodes, parts[2:first_leaf], strict=True):
                table.index_add_(0, places.node, part)
            for table, part in zip(self.leaves, parts[first_leaf:], strict=True):
                table.index_add_(0, places.leaf, part)
        self.tables += [layer.query, layer.cells.mean]
        self.sums += [query, mean]

    def _group(self, layer: Layer, members: Tensor, places: Places) -> Sequence[Tensor]:
        """Gradients of the queries, mean queries, nodes and leaves of some blocks."""
        with torch.enable_grad():
            pieces = Pieces.of(_plain(self.made.forest), _plain_layer(layer), places)
            query = layer.query.detach()[members].requires_grad_()
            wanted = [query, pieces.mean, *pieces.nodes, *pieces[2:]]
            for piece in wanted:
                assert isinstance(piece, Tensor)
                piece.requires_grad_()
            key, value, bias = pieces.joined(places)
            loss = self._loss(layer.rows[members], query, key, value, bias.unsqueeze(1))
            return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    def _loss(
        self, rows: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor
    ) -> Tensor:
        """The sums of some blocks times their gradients; those of the rows' factors are added."""
        real = rows.clamp(min=0)
        log_scale = (self.cotangent.log_scale + self.shift)[real].masked_fill(rows < 0, -math.inf)
        weight = (query @ key.transpose(1, 2) + bias + log_scale.unsqueeze(2)).exp()
        slope = self.cotangent.num[real] @ value.transpose(1, 2)
        terms = weight * (slope + self.cotangent.den[real].unsqueeze(2))
        self.row_factor.index_add_(0, real.flatten(), terms.detach().sum(2).flatten())
        return terms.sum()

    def to_tokens(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the tokens from those of the tables."""
        pairs = zip(self.tables, self.sums, strict=True)
        outputs, given = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        parts = torch.autograd.grad(
            outputs, leaves, given, allow_unused=True, materialize_grads=True
        )
        return list(parts)

    def add_chunks(self, chunk: int, leaves: Sequence[Tensor], parts: list[Tensor]) -> None:
        """Causal: what flows back from the chunks that rows share with their own keys."""
        with torch.enable_grad():
            for rows, *tensors in chunked(self.made, chunk, GROUP_KEYS):
                loss = self._loss(rows, *tensors)
                more = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                for part, extra in zip(parts, more, strict=True):
                    part += extra


def _plain(forest: Forest) -> Forest:
    fields = {name: getattr(forest, name).detach() for name in Forest.__dataclass_fields__}
    return Forest(**fields)


def _plain_layer(layer: Layer) -> Layer:
    return replace(layer, cells=replace(layer.cells, mean=layer.cells.mean.detach()))
