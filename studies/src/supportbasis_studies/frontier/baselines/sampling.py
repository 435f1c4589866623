"""HyperAttention: hashing for the large scores, uniform samples for the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import Answer, Case, attend, sort_work

PLANES = 7
NEAR_SHARE = 1 / 3  # of the budget, at most, for exact segments of causal attention

Piece = tuple[slice, slice]  # queries, and keys that all of them see


def hyper(case: Case, budget: float, seed: int) -> Answer | None:
    """Blocks on the diagonal after sorting by hash, and uniformly sampled keys for the rest.

    HyperAttention (Han et al., 2023): queries and keys are sorted by the Hamming-sorted code of 7
    random hyperplanes and attend exactly within equal blocks; a sample of keys, each of which
    stands for m / s of them, estimates what lies outside. Blocks and sample are of equal size.
    Causal: the second half of the tokens sees the first half so, and each half is halved again,
    down to segments that are exact.
    """
    head = case.head
    generator = torch.Generator().manual_seed(seed)
    pieces, segments = _pieces(case, budget)
    hashing = float(PLANES * head.d * (head.n + head.m))
    hashing += sum(sort_work(q.stop - q.start) + sort_work(k.stop - k.start) for q, k in pieces)
    near = sum((part.stop - part.start) * (part.stop - part.start + 1) / 2 for part in segments)
    rows = sum(q.stop - q.start for q, _ in pieces)
    left = (budget - hashing / case.exact_work) * case.pairs - near
    count = max(0, int(left / max(1, rows)))
    if count < 2 and budget < 1:
        return None
    planes = torch.randn(head.d, PLANES, generator=generator, device="cpu").to(head.key.device)
    weight = torch.full_like(case.scores, -math.inf)  # logarithms
    for part in segments:
        weight[_within(case, part), part] = 0.0
    paid = near
    for queries, keys in pieces:
        most = keys.stop - keys.start
        block, sample = (most, 0) if budget >= 1 else (count - count // 2, count // 2)
        mine = _within(case, queries)
        found = _weights(case, queries, keys, planes, min(block, most), sample, generator)
        weight[mine, keys] = found
        paid += (queries.stop - queries.start) * (min(block, most) + sample)
    output = attend(case.scores + weight, head.value)
    cost = paid / case.pairs + (0.0 if budget >= 1 else hashing / case.exact_work)
    return Answer(output, cost, f"block {count - count // 2}, sample {count // 2}")


def _pieces(case: Case, budget: float) -> tuple[list[Piece], list[slice]]:
    """Rectangles that are hashed, and segments on the diagonal that are exact."""
    n = case.head.n
    if not case.head.is_causal:
        return [(slice(0, n), slice(0, case.head.m))], []
    pieces, segments = [], [slice(0, n)]
    while budget < 1 and segments[0].stop > max(2.0, NEAR_SHARE * budget * n):
        halves = []
        for part in segments:
            middle = (part.start + part.stop + 1) // 2
            pieces.append((slice(middle, part.stop), slice(part.start, middle)))
            halves += [slice(part.start, middle), slice(middle, part.stop)]
        segments = halves
    return pieces, segments


def _within(case: Case, part: slice) -> slice:
    """Which of the sampled rows, which are sorted, lie in a part of the tokens."""
    edges = torch.tensor([part.start, part.stop], device=case.rows.device)
    first, last = torch.searchsorted(case.rows, edges).tolist()
    return slice(first, last)


def _weights(
    case: Case, queries: slice, keys: slice, planes: Tensor, block: int, sample: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Logarithms of the weights of a piece's keys at its sampled rows: 0 in the row's own block,
    that of what it stands for if it was sampled elsewhere, -inf for all others."""
    most, rows = keys.stop - keys.start, queries.stop - queries.start
    own = _place(case.head.key[keys], planes) // block
    at = case.rows[_within(case, queries)] - queries.start
    mine = _place(case.head.query[queries], planes)[at] * math.ceil(most / block) // rows
    drawn = torch.randint(most, (sample,), generator=generator, device="cpu")
    drawn = drawn.bincount(minlength=most)
    rest = (drawn.to(own.device) * (most / max(1, sample))).log()
    return torch.where(own == mine.unsqueeze(1), 0.0, rest)


def _place(x: Tensor, planes: Tensor) -> Tensor:
    """The place of each token in the order of its hash."""
    bits = (x @ planes > 0).long()
    code = (bits << torch.arange(planes.shape[1], device=x.device)).sum(1)
    order = _gray_rank(code, planes.shape[1]).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(x), device=x.device)
    return place


def _gray_rank(code: Tensor, bits: int) -> Tensor:
    """Where a code stands in the Gray sequence, whose neighbours differ in one bit."""
    rank, shift = code.clone(), 1
    while shift < bits:
        rank ^= rank >> shift
        shift *= 2
    return rank
