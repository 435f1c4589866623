"""Lists of exact and tilted keys: what a block of similar queries attends to.

Keys are sorted into leaves of L similar keys, queries into cells of B similar queries. For a cell
with mean query m the keys of a leaf act as one tilted key: with t_j = scale <m, k_j> + b_j and w =
softmax(t), its key is sum_j w_j k_j and its value sum_j w_j v_j. Its weight is exact for m, times
1 + s / 2, with s the estimated variance of the scores of the cell's queries with the leaf's keys
about it: by Jensen's inequality the weight that is exact for m is too small for all other queries.
Important leaves of a cell are open: their keys are attended to exactly. In causal attention both
are sorted within windows of W positions: a query attends to its own window exactly and to the
leaves of earlier windows through the list of its cell.

Everything here is for all heads at once, [heads, ...]; keys may have fewer heads than queries.
Tables and lists are constants of gradients, tilts are differentiable functions of m, keys, values
and log-weights b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .sorting import head_permutation, nearest, window_length, window_permutation


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
    """Sorted keys, cells of queries, and tiles of rows that share a cell's list."""

    slots: Tensor  # [key heads, leaves * L]: which key, -1 for none
    key: Tensor  # [key heads, leaves, L, d]
    value: Tensor  # [key heads, leaves, L, dv]
    weight: Tensor | None  # [heads, leaves, L]: log-weights; None: all keys are real and weigh 1
    spread: Tensor  # [key heads, leaves]: variance of the keys of a leaf, sum over coordinates
    members: Tensor  # [heads, cells, B]: queries that a cell is made of, -1 for none
    mean: Tensor  # [heads, cells, d]
    variance: Tensor  # [heads, cells]: of a cell's queries, mean over coordinates
    visible: Tensor  # [cells]: how many leaves, the first ones, a cell attends to
    tiles: Tensor  # [heads, tiles, T]: rows, -1 for none
    first_tile: Tensor  # [heads, cells]: tiles of a cell lie together
    tile_count: Tensor  # [heads, cells]


class Tilts(NamedTuple):
    """Tilted keys: leaves as some cells attend to them."""

    key: Tensor  # [heads, cells, leaves, d]
    value: Tensor  # [heads, cells, leaves, dv]
    log_weight: Tensor  # [heads, cells, leaves]: the score of q is scale <q, key> + log_weight


def tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    settings: ListSettings,
    dtype: torch.dtype,
) -> Tables:
    """Tables of tokens [heads, tokens, dim] and key log-weights [heads, m], in the dtype of sums:
    tokens are sorted in their own dtype."""
    n, keys = query.shape[1], key.shape[1]
    if settings.window:
        keys = min(n, keys)
        slots = _by_window(key, keys, settings.window, settings.leaf)
        members = _by_window(query, n, settings.window, settings.block)
    else:
        hidden = None if weight is None else (weight == -math.inf)
        slots = _by_head(key, settings.leaf, hidden, len(query) // len(key))
        members = _by_head(query, settings.block, None, 1)
    members = members.unflatten(1, (-1, settings.block))
    leaves = slots.shape[1] // settings.leaf
    cells = torch.arange(members.shape[1], device=query.device)
    visible = visible_leaves(cells, leaves, settings)
    if settings.strict:
        none = members.new_full((len(members), settings.cells, settings.block), -1)
        members = torch.cat([none, members[:, : -settings.cells]], 1)
    mean, variance = cell_means(query, members, dtype)
    if settings.strict:
        tiled = tiles_by_centre(query, mean, settings)
    else:
        one = torch.ones_like(members[..., 0])
        tiled = (members, cells.expand_as(one), one)
    leaf_key = taken(key, slots).unflatten(1, (leaves, -1)).to(dtype)
    return Tables(
        slots,
        leaf_key,
        taken(value, slots).unflatten(1, (leaves, -1)).to(dtype),
        _leaf_weights(weight, slots, leaves, len(query) // len(key)),
        _variances(leaf_key, slots.unflatten(1, (leaves, -1))),
        members,
        mean,
        variance,
        visible,
        *tiled,
    )


def visible_leaves(cells: Tensor, leaves: int, settings: ListSettings) -> Tensor:
    """How many leaves, the first ones, each cell attends to: those of earlier windows."""
    if not settings.window:
        return torch.full_like(cells, leaves)
    return (cells // settings.cells * (settings.window // settings.leaf)).clamp(max=leaves)


def _by_window(x: Tensor, count: int, width: int, leaf: int) -> Tensor:
    """The first ``count`` tokens, sorted within windows: [heads, slots], -1 for none."""
    if _has_kernel(x, width, leaf):
        from ..cuda.lists import window_sorting as sorting

        return sorting.window_permutation(x.contiguous(), width, leaf, count).long()
    heads, windows = len(x), -(-count // width)
    padded = pad(x[:, :count], (0, 0, 0, windows * width - count))
    first = torch.arange(windows, device=x.device).mul_(width).repeat(heads)
    real = None if count == windows * width else (count - first).clamp(max=width)
    at = window_permutation(padded.reshape(heads * windows, width, -1), leaf, real)
    at = at + first.unsqueeze(1)
    return torch.where(at < count, at, -1).view(heads, windows * width)


def _by_head(x: Tensor, leaf: int, hidden: Tensor | None, group: int) -> Tensor:
    """All tokens, sorted: [heads, slots], -1 for none and for keys that are masked in all of the
    ``group`` heads that share them."""
    if hidden is not None:
        hidden = hidden.unflatten(0, (-1, group)).all(1)
    if _has_kernel(x, window_length(x.shape[1], leaf), leaf):
        from ..cuda.lists import window_sorting as sorting

        return sorting.head_permutation(x.contiguous(), leaf, x.shape[1], hidden).long()
    return torch.stack(
        [head_permutation(x[i], leaf, None if hidden is None else hidden[i]) for i in range(len(x))]
    )


def _has_kernel(x: Tensor, width: int, leaf: int) -> bool:
    """Whether a kernel sorts such tokens: they have to be on a GPU."""
    return (
        x.is_cuda and x.dtype != torch.float64 and 16 <= width <= 4096 and leaf >= 2
        and find_spec("triton") is not None
    )  # fmt: skip


def taken(x: Tensor, index: Tensor) -> Tensor:
    """Tokens [heads, ..., dim] of x [heads, tokens, dim]; zeros for an index of -1."""
    heads, tokens = x.shape[:2]
    first = torch.arange(heads, device=x.device).mul_(tokens).view(-1, *[1] * (index.dim() - 1))
    part = x.flatten(0, 1)[(index.clamp(min=0) + first).flatten()].view(*index.shape, -1)
    return part.masked_fill_((index < 0).unsqueeze(-1), 0.0)


def _leaf_weights(weight: Tensor | None, slots: Tensor, leaves: int, group: int) -> Tensor | None:
    if weight is None:
        weight = torch.zeros((), device=slots.device).expand(*slots.shape)
        padded = slots < 0
        if slots.device.type == "cpu" and not bool(padded.any()):
            return None
    else:
        slots = slots.repeat_interleave(group, 0)
        padded = slots < 0
        weight = weight.gather(1, slots.clamp(min=0))
    return weight.masked_fill(padded, -math.inf).unflatten(1, (leaves, -1))


def cell_means(query: Tensor, members: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean query of each cell, [heads, cells, d], and the variance of its queries, the mean over
    coordinates, [heads, cells]; zeros where it is empty."""
    part = taken(query, members).to(dtype)
    mean = part.sum(2) / (members >= 0).sum(2, keepdim=True).clamp(min=1)
    return mean, _variances(part, members) / max(1, query.shape[-1])


def tiles_by_centre(
    query: Tensor, mean: Tensor, settings: ListSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in tiles of the nearest of their window's cells [heads, cells, d]: rows [heads, tiles,
    T], -1 for none, and the first tile and the number of tiles of each cell."""
    (heads, cells), n = mean.shape[:2], query.shape[1]
    width, each, size = settings.window, settings.cells, settings.tile
    windows = cells // each
    padded = pad(query, (0, 0, 0, windows * width - n)).view(heads, windows, width, -1)
    cell = nearest(padded.to(mean), mean.view(heads, windows, each, -1))
    position = torch.arange(windows * width, device=query.device).view(windows, width)
    cell = torch.where(position < n, cell, each)
    held = cell.new_zeros(heads, windows, each + 1)
    held = held.scatter_add_(2, cell, torch.ones_like(cell))[..., :each]
    count = (held + size - 1) // size
    first = count.cumsum(2) - count
    at = cell.argsort(dim=2, stable=True)
    cell = cell.gather(2, at)
    rank = torch.arange(width, device=query.device) - pad(held.cumsum(2) - held, (0, 1)).gather(
        2, cell
    )
    each_window = width // size + each  # tiles
    slot = pad(first, (0, 1)).gather(2, cell) * size + rank
    slot = torch.where(cell < each, slot, each_window * size)
    rows = torch.where(position < n, position, -1).expand(heads, -1, -1).gather(2, at)
    tiles = rows.new_full((heads, windows, each_window * size + 1), -1).scatter_(2, slot, rows)
    tiles = tiles[..., :-1].reshape(heads, windows * each_window, size)
    first = first + torch.arange(windows, device=query.device).view(-1, 1) * each_window
    return tiles, first.flatten(1), count.flatten(1)


def tilt(made: Tables, cells: slice | Tensor, leaves: int, scale: float) -> Tilts:
    """Tilted keys of the first ``leaves`` leaves for some cells."""
    group = len(made.mean) // len(made.key)
    heads, dtype = len(made.mean), made.mean.dtype
    key, value = (x[:, :leaves].to(dtype) for x in (made.key, made.value))
    mean = made.mean[:, cells].unflatten(0, (-1, group)).flatten(1, 2)  # [key heads, cells, d]
    score = (key.flatten(1, 2) @ (scale * mean).mT).unflatten(1, (leaves, -1))
    if made.weight is not None:  # [key heads, leaves, L, group * cells]
        weight = made.weight[:, :leaves].to(dtype).unflatten(0, (-1, group)).movedim(1, 3)
        score = score + weight.repeat_interleave(score.shape[3] // group, 3)
    top = score.amax(2, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    share = weights_of(score - top)
    total = share.sum(2).unsqueeze(3)  # [key heads, leaves, group * cells, 1]
    inverse = 1 / torch.where(total > 0, total, 1.0)
    tilted, tilted_value = (share.mT @ key) * inverse, (share.mT @ value) * inverse
    log_weight = (total.log().squeeze(3) + top.squeeze(2)) - scale * (
        mean.unsqueeze(1) * tilted
    ).sum(3)
    hidden = torch.arange(leaves, device=score.device) >= made.visible[cells].unsqueeze(1)

    def by_head(x: Tensor) -> Tensor:
        """[key heads, leaves, group * cells, ...] -> [heads, cells, leaves, ...], a view."""
        x = x.unflatten(2, (group, -1)).movedim(1, 3)
        return x.reshape(heads, *x.shape[2:]) if len(x) > 1 or group > 1 else x[0]

    curvature = (score_variances(made, cells, scale)[..., :leaves] / 2).log1p()
    log_weight = (by_head(log_weight) + curvature).masked_fill(hidden, -math.inf)
    return Tilts(by_head(tilted), by_head(tilted_value), log_weight)


def score_variances(made: Tables, cells: slice | Tensor, scale: float) -> Tensor:
    """Estimated variance of scale <q - mean, k - mean> over queries q of a cell and keys k of a
    leaf, as if neither had a direction: [heads, cells, leaves]."""
    variance = made.variance[:, cells]
    spread = made.spread.to(variance).repeat_interleave(len(variance) // len(made.spread), 0)
    return scale**2 * variance.unsqueeze(2) * spread.unsqueeze(1)


def weights_of(score: Tensor) -> Tensor:
    """exp, in place, of scores whose largest is 0. Weights far below rounding are 0: they and
    their squares would be subnormal numbers, with which a CPU computes a hundred times slower."""
    least = 1e-20 if score.dtype == torch.float64 else 1e-10
    weight = score.exp_()
    return torch.threshold_(weight, least, 0.0)


def _variances(x: Tensor, index: Tensor) -> Tensor:
    """Mean squared distance of tokens [..., size, d] from their mean, of those that are real."""
    real = (index >= 0).to(x.dtype)
    count = real.sum(-1).clamp(min=1)
    away = x - (x.sum(-2) / count.unsqueeze(-1)).unsqueeze(-2)
    return (away.square().sum(-1) * real).sum(-1) / count


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
