"""What lists of any price are held to: sampled rows of every kind of block, and their exact output.

Rows of a block fail together, so whole blocks are the units of the sample. Errors are far from
alike, though: most of the squared error of a head can lie in a few rows, each of which attends to
a key that its list does not hold. Such rows are mostly unlike the query that their list was made
for. So the blocks that are widest are all looked at, and of every block that is looked at the rows
that are furthest from its query; others are sampled and stand for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import PARTS, PLACES, Layer, Structure
from ..components.blocks import block_sums
from ..plans import HeadPlan
from ..problem import Head
from ..sampling import RowSample, exact_rows

WIDEST_BLOCKS, CHECKED_BLOCKS, CHECKED_ROWS = 12, 40, 1024
FEWEST_BLOCKS = 4  # of a part of a causal head
WIDE_PRECISION = 1e-5  # tolerance below which rows are compared in float64


@dataclass(frozen=True, eq=False)
class BlockCheck:
    """Sampled rows, and the cells and chunks that hold them."""

    structure: Structure
    parts: tuple[_Sampled, ...]
    chunk: int

    @staticmethod
    def draw(
        whole: Structure, head: Head, chunk: int, seed: int, tolerance: float = 1.0
    ) -> BlockCheck:
        generator = torch.Generator().manual_seed(seed)
        metric = whole.head.key.var(0, unbiased=False)
        dtype = torch.float64 if tolerance < WIDE_PRECISION else head.dtype
        parts = []
        for layer, members, share in _parts(whole):
            least = min(FEWEST_BLOCKS, len(members))
            # small blocks, of which a few err most
            wanted = CHECKED_BLOCKS * (PARTS if whole.order == PLACES else 1)
            counts = [max(least, math.ceil(share * x)) for x in (WIDEST_BLOCKS, wanted)]
            far = _distances(layer, members, metric)
            sample = _sampled_blocks(far, counts[0], counts[1], generator)
            rows, weight = _sampled_rows(
                layer.rows[members[sample.rows]], far[sample.rows], share, generator
            )
            exact = exact_rows(head, rows.flatten(), dtype=dtype).view(*rows.shape, -1)
            parts.append(_Sampled(rows, weight, exact.double(), sample))
        rows = torch.cat([part.rows.flatten() for part in parts])
        return BlockCheck(whole.around(rows, chunk), tuple(parts), chunk)

    @staticmethod
    def of_rows(
        whole: Structure, plan: HeadPlan, head: Head, sample: RowSample, tolerance: float
    ) -> BlockCheck:
        """The check on rows that were drawn one by one; those that have no list are left out."""
        assert plan.blocks is not None
        chunk, rows = plan.blocks.chunk, sample.rows
        dtype = torch.float64 if tolerance < WIDE_PRECISION else head.dtype
        exact = exact_rows(head, rows, dtype=dtype).double().unsqueeze(1)
        listed = (rows >= plan.exact_rows).double().unsqueeze(1)
        part = _Sampled(rows.unsqueeze(1), listed, exact, sample)
        return BlockCheck(whole.around(rows, chunk), (part,), chunk)

    def error(self, price: float) -> tuple[float, float]:
        """Relative Frobenius error of all rows as the sample has it, and its upper limit."""
        total = block_sums(self.structure, self.structure.select(price), self.chunk)
        output = total.divide_(total.seen)[0]
        parts = [part.error(output) for part in self.parts]
        size = max(sum(part[0] for part in parts), 1e-300)
        if not math.isfinite(size):
            return math.inf, math.inf  # squares that overflow say nothing
        measured = sum(part[0] * part[1] for part in parts) / size
        limit = sum(part[0] * part[2] for part in parts) / size
        return math.sqrt(measured), math.sqrt(limit)


@dataclass(frozen=True, eq=False)
class _Sampled:
    """A few rows of some blocks of one layer, with their exact output."""

    rows: Tensor  # [blocks, rows]
    weight: Tensor  # [blocks, rows]: how many rows of its block each stands for
    exact: Tensor  # [blocks, rows, dv]
    sample: RowSample  # of blocks

    def error(self, output: Tensor) -> tuple[float, float, float]:
        """Squared size of the layer's output; relative squared error, and its upper limit."""
        away = (output[self.rows].double() - self.exact).square().sum(2)
        squared = (away * self.weight).sum(1)
        size = (self.exact.square().sum(2) * self.weight).sum(1)
        measured, limit = self.sample.frobenius_limit(squared, size)
        return self.sample.total(size), measured**2, limit**2


def _parts(whole: Structure) -> Iterator[tuple[Layer, Tensor, float]]:
    """Layers, some of their blocks, and how much of the sample these get: blocks in which every
    row that has a list comes once.

    A row of a causal head is in all layers up to the widest whose first window it is not in; it
    is looked at there.
    """
    first = whole.head.n
    rows = sum(int((layer.rows >= 0).sum()) for layer in whole.layers[-1:])
    for layer in reversed(whole.layers):
        real = layer.rows >= 0
        if whole.chunks is None:
            yield layer, torch.arange(len(layer.rows), device=real.device), 1.0
            continue
        members = (layer.rows.amax(1) < first).nonzero().squeeze(1)
        if len(members):
            yield layer, members, min(1.0, int(real[members].sum()) / max(1, rows))
        first = int(layer.rows[real].min())


def _distances(layer: Layer, members: Tensor, metric: Tensor) -> Tensor:
    """How far the queries of some blocks are from the one that their list is made for: the
    variance, over the keys, of the scores that lie between them; [blocks, size], 0 for none."""
    mean = layer.cells.mean[layer.owner[members]].unsqueeze(1)
    away = ((layer.query[members] - mean).square() * metric).sum(2)
    return away.masked_fill(layer.rows[members] < 0, 0.0)


def _sampled_blocks(far: Tensor, widest: int, count: int, generator: torch.Generator) -> RowSample:
    """The ``widest`` blocks, and ``count`` that stand for the others."""
    order = far.sum(1).argsort(descending=True)
    census, others = order[:widest], order[widest:]
    chosen = torch.randperm(len(others), generator=generator)[:count].to(order.device)
    blocks, at = torch.cat([census, others[chosen]]).sort()
    each = len(others) / max(1, len(chosen))
    weight = torch.where(at < len(census), 1.0, each).double()
    return RowSample(blocks, weight, len(order))


def _sampled_rows(
    rows: Tensor, far: Tensor, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of blocks [blocks, size] (-1 for none), half of them those that are furthest and half
    sampled, with how many rows of the block each stands for."""
    real = rows >= 0
    count = min(rows.shape[1], math.ceil(share * CHECKED_ROWS / max(1, len(rows))))
    furthest = count // 2
    place = torch.rand(rows.shape, generator=generator).to(far)
    ranked = far.masked_fill(~real, -1.0).argsort(1, descending=True)
    place.scatter_(1, ranked[:, :furthest], -1.0)
    at = place.masked_fill(~real, 2.0).argsort(1)[:, :count]
    others = real.sum(1, keepdim=True) - furthest
    stands = (others / max(1, count - furthest)).clamp(min=1.0).expand(-1, count).clone()
    stands[:, :furthest] = 1.0
    kept = real.gather(1, at)
    return rows.gather(1, at).clamp(min=0), stands.double() * kept
