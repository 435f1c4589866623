"""Block support: frames change nothing, trees cover everything, lists are worth their keys."""

import math
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import beyond, dense_attention, qkv
from supportbasis import cost, selection
from supportbasis.blocks import BlockSettings, remembered, structure
from supportbasis.components import BlockSum, ExactSum, evaluate
from supportbasis.forest import Nodes, build, tilted
from supportbasis.frame import balanced, framed, own_frame
from supportbasis.inputs import attention_problem
from supportbasis.methods import BlockSupport
from supportbasis.tree import assign, leading, leaf_layout, order


def head_of(q, k, v, bias=None, causal=False, scale=None):
    return attention_problem(q, k, v, bias, 0.0, causal, scale, False).head(0, 0)


def clustered(n=2048, d=8, clusters=12, noise=0.15, size=3.0, seed=0, dtype=torch.float32):
    """Queries and keys around common centres, values that follow the keys: a head as models have
    them, in small."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, d, generator=generator, dtype=torch.float64)
    sides = []
    for _ in range(2):
        which = torch.randint(clusters, (n,), generator=generator)
        jitter = torch.randn(n, d, generator=generator, dtype=torch.float64)
        sides.append(centres[which] + noise * jitter)
    value = torch.tanh(sides[1] @ torch.randn(d, d, generator=generator, dtype=torch.float64))
    score = sides[0][:200] @ sides[1][:400].T / math.sqrt(d)
    factor = math.sqrt(size / float(score.std()))
    return tuple(x.to(dtype)[None, None] for x in (sides[0] * factor, sides[1] * factor, value))


def relative(given, exact):
    return float((given.double() - exact).norm() / exact.norm())


# ---- frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_frame_changes_no_score(dtype, causal):
    q, k, v = qkv(1, 1, n=90, m=70, d=6, dtype=dtype)
    q, k = q * torch.linspace(0.1, 3, 6, dtype=dtype) + 1, k * torch.linspace(2, 0.2, 6) - 2
    k = k.to(dtype)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(0)).to(dtype)
    head = head_of(q, k, v, bias, causal)
    frame = balanced(head)
    framed = frame.apply(head)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    plain, moved = (evaluate([ExactSum(head.live_keys)], h, None) for h in (head, framed))
    moved.log_scale = moved.log_scale + frame.row_shift(head, None)
    for a, b in zip(plain.divide_(plain.seen), moved.divide_(moved.seen), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_frame_balances_and_rotates():
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    q, k, v = qkv(1, 1, n=1000, m=900, d=5)
    head = head_of(q @ mix + 3, k @ mix.T.inverse() * 0.7, v, scale=0.4)
    frame = balanced(head)
    framed = frame.apply(head)
    for x in (framed.query, framed.key):
        spread = torch.cov(x.T, correction=0)
        torch.testing.assert_close(spread, torch.diag(frame.spectrum), rtol=1e-6, atol=1e-6)
    assert float(framed.key.mean(0).abs().max()) < 1e-9
    assert (frame.spectrum.diff() <= 1e-12).all()
    assert float(framed.query.norm()) < float((head.query * head.scale**0.5).norm())


def test_frames_of_flat_and_empty_data():
    q, k, v = qkv(1, 1, n=40, d=4)
    for query, key in ((q * 0, k), (q, k * 0 + 0.3), (q * 0, k * 0), (q[:, :, :0], k)):
        head = head_of(query, key, v)
        framed = balanced(head).apply(head)
        assert framed.query.isfinite().all() and framed.key.isfinite().all()
        score = framed.query @ framed.key.T + framed.key_log_weight
        given = score + balanced(head).row_shift(head, None).unsqueeze(1)
        torch.testing.assert_close(given, query[0, 0] @ key[0, 0].T / 2)


# ---- trees ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "depth", "leaf", "dim"), [(1, 5, 4, 3), (3, 3, 7, 1), (2, 0, 9, 2)]
)
def test_the_order_of_a_tree_is_a_permutation_of_each_segment(segments, depth, leaf, dim):
    x = torch.randn(segments, leaf << depth, dim, generator=torch.Generator().manual_seed(0))
    at, _ = order(x, depth)
    assert torch.equal(at.sort(1).values, torch.arange(leaf << depth).expand(segments, -1))


def test_a_tree_on_a_line_sorts_it():
    x = torch.randn(1, 64, 1, generator=torch.Generator().manual_seed(0))
    leaves = x[0, order(x, 4)[0][0], 0].view(16, 4)
    edges = torch.stack([leaves.amin(1), leaves.amax(1)], 1)
    forward = edges[edges[:, 0].argsort()]
    assert (forward[1:, 0] >= forward[:-1, 1]).all()  # leaves do not overlap
    near, far = leaves.var(1).mean(), x.var()
    assert near < 0.05 * far


def test_a_tree_finds_clusters():
    _, k, _ = clustered(n=2048, clusters=8, noise=0.02)
    leaves = k[0, 0][order(k[0], 5)[0][0]].view(32, 64, -1)
    assert float(leaves.var(1).sum(1).median()) < 0.01 * float(k[0, 0].var(0).sum())


def test_leaves_are_alike_and_not_too_large():
    for tokens in (1, 7, 16, 17, 100, 4096, 5000):
        depth, size = leaf_layout(tokens, 16)
        assert size <= 16 or tokens <= 16
        assert (size << depth) >= tokens > ((size - 1) << depth)
    assert leading(torch.tensor([3.0, 2.0, 1e-3])) == 2
    assert leading(torch.zeros(3)) == 1


# ---- forests ----------------------------------------------------------------------------------


def framed_head(seed=0, bias=True):
    q, k, v = clustered(n=600, d=5, dtype=torch.float64, seed=seed)
    weight = torch.randn(600, generator=torch.Generator().manual_seed(seed)) if bias else None
    if weight is not None:
        weight = weight.double()
        weight[::7] = -math.inf
    head = head_of(q, k, v, weight)
    frame = balanced(head)
    return frame.apply(head), frame


def forest_of(head, frame):
    positions = torch.full((1, 1024), -1)
    positions[0, : len(head.live_keys)] = head.live_keys
    return build(head, head.key * frame.spectrum.sqrt(), positions, 16)


def keys_below(forest, node):
    """Rows of the leaf tables that a node stands for."""
    while forest.child[node[0]] >= 0:
        first = forest.child[node]
        node = torch.stack([first, first + 1], 1).flatten()
    return forest.leaf[node]


def test_nodes_hold_the_moments_of_their_keys():
    head, frame = framed_head()
    forest = forest_of(head, frame)
    for node in (0, 1, 5, 40, len(forest.key) - 1):
        rows = keys_below(forest, torch.tensor([node]))
        key, value = forest.leaf_key[rows].flatten(0, 1), forest.leaf_value[rows].flatten(0, 1)
        weight = forest.leaf_weight[rows].flatten().exp()
        share = weight / weight.sum()
        torch.testing.assert_close(forest.log_mass[node], weight.sum().log())
        torch.testing.assert_close(forest.key[node], share @ key)
        torch.testing.assert_close(forest.value[node], share @ value)
        away, apart = key - share @ key, value - share @ value
        gap, step = forest.gap[node], forest.step[node]
        variance = forest.variance[node] + gap.square()
        torch.testing.assert_close(variance, share @ away.square())
        covariance = forest.covariance[node] + gap[:8].unsqueeze(1) * step
        torch.testing.assert_close(covariance, (away.T * share) @ apart)
        half = len(share) // 2
        parts = [share[:half], share[half:]]
        if min(float(part.sum()) for part in parts) > 0:
            left, right = (
                part @ x / part.sum()
                for x, part in ((key[:half], parts[0]), (key[half:], parts[1]))
            )
            root = (parts[0].sum() * parts[1].sum()).sqrt()
            torch.testing.assert_close(gap, (left - right) * root)
        scatter = (share @ apart.square().sum(1)) * share.square().sum()
        torch.testing.assert_close(forest.scatter[node], scatter)
        torch.testing.assert_close(forest.others[node] + 1, 1 / share.square().sum())


def test_a_tilted_node_is_right_to_second_order():
    """Around the query for which a node was tilted its log mass and mean value are nearly those of
    its keys; the mean key alone errs by the variance, the mean value by the covariance."""
    head, frame = framed_head()
    forest = forest_of(head, frame)
    node = torch.arange(31, 63)
    node = node[forest.log_mass[node] > -math.inf]  # what fills leaves up has no mass
    rows = torch.stack([keys_below(forest, x.view(1)) for x in node])
    key, value = (x[rows].flatten(1, 2) for x in (forest.leaf_key, forest.leaf_value))
    weight = forest.leaf_weight[rows].flatten(1)
    for size in (0.05, 0.1):
        query = torch.zeros(len(node), head.dim, dtype=torch.float64)
        query[:, 0] = size  # along one coordinate: variances are kept, covariances of keys are not
        score = torch.einsum("nsd,nd->ns", key, query) + weight
        exact, mean = score.logsumexp(1), torch.einsum("ns,nsd->nd", score.softmax(1), value)
        coarse_key, coarse_value, log_weight = tilted(
            Nodes(*(field[node] for field in forest.nodes)), query
        )
        given = (coarse_key * query).sum(1) + log_weight
        plain = (forest.key[node] * query).sum(1) + forest.log_mass[node]
        assert (given - exact).norm() < 0.5 * (plain - exact).norm()
        assert (coarse_value - mean).norm() < 0.2 * (forest.value[node] - mean).norm()


# ---- lists ------------------------------------------------------------------------------------


CASES = [(300, 300), (257, 130), (90, 411), (64, 64), (33, 7), (1, 1), (5, 200)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", ["none", "bias", "mask"])
@pytest.mark.parametrize(("n", "m"), CASES)
def test_at_no_price_every_key_is_exact(n, m, weights, causal):
    for dtype, size in ((torch.float64, 0.1), (torch.float64, 3.0), (torch.float32, 1.0)):
        q, k, v = qkv(1, 1, n=n, m=m, d=5, dv=3, scale=size, dtype=dtype)
        bias = None
        if weights != "none":
            bias = 2 * torch.randn(m, generator=torch.Generator().manual_seed(1)).to(dtype)
            bias = bias > -1 if weights == "mask" else bias
        head = head_of(q, k, v, bias, causal)
        for block, chunk in ((16, 32), (64, 64)):
            lists = BlockSum(BlockSettings(0.0, block, 8, chunk), balanced(head))
            total = evaluate([lists], head, None)
            output, lse = total.divide_(total.seen)
            exact, exact_lse = dense_attention(q, k, v, bias, causal)
            tolerance = 1e-9 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(output.double(), exact[0, 0], rtol=0, atol=tolerance)
            torch.testing.assert_close(lse.double(), exact_lse[0, 0], rtol=0, atol=10 * tolerance)


def test_lists_cover_every_key_once():
    head, frame = framed_head()
    original = head_of(*clustered(n=600, d=5, dtype=torch.float64))
    made = remembered(original, balanced(original), BlockSettings(1.0, 32, 8, 64))
    for price in (1.0, 1e-4, 1e-8, 0.0):
        lists = made.select(price)[0]
        for block in range(0, len(made.layers[0].owner), 5):
            nodes = lists.coarse[1][lists.coarse[0] == block]
            leaves = [lists.exact[1][lists.exact[0] == block]]
            leaves += [keys_below(made.forest, node.view(1)) for node in nodes]
            seen = torch.cat(leaves).sort().values
            assert torch.equal(seen, torch.arange(len(made.forest.leaf_key)))
    assert head.n and frame.spectrum.numel()


def test_a_lower_price_buys_more_keys_and_less_error():
    q, k, v = clustered(n=4096)
    head, exact = head_of(q, k, v), dense_attention(q, k, v)[0][0, 0]
    frame = balanced(head)
    keys, errors = [], []
    for price in (1e-2, 1e-4, 1e-6, 1e-8):
        part = BlockSum(BlockSettings(price, 64, 16, 256), frame)
        total = evaluate([part], head, None)
        made = remembered(head, frame, part.settings)
        keys.append(int(made.select(price)[0].lengths(16)[1].sum()))
        errors.append(relative(total.divide_(total.seen)[0], exact))
    assert keys == sorted(keys) and keys[-1] > 2 * keys[0]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 5


def test_a_row_far_from_its_block_is_left_alone():
    q, k, v = clustered(n=1024, clusters=2, noise=0.02, size=4.0)
    odd = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:5]
    q[0, 0, odd] = -2 * q[0, 0, odd.roll(1)]
    head = head_of(q, k, v)
    made = remembered(head, balanced(head), BlockSettings(1.0, 64, 16, 64, "tree"))
    assert len(made.layers) == 2
    alone, rest = made.layers[1].rows, made.layers[0].rows
    assert set(odd.tolist()) <= set(alone.flatten().tolist())
    together = torch.cat([alone.flatten(), rest[rest >= 0]])
    assert torch.equal(together.sort().values, torch.arange(1024))


def test_first_masses_are_lower_bounds():
    q, k, v = clustered(n=512, dtype=torch.float64)
    head = head_of(q, k, v)
    made = remembered(head, balanced(head), BlockSettings(1.0, 1, 8, 64))  # blocks of one query
    layer = made.layers[0]
    lse = (layer.query[:, 0] @ made.head.key.T + made.head.key_log_weight).logsumexp(1)
    assert (layer.view.log_mass <= lse + 1e-9).all()
    mass = selection._masses(made.forest, layer.cells, *layer.start)
    assert (mass.likely >= mass.least).all()


# ---- the method -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.1, 0.2, 0.4])
def test_a_budget_is_kept_and_used(budget):
    q, k, v = clustered(n=4096)
    result = sb.attention(q, k, v, method=sb.BlockSupport(budget), return_result=True)
    (plan,) = result.plan.heads
    assert plan.kind == "block"
    assert 0.8 * budget < plan.cost <= budget
    exact, lse = dense_attention(q, k, v)
    error = relative(result.output, exact)
    assert error < 0.05
    assert error <= 2 * float(result.certificate.limit)  # errors sit in few blocks
    assert float(result.certificate.bound) >= error
    torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=0.2)
    assert "keys a query" in str(plan) and "frame" in str(plan)


def test_a_tolerance_is_met():
    for seed in range(4):
        q, k, v = clustered(n=4096, seed=seed, size=1.0 + seed)
        exact, _ = dense_attention(q, k, v)
        for tolerance in (0.1, 0.03, 0.01):
            method = sb.BlockSupport(tolerance=tolerance)
            plan = sb.plan(q, k, v, method=method)
            given = sb.attention(q, k, v, plan=plan)
            assert relative(given, exact) <= 1.25 * tolerance


def test_fewer_keys_a_query_are_needed_as_the_length_grows():
    shares = []
    for n in (2048, 8192):
        q, k, v = clustered(n=n)
        plan = sb.plan(q, k, v, method=sb.BlockSupport(tolerance=0.05))
        shares.append(plan.heads[0].keys / n)
    assert shares[1] < 0.5 * shares[0]


def test_plans_of_blocks_are_kept_and_reused(tmp_path):
    q, k, v = clustered(n=2048)
    plan = sb.plan(q, k, v, method=sb.BlockSupport(0.3))
    plan.save(tmp_path / "plan.json")
    loaded = sb.Plan.load(tmp_path / "plan.json")
    assert loaded.method == plan.method
    expected = sb.attention(q, k, v, plan=plan)
    torch.testing.assert_close(sb.attention(q, k, v, plan=loaded), expected)
    more = clustered(n=3000, seed=0)
    exact, _ = dense_attention(*more)
    assert relative(sb.attention(*more, plan=loaded), exact) < 0.05


def test_grouped_heads_masks_and_other_dims():
    q, k, v = (torch.cat([clustered(n=1200, seed=s)[i] for s in range(4)], 1) for i in range(3))
    k, v = k[:, ::2], torch.cat([v[:, ::2], v[:, ::2, :, :3]], -1)
    mask = torch.rand(1200, generator=torch.Generator().manual_seed(0)) < 0.8
    call = {"attn_mask": mask, "enable_gqa": True}
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.5), return_result=True, **call)
    exact, _ = dense_attention(q, k, v, mask)
    assert result.output.shape == exact.shape
    assert {head.kind for head in result.plan.heads} == {"block"}
    assert float(result.certificate.measured.max()) < 0.3
    assert relative(result.output, exact) < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype):
    q, k, v = clustered(n=1024, dtype=dtype)
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.5), return_result=True)
    assert result.output.dtype == dtype
    assert relative(result.output, dense_attention(q, k, v)[0]) < 0.1


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q, torch.full_like(k, 0.7)),
        lambda q, k: (q * 0, k),
        lambda q, k: (q * 1e3, k * 1e3),
        lambda q, k: (q * 1e-8, k * 1e-8),
        lambda q, k: (q * 0.01 + 5, k * 0.01 - 3),
        lambda q, k: (q, torch.where(k[..., :1] > 0, 1.0, -1.0) * torch.ones_like(k)),
        lambda q, k: (q[..., :1] * torch.ones_like(q), k[..., :1] * torch.ones_like(k)),
    ],
    ids=["equal keys", "zero queries", "huge", "tiny", "one cluster", "two keys", "one line"],
)
def test_degenerate_data_is_right_and_finite(change):
    q, k, v = qkv(1, 1, n=1500, d=6, dtype=torch.float32)
    q, k = change(q, k)
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.4), return_result=True)
    exact, _ = dense_attention(q, k, v)
    assert result.output.isfinite().all()
    assert relative(result.output, exact) < 1e-3


def test_short_heads_and_tight_budgets_are_exact_and_say_why():
    q, k, v = clustered(n=100)
    plan = sb.plan(q, k, v, method=sb.BlockSupport(0.5, tail="coarse"))
    assert plan.heads[0].kind == "exact" and "too few" in plan.heads[0].reason
    plan = sb.plan(*clustered(n=1000), method=sb.BlockSupport(0.01))
    assert plan.heads[0].kind == "exact" and "budget" in plan.heads[0].reason


# ---- causal -----------------------------------------------------------------------------------


def test_tokens_fall_into_the_leaves_of_another_tree():
    x = torch.randn(3, 256, 4, generator=torch.Generator().manual_seed(0))
    at, splits = order(x, 5)
    leaf = torch.empty(3, 256, dtype=torch.long)
    leaf.scatter_(1, at, torch.arange(32).repeat_interleave(8).expand(3, -1))
    assert torch.equal(assign(x, splits), leaf)  # its own tokens fall where they are
    moved = assign(x + 1e-4 * torch.randn(x.shape, generator=torch.Generator()), splits)
    assert (moved == leaf).float().mean() > 0.99


def assert_blind_to_the_future(plan, q, k, v, t):
    """Outputs before position t do not change with the tokens from t on; those after it do."""
    before = sb.attention(q, k, v, is_causal=True, plan=plan)
    generator = torch.Generator().manual_seed(t)
    for x in (q, k, v):
        x[:, :, t:] = 2 * torch.randn(x[:, :, t:].shape, generator=generator)
    after = sb.attention(q, k, v, is_causal=True, plan=plan)
    torch.testing.assert_close(before[:, :, :t], after[:, :, :t], rtol=0, atol=2e-6)
    assert float((before - after)[:, :, t:].abs().max()) > 0.1


@pytest.mark.parametrize("t", [1, 100, 777, 2048, 3001, 4095])
def test_nothing_is_known_of_the_future(t):
    """With one plan, outputs before position t do not depend on any token from t on."""
    q, k, v = clustered(n=4096)
    plan = beyond(sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.3)))
    assert plan.heads[0].kind == "block"
    assert_blind_to_the_future(plan, q, k, v, t)


def test_the_frame_of_a_causal_plan_knows_only_the_rows_that_are_exact():
    q, k, v = clustered(n=4096)
    plan = sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.3)).heads[0]
    for x in (q, k, v):
        x[:, :, plan.exact_rows :] *= 1.5
    again = sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.3)).heads[0]
    assert again.exact_rows == plan.exact_rows == 128
    assert torch.equal(again.frame.query_map, plan.frame.query_map)
    assert torch.equal(again.frame.key_centre, plan.frame.key_centre)


def test_causal_budgets_and_tolerances():
    q, k, v = clustered(n=8192)
    exact, _ = dense_attention(q, k, v, is_causal=True)
    call = {"is_causal": True}
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.2), return_result=True, **call)
    assert 0.15 < result.plan.cost <= 0.2
    error = relative(result.output, exact)
    assert error < 0.1 and error <= 1.1 * float(result.certificate.limit)
    for tolerance in (0.1, 0.03):
        plan = sb.plan(q, k, v, method=sb.BlockSupport(tolerance=tolerance), **call)
        given = sb.attention(q, k, v, plan=plan, **call)
        assert relative(given, exact) <= 1.25 * tolerance


@pytest.mark.parametrize(("n", "m"), [(3000, 2000), (2000, 3000), (2049, 2049)])
def test_causal_lengths_that_differ(n, m):
    q, k, v = clustered(n=3000)
    q, k, v = q[:, :, :n], k[:, :, :m], v[:, :, :m]
    mask = torch.rand(m, generator=torch.Generator().manual_seed(0)) < 0.9
    mask[0] = True
    call = {"is_causal": True, "attn_mask": mask}
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.6), return_result=True, **call)
    exact, _ = dense_attention(q, k, v, mask, is_causal=True)
    assert result.plan.heads[0].kind == "block"
    assert relative(result.output, exact) < 0.15


def test_kernel_sums_by_blocks():
    q, k, v = clustered(n=2048, size=1.0)
    result = sb.kernel_sum(q, k, v, method=sb.BlockSupport(0.5), return_result=True)
    exact = sb.kernel_sum(q, k, v, method=sb.Exact(), return_result=True)
    given, truth = (r.output.double() * r.log_scale.double().exp() for r in (result, exact))
    assert relative(given, truth) < 0.05


def test_bad_arguments_are_named():
    for arguments, name in (
        ({"budget": 0}, "budget"),
        ({"budget": math.nan}, "budget"),
        ({"tolerance": -1}, "tolerance"),
        ({"budget": 0.1, "tolerance": 0.1}, "both"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2.5}, "block_size"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(sb.InputError, match=name):
            sb.BlockSupport(**arguments)
    assert sb.BlockSupport() == sb.BlockSupport(0.1)


def test_auto_takes_lists_on_clustered_heads_and_keeps_its_promise():
    q, k, v = clustered(n=16384, d=16, clusters=40, size=4.0)
    plan = sb.plan(q, k, v, method=sb.Auto(0.03))
    assert plan.heads[0].kind == "block"
    assert plan.heads[0].measured is not None
    rows = torch.arange(0, 16384, 61)
    exact, _ = dense_attention(q[:, :, rows], k, v)
    assert relative(sb.attention(q, k, v, plan=plan)[:, :, rows], exact) <= 1.25 * 0.03
    again = sb.plan(q, k, v, method=sb.Auto(0.03))
    assert replace(again.heads[0].blocks) == plan.heads[0].blocks  # deterministic


def test_a_plan_that_is_used_again_is_checked():
    """On the same tokens the certificate says that it holds; on others it says what is true."""
    tolerance = 0.05
    q, k, v = clustered(n=4096, size=2.0)
    plan = beyond(sb.plan(q, k, v, method=sb.BlockSupport(tolerance=tolerance, tail="coarse")))
    assert plan.heads[0].kind == "block"
    assert sb.attention(q, k, v, plan=plan, return_result=True).certificate.holds(1.25 * tolerance)
    for factor in (0.5, 1.5, 2.5):
        result = sb.attention(factor * q, factor * k, v, plan=plan, return_result=True)
        error = relative(result.output, dense_attention(factor * q, factor * k, v)[0])
        if error > 1.25 * tolerance:
            assert not result.certificate.holds(tolerance)
        if result.certificate.holds(tolerance):
            assert error <= 1.25 * tolerance


def test_an_order_that_causal_windows_do_not_have_is_named():
    q, k, v = clustered(n=2048)
    for name in ("groups", "sequence"):
        method = sb.BlockSupport(0.6, order=name, tail="coarse")
        (plan,) = sb.plan(q, k, v, is_causal=True, method=method).heads
        assert plan.kind == "block" and plan.blocks.order == "tree"
        assert f"not by '{name}'" in plan.reason and plan.reason in str(plan)
        (plan,) = sb.plan(q, k, v, method=method).heads
        assert plan.blocks.order == name and not plan.reason


def test_a_head_has_one_frame():
    head = head_of(*clustered(n=512))
    assert own_frame(head) is own_frame(head)
    assert framed(head, own_frame(head)) is framed(head, own_frame(head))


def test_a_budget_of_all_keys_buys_them():
    q, k, v = clustered(n=512)
    (plan,) = sb.plan(q, k, v, method=sb.BlockSupport(1.0)).heads
    assert plan.kind == "exact" and "buys all keys" in plan.reason


def test_nothing_useless_is_bought():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4096, 6, generator=generator).unbind(0)
    for size in (1.0, 3.0):
        plan = sb.plan(size * q, size * k, v, method=sb.BlockSupport(0.02))
        output = sb.attention(size * q, size * k, v, plan=plan)
        assert relative(output, dense_attention(size * q, size * k, v)[0]) < 1
    assert plan.heads[0].kind == "exact" and "err by" in plan.heads[0].reason


def local(n=2048, d=16):
    """Queries that want their neighbours in the sequence, whatever else tokens hold."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(n).unsqueeze(1) * torch.linspace(0.02, 0.3, d // 2)
    angles = torch.cat([place.cos(), place.sin()], 1)
    q, k, v = torch.randn(3, n, d, generator=generator).unbind(0)
    return (4 * angles + q)[None], (4 * angles + k)[None], v[None]


