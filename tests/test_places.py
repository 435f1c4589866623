"""Lists in the order of the sequence: every pair once, nothing from the future, and the places
that rows look at whatever stands there."""

import math
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import beyond, dense_attention, qkv
from supportbasis import cost, places, selection
from supportbasis.blocks import PLACES, BlockSettings, remembered
from supportbasis.components import BlockSum, blocks, evaluate
from supportbasis.frame import plain_frame
from supportbasis.methods.block_support import BlockSearch
from supportbasis.places import Profile
from supportbasis.sampling import exact_rows
from test_blocks import assert_blind_to_the_future, clustered, head_of, relative

CASES = [(300, 300), (257, 130), (90, 411), (64, 64), (33, 7), (1, 1), (5, 200)]


def settings(head, price, block=16, leaf=8, looks=True):
    profile = Profile.of(head, leaf, looks)
    return BlockSettings(price, block, leaf, math.lcm(block, leaf), PLACES, profile)


def local(n=2048, d=16, reach=12.0, seed=0):
    """Scores that fall with the distance and know nothing of what stands there."""
    generator = torch.Generator().manual_seed(seed)
    place, rate = torch.arange(n).double(), torch.logspace(0, -2.5, d // 2, dtype=torch.float64)
    angle = place.unsqueeze(1) * rate
    turned = torch.cat([angle.cos(), angle.sin()], 1) * math.sqrt(2 * reach / math.sqrt(d))
    value = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return tuple(x.float()[None, None] for x in (turned, turned, value))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", ["none", "bias", "mask"])
@pytest.mark.parametrize(("n", "m"), CASES)
def test_at_no_price_every_key_is_exact(n, m, weights, causal):
    for dtype, size in ((torch.float64, 3.0), (torch.float32, 1.0)):
        q, k, v = qkv(1, 1, n=n, m=m, d=5, dv=3, scale=size, dtype=dtype)
        bias = None
        if weights != "none":
            bias = 2 * torch.randn(m, generator=torch.Generator().manual_seed(1)).to(dtype)
            bias = bias > -1 if weights == "mask" else bias
        head = head_of(q, k, v, bias, causal)
        for block, leaf in ((16, 8), (6, 8)):
            lists = BlockSum(settings(head, 0.0, block, leaf), plain_frame(head))
            total = evaluate([lists], head, None)
            output, lse = total.divide_(total.seen)
            exact, exact_lse = dense_attention(q, k, v, bias, causal)
            tolerance = 1e-9 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(output.double(), exact[0, 0], rtol=0, atol=tolerance)
            torch.testing.assert_close(lse.double(), exact_lse[0, 0], rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_lists_cover_every_key_once(causal):
    n, block, leaf = 3000, 16, 16
    head = head_of(*clustered(n=n, d=5), causal=causal)
    made = remembered(head, plain_frame(head), settings(head, 1.0, block, leaf))
    layer, view = made.layers[0], made.layers[0].view
    for price in (1.0, 1e-3, 1e-6):
        lists = made.select(price)[0]
        for cell in range(0, len(layer.owner), 7):
            nodes = lists.coarse[1][lists.coarse[0] == cell]
            leaves = [lists.exact[1][lists.exact[0] == cell]]
            leaves += [
                torch.arange(int(view.first[node]), int(view.first[node] + view.leaves[node]))
                for node in nodes
            ]
            last = int(layer.rows[cell, 0]) // leaf if causal else len(made.forest.leaf_key)
            assert torch.equal(torch.cat(leaves).sort().values, torch.arange(last))


@pytest.mark.parametrize("t", [1, 17, 100, 777, 2048, 3001, 4095])
def test_nothing_is_known_of_the_future(t):
    """With one plan, outputs before position t do not depend on any token from t on."""
    q, k, v = clustered(n=4096)
    plan = sb.plan(
        q, k, v, is_causal=True, method=sb.BlockSupport(0.3, order=PLACES, tail="coarse")
    )
    assert plan.heads[0].blocks.order == PLACES and plan.heads[0].exact_rows == 0
    assert_blind_to_the_future(beyond(plan), q, k, v, t)


def test_a_plain_frame_changes_no_score():
    q, k, v = qkv(1, 1, n=40, m=30, d=6)
    head = head_of(q, k, v)
    moved = plain_frame(head).apply(head)
    assert plain_frame(head).is_plain and plain_frame(head) is plain_frame(head)
    assert not bool(plain_frame(head).row_shift(head, None).any())
    torch.testing.assert_close(moved.query @ moved.key.T, head.query @ head.key.T * head.scale)


def test_distances_come_in_bins():
    given = places.bin_of(torch.arange(17)).tolist()
    assert given == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8]
    assert [places.bins(leaves) for leaves in (1, 2, 4, 5, 6, 7, 17)] == [1, 2, 4, 5, 5, 6, 9]


@pytest.mark.parametrize("causal", [False, True])
def test_a_profile_is_where_the_attention_is(causal):
    q, k, v = local()
    head, leaf = head_of(q, k, v, causal=causal), 16
    profile = Profile.of_plan(Profile.of(head, leaf, True))
    assert profile.size == pytest.approx(float(v.square().sum(3).mean()))
    assert profile.before[0] > 10 * profile.before[-1] and sum(profile.start) < 1.1
    assert all(x == 0 for x in profile.behind[1:]) == causal
    near, start = profile.sums(128, head.query)
    assert near[0] == start[0] == 0 and len(near) == 256 and len(start) == 129
    assert bool((near.diff() >= 0).all())
    middle = near[128] - near[127]  # of the row's own leaf
    assert float(middle) == pytest.approx(max(profile.before[0], profile.behind[0]), rel=1e-5)
    assert Profile.of_plan(Profile.of(head, leaf, False)) == (profile.size, (), (), ())


def test_nodes_are_judged_by_what_they_hold():
    """Every number from the tokens themselves, for one block and one node at a time."""
    q, k, v = (x.double() for x in clustered(n=512, d=5))
    made_of = head_of(q, k, v)
    chosen = settings(made_of, 1.0)
    shares = torch.rand(len(chosen.profile) - 1, generator=torch.Generator().manual_seed(0)) / 20
    chosen = replace(chosen, profile=(chosen.profile[0], *shares.tolist()))
    made = remembered(made_of, plain_frame(made_of), chosen)
    layer, profile, leaf = made.layers[0], Profile.of_plan(chosen.profile), chosen.leaf_size
    glance, key, value = layer.view, made.head.key, made.head.value
    blocks = torch.tensor([0, 7, 31])
    nodes = torch.arange(len(glance.first))
    block, node = blocks.repeat_interleave(len(nodes)), nodes.repeat(len(blocks))
    settled = torch.full((len(layer.rows),), -1.0, dtype=torch.float64)
    mass, error = layer.view.judge(made.forest, layer.cells, block, node, settled)

    def share(number, place):
        """Of a leaf, for a block at a place."""
        far = number - place
        part = profile.before if far < 0 else profile.behind
        of = int(places.bin_of(torch.tensor(abs(far))))
        return part[of] + profile.start[int(places.bin_of(torch.tensor(number)))]

    for b in blocks.tolist():
        mine = block == b
        members, place = layer.query[b], b * 16 // leaf
        mean, wide = members.mean(0), float(members.var(0, unbiased=False).sum())
        wanted, rest = [], []
        for first, leaves in zip(glance.first.tolist(), glance.leaves.tolist(), strict=True):
            keys = slice(first * leaf, (first + leaves) * leaf)
            count, spread = leaves * leaf, float(key[keys].var(0, unbiased=False).mean())
            inner, outer = float(mean @ mean) * spread, wide * spread
            above = min(inner / 2, math.sqrt(inner * (count - 1)))
            wanted.append(float(mean @ key[keys].mean(0)) + math.log(count) + above)
            both = min(inner + outer, 6.0)
            off = min(both**1.5 / 6 + outer, 2.0)
            scatter = float(value[keys].var(0, unbiased=False).sum()) / count
            bad = math.expm1(both) * scatter + off**2 * float(value[keys].square().sum(1).mean())
            usual = sum(share(first + i, place) for i in range(leaves))
            rest.append((bad / profile.size / (8 if leaves > 1 else 1), usual))
        wanted = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(mass[mine], wanted, rtol=1e-9, atol=1e-9)
        total = torch.logaddexp(settled[b], wanted.logsumexp(0))
        bad, usual = torch.tensor(rest, dtype=torch.float64).unbind(1)
        expected = ((wanted - total).exp() + usual).square() * bad
        torch.testing.assert_close(error[mine], expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_look_at_places_are_cheap_there(causal):
    q, k, v = local(2048)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    plan = sb.plan(q, k, v, is_causal=causal, method=sb.BlockSupport(0.2))
    assert plan.heads[0].blocks.order == PLACES and 0.15 < plan.cost <= 0.2
    assert "in the order of the sequence" in str(plan)
    error = relative(sb.attention(q, k, v, is_causal=causal, plan=plan), exact)
    assert error < 0.05
    assert plan.heads[0].measured == pytest.approx(error, rel=0.5)


SLOW_PAIRS = cost.Rates(((4.0, 1e-7), (64.0, 1e-7)), 1e-7, 1e-8, 1e-10)  # all else is quick


@pytest.mark.parametrize("causal", [False, True])
def test_auto_tries_places(causal, monkeypatch):
    monkeypatch.setattr(cost, "calibrate", lambda *_: SLOW_PAIRS)
    q, k, v = local(2048)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    plan = sb.plan(q, k, v, is_causal=causal, method=sb.Auto(0.1))
    assert not causal or plan.heads[0].blocks.order == PLACES
    assert plan.speedup > 1.5
    assert relative(sb.attention(q, k, v, is_causal=causal, plan=plan), exact) < 0.125


def test_pieces_add_up_to_the_whole(monkeypatch):
    q, k, v = local(600)
    plan = sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.4, order=PLACES))
    assert plan.heads[0].blocks.order == PLACES
    whole = sb.attention(q, k, v, is_causal=True, plan=plan)
    monkeypatch.setattr(selection, "PAIRS", 7)
    monkeypatch.setattr(blocks, "GROUP_ENTRIES", 2**12)
    pieces = sb.attention(q, k, v, is_causal=True, plan=plan)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


