"""Lists of exact and tilted keys: what a block of similar queries attends to.

Keys k_j, of values v_j and log-weights b_j, are sorted into leaves of L similar keys, queries q_i
into cells of B similar queries. For a cell of mean query m a leaf acts as one tilted key:

    t_j = scale <m, k_j> + b_j    w = softmax t    kt = sum_j w_j k_j    vt = sum_j w_j v_j
    lt = logsumexp t - scale <m, kt> + log(1 + s / 2)    s = scale^2 variance spread

with variance = mean_i |q_i - m|^2 / d and spread the mean of |k_j - mean|^2 over the leaf: s
estimates the variance of the scores between them. By Jensen's inequality the weight that is exact
for m is too small for all other queries. Leaves whose `importance` exceeds the price are open:
their keys are attended to exactly. In causal attention both are sorted within windows of W
positions: a query attends to its own window exactly and to the leaves of earlier windows through
the list of its cell.

Tables and lists are constants of gradients, tilts are differentiable functions of m, keys, values
and log-weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..problem.problem import Head
from .sorting import head_permutation, nearest, window_length


@dataclass(frozen=True)
class ListSettings:
    """Sizes and the price of lists."""

    # the error-cost multiplier: a cell opens a leaf that costs its rows, as a tilted key, more than
    # this squared relative error (estimated by `importance`)
    price: float
    block: int  # B: queries of a cell
    leaf: int  # L: keys of a leaf
    window: int = 0  # W: positions of a causal window; 0: not causal
    strict: bool | None = False  # causal: cells come from the window before, so that no output
    # depends on a later token; None: exactly when gradients are recorded

    def __str__(self) -> str:
        text = f"blocks of {self.block}, leaves of {self.leaf}"
        if self.window:
            how = {None: "strict with gradients", True: "strict", False: "not strict"}[self.strict]
            text += f", windows of {self.window} ({how})"
        return text + f", price {self.price:.2g}"

    @property
    def cells(self) -> int:
        """Cells of a window; 1 where there are no windows."""
        return self.window // self.block if self.window else 1

    @property
    def tile(self) -> int:
        """Rows that are attended together."""
        return max(1, self.block // 2) if self.strict else self.block


SCORED_MEMBERS = 32  # of a cell, at even strides: their coarse scores decide which leaves open


class Tables(NamedTuple):
    """Sorted keys of a head, cells of queries, and tiles of rows that share a cell's list."""

    slots: Tensor  # [leaves, L]: which key, -1 for none
    key: Tensor  # [leaves, L, d]
    value: Tensor  # [leaves, L, dv]
    weight: Tensor | None  # [leaves, L]: log-weights; None: all keys are real and weigh 1
    spread: Tensor  # [leaves]: variance of the keys of a leaf, sum over coordinates
    members: Tensor  # [cells, B]: queries that a cell is made of, -1 for none
    mean: Tensor  # [cells, d]
    variance: Tensor  # [cells]: of a cell's queries, mean over coordinates
    visible: Tensor  # [cells]: how many leaves, the first ones, a cell attends to
    tiles: Tensor  # [tiles, T]: rows, -1 for none
    cell: Tensor  # [tiles]: of each tile; any of its window for a tile without rows


class Tilts(NamedTuple):
    """Tilted keys: leaves as some cells attend to them."""

    key: Tensor  # [cells, leaves, d]
    value: Tensor  # [cells, leaves, dv]
    log_weight: Tensor  # [cells, leaves]: the score of q is scale <q, key> + log_weight
    variance: Tensor  # [cells, leaves]: s, of scale <q - mean, k - mean> over queries q of the cell
    # and keys k of the leaf, as if neither had a direction

    def of(self, cells: Tensor) -> Tilts:
        """Those of some cells."""
        return Tilts(*(x[cells] for x in self))


