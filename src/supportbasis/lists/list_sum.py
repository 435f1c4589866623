"""The list component: rows of a cell attend to open leaves exactly, to the others as tilted keys.

A few windows at a time, so that tilts stay within a workspace. Rows of a tile go through three
softmaxes, which are joined by their log-sum-exps: the keys of their own window (causal), the tilted
keys of closed leaves, and the keys of open leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..components import flash
from ..components.cotangent import Cotangent, Gradients
from ..components.exact_sum import softmax_rounding
from ..components.partial import Partial, merged
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff
from .tables import (
    ListSettings,
    Tables,
    Tilts,
    deviations,
    importance,
    rows_of,
    tables,
    tilt,
    weights_of,
    window_ranges,
)

ENTRIES = (2**22, 2**26)  # of the largest array at a time, on a CPU (in its caches) and a GPU
GATHERED = 2**22  # entries of keys that are copied at a time
Attended = tuple[Tensor, Tensor]  # output [..., rows, dv] and lse [..., rows]


@dataclass(frozen=True, eq=False)
class ListSum:
    """All rows with all keys, by lists."""

    settings: ListSettings

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        assert rows is None
        if not head.n or not head.m:
            return
        output, lse = list_attention(head, self.settings)
        den = (lse > -math.inf).to(lse.dtype)  # sums are in units of exp(lse)
        reach = abs(head.scale) * head.query_norms.max() * head.key_norms.max()
        noise = softmax_rounding(head, reach, head.m).clamp(max=1.0)
        total.add_(Partial(output, den, lse, den * noise.to(den)))

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        assert rows is None
        from .list_gradients import add_gradients

        if head.n and head.m:
            add_gradients(self.settings, total, cotangent, head)


def coarse_weights(query: Tensor, tilts: Tilts, scale: float) -> tuple[Tensor, Tensor]:
    """Weights of rows [cells, rows, d] with the tilted keys of their cell, [cells, rows, leaves],
    in units of exp(top), and top [cells, rows]."""
    score = torch.baddbmm(tilts.log_weight.unsqueeze(1), query, tilts.key.mT, alpha=scale)
    top = score.amax(2)
    top = torch.where(top > -math.inf, top, 0.0)
    return weights_of(score.sub_(top.unsqueeze(2))), top


class Group(NamedTuple):
    """Cells of some windows, rows of their tiles, tilted keys, and which leaves are open."""

    cells: slice
    rows: Tensor  # [tiles, T]; -1 for none
    cell: Tensor  # [tiles]: of each tile, counted from the first; any for a tile without rows
    tilts: Tilts
    open: Tensor  # [cells, leaves]
    coarse: tuple[Tensor, Tensor] | None  # of the members, where tiles are cells

    def of_tiles(self) -> tuple[Tilts, Tensor]:
        """Tilted keys and open leaves of the cell of each tile."""
        if self.coarse is not None:
            return self.tilts, self.open
        return self.tilts.of(self.cell), self.open[self.cell]


def list_attention(head: Head, settings: ListSettings) -> Attended:
    """Output [n, dv] and lse [n] of all rows in the dtype of sums."""
    made, (output, lse) = tables(head, settings), own_windows(head, settings.window)
    for group in groups(head, made, settings):
        at, part = group.rows, attend(head, made, group)
        output[at], lse[at] = merged(output[at], lse[at], *part)
    return output[:-1], lse[:-1]


def groups(head: Head, made: Tables, settings: ListSettings) -> Iterator[Group]:
    """Groups of consecutive windows, as many as the workspace allows, that attend to any leaf."""
    each, visible = settings.cells, made.visible[:: settings.cells].tolist()
    tiles, cell = (x.unflatten(0, (len(visible), -1)) for x in (made.tiles, made.cell))
    pairs = ENTRIES[head.query.is_cuda] // max(settings.block, settings.leaf)
    for first, last in window_ranges(visible, each, pairs):
        cells = slice(first * each, last * each)
        members, tilts = made.members[cells], tilt(made, cells, visible[last - 1], head.scale)
        coarse = coarse_weights(rows_of(head, members), tilts, head.scale)
        opened = importance(coarse[0], members, tilts.variance) > settings.price
        opened &= tilts.log_weight > -math.inf
        rows, owner = (x[first:last].flatten(0, 1) for x in (tiles, cell))
        known = None if settings.strict else coarse
        yield Group(cells, rows, owner - cells.start, tilts, opened, known)


def attend(head: Head, made: Tables, group: Group) -> Attended:
    """Rows of tiles [tiles, T] over the tilted keys and the open leaves of their cells."""
    query, (tilts, opened) = rows_of(head, group.rows), group.of_tiles()
    weight, top = group.coarse or coarse_weights(query, tilts, head.scale)
    closed = (~opened).to(head.dtype).unsqueeze(2)
    total = (weight @ closed).squeeze(2)
    output = weight @ (tilts.value * closed)
    output /= torch.where(total > 0, total, 1.0).unsqueeze(2)
    lse = total.log() + top
    for some, _, keys in open_leaves(made, opened):
        exact = attention(query[some], *keys, head.scale)
        output[some], lse[some] = merged(output[some], lse[some], *exact)
    return output, lse


def list_reach(head: Head, settings: ListSettings) -> float:
    """Upper bound of |q - m| times the diameter of a leaf, over a cell's rows and members q, its
    mean m and its closed leaves. (On a GPU over all visible leaves: kernels select with other
    roundings.)"""
    made, widest = tables(head, settings), 0.0
    apart, _ = deviations(made.key, made.slots)
    diameter = 2 * torch.linalg.vector_norm(apart, dim=2).amax(1)  # [leaves]
    for group in groups(head, made, settings):
        cell, mean = group.cell, made.mean[group.cells].unsqueeze(1)
        closed = group.tilts.log_weight > -math.inf
        closed = closed if head.query.is_cuda else closed & ~group.open
        leaf = (diameter[: closed.shape[1]] * closed).amax(1)[cell]
        for rows in (made.members[group.cells][cell], group.rows):
            away = torch.linalg.vector_norm(rows_of(head, rows) - mean[cell], dim=2)
            away = away.masked_fill(rows < 0, 0).amax(1)
            widest = max(widest, float((away * leaf).max()))
    return widest * (1 + 4 * gamma(head.dim + 8, product_roundoff(head.dtype)))


def row_risks(head: Head, settings: ListSettings, made: Tables | None = None) -> Tensor:
    """Estimated squared error of each row through its closed leaves, float64 [n]."""
    made = tables(head, settings) if made is None else made
    risk = torch.zeros(head.n + 1, dtype=torch.float64, device=head.query.device)  # last: row -1
    own = own_windows(head, settings.window)[1]
    for group in groups(head, made, settings):
        rows, (tilts, opened) = group.rows, group.of_tiles()
        weight, top = group.coarse or coarse_weights(rows_of(head, rows), tilts, head.scale)
        total = weight.sum(2) + (own[rows] - top).exp()
        inner = tilts.variance.masked_fill(opened, 0.0).unsqueeze(2)
        found = (weight.square() @ inner).squeeze(2) / total.square().clamp(min=1e-30)
        risk[rows] = found.double()
    return risk[:-1]


def open_leaves(
    made: Tables, opened: Tensor
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor | None]]]:
    """Groups of cells that open equally many leaves, so that no list is padded; long lists in
    several groups. Which cells [some], their leaves [some, leaves], and the keys, values [some,
    keys, ...] and log-weights [some, 1, keys] of these."""
    count, entries = opened.sum(1), max(made.key[0].numel(), made.value[0].numel())
    for length in count[count > 0].unique().tolist():
        members = (count == length).nonzero().squeeze(1)
        for some in members.split(max(1, GATHERED // (length * entries))):
            leaves = opened[some].nonzero()[:, 1].view(-1, length)
            key, value = (x[leaves].flatten(1, 2) for x in (made.key, made.value))
            weight = None if made.weight is None else made.weight[leaves].flatten(1).unsqueeze(1)
            yield some, leaves, (key, value, weight)


def own_windows(head: Head, width: int) -> Attended:
    """Every row over the keys of its own window that are not ahead of it, a few windows at a time,
    and a last row, -1, without keys; no row has any without windows. Keys have log-weights where
    some are hidden, missing or weigh anything else than 1."""
    output = head.query.new_zeros(head.n + 1, head.value_dim, dtype=head.dtype)
    lse = output.new_full((head.n + 1,), -math.inf)
    if not width:
        return output, lse
    windows, keys = -(-head.n // width), min(head.n, head.m)
    query, key, value = (
        pad(x.detach().to(head.dtype), (0, 0, 0, windows * width - len(x))).view(windows, width, -1)
        for x in (head.query, head.key[:keys], head.value[:keys])
    )
    bias = None
    if head.key_log_weight is not None or keys < head.n:
        bias = head.log_weights(head.dtype)[:keys].detach()
        bias = pad(bias, (0, windows * width - keys), value=-math.inf).view(windows, 1, width)
    step, parts = max(1, ENTRIES[head.query.is_cuda] // width**2), []
    for first in range(0, windows, step):
        at = slice(first, first + step)
        weight = None if bias is None else bias[at]
        parts.append(attention(query[at], key[at], value[at], weight, head.scale, is_causal=True))
    for whole, column in zip((output, lse), zip(*parts, strict=True), strict=True):
        whole[:-1] = torch.cat(column).flatten(0, 1)[: head.n]
    return output, lse


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float,
    is_causal: bool = False,
) -> Attended:  # fmt: skip
    """Softmax attention of batches of rows [batch, rows, d] over keys of their own, with
    log-weights [batch, 1, keys]; a row without keys has zeros and lse -inf."""
    if flash.AVAILABLE and query.is_cpu:
        q, k, v = (x.unsqueeze(0) for x in (query, key, value))
        mask = None if bias is None else bias.unsqueeze(0)
        output, lse = flash.attend(q, k, v, mask, scale, is_causal)
        return output[0], lse[0].to(query.dtype)
    score = scale * (query @ key.mT)
    score = score if bias is None else score + bias
    if is_causal:
        score = score + torch.full_like(score[0], -math.inf).triu_(1)
    lse = score.logsumexp(2)
    weight = (score - torch.where(lse > -math.inf, lse, 0.0).unsqueeze(2)).exp_()
    return weight @ value, lse
