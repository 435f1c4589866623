"""Gradients of the list kernels against autograd through the dense float64 transcription."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from device_cases import DEVICE, UNIT, relative, slow_case
from list_kernel_cases import (
    CASES,
    HALF,
    INF,
    Case,
    case,
    dense_attend,
    dense_tilts,
    gap_price,
    marks,
    opened_by,
)

from supportbasis.cuda.lists import list_attention as fast  # isort: skip
from supportbasis.cuda.lists import list_backward as back  # isort: skip

pytestmark = marks
NAMES = ("query", "key", "value", "weight")


@dataclass
class Problem:
    """A case, its lists, a random loss, and what autograd says about it."""

    case: Case
    tilts: fast.Tilts
    lists: fast.Lists
    rows: back.Rows
    known: back.Totals  # float64

    def totals(self, fill: float = 0.0) -> back.Totals:
        given = {
            name: torch.full_like(x, fill).float()
            for name, x in zip(NAMES, totals_of(self.known), strict=True)
        }
        return back.Totals(spread=torch.zeros_like(self.known.spread).float(), **given)

    def gradients(self, totals: back.Totals | None = None) -> back.Totals:
        totals = totals or self.totals()
        tilts = replace(self.tilts, kt=self.tilts.kt.clone(), vt=self.tilts.vt.clone())
        back.gradients(self.case.tables, tilts, self.lists, self.rows, totals)
        back.add_spreads(self.case.tables, totals)
        return totals


def totals_of(totals: back.Totals) -> list[Tensor]:
    return [getattr(totals, name) for name in NAMES]


def problem(given: Case, price: Tensor) -> Problem:
    tables, (tilts, lists) = given.tables, given.select(price)
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)  # noqa: E731
    grad = randn(*tables.query.shape[:2], tables.vs.shape[2]).to(tables.query.dtype)
    x = given.tokens
    x = replace(x, q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), b=x.b.clone())
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.b)]
    opened = opened_by(lists, tables.ks.shape[1] // tables.leaf)
    dense = dense_tilts(x, tables, given.scale)
    output, lse = dense_attend(x, dense, tables, opened, given.own, given.scale)
    some = lse > -INF
    grad_lse = randn(*lse.shape) * some
    loss = (output * grad).sum() + (lse.where(some, lse.new_zeros(())) * grad_lse).sum()
    known = torch.autograd.grad(loss, leaves)
    slope = (grad * output.detach()).sum(-1) - grad_lse
    rows = back.Rows(grad, slope.float(), lse.detach().float())
    spread = known[0].new_zeros(tables.heads, tables.spread.shape[1])
    return Problem(given, tilts, lists, rows, back.Totals(*known[:3], spread, known[3]))


def price_of(given: Case) -> Tensor:
    """Of the last head every leaf is open, or none; the others have some of both."""
    price = gap_price(given.known, 0.3)
    if given.tables.heads > 1:
        price[-1] = -1.0 if given.strict else INF
    return price


SLOW = ("full-unweighted-whole", "causal-unweighted", "full-wide-leaf", "half-full-padding")


@pytest.fixture(params=[slow_case(x) if x in SLOW else x for x in CASES], scope="module")
def any_problem(request) -> Problem:
    given = case(**CASES[request.param])
    return problem(given, price_of(given))


@pytest.fixture(scope="module")
def full_problem() -> Problem:
    given = case("full")
    return problem(given, price_of(given))


def compare(mine: back.Totals, known: back.Totals, rough: float) -> None:
    for name, x, right in zip(NAMES, totals_of(mine), totals_of(known), strict=True):
        assert relative(x, right) < rough, name


def test_gradients(any_problem):
    compare(any_problem.gradients(), any_problem.known, any_problem.case.rough)


def test_cells_of_several_blocks_of_rows():
    """Tiles longer than the rows of a program."""
    given = case("full", heads=1, n=200, block=128)
    one = problem(given, gap_price(given.known, 0.5))
    compare(one.gradients(), one.known, given.rough)


@pytest.mark.slow
def test_gradients_repeat_to_the_bit_and_add_to_what_is_there():
    given = case("strict", n=150, heads=1)
    one = problem(given, gap_price(given.known, 0.3))
    results = one.gradients(), one.gradients(), one.gradients(one.totals(1.0))
    for x, same, more in zip(*map(totals_of, results), strict=True):
        assert torch.equal(x, same)
        # at most three parts are added to a sum, each time rounded in units of the sum
        assert (more - 1 - x).abs().max() <= 3 * UNIT[torch.float32] * (1 + x.abs().max())


@pytest.mark.parametrize("kind", ["causal", "strict"])
def test_gradients_of_ranges_of_whole_windows_add_up(kind):
    given = case(kind, n=150, heads=1)
    price, tables = gap_price(given.known, 0.3), given.tables
    one = problem(given, price)
    totals, per = one.totals(), 2
    for first, last in ((0, per), (per, 2 * per), (2 * per, tables.cells)):
        leaves = max(1, int(tables.visible[last - 1]))
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, price)
        back.gradients(tables, tilts, lists, one.rows, totals)
    back.add_spreads(tables, totals)
    compare(totals, one.known, given.rough)


def test_lists_are_transposed_chunk_by_chunk_and_means_summed_in_splits(monkeypatch):
    given = case("causal", n=150, heads=1)
    one = problem(given, gap_price(given.known, 0.3))
    monkeypatch.setattr(back, "CHUNK", 4)
    monkeypatch.setattr(back, "LEAST_SPLIT", 3)
    compare(one.gradients(), one.known, given.rough)


def test_transposed_lists_are_the_tiles_of_the_cells_that_have_a_leaf_open():
    given = case("strict", n=150)
    one = problem(given, price_of(given))
    tables, leaves = given.tables, given.leaves
    gathered = back.gather(tables, one.tilts, one.rows)
    lists = back.transposed(one.lists, gathered)
    opened = opened_by(one.lists, leaves)
    for head in range(tables.heads):
        cell, rows = tables.cell[head], tables.rows[head]
        for leaf in range(leaves):
            right = (rows >= 0).any(-1) & opened[head, cell.clamp(min=0), leaf]
            mine = lists.index[head, leaf, : lists.count[head, leaf]].long()
            assert torch.equal(mine, right.nonzero()[:, 0])


def test_the_gradient_of_the_output_may_be_float32():
    given = case("causal", dtype=HALF, heads=1)
    one = problem(given, gap_price(given.known, 0.3))
    one.rows = replace(one.rows, grad=one.rows.grad.float())
    compare(one.gradients(), one.known, given.rough)
