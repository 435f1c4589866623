"""Baselines whose pattern does not depend on the data: windows, sinks, random blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import Answer, Case, Grid, attend, only

SINKS = 64
SINK_SHARE = 1 / 8  # of the keys of a query, at most
BLOCK, SMALLEST = 64, 16
PARTS = (2, 3, 3)  # global, window and random blocks of a query in BigBird


def window(case: Case, budget: float, seed: int) -> Answer | None:
    """A window around each token and the first tokens of the sequence.

    Longformer (Beltagy et al., 2020) with its global tokens at the start, where sinks are. Global
    tokens see everything, which is paid for. Causal: a window that ends at the token, and global
    tokens that are only seen.
    """
    head = case.head
    if budget >= 1:
        return _whole(case)
    count = case.keys(budget)
    sinks = int(min(SINKS, SINK_SHARE * count))
    seeing = 0.0 if head.is_causal else sinks * head.m / head.n
    width = int(count - sinks - seeing)
    if width < 1:
        return None
    kept = _near(case, width)
    kept[:, :sinks] = True
    if not head.is_causal:
        kept[case.rows < sinks] = True
    output = attend(only(case.scores, kept), head.value)
    return Answer(output, case.share(width + sinks + seeing), f"window {width}, {sinks} sinks")


def random_blocks(case: Case, budget: float, seed: int) -> Answer | None:
    """Global blocks at the start, a window of blocks and random blocks.

    BigBird (Zaheer et al., 2020), in its proportions of 2, 3 and 3 blocks. Causal: the window
    ends at the query's block, global blocks are only seen, and random ones lie before.
    """
    head = case.head
    if budget >= 1:
        return _whole(case)
    size = BLOCK
    while size > SMALLEST and case.keys(budget) < sum(PARTS) * size:
        size //= 2
    grid = Grid.of(case, size)
    affordable = case.keys(budget) / size
    twice = 1 + (0.0 if head.is_causal else head.m / head.n)  # a global block sees everything, too
    unit = affordable / (PARTS[0] * twice + PARTS[1] + PARTS[2])
    first, wide = int(PARTS[0] * unit), max(1, int(PARTS[1] * unit))
    chance = int(affordable - first * twice - wide)
    if chance < 0:
        return None
    kept = _block_mask(grid, first, wide, chance, seed)
    cost = grid.share(kept)
    if cost > budget:  # one block is too much
        return None
    output = attend(only(case.scores, grid.of_rows(kept)), head.value)
    return Answer(output, cost, f"blocks of {size}: {first} + {wide} + {chance}")


def _whole(case: Case) -> Answer:
    return Answer(attend(case.scores, case.head.value), 1.0, "all keys")


def _near(case: Case, width: int) -> Tensor:
    """The ``width`` keys around each row, or up to it; windows are moved inward at the ends."""
    head = case.head
    centre = case.rows * head.m // head.n
    before = width - 1 if head.is_causal else width // 2
    first = (centre - before).clamp(0, head.m - width).unsqueeze(1)
    return (case.at >= first) & (case.at < first + width)


def _block_mask(grid: Grid, first: int, wide: int, chance: int, seed: int) -> Tensor:
    """Global, window and random blocks, no block twice: [row blocks, key blocks]."""
    rows, keys, causal = grid.rows.count, grid.keys.count, grid.case.head.is_causal
    generator = torch.Generator().manual_seed(seed)
    start = torch.arange(rows, device="cpu") * keys // rows - (wide - 1 if causal else wide // 2)
    start = start.clamp(0, max(0, keys - wide)).unsqueeze(1)
    at = torch.arange(keys, device="cpu")
    kept = (at >= start) & (at < start + wide)
    kept |= at < first
    seen = grid.pairs.cpu() > 0
    draw = torch.rand(rows, keys, generator=generator, device="cpu").masked_fill_(
        kept | ~seen, -1.0
    )
    kept.scatter_(1, draw.topk(min(chance, keys), 1).indices, True)
    if not causal:
        kept[:first] = True
    return (kept & seen).to(grid.case.rows.device)
