"""What lists are held to: every row counts once, and rows unlike their block are looked at."""

import math

import pytest
import torch

import supportbasis as sb
from cases import dense_attention
from supportbasis.inputs import attention_problem
from supportbasis.methods import block_check
from supportbasis.methods.block_check import BlockCheck
from supportbasis.methods.block_support import BlockSearch
from supportbasis.plans import Plan


def search(n=1000, d=8, order="auto", causal=False, size=16, seed=0, change=None):
    """Lists of a head of smooth walks, whose neighbours are alike."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (0.08 * torch.randn(3, n, d, generator=generator)).cumsum(1).unbind(0)
    if change is not None:
        change(q, k, v)
    tensors = tuple(x[None, None] for x in (q, k, v))
    head = attention_problem(*tensors, None, 0.0, causal, None, False).head(0, 0)
    return tensors, BlockSearch.of(head, size, seed, order)


def drawn(made, seed=0):
    return BlockCheck.draw(made.whole, made.head, made.base.blocks.chunk, seed)


@pytest.mark.parametrize("order", ["auto", "places"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_row_that_has_a_list_counts_once(order, causal):
    made = search(order=order, causal=causal)[1]
    seen = torch.zeros(made.head.n)
    for layer, members, share in block_check._parts(made.whole):
        assert 0 < share <= 1
        rows = layer.rows[members]
        seen.index_add_(0, rows[rows >= 0], torch.ones(int((rows >= 0).sum())))
    settings = made.base.blocks
    first = settings.block_size if order == "places" else settings.chunk  # rows that have no list
    first = first if causal else 0
    assert seen[:first].sum() == 0
    assert (seen[first:] == 1).all()


@pytest.mark.parametrize("order", ["auto", "places"])
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_stand_for_all_rows_of_their_blocks(order, causal, monkeypatch):
    made = search(order=order, causal=causal)[1]
    monkeypatch.setattr(block_check, "CHECKED_ROWS", 100)
    check = drawn(made)
    parts = list(block_check._parts(made.whole))
    for part, (layer, members, _) in zip(check.parts, parts, strict=True):
        real = (layer.rows[members[part.sample.rows]] >= 0).sum(1)
        torch.testing.assert_close(part.weight.sum(1), real.double())
    assert any(float(part.weight.max()) > 1 for part in check.parts)


@pytest.mark.parametrize("order", ["auto", "places"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_census_measures_the_error(order, causal, monkeypatch):
    """Where all rows are looked at the error is that of the plan, on rows that have a list."""
    tensors, made = search(order=order, causal=causal, n=700)
    monkeypatch.setattr(block_check, "CHECKED_ROWS", 10**6)
    monkeypatch.setattr(block_check, "WIDEST_BLOCKS", 10**6)
    price = math.exp(-6)
    measured, limit = drawn(made).error(price)
    assert measured == pytest.approx(limit, rel=1e-9)
    plan = made.plan(price)
    output = sb.attention(*tensors, is_causal=causal, plan=plan_of(plan, tensors))[0, 0]
    exact = dense_attention(*tensors, is_causal=causal)[0][0, 0]
    first = max(plan.exact_rows, plan.blocks.chunk) if causal else 0
    away = (output.double() - exact)[first:].norm()
    assert measured * float(exact.norm()) == pytest.approx(float(away), rel=0.1)


def plan_of(head_plan, tensors):
    return Plan(sb.Auto(0.1), 1, 1, tensors[0].shape[-1], (head_plan,))


def test_few_rows_that_are_unlike_their_block_are_found():
    """Three queries in places where their neighbours look elsewhere: a sample would miss them."""
    rows = [211, 500, 803]

    def change(q, k, v):
        k[::97] = 0.0
        k[::97, 0] = 6.0
        v[::97] *= 20.0
        q[:, 0] = 0.0
        q[rows] = 0.0
        q[rows, 0] = 6.0

    for seed in range(3):
        made = search(n=1024, order="places", size=64, seed=seed, change=change)[1]
        check = drawn(made, seed)
        looked = torch.cat([part.rows.flatten() for part in check.parts])
        assert set(rows) <= set(looked.tolist())


def test_the_check_is_the_same_for_a_seed():
    made = search()[1]
    first, again, other = (drawn(made, seed).error(1e-3) for seed in (0, 0, 1))
    assert first == again
    assert first != other