def tables(head: Head, settings: ListSettings) -> Tables:
    """The tables of a head, in the dtype of sums: tokens are sorted in their own dtype."""
    query, key, log_weight = head.query.detach(), head.key.detach(), head.key_log_weight
    hidden = None
    if settings.window:
        key = key[: head.n]  # no row attends to the others
    elif log_weight is not None:
        hidden = log_weight == -math.inf
    slots = _sorted(key, settings.leaf, settings.window, hidden)
    members = _sorted(query, settings.block, settings.window, None)
    cells = torch.arange(len(members), device=members.device)
    visible = visible_leaves(cells, len(slots), settings)
    if settings.strict:  # the cells of a window are made of the queries before it
        members = pad(members, (0, 0, settings.cells, -settings.cells), value=-1)
    member = rows_of(head, members)
    mean = member.sum(1) / (members >= 0).sum(1, keepdim=True).clamp(min=1)
    tiles, cell = members, cells
    if settings.strict:
        tiles, cell = (x[0] for x in tiles_by_centre(query[None], mean[None], settings)[:2])
    weight, padded = None, slots < 0
    if log_weight is not None or bool(padded.any()):
        weight = head.log_weights(head.dtype).detach()[slots.clamp(min=0)]
        weight = weight.masked_fill(padded, -math.inf)
    leaf_key, leaf_value = (taken(x, slots, head.dtype) for x in (key, head.value))
    return Tables(
        slots, leaf_key, leaf_value, weight, _variances(leaf_key, slots),
        members, mean, _variances(member, members) / head.dim, visible, tiles, cell,
    )  # fmt: skip