def test_costs_are_those_of_all_blocks():
    """Lists of causal blocks grow with their place: the sample must not miss the long ones."""
    q, k, v = clustered(n=4096)
    search = BlockSearch.of(head_of(q, k, v, causal=True), 64, 0, PLACES)
    plan = search.affordable(0.2)
    made = search.whole
    (lists,) = made.select(plan.blocks.price)
    coarse, exact = lists.lengths(made.forest.leaf_size)
    keys = float((coarse + exact).double().sum()) * 16 / 4096 + 8
    assert plan.keys == pytest.approx(keys, rel=0.05)


def test_plans_are_kept(tmp_path):
    q, k, v = local()
    plan = sb.plan(q, k, v, method=sb.BlockSupport(0.3, order=PLACES, tail="coarse"))
    plan.save(tmp_path / "plan.json")
    again = sb.Plan.load(tmp_path / "plan.json")
    assert again.heads[0].blocks == plan.heads[0].blocks
    torch.testing.assert_close(
        sb.attention(q, k, v, plan=again), sb.attention(q, k, v, plan=plan), rtol=0, atol=0
    )


def test_exact_rows_come_in_any_order():
    q, k, v = qkv(1, 1, n=300, m=300, d=5)
    exact, _ = dense_attention(q, k, v, is_causal=True)
    rows = torch.tensor([299, 3, 150, 3, 0, 298])
    given = exact_rows(head_of(q, k, v, causal=True), rows)
    torch.testing.assert_close(given, exact[0, 0, rows], rtol=0, atol=1e-6)
