"""HyperAttention: hashing for the large scores, uniform samples for the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import Answer, Case, attend, only, sort_work

PLANES = 7


def hyper(case: Case, budget: float, seed: int) -> Answer | None:
    """Blocks on the diagonal after sorting by hash, and uniformly sampled keys for the rest.

    HyperAttention (Han et al., 2023): queries and keys are sorted by the Hamming-sorted code of 7
    random hyperplanes and attend exactly within equal blocks; a sample of keys, each of which
    stands for m / s of them, estimates what lies outside. Blocks and sample are of equal size.
    """
    head = case.head
    generator = torch.Generator().manual_seed(seed)
    hashing = PLANES * head.d * (head.n + head.m) + sort_work(head.n) + sort_work(head.m)
    count = int((budget - hashing / case.exact_work) * head.m)
    if count < 2 and budget < 1:
        return None
    block, sample = (head.m, 0) if budget >= 1 else (count - count // 2, count // 2)
    planes = torch.randn(head.d, PLANES, generator=generator)
    blocks = math.ceil(head.m / block)
    own = _place(head.key, planes) // block
    mine = _place(head.query, planes)[case.rows] * blocks // head.n
    same = own.unsqueeze(0) == mine.unsqueeze(1)
    drawn = torch.randint(head.m, (sample,), generator=generator)
    rest = only(case.scores[:, drawn], ~same[:, drawn]) + math.log(head.m / max(1, sample))
    scores = torch.cat([only(case.scores, same), rest], 1)
    output = attend(scores, torch.cat([head.value, head.value[drawn]]))
    cost = (block + sample) / head.m + (0.0 if budget >= 1 else hashing / case.exact_work)
    return Answer(output, cost, block + sample, f"block {block}, sample {sample}")


def _place(x: Tensor, planes: Tensor) -> Tensor:
    """The place of each token in the order of its hash."""
    bits = (x @ planes > 0).long()
    code = (bits << torch.arange(planes.shape[1])).sum(1)
    order = _gray_rank(code, planes.shape[1]).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(x))
    return place


def _gray_rank(code: Tensor, bits: int) -> Tensor:
    """Where a code stands in the Gray sequence, whose neighbours differ in one bit."""
    rank, shift = code.clone(), 1
    while shift < bits:
        rank ^= rank >> shift
        shift *= 2
    return rank