def visible_leaves(cells: Tensor, leaves: int, settings: ListSettings) -> Tensor:
    """How many leaves, the first ones, each cell attends to: those of earlier windows."""
    if not settings.window:
        return torch.full_like(cells, leaves)
    return (cells // settings.cells * (settings.window // settings.leaf)).clamp(max=leaves)


def window_ranges(visible: Sequence[int], cells: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of windows of some ``cells`` that attend to any leaf, from the ``visible`` leaves of
    each: of one window, or as many as have at most so many pairs of a cell and a leaf."""
    first = sum(not leaves for leaves in visible)  # the first ones
    while first < len(visible):
        last = first + 1
        while last < len(visible) and (last + 1 - first) * cells * visible[last] <= most:
            last += 1
        yield first, last
        first = last


def _sorted(x: Tensor, leaf: int, window: int, hidden: Tensor | None) -> Tensor:
    """Tokens sorted into leaves [leaves, L], -1 for none, within windows (0: all that are not
    ``hidden``)."""
    width = window or window_length(len(x), leaf)
    has_kernel = x.is_cuda and x.dtype != torch.float64 and 16 <= width <= 4096 and leaf >= 2
    if not has_kernel or find_spec("triton") is None:
        return head_permutation(x, leaf, hidden, window).view(-1, leaf)
    from ..cuda.lists.window_sorting import head_permutation as sort

    some = None if hidden is None else hidden[None]
    return sort(x[None].contiguous(), leaf, some, window).long().view(-1, leaf)


def taken(x: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens [..., dim] of x [tokens, dim] as constants; zeros for an index of -1."""
    part = x.detach()[index.clamp(min=0)].to(dtype)
    return part.masked_fill_((index < 0).unsqueeze(-1), 0.0)


def rows_of(head: Head, rows: Tensor) -> Tensor:
    """Queries of rows [cells, rows] in the dtype of sums."""
    return taken(head.query, rows, head.dtype)


def tiles_by_centre(query: Tensor, mean: Tensor, settings: ListSettings) -> tuple[Tensor, ...]:
    """Rows in tiles of the nearest of their window's cells [heads, cells, d]: rows [heads, tiles,
    T], -1 for none, the cell of each tile, the first tile and the number of tiles of each cell."""
    (heads, cells), n = mean.shape[:2], query.shape[1]
    width, each, size = settings.window, settings.cells, settings.tile
    windows, most = cells // each, width // size + each  # tiles of a window

    def numbers(count: int) -> Tensor:
        return torch.arange(count, device=query.device).expand(heads, -1).contiguous()

    padded = pad(query, (0, 0, 0, windows * width - n)).view(heads, windows, width, -1)
    cell = nearest(padded.to(mean), mean.view(heads, windows, each, -1))
    cell, row = cell.sort(dim=2, stable=True)
    window = numbers(windows).unsqueeze(2)
    cell, row = (cell + window * each).flatten(1), (row + window * width).flatten(1)
    begin = torch.searchsorted(cell, numbers(cells + 1))
    count = (begin.diff(dim=1) + size - 1) // size
    tiles = count.view(heads, windows, each)
    first = (tiles.cumsum(2) - tiles + window * most).flatten(1)
    slot = numbers(windows * width) + (first * size - begin[:, :-1]).gather(1, cell)
    rows = row.new_full((heads, windows * most * size), -1)
    rows = rows.scatter_(1, slot, row.masked_fill(row >= n, -1)).view(heads, -1, size)
    owner = torch.searchsorted(first, numbers(windows * most), right=True) - 1
    return rows, owner, first, count


def tilt(made: Tables, cells: slice | Tensor, leaves: int, scale: float) -> Tilts:
    """Tilted keys of the first ``leaves`` leaves for some cells."""
    key, value, mean = made.key[:leaves], made.value[:leaves], made.mean[cells]
    score = (key.flatten(0, 1) @ (scale * mean).T).unflatten(0, (leaves, -1))  # [leaves, L, cells]
    if made.weight is not None:
        score = score + made.weight[:leaves].unsqueeze(2)
    top = score.amax(1, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    share = weights_of(score - top)
    total = share.sum(1)  # [leaves, cells]
    inverse = (1 / torch.where(total > 0, total, 1.0)).unsqueeze(2)
    tilted, tilted_value = ((share.mT @ x) * inverse for x in (key, value))
    variance = scale**2 * made.variance[cells].unsqueeze(1) * made.spread[:leaves]
    log_weight = total.log() + top.squeeze(1) - scale * (mean * tilted).sum(2)
    log_weight = log_weight.T + (variance / 2).log1p()
    hidden = torch.arange(leaves, device=score.device) >= made.visible[cells].unsqueeze(1)
    log_weight = log_weight.masked_fill(hidden, -math.inf)
    return Tilts(tilted.transpose(0, 1), tilted_value.transpose(0, 1), log_weight, variance)


def weights_of(score: Tensor) -> Tensor:
    """exp, in place, of scores whose largest is 0. Weights far below rounding are 0: they and
    their squares would be subnormal numbers, with which a CPU computes a hundred times slower."""
    least = 1e-20 if score.dtype == torch.float64 else 1e-10
    weight = score.exp_()
    return torch.threshold_(weight, least, 0.0)


def deviations(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [..., size, d] less their mean, of those that are real, and how many these are,
    [..., 1, 1]; an index of -1 is no token, has zeros and keeps them."""
    real = (index >= 0).unsqueeze(-1)
    count = real.sum(-2, keepdim=True).clamp(min=1)
    return (x - x.sum(-2, keepdim=True) / count) * real, count


def _variances(x: Tensor, index: Tensor) -> Tensor:
    """Mean squared distance of tokens [..., size, d] from their mean, of those that are real."""
    away, count = deviations(x, index)
    return away.square().sum(-1).sum(-1) / count[..., 0, 0]


def importance(weight: Tensor, members: Tensor, inner: Tensor) -> Tensor:
    """Estimated squared error of leaves as tilted keys, relative to the output, [cells, leaves]:
    the mean squared share of a leaf in the attention of some members to all leaves, times the
    variance of scores within it. ``weight`` [cells, B, leaves] may have any units. (The keys of
    their own window do not enter: those of later members are ahead of earlier ones.)"""
    stride = max(1, members.shape[1] // SCORED_MEMBERS)
    weight, members = weight[:, ::stride], members[:, ::stride]
    total = weight.sum(2)
    real = (members >= 0) & (total > 0)
    factor = torch.where(real, total, math.inf).square().reciprocal()
    count = real.sum(1, keepdim=True).clamp(min=1)
    return (factor.unsqueeze(1) @ weight.square()).squeeze(1) / count * inner
