"""Kernels of the lists against a dense float64 transcription: interpreted, or on the device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from device_cases import DEVICE, UNIT, relative
from list_kernel_cases import (
    CASES,
    HALF,
    INF,
    Case,
    case,
    dense_attend,
    dense_importance,
    gap_price,
    marks,
    opened_by,
)

from supportbasis.cuda.lists import list_attention as fast  # isort: skip

pytestmark = marks


@pytest.fixture(params=CASES, scope="module")
def any_case(request) -> Case:
    return case(**CASES[request.param])


def test_means_are_those_of_the_real_members(any_case):
    tables = any_case.tables
    rough = 4 * UNIT[torch.float32] * math.sqrt(tables.members.shape[2])
    assert relative(tables.mean, any_case.dense.mean) < rough
    for head, cell in ((0, 0), (tables.heads - 1, tables.cells - 1)):
        rows = tables.members[head, cell]
        rows = any_case.tokens.q[head, rows[rows >= 0].long()]
        qvar = rows.var(0, correction=0).mean() if len(rows) else rows.new_zeros(())
        assert abs(tables.variance[head, cell] - qvar) <= 2 * rough * qvar


def test_tilts(any_case):
    tilts, known = any_case.made, any_case.dense
    known = [y[:, :, : any_case.leaves] for y in (known.kt, known.vt, known.lt)]
    seen = known[2] > -INF
    assert ((tilts.lt > -INF) == seen).all()
    hidden = any_case.seen & ~seen
    assert (tilts.kt[hidden] == 0).all() and (tilts.vt[hidden] == 0).all()
    for mine, right in zip((tilts.kt, tilts.vt, tilts.lt), known, strict=True):
        assert relative(mine[seen], right[seen]) < any_case.rough


def test_tilts_of_a_range_are_the_same_bits(any_case):
    """Also of the first cells, which see few of the leaves, and in causal attention none."""
    whole, half = any_case.made, any_case.tables.cells // 2
    for first, last in ((0, half), (half, any_case.tables.cells)):
        part = any_case.tilts(first, last)
        seen = part.lt > -INF
        assert torch.equal(part.lt, whole.lt[:, first:last])
        for mine, all_cells in ((part.kt, whole.kt), (part.vt, whole.vt)):
            assert torch.equal(mine[seen], all_cells[:, first:last][seen])


def test_the_tilt_is_exact_at_the_mean(any_case):
    """But for the factor 1 + s / 2. kt is rounded, m too: lt makes up for both, so that only
    float32 roundings remain."""
    tables, tilts, x = any_case.tables, any_case.made, any_case.tokens
    m = tables.mean.to(tables.ks.dtype).double()
    mine = any_case.scale * torch.einsum("hcd,hcld->hcl", m, tilts.kt.double()) + tilts.lt
    k, b = (y.unflatten(1, (-1, tables.leaf))[:, : any_case.leaves] for y in (x.k, x.b))
    right = any_case.scale * torch.einsum("hcd,hljd->hclj", m, k) + b.unsqueeze(1)
    spread = tables.spread[:, : any_case.leaves].repeat_interleave(tables.group, 0).unsqueeze(1)
    factor = 1 + any_case.scale**2 / 2 * tables.variance.unsqueeze(2) * spread
    right = right + factor.double().log().unsqueeze(3)
    seen = tilts.lt > -INF
    size = 1 + right.logsumexp(-1)[seen].abs().max()
    rough = 2 * UNIT[torch.float32] * (tables.ks.shape[2] + 3) * size  # two products of d terms
    assert (mine - right.logsumexp(-1))[seen].abs().max() < rough


def test_some_members_are_asked():
    given = case("full", heads=1, n=130, block=64)
    known = dense_importance(given.tokens, given.dense, given.tables, given.scale, 2)
    assert relative(known, given.known) > 0.01
    price = gap_price(known, 0.3)
    opened = opened_by(given.select(price)[1], given.leaves)
    assert torch.equal(opened, known > price.view(-1, 1, 1))


def test_lists_are_the_leaves_above_the_price(any_case):
    price = gap_price(any_case.known, 0.3)
    tilts, lists = any_case.select(price)
    opened = opened_by(lists, any_case.leaves)
    price = price.view(-1, 1, 1)
    sure = (any_case.known / price - 1).abs() > 3 * any_case.rough
    if any_case.tables.ks.dtype == torch.float32:
        assert sure.all()
    assert ((opened == (any_case.known > price)) | ~sure).all() and opened.any()
    assert torch.equal(tilts.lt, any_case.made.lt.masked_fill(opened, -INF))


def test_lists_are_compacted_chunk_by_chunk(monkeypatch):
    given = case("full", heads=1)
    price = gap_price(given.known, 0.5)
    lists = given.select(price)[1]
    shapes = tuple((32, 16, 4, 1) for _ in fast.TILES["select"])
    monkeypatch.setitem(fast.TILES, "select", shapes)
    tilts, again = given.select(price)
    opened = opened_by(again, given.leaves)
    assert torch.equal(opened, opened_by(lists, given.leaves))
    assert torch.equal(tilts.lt, given.made.lt.masked_fill(opened, -INF))


def compare_attention(given: Case, price: Tensor) -> Tensor:
    tables, (tilts, lists) = given.tables, given.select(price)
    output = torch.full((*tables.query.shape[:2], tables.vs.shape[2]), math.nan, device=DEVICE)
    output, lse = output.to(tables.ks.dtype), output[..., 0].clone()
    fast.attend(tables, tilts, lists, given.own, output, lse)
    opened = opened_by(lists, tables.ks.shape[1] // tables.leaf)
    right, size = dense_attend(given.tokens, given.dense, tables, opened, given.own, given.scale)
    some = size > -INF
    assert torch.equal(lse > -INF, some) and (output[~some] == 0).all()
    assert relative(output, right) < given.rough
    assert relative(lse[some], size[some]) < given.rough
    return opened[:, :, : given.leaves]


def test_attention(any_case):
    """Of the last head every leaf is open, or none: the others have some of both."""
    price = gap_price(any_case.known, 0.3)
    everything = any_case.strict
    if any_case.tables.heads > 1:
        price[-1] = -1.0 if everything else INF
    opened = compare_attention(any_case, price)
    assert opened[0].any() and not opened[0, any_case.seen[0]].all()
    if any_case.tables.heads > 1:
        assert torch.equal(opened[-1], any_case.seen[-1] & everything)


def test_attention_of_ranges_of_whole_windows_is_the_same_bits():
    given = case("strict", n=150, heads=1)
    price = gap_price(given.known, 0.3)
    tables, (tilts, lists) = given.tables, given.select(price)
    output, lse = torch.full_like(given.own[0], math.nan), torch.full_like(given.own[1], math.nan)
    again, size = output.clone(), lse.clone()
    fast.attend(tables, tilts, lists, given.own, output, lse)
    for first, last, leaves in ((0, 2, 1), (2, 6, 8)):
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, price)
        fast.attend(tables, tilts, lists, given.own, again, size)
    assert torch.equal(again, output) and torch.equal(size, lse)


def test_the_own_output_may_be_float32():
    given = case("causal", dtype=HALF, heads=1)
    given = replace(given, own=(torch.randn_like(given.own[0].float()), given.own[1]))
    compare_attention(given, gap_price(given.known, 0.3))
