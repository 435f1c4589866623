"""Which tokens of the sequence a rank holds.

A sequence is cut into chunks. In the layout "contiguous" rank r holds chunk r. In "zigzag" there
are two chunks for each of R ranks, and rank r holds chunk r followed by chunk 2R - 1 - r: in causal
attention, where later rows have more keys, all ranks then have the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from .ranks import Ranks

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise InputError(f"layout must be one of {LAYOUTS}, got {layout!r}")


class Chunk(NamedTuple):
    """Consecutive tokens of the sequence, all on one rank."""

    rank: int
    start: int  # in the slice of that rank
    stop: int

    def of(self, x: Tensor, dim: int = 2) -> Tensor:
        """These tokens of that rank's tensor."""
        return x.narrow(dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class TokenLayout:
    """All chunks in the order of the sequence, from the number of tokens that each rank holds.

    Of c tokens in the zig-zag layout the first (c + 1) // 2 belong to the earlier chunk.
    """

    lengths: tuple[int, ...]
    layout: Layout

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        if self.layout == "contiguous":
            return tuple(Chunk(rank, 0, count) for rank, count in enumerate(self.lengths))
        early = [Chunk(r, 0, (count + 1) // 2) for r, count in enumerate(self.lengths)]
        late = [Chunk(r, (count + 1) // 2, count) for r, count in enumerate(self.lengths)]
        return tuple(early + late[::-1])

    @cached_property
    def offsets(self) -> list[int]:
        """Position of the first token of each chunk."""
        sizes = torch.tensor([0] + [chunk.stop - chunk.start for chunk in self.chunks])
        return sizes.cumsum(0)[:-1].tolist()

    def own(self, rank: int) -> list[int]:
        """Numbers of the chunks of a rank, as they follow each other in its slice."""
        return [number for number, chunk in enumerate(self.chunks) if chunk.rank == rank]

    def join(self, slices: Sequence[Tensor], dim: int = 2) -> Tensor:
        """The sequence from the slices of all ranks."""
        if self.layout == "contiguous":
            return torch.cat(list(slices), dim)
        return torch.cat([chunk.of(slices[chunk.rank], dim) for chunk in self.chunks], dim)

    def slices(self, x: Tensor, dim: int = 2) -> list[Tensor]:
        """The slices of all ranks, of a sequence."""
        if self.layout == "contiguous":
            return list(x.split(list(self.lengths), dim))
        sizes = [chunk.stop - chunk.start for chunk in self.chunks]
        parts = x.split(sizes, dim)
        return [
            torch.cat([parts[number] for number in self.own(rank)], dim)
            for rank in range(len(self.lengths))
        ]


def split_tokens(
    x: Tensor,
    dim: int = -2,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layout = "contiguous",
) -> Tensor:
    """The slice of this rank, of a tensor ``x`` that every rank has whole, with its tokens in
    ``dim``; differentiable. ``group`` and ``layout`` are those of `sb.distributed.attention`."""
    check_layout(layout)
    ranks = Ranks(group)
    chunks = x.shape[dim] // ranks.size, x.shape[dim] % ranks.size
    lengths = tuple(chunks[0] + (rank < chunks[1]) for rank in range(ranks.size))
    if layout == "zigzag":  # chunks r and 2R - 1 - r, so that the first is not the shorter one
        sizes = [len(part) for part in torch.arange(x.shape[dim]).tensor_split(2 * ranks.size)]
        lengths = tuple(sizes[r] + sizes[-1 - r] for r in range(ranks.size))
    return TokenLayout(lengths, layout).slices(x, dim)[ranks.rank]


def gather_tokens(
    x: Tensor,
    dim: int = -2,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layout = "contiguous",
) -> Tensor:
    """The whole tensor on every rank, from the slices ``x`` of all of them, with tokens in ``dim``:
    the inverse of `split_tokens`, without gradients."""
    check_layout(layout)
    ranks = Ranks(group)
    x = x.detach().movedim(dim, 0).contiguous()
    own = torch.tensor([len(x)], device=x.device)
    lengths = tuple(int(count) for count in ranks.gather(own))
    width = x[:1].numel() if len(x) else x.new_empty(1, *x.shape[1:]).numel()
    parts = ranks.exchange([x] * ranks.size, [count * width for count in lengths])
    slices = [part.view(count, *x.shape[1:]) for part, count in zip(parts, lengths, strict=True)]
    return TokenLayout(lengths, layout).join(slices, 0).movedim(0, dim)
