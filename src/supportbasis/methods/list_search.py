"""Searches for the price of lists: their error at all prices at once, on sampled rows.

`ListSettings.price` is the error-cost multiplier; tilts do not depend on it. For a sampled row,
every leaf has its exact sums and those of its tilted key; leaves open by descending importance, so
one running sum over the differences gives the row's output at every price.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..accuracy.sampling import RowSample
from ..lists.list_sum import ENTRIES, coarse_weights, own_windows, row_risks
from ..lists.tables import ListSettings, importance, rows_of, tables, tilt
from ..plans import ListHead
from ..plans.cost import list_work
from ..problem.problem import Head

# From so many tokens on: queries of a block, keys of a leaf. Tilts and their attention take
# n^2 (1 / block + 1 / leaf), so both grow with the length.
SIZES = {
    0: (32, 16), 8192: (64, 32), 16384: (128, 64), 98304: (256, 64), 524288: (512, 128),
    786432: (512, 256),
}  # fmt: skip
CAUSAL_SIZES = {
    0: (32, 16), 8192: (64, 32), 16384: (128, 64), 262144: (256, 128), 786432: (512, 128),
}  # fmt: skip
WIDE_BLOCK = 512
WINDOWS, LEAST_WINDOW, LARGEST_WINDOW = 32, 512, 2048  # windows of a causal head; their positions
VERY_LONG = 262144  # tokens from which on windows may have twice as many
FIRST_ROWS, ROWS = 192, 512  # rows on which errors are measured: to find a price, to check it
ROUNDS = 4  # of checks, each at a lower price, after which a head is exact
PRICES = tuple(math.exp(x / 4) for x in range(-184, 41))
STEPS = 32  # between two of them
WIDE_PRECISION = 1e-5  # tolerance below which errors are measured in float64


def settings_for(head: Head, block: int | None, strict: bool | None) -> ListSettings:
    """Sizes for a head, at a price of 0."""
    sizes = CAUSAL_SIZES if head.is_causal else SIZES
    chosen = max(pair for tokens, pair in sizes.items() if tokens <= head.n)
    if block is not None:
        nearest = max(size for size, _ in sizes.values() if size <= max(32, block))
        leaf = min(leaf for size, leaf in sizes.values() if size == nearest)
        chosen = (block, max(1, min(leaf, block // 2)))
    window = 0
    if head.is_causal:  # a power of two near n / 32
        largest = LARGEST_WINDOW * (2 if head.n >= VERY_LONG else 1)
        wish = min(largest, max(LEAST_WINDOW, head.n // WINDOWS))
        window = max(chosen[0], 1 << (wish.bit_length() - 1))
    return ListSettings(0.0, *chosen, window, strict and bool(window))


def fastest_lists(head: Head, block: int | None = None) -> float:
    """Predicted speedup of lists without open leaves."""
    return list_work(head, settings_for(head, block, False), 0.0).speedup(head)


class Curves(NamedTuple):
    """Errors of sampled rows, and lengths of lists, at all prices."""

    prices: Sequence[float]  # ascending
    sample: RowSample
    squared: Tensor  # float64 [prices, rows]: squared errors
    size: Tensor  # float64 [rows]: squared sizes of exact outputs
    opened: Tensor  # float64 [prices]: open leaves of a row, mean over all rows

    def error(self, at: int) -> tuple[float, float]:
        """Relative Frobenius error at a price, and its upper limit."""
        return self.sample.frobenius_limit(self.squared[at], self.size)

    def highest(self, tolerance: float, most: int) -> int:
        """Index of the highest price, up to ``most``, whose error at its upper limit is within
        tolerance; -1: none. The error grows with the price."""
        return bisect_left(range(most + 1), True, key=lambda at: self.error(at)[1] > tolerance) - 1


class ListSearch:
    """Plans of one head at any price.

    A first, small sample finds a price. It is checked on another sample, which contains almost
    surely the rows with much weight on leaves that are closed at this price."""

    def __init__(self, head: Head, settings: ListSettings, strict: bool | None, seed: int):
        self.head, self.settings, self.seed = head, settings, seed
        self.strict = strict  # as the caller gave it; in the settings it is settled
        self.made = made = tables(head, settings)
        self.own = own_windows(head, settings.window)
        self.cell = made.cell.new_empty(head.n + 1)  # of each row; last: of row -1
        self.cell[made.tiles] = made.cell.unsqueeze(1).expand_as(made.tiles)

    @staticmethod
    def of(
        head: Head, block: int | None, strict: bool | None, seed: int, tolerance: float
    ) -> ListSearch | str:
        """The search, or why there can be none."""
        if not head.normalise:
            return "kernel sums have no lists"
        settings = settings_for(head, block, head.requires_grad if strict is None else strict)
        if min(head.n, head.m) <= max(settings.window, 2 * settings.block):
            return "there are too few tokens for lists"
        if tolerance < WIDE_PRECISION:
            head = replace(head, precision=torch.float64)
        given = strict if settings.window else False
        return ListSearch(head, settings, given, seed)

    def affordable(self, budget: float) -> ListHead | None:
        """The plan of the lowest price whose cost is within the budget: first on a grid of prices,
        then between two of them."""
        at = self._cheapest(self._first, budget)
        if at is None:
            return None
        low, high = PRICES[max(0, at - 1)], PRICES[at]
        between = [low * (high / low) ** (i / STEPS) for i in range(STEPS + 1)]
        higher = PRICES[at + 1 :]  # new rows may have longer lists than those had
        curves = self._curves((*between, *higher), high)
        at = self._cheapest(curves, budget)
        return None if at is None else self._plan(at, curves)

    def with_open_leaves(self, shares: Sequence[float]) -> list[ListHead]:
        """Plans of ascending cost: about these shares of the leaves that rows see are open."""
        opened = self._first.opened  # at the lowest price almost every leaf is open
        found = {int((opened - share * opened[0]).abs().argmin()) for share in shares}
        return [self._plan(at, self._first) for at in sorted(found, reverse=True)]

    def at(self, price: float) -> ListHead:
        return self._plan(0, self._curves([price], price))

    def _cheapest(self, curves: Curves, budget: float) -> int | None:
        """The lowest price within the budget; None: the highest is not."""
        count = len(curves.prices)
        at = bisect_left(range(count), True, key=lambda at: self._plan(at, curves).cost <= budget)
        return at if at < count else None

    def likely(self, tolerance: float) -> ListHead | None:
        """The plan within a tolerance by the first sample alone."""
        at = self._first.highest(tolerance, len(PRICES) - 1)
        return None if at < 0 else self._plan(at, self._first)

    def within(self, tolerance: float, speedup: float = 0.0) -> ListHead | None:
        """The plan of the highest price whose error, at its upper limit, is within tolerance; None
        where it is not cheaper than exact attention or not predicted to be faster than that."""
        curves = self._first
        at = curves.highest(tolerance, len(PRICES) - 1)
        for _ in range(ROUNDS):
            plan = None if at < 0 else self._plan(at, curves)
            if plan is None or plan.cost >= 1 or plan.speedup <= speedup:
                return None
            curves, before = self._curves(PRICES, PRICES[at]), at
            at = curves.highest(tolerance, before)
            if at == before:
                return self._plan(at, curves)
        return None

    def _plan(self, at: int, curves: Curves) -> ListHead:
        settings, opened = replace(self.settings, price=curves.prices[at]), float(curves.opened[at])
        return ListHead(
            measured=curves.error(at)[0],
            lists=replace(settings, strict=self.strict),
            keys=opened * settings.leaf,
            **list_work(self.head, settings, opened).settings(self.head),
        )

    @cached_property
    def _first(self) -> Curves:
        """Curves on a first, small sample."""
        return self._curves(PRICES, None)

    def _curves(self, at_prices: Sequence[float], drawn_for: float | None) -> Curves:
        """Curves on rows sampled for a price; None: on a first, smaller sample."""
        head, on_gpu = self.head, self.head.query.is_cuda
        if drawn_for is None:
            sample = RowSample.draw(head, FIRST_ROWS, self.seed)
        else:
            risks = row_risks(head, replace(self.settings, price=drawn_for), self.made)
            sample = RowSample.draw(head, ROWS, self.seed, (risks,))
        prices = torch.tensor(at_prices, dtype=torch.float64, device=head.query.device)
        at_once = max(8, min(256 if on_gpu else 64, ENTRIES[on_gpu] // head.m))
        cell, permutation = self.cell[sample.rows].sort(stable=True)
        both = zip(cell.split(at_once), sample.rows[permutation].split(at_once), strict=True)
        parts = zip(*(self._errors(*some, prices) for some in both), strict=True)
        squared, size, count = (torch.cat(x, -1)[..., permutation.argsort()] for x in parts)
        return Curves(at_prices, sample, squared, size, count.double() @ sample.weight / head.n)

    def _errors(self, cell: Tensor, rows: Tensor, prices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squared errors [prices, rows], squared sizes [rows] and open leaves [prices, rows]."""
        head, made, (own, own_lse) = self.head, self.made, (x[rows] for x in self.own)
        cells, owner = cell.unique(return_inverse=True)
        leaves = max(1, int(made.visible[cells].max()))  # one that is hidden in the first window
        key, value = made.key[:leaves], made.value[:leaves]
        tilts = tilt(made, cells, leaves, head.scale)
        members = made.members[cells]
        weight, _ = coarse_weights(rows_of(head, members), tilts, head.scale)
        matters = importance(weight, members, tilts.variance)[owner].T.double().contiguous()
        query, tilts = rows_of(head, rows), tilts.of(owner)  # [rows, d]
        coarse = (tilts.key @ query.unsqueeze(2)).squeeze(2) * head.scale + tilts.log_weight
        score = (head.scale * (query @ key.flatten(0, 1).T)).unflatten(1, key.shape[:2])
        if made.weight is not None:
            score = score + made.weight[:leaves]
        score = score.masked_fill((coarse == -math.inf).unsqueeze(2), -math.inf)
        top = torch.maximum(torch.maximum(score.amax((1, 2)), coarse.amax(1)), own_lse)
        top = torch.where(top > -math.inf, top, 0.0)
        exact = (score - top.view(-1, 1, 1)).exp_().transpose(0, 1)  # [leaves, rows, L]
        sums = torch.cat([exact @ value, exact.sum(2, True)], 2)
        tilted = pad(tilts.value, (0, 1), value=1.0) * (coarse - top.unsqueeze(1)).exp_()[..., None]
        share = (own_lse - top).exp_().double().unsqueeze(1)
        start = tilted.double().sum(1) + pad(own.double(), (0, 1), value=1.0) * share
        return _at_prices(prices, start, sums - tilted.transpose(0, 1), matters)


def _at_prices(
    prices: Tensor, start: Tensor, change: Tensor, matters: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `ListSearch._errors` returns, from sums of rows, numerators and denominators, last:
    those with all leaves as tilted keys [rows, dv + 1], by how much they change when a leaf opens
    [leaves, rows, dv + 1], and its importance [leaves, rows]; all but the change in float64."""
    rows = len(start)
    step = torch.searchsorted(prices, matters)  # leaves are open at the prices below
    at = (step * rows + torch.arange(rows, device=step.device)).flatten()
    shape = (len(prices) + 1, *start.shape)
    steps = start.new_zeros(shape).flatten(0, 1)
    steps = steps.index_add_(0, at, change.flatten(0, 1).double()).view(shape)
    total = start + steps.flip(0).cumsum(0).flip(0)  # [p]: all steps from p on
    output = total[..., :-1] / total[..., -1:]
    exact = output[0].nan_to_num()  # everything is open
    count = torch.bincount(at, minlength=shape[0] * shape[1]).view(shape[:2])
    count = count.flip(0).cumsum(0).flip(0)[1:]
    squared = (output[1:] - exact).nan_to_num().square().sum(2)
    return squared, exact.square().sum(1), count