def test_an_open_order_takes_what_errs_least():
    q, k, v = local()
    made = {}
    for name in ("auto", "tree", "sequence", "places"):
        method = sb.BlockSupport(0.3, order=name, tail="coarse")
        (plan,) = sb.plan(q, k, v, method=method).heads
        output = sb.attention(q, k, v, method=method)
        made[name] = plan, relative(output, dense_attention(q, k, v)[0])
    errors = {name: error for name, (_, error) in made.items()}
    assert errors["sequence"] < 0.9 * errors["tree"]
    assert errors["places"] < errors["sequence"]
    assert made["auto"][0].blocks.order == "places" and errors["auto"] == errors["places"]


def test_a_sequence_pays_for_no_tree():
    head = head_of(*local())
    frame = own_frame(head)
    made = [
        structure(framed(head, frame), frame.spectrum, BlockSettings(1.0, 64, 16, 128, name))
        for name in ("tree", "sequence")
    ]
    assert [x.levels for x in made] == [7 + 8, 2 + 3]


def test_orders_that_kernels_leave_to_pytorch_are_costed_as_such(monkeypatch):
    monkeypatch.setattr(cost, "_has_kernels", lambda head: True)
    q, k, v = clustered(clusters=40, noise=0.02)
    head = head_of(q, k, v)
    expected = {"tree": cost.DEVICE, "sequence": cost.DEVICE, "groups": cost.ENGINE}
    assert all(cost.handling(head, order) is expected[order] for order in expected)
    causal = head_of(q, k, v, causal=True)
    assert cost.handling(causal, "auto") is cost.CAUSAL
    assert cost.handling(causal, "places") is cost.ENGINE
    sizes = cost.ListSizes(10, 8, 100.0, 50.0, 1000, 500.0, 250.0)
    seconds = {
        order: cost.block_work(head, BlockSettings(1.0, 64, 16, 64, order), sizes).seconds(head)
        for order in expected
    }
    assert seconds["groups"] > seconds["tree"] + 0.9 * cost.ENGINE.trees
    first = next(BlockSupport(0.2)._searches(head))
    assert first.order == "tree"
