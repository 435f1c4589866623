"""Baselines that compute the blocks of the score matrix that look largest.

Blocks are of neighbouring tokens, as they come: that is what these methods do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import Answer, Case, Grid, Segments, attend, only, sort_work

LARGEST, SMALLEST = 64, 16
FEW = 4  # blocks a query should at least see
STRIDES = (8, 16, 32, 64, 128)
XATTENTION_BLOCK = 128
SCORING_SHARE = 1 / 3  # of the budget, at most, for the scores of blocks
MASS_STEPS = 30


def top_blocks(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention in the blocks whose mean query and mean key score highest, nothing else.

    The block-sparse pattern of MInference (Jiang et al., 2024): tokens are pooled in blocks of
    64, and every block of queries keeps the same number of blocks of keys, or all that it sees.
    """
    grid = Grid.of(case, _block_size(case.keys(budget)))
    work = grid.pooling() / case.exact_work
    left = math.inf if budget >= 1 else (budget - work) * case.pairs
    mask, kept = grid.top(grid.pooled(), grid.pairs, left)
    if kept < 1:
        return None
    output = attend(only(case.scores, grid.of_rows(mask)), case.head.value)
    sizes = f"{kept} of {grid.keys.count} blocks of {grid.keys.size}"
    return Answer(output, grid.share(mask) + work, sizes)


def oracle(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention of each row in the blocks of keys that hold most of its weight.

    No method: the weights are those of exact attention, and finding them is not counted. It
    shows what dropping the rest costs at best.
    """
    head = case.head
    keys = Segments.of_size(head.m, _block_size(case.keys(budget)), case.rows.device)
    kept = keys.count if budget >= 1 else int(case.keys(budget) / keys.size)
    if kept < 1:
        return None
    weight = case.scores.softmax(1)
    mass = weight.new_zeros(len(weight), keys.count).index_add_(1, keys.index(), weight)
    mask = torch.zeros_like(mass, dtype=torch.bool)
    mask.scatter_(1, mass.topk(kept, 1).indices, True)
    output = attend(only(case.scores, keys.spread(mask)), head.value)
    sizes = f"{kept} of {keys.count} blocks of {keys.size}"
    return Answer(output, case.share(kept * keys.size), sizes)


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
    size = max(stride, min(XATTENTION_BLOCK, _block_size(case.keys(budget))))
    grid = Grid.of(case, size)
    work = case.pairs * head.d / stride + sort_work(grid.keys.count, grid.rows.count)
    left = math.inf if budget >= 1 else (budget - work / case.exact_work) * case.pairs
    mask = _by_mass(_antidiagonal_mass(case, stride, grid), grid.pairs, left)
    if mask is None:
        return None
    output = attend(only(case.scores, grid.of_rows(mask)), head.value)
    cost = grid.share(mask) + work / case.exact_work
    return Answer(output, cost, f"blocks of {size}, stride {stride}")


def centroids(case: Case, budget: float, seed: int) -> Answer | None:
    """Exact attention in the top blocks; every other block is its mean key and mean value.

    PISA (Li et al., 2026), with the zeroth order of its expansion around the mean key of each
    fixed block. About half of the budget goes to the means. Causal: the block of the query's own
    place is exact, and blocks before it are means or exact.
    """
    head = case.head
    grid = Grid.of(case, 2 ** math.ceil(math.log2(max(SMALLEST, min(2 / budget, head.m)))))
    score = grid.pooled()
    closed = grid.rows.lengths().unsqueeze(1).expand_as(score)  # pairs of a query and a mean
    if head.is_causal:
        score.diagonal().fill_(math.inf)
        closed = closed.tril(-1)
    work = (grid.pooling() + head.m * head.dv) / case.exact_work
    coarse = float(closed.double().sum())
    left = math.inf if budget >= 1 else (budget - work) * case.pairs - coarse
    mask, kept = grid.top(score, grid.pairs - closed, left)
    if left < 0 or (head.is_causal and kept < 1):
        return None
    key, value = (grid.keys.mean(x) for x in (head.key, head.value))
    near, far = (x[case.rows // grid.rows.size] for x in (mask, ~mask & (closed > 0)))
    means = case.query @ key.T * head.scale + grid.keys.lengths().log()
    both = torch.cat([only(case.scores, grid.keys.spread(near)), only(means, far)], 1)
    output = attend(both, torch.cat([head.value, value]))
    saved = float((mask * closed).double().sum())
    cost = grid.share(mask) + (coarse - saved) / case.pairs + work
    sizes = f"{kept} of {grid.keys.count} blocks of {grid.keys.size}, rest means"
    return Answer(output, cost, sizes)


def _block_size(keys: float) -> int:
    """64, or less where a query may see only a few keys."""
    size = LARGEST
    while size > SMALLEST and FEW * size > keys:
        size //= 2
    return size


def _stride(case: Case, budget: float) -> int | None:
    """The finest stride whose scores are affordable."""
    head = case.head
    longest = min(head.n, head.m)
    for stride in STRIDES:
        if head.d / (head.d + head.dv) / stride <= SCORING_SHARE * budget and stride <= longest:
            return stride
    return None


def _antidiagonal_mass(case: Case, stride: int, grid: Grid) -> Tensor:
    """Softmax of mean antidiagonal scores, summed over blocks: [row blocks, key blocks]."""
    head, rows, keys = case.head, grid.rows, grid.keys
    query = _strided(head.query, stride)
    key = _strided(head.key, stride, backwards=True)
    at = torch.arange(len(key), device=key.device)
    total = query.new_zeros(rows.count, keys.count)
    step = max(1, 2**24 // len(key))
    for start in range(0, len(query), step):
        part = query[start : start + step] @ key.T * (head.scale / stride)
        mine = torch.arange(start, start + len(part), device=key.device)
        if head.is_causal:
            part.masked_fill_(at > mine.unsqueeze(1), -math.inf)
        mass = part.new_zeros(len(part), keys.count)
        mass.index_add_(1, at * stride // keys.size, part.softmax(1))
        total.index_add_(0, mine * stride // rows.size, mass)
    return total / total.sum(1, keepdim=True)


def _strided(x: Tensor, stride: int, backwards: bool = False) -> Tensor:
    """[n, d] → [n / stride, stride · d]; the last tokens are repeated to fill up."""
    missing = -len(x) % stride
    if missing:
        x = torch.cat([x, x[-1:].expand(missing, -1)])
    x = x.view(-1, stride, x.shape[1])
    return (x.flip(1) if backwards else x).flatten(1)


def _by_mass(mass: Tensor, pairs: Tensor, left: float) -> Tensor | None:
    """Each row's largest blocks up to a common share of the mass, the largest share whose pairs
    are at most ``left``; each row keeps its largest."""
    if left == math.inf:
        return torch.ones_like(mass, dtype=torch.bool)
    ranked, order = mass.sort(1, descending=True)
    before = ranked.cumsum(1) - ranked  # mass that is kept already
    needed = pairs.double().gather(1, order)

    def kept(share: float) -> Tensor:
        chosen = before < share
        chosen[:, 0] = True
        return chosen

    low, high = 0.0, 1.0
    if float((needed * kept(low)).sum()) > left:
        return None
    for _ in range(MASS_STEPS):
        middle = (low + high) / 2
        fits = float((needed * kept(middle)).sum()) <= left
        low, high = (middle, high) if fits else (low, middle)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, kept(low))
