"""Baselines whose pattern does not depend on the data: windows, sinks, random blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import Answer, Case, Segments, attend, only

SINKS = 64
SINK_SHARE = 1 / 8  # of the keys of a query, at most
BLOCK, SMALLEST = 64, 16
PARTS = (2, 3, 3)  # global, window and random blocks of a query in BigBird


def window(case: Case, budget: float, seed: int) -> Answer | None:
    """A window around each token and the first tokens of the sequence.

    Longformer (Beltagy et al., 2020) with its global tokens at the start, where sinks are. Global
    tokens see everything, which is paid for.
    """
    head = case.head
    if budget >= 1:
        return _whole(case)
    count = budget * head.m
    sinks = int(min(SINKS, SINK_SHARE * count))
    width = int(count - sinks - sinks * head.m / head.n)
    if width < 1:
        return None
    kept = _near(case, width)
    kept[:, :sinks] = True
    kept[case.rows < sinks] = True
    output = attend(only(case.scores, kept), head.value)
    used = width + sinks + sinks * head.m / head.n
    return Answer(output, used / head.m, width + sinks, f"window {width}, {sinks} sinks")


def random_blocks(case: Case, budget: float, seed: int) -> Answer | None:
    """Global blocks at the start, a window of blocks and random blocks.

    BigBird (Zaheer et al., 2020), in its proportions of 2, 3 and 3 blocks.
    """
    head = case.head
    if budget >= 1:
        return _whole(case)
    size = BLOCK
    while size > SMALLEST and budget * head.m < sum(PARTS) * size:
        size //= 2
    rows, keys = (Segments.of_size(x, size) for x in (head.n, head.m))
    affordable = budget * head.m / size
    twice = 1 + head.m / head.n  # a global block is seen, and sees everything
    unit = affordable / (PARTS[0] * twice + PARTS[1] + PARTS[2])
    first, wide = int(PARTS[0] * unit), max(1, int(PARTS[1] * unit))
    chance = int(affordable - first * twice - wide)
    if chance < 0:
        return None
    kept = _block_mask(rows, keys, first, wide, chance, seed)[case.rows // size]
    output = attend(only(case.scores, keys.spread(kept)), head.value)
    used = (first + wide + chance) * size
    cost = used / head.m + first * size / head.n
    return Answer(output, cost, used, f"blocks of {size}: {first} + {wide} + {chance}")


def _whole(case: Case) -> Answer:
    return Answer(attend(case.scores, case.head.value), 1.0, case.head.m, "all keys")


def _near(case: Case, width: int) -> Tensor:
    """The ``width`` keys around each row; windows are moved inward at the ends."""
    head = case.head
    centre = case.rows * head.m // head.n
    first = (centre - width // 2).clamp(0, head.m - width).unsqueeze(1)
    at = torch.arange(head.m)
    return (at >= first) & (at < first + width)


def _block_mask(
    rows: Segments, keys: Segments, first: int, wide: int, chance: int, seed: int
) -> Tensor:
    """Global, window and random blocks, no block twice: [row blocks, key blocks]."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.arange(rows.count) * keys.count // rows.count - wide // 2
    start = start.clamp(0, max(0, keys.count - wide)).unsqueeze(1)
    at = torch.arange(keys.count)
    kept = (at >= start) & (at < start + wide)
    kept |= at < first
    draw = torch.rand(rows.count, keys.count, generator=generator).masked_fill_(kept, -1.0)
    kept.scatter_(1, draw.topk(min(chance, keys.count), 1).indices, True)
    kept[:first] = True
    return kept
