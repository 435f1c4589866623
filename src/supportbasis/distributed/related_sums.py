"""Exchanges between the chunks of a sequence: sums over the chunks before, after, or all of them,
and tokens that all ranks need.

Every rank gives, for each of its chunks, one vector for each unit (a batch element and a head). The
vectors of all chunks are transposed, so that each rank has a part of all of them, added up there,
and transposed back. That moves 2 (R - 1) / R of a chunk's vectors, whatever the number R of ranks,
and however many tokens there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .ranks import Ranks
from .token_layout import TokenLayout

Relation = Literal["before", "after", "all"]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of all ranks, each rank having the same number of them."""

    ranks: Ranks
    layout: TokenLayout
    is_causal: bool

    @cached_property
    def own(self) -> list[int]:
        return self.layout.own(self.ranks.rank)

    @cached_property
    def order(self) -> list[int]:
        """Offsets of all chunks, in the order of the sequence, where those of each rank follow each
        other."""
        numbers = [c for rank in range(self.ranks.size) for c in self.layout.own(rank)]
        return torch.tensor(numbers).argsort().tolist()

    def related(self, number: int, relation: Relation) -> range:
        """Numbers of the chunks that lie before or after one, or of all, that one included."""
        count = len(self.layout.chunks)
        return {
            "before": range(number),
            "after": range(number + 1, count),
            "all": range(count),
        }[relation if self.is_causal else "all"]

    def gather(self, x: Tensor) -> Tensor:
        """[own chunks, ...] to [all chunks, ...], in order."""
        return torch.cat(self.ranks.gather(x))[self.order]

    def sums(
        self, vectors: Sequence[Sequence[Tensor]], tops: Tensor, relation: Relation
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Sums over the related chunks of each own chunk, in units of exp of their largest top.

        ``vectors`` are those of the own chunks and of each unit, in units of exp(tops), [own
        chunks, units]; tops of -inf: of no weight.
        """
        size, rank = self.ranks.size, self.ranks.rank
        sizes = [len(unit) for unit in vectors[0]]
        flat = torch.stack([torch.cat(list(units)) for units in vectors])
        width = math.ceil(flat.shape[1] / size)
        flat = torch.nn.functional.pad(flat, (0, width * size - flat.shape[1]))
        sent = [torch.cat([part, tops], 1) for part in flat.split(width, 1)]
        found = torch.cat(self.ranks.gather_parts(sent))[self.order]
        part, all_tops = found.split([width, len(sizes)], 1)
        summed, new_tops = self._summed(part, all_tops, sizes, rank * width, relation)
        back = [summed[self.layout.own(r)] for r in range(size)]
        whole = torch.cat(self.ranks.gather_parts(back), 1)[:, : sum(sizes)]
        return [list(row.split(sizes)) for row in whole], new_tops[self.own]

    def _summed(
        self, part: Tensor, tops: Tensor, sizes: Sequence[int], start: int, relation: Relation
    ) -> tuple[Tensor, Tensor]:
        """Sums of one part of all chunks' vectors, of the entries from ``start`` on; and tops."""
        count = len(self.layout.chunks)
        related = torch.zeros(count, count, dtype=torch.bool, device=part.device)
        for number in range(count):
            related[number, list(self.related(number, relation))] = True
        shown = tops.masked_fill(~related.unsqueeze(2), -math.inf)  # [to, from, units]
        new_tops = shown.amax(1)
        unit = torch.where(new_tops > -math.inf, new_tops, 0.0)
        weight = (shown - unit.unsqueeze(1)).exp_()
        summed, edge, width = torch.zeros_like(part), 0, part.shape[1]
        for number, size in enumerate(sizes):
            first, last = max(edge, start) - start, min(edge + size, start + width) - start
            if first < last:
                summed[:, first:last] = weight[:, :, number] @ part[:, first:last]
            edge += size
        return summed, new_tops


@dataclass(frozen=True, eq=False)
class Gathered:
    """Tokens that every rank has of all chunks and units, in the order of chunks, then units."""

    chunks: Chunks
    counts: Tensor  # [chunks, units], on the CPU
    tokens: Tensor  # [all of them, width]

    @staticmethod
    def of(chunks: Chunks, counts: Tensor, own: Sequence[Tensor], width: int) -> Gathered:
        """From those of this rank, for each own chunk and each unit."""
        ranks, device = chunks.ranks, own[0].device
        by_rank = [int(counts[chunks.layout.own(r)].sum()) for r in range(ranks.size)]
        sent = torch.cat(list(own))
        parts = ranks.exchange([sent] * ranks.size, [count * width for count in by_rank])
        whole = torch.cat(parts).view(-1, width)
        return Gathered(chunks, counts, whole[_by_chunk(chunks, counts).to(device)])

    def spans(self, unit: int, numbers: Sequence[int]) -> Tensor:
        """Offsets of the tokens of a unit in some chunks."""
        starts = self.counts.flatten().cumsum(0).view_as(self.counts) - self.counts
        found = [
            torch.arange(int(starts[c, unit]), int(starts[c, unit] + self.counts[c, unit]))
            for c in numbers
        ]
        index = torch.cat(found) if found else torch.arange(0)
        return index.to(self.tokens.device)

    def returned(self, made: Tensor) -> list[Tensor]:
        """What all ranks made of the own tokens, [own tokens, width], for each rank."""
        ranks, order = self.chunks.ranks, _by_chunk(self.chunks, self.counts)
        by_rank = [int(self.counts[self.chunks.layout.own(r)].sum()) for r in range(ranks.size)]
        in_ranks = made[order.argsort().to(made.device)]
        width, own = made.shape[1], by_rank[ranks.rank]
        parts = ranks.exchange(in_ranks.split(by_rank), [own * width] * ranks.size)
        return [part.view(own, width) for part in parts]


def _by_chunk(chunks: Chunks, counts: Tensor) -> Tensor:
    """Offsets in the order of ranks, sorted by the order of chunks."""
    sizes = counts.sum(1).tolist()
    numbers = [c for r in range(chunks.ranks.size) for c in chunks.layout.own(r)]
    owner = torch.cat([torch.full((sizes[c],), c) for c in numbers])
    return owner.argsort(stable=True)
