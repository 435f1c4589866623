"""Baselines that compute the blocks of the score matrix that look largest.

Blocks are of neighbouring tokens, as they come: that is what these methods do.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .common import Answer, Case, Segments, attend, only, sort_work

LARGEST, SMALLEST = 64, 16
FEW = 4  # blocks a query should at least see
STRIDES = (8, 16, 32, 64, 128)
XATTENTION_BLOCK = 128
SCORING_SHARE = 1 / 3  # of the budget, at most, for the scores of blocks
MASS_STEPS = 30


def top_blocks(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention in the blocks whose mean query and mean key score highest, nothing else.

    The block-sparse pattern of MInference (Jiang et al., 2024): tokens are pooled in blocks of
    64, and every block of queries keeps the same number of blocks of keys.
    """
    head, size = case.head, _block_size(budget * case.head.m)
    rows, keys = (Segments.of_size(x, size) for x in (head.n, head.m))
    score = rows.mean(head.query) @ keys.mean(head.key).T * head.scale
    work = _pooling(case, rows, keys) + sort_work(keys.count, rows.count)
    kept = min(keys.count, int((budget - work / case.exact_work) * head.m / keys.size + 1e-9))
    if kept < 1 and budget < 1:
        return None
    if budget >= 1:
        kept = keys.count
    mask = _top(score, kept)[case.rows // rows.size]
    output = attend(only(case.scores, keys.spread(mask)), head.value)
    used = min(head.m, kept * keys.size)
    cost = used / head.m + work / case.exact_work
    return Answer(output, cost, used, f"{kept} of {keys.count} blocks of {keys.size}")


def antidiagonals(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention in the blocks whose strided antidiagonals weigh most, nothing else.

    XAttention (Xu et al., 2025): mean scores along antidiagonals of a stride stand for the block;
    after a softmax every block of queries keeps blocks up to the same share of the mass. The
    stride is the finest whose scores take no more than a third of the budget.
    """
    head = case.head
    stride = _stride(case, budget)
    if stride is None:
        return None
    size = max(stride, min(XATTENTION_BLOCK, _block_size(budget * head.m)))
    rows, keys = (Segments.of_size(x, size) for x in (head.n, head.m))
    mass = _antidiagonal_mass(case, stride, rows, keys)
    work = head.n * head.m * head.d / stride + sort_work(keys.count, rows.count)
    affordable = (budget - work / case.exact_work) * rows.count * head.m / keys.size
    if budget >= 1:
        affordable = rows.count * keys.count
    mask = _by_mass(mass, affordable)
    if mask is None:
        return None
    output = attend(only(case.scores, keys.spread(mask[case.rows // rows.size])), head.value)
    share = float((mask * keys.lengths()).sum()) / (rows.count * head.m)
    cost = share + work / case.exact_work
    return Answer(output, cost, share * head.m, f"blocks of {size}, stride {stride}")


def centroids(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention in the top blocks; every other block is its mean key and mean value.

    PISA (Li et al., 2026), with the zeroth order of its expansion around the mean key of each
    fixed block. About half of the budget goes to the means.
    """
    head = case.head
    size = 2 ** math.ceil(math.log2(max(SMALLEST, min(2 / budget, head.m))))
    rows, keys = (Segments.of_size(x, size) for x in (head.n, head.m))
    centre, mean = keys.mean(head.key), keys.mean(head.value)
    score = rows.mean(head.query) @ centre.T * head.scale
    work = _pooling(case, rows, keys) + sort_work(keys.count, rows.count) + head.m * head.dv
    left = budget - work / case.exact_work - keys.count / head.m
    kept = min(keys.count, int(left * head.m / (keys.size - 1) + 1e-9)) if size > 1 else 0
    if left < 0 and budget < 1:
        return None
    if budget >= 1:
        kept = keys.count
    mask = _top(score, kept)[case.rows // rows.size]
    coarse = case.query @ centre.T * head.scale + keys.lengths().log()
    both = torch.cat([only(case.scores, keys.spread(mask)), only(coarse, ~mask)], 1)
    output = attend(both, torch.cat([head.value, mean]))
    used = min(head.m, kept * keys.size) + keys.count - kept
    cost = used / head.m + work / case.exact_work
    return Answer(output, cost, used, f"{kept} of {keys.count} blocks of {keys.size}, rest means")


def sorted_centroids(case: Case, budget: float, seed: int) -> Answer | None:
    """`centroids` of tokens that were sorted first, so that blocks hold what is alike.

    Not a published method but the natural next step: queries and keys are each sorted by median
    splits along their widest coordinate, and the sorting is paid for.
    """
    head = case.head
    levels = max(0, math.ceil(math.log2(head.m / SMALLEST)))
    work = levels * (head.n + head.m) * (head.d + math.log2(head.m)) / case.exact_work
    if work >= budget:
        return None
    query_order, key_order = (_median_splits(x, levels) for x in (head.query, head.key))
    place = torch.empty_like(query_order)
    place[query_order] = torch.arange(head.n)
    moved = replace(
        head,
        query=head.query[query_order],
        key=head.key[key_order],
        value=head.value[key_order],
    )
    answer = centroids(Case(moved, place[case.rows]), budget - work, seed)
    return None if answer is None else replace(answer, cost=answer.cost + work)


def _block_size(keys: float) -> int:
    """64, or less where a query may see only a few keys."""
    size = LARGEST
    while size > SMALLEST and FEW * size > keys:
        size //= 2
    return size


def _pooling(case: Case, rows: Segments, keys: Segments) -> float:
    """Means of blocks and their scores."""
    head = case.head
    return head.d * (head.n + head.m + rows.count * keys.count)


def _top(score: Tensor, kept: int) -> Tensor:
    """A mask of the largest entries of each row."""
    mask = torch.zeros_like(score, dtype=torch.bool)
    return mask.scatter_(1, score.topk(kept, 1).indices, True)


def _stride(case: Case, budget: float) -> int | None:
    """The finest stride whose scores are affordable."""
    head = case.head
    longest = min(head.n, head.m)
    for stride in STRIDES:
        if head.d / (head.d + head.dv) / stride <= SCORING_SHARE * budget and stride <= longest:
            return stride
    return None


def _antidiagonal_mass(case: Case, stride: int, rows: Segments, keys: Segments) -> Tensor:
    """Softmax of mean antidiagonal scores, summed over blocks: [row blocks, key blocks]."""
    head = case.head
    query = _strided(head.query, stride)
    key = _strided(head.key, stride, backwards=True)
    owner = torch.arange(len(key)) * stride // keys.size
    total = query.new_zeros(rows.count, keys.count)
    step = max(1, 2**24 // len(key))
    for start in range(0, len(query), step):
        part = (query[start : start + step] @ key.T * (head.scale / stride)).softmax(1)
        mass = part.new_zeros(len(part), keys.count).index_add_(1, owner, part)
        block = torch.arange(start, start + len(part)) * stride // rows.size
        total.index_add_(0, block, mass)
    return total / total.sum(1, keepdim=True)


def _strided(x: Tensor, stride: int, backwards: bool = False) -> Tensor:
    """[n, d] → [n / stride, stride · d]; the last tokens are repeated to fill up."""
    missing = -len(x) % stride
    if missing:
        x = torch.cat([x, x[-1:].expand(missing, -1)])
    x = x.view(-1, stride, x.shape[1])
    return (x.flip(1) if backwards else x).flatten(1)


def _by_mass(mass: Tensor, affordable: float) -> Tensor | None:
    """Each row's largest entries up to a common share, the largest that is affordable."""
    if affordable >= mass.numel():
        return torch.ones_like(mass, dtype=torch.bool)
    ranked, order = mass.sort(1, descending=True)
    before = ranked.cumsum(1) - ranked  # mass that is kept already
    low, high = 0.0, 1.0
    for _ in range(MASS_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _count(before, middle) <= affordable else (low, middle)
    if _count(before, low) > affordable:
        return None
    kept = before < low
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _count(before: Tensor, share: float) -> int:
    """Entries that are kept; each row keeps its largest."""
    return int((before[:, 1:] < share).sum()) + len(before)


def _median_splits(x: Tensor, levels: int) -> Tensor:
    """An order of the rows of x [n, d]: halved again and again along the widest coordinate."""
    order = torch.arange(len(x)).unsqueeze(0)
    missing = -len(x) % (1 << levels)
    if missing:
        order = torch.cat([order, order[:, -1:].expand(1, missing)], 1)
    filler = torch.arange(order.shape[1]).unsqueeze(0) >= len(x)
    for _ in range(levels):
        parts = x[order]
        axis = parts.var(1).argmax(1)
        along = parts.gather(2, axis[:, None, None].expand(-1, parts.shape[1], 1)).squeeze(2)
        at = along.argsort(1)
        half = order.shape[1] // 2
        order, filler = (y.gather(1, at).view(-1, half) for y in (order, filler))
    return order.flatten()[~filler.flatten()]
