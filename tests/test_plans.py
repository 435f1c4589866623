"""Plans: what they say, what they cost, that they can be kept and reused."""

import json
import math

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from supportbasis.components import ExactSum, PolynomialSum
from supportbasis.lists.tables import ListSettings
from supportbasis.plans import ListHead, cost
from supportbasis.plans.drawing import CLOSED, OPEN, OWN, draw_supports
from supportbasis.problem.validation import attention_problem

METHODS = [
    sb.Exact(),
    sb.Polynomial(2),
    sb.SingleThreshold(1.2, 2),
    sb.MultiThreshold(1.5, 2),
    sb.MultiThreshold(1.5, 1, sketch_size=12, seed=4),
    sb.PowerAttention(2),
    sb.PowerAttention(4, sketch_size=12, seed=4),
    sb.Auto(0.1),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_plan_gives_the_same_as_its_method(method):
    q, k, v = qkv(2, 3, n=40, scale=0.5)
    plan = sb.plan(q, k, v, method=method)
    assert len(plan.heads) == 3
    expected = sb.attention(q, k, v, method=method)
    torch.testing.assert_close(sb.attention(q, k, v, plan=plan), expected)
    torch.testing.assert_close(sb.attention(q, k, v, plan=plan, method=method), expected)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_saved_and_loaded_plans_do_the_same(method, tmp_path):
    q, k, v = qkv(2, 3, n=40, scale=0.5)
    plan = sb.plan(q, k, v, method=method)
    plan.save(tmp_path / "plan.json")
    loaded = sb.Plan.load(tmp_path / "plan.json")
    assert loaded.method == method
    assert loaded.cost == pytest.approx(plan.cost)
    torch.testing.assert_close(sb.attention(q, k, v, plan=loaded), sb.attention(q, k, v, plan=plan))
    longer = qkv(2, 3, n=55, seed=1, scale=0.5)
    sb.attention(*longer, plan=loaded)  # no index sets: any length


def test_a_saved_plan_is_plain_json_without_indices(tmp_path):
    q, k, v = qkv(1, 1, n=40)
    sb.plan(q, k, v, method=sb.SingleThreshold(1.2)).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert "large_rows" not in content["heads"][0]
    assert content["heads"][0]["threshold"] == 1.2


def test_infinite_errors_survive_saving(tmp_path):
    q, k, v = qkv(1, 1, n=10, scale=100.0)
    plan = sb.plan(q, k, v, method=sb.Polynomial(3))
    assert plan.heads[0].polynomial.error == math.inf
    plan.save(tmp_path / "plan.json")
    json.loads((tmp_path / "plan.json").read_text(), parse_constant=lambda s: pytest.fail(s))
    assert sb.Plan.load(tmp_path / "plan.json").heads[0].polynomial == plan.heads[0].polynomial


def test_a_plan_that_does_not_fit_is_refused():
    q, k, v = qkv(2, 3, n=40)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(1.2))
    with pytest.raises(sb.InputError, match="heads, dim"):
        sb.attention(q[:, :1], k[:, :1], v[:, :1], plan=plan)
    with pytest.raises(sb.InputError, match="the plan was made with"):
        sb.attention(q, k, v, plan=plan, method=sb.Exact())


def test_a_reused_plan_is_a_valid_cover_of_any_data():
    """Index sets of other data: the decomposition stays exact where the polynomial is."""
    q, k, v = qkv(1, 1, n=60, d=3, scale=0.01)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(0.015, 6))
    assert 0 < plan.heads[0].large[0] < 60
    other = qkv(1, 1, n=60, d=3, scale=0.01, seed=9)
    exact, _ = dense_attention(*other)
    torch.testing.assert_close(sb.attention(*other, plan=plan), exact, rtol=1e-9, atol=1e-9)


def cover(plan, head):
    """How often each pair is summed, and how often exactly."""
    counts = torch.zeros(head.n, head.m, dtype=torch.int64)
    exact = torch.zeros_like(counts)
    for group in plan.basis(head):
        rows = torch.arange(head.n) if group.rows is None else group.rows
        for component in group.components:
            keys = torch.arange(head.m) if component.keys is None else component.keys
            counts[rows[:, None], keys] += 1
            if isinstance(component, ExactSum):
                exact[rows[:, None], keys] += 1
            else:
                assert isinstance(component, PolynomialSum)
    return counts, exact


@pytest.mark.parametrize("threshold", [0.01, 0.7, 1.2, 1.9, 50.0])
@pytest.mark.parametrize("padded", [False, True])
def test_supports_are_disjoint_and_cover_everything(threshold, padded):
    """Definition B.5 for the components that actually run; and Cases 1-2 count the exact pairs."""
    q, k, v = qkv(1, 1, n=50, m=43, d=3)
    mask = torch.rand(43, generator=torch.Generator().manual_seed(0)) < 0.8 if padded else None
    problem = attention_problem(q, k, v, mask, 0.0, False, None, False)
    plan = sb.plan(q, k, v, attn_mask=mask, method=sb.SingleThreshold(threshold, 2))
    head, head_plan = problem.head(0, 0), plan.heads[0]
    counts, exact = cover(head_plan, head)
    live = torch.ones(43, dtype=torch.bool) if mask is None else mask
    assert (counts[:, live] == 1).all()
    assert (counts[:, ~live] == 0).all()
    large_rows = int((q[0, 0].abs().amax(1) > threshold).sum())
    large_keys = int(((k[0, 0].abs().amax(1) > threshold) & live).sum())
    if head_plan.kind == "single-threshold":
        assert head_plan.large[0] == large_rows
        assert head_plan.large[1] == large_keys
        expected = large_rows * int(live.sum()) + (50 - large_rows) * large_keys
        assert int(exact.sum()) == expected <= (large_rows + large_keys) * max(50, 43)


def test_cost_counts_everything_and_is_small_on_bounded_inputs():
    q, k, v = qkv(1, 1, n=32768, d=64, scale=0.1, dtype=torch.float32)
    for method in (sb.SingleThreshold(0.4, 2), sb.SingleThreshold(None, 2), sb.Polynomial(2)):
        plan = sb.plan(q, k, v, method=method)
        assert plan.cost < 0.2
        assert plan.heads[0].kind != "exact"
        features = 2 * 32768 * 2145 * 66 / (32768**2 * 128)
        assert plan.cost > features * 0.98
    large = sb.plan(q, k, v, method=sb.SingleThreshold(0.4, 2)).heads[0]
    share = 1 - (1 - large.large[0] / 32768) * (1 - large.large[1] / 32768)
    assert large.cost > features * (1 - share) + share


def test_threshold_none_takes_the_largest_feasible_threshold():
    """One step further and the certified error would pass 5 %."""
    q, k, v = qkv(1, 1, n=400, d=4, scale=0.7)
    method = sb.SingleThreshold(None, 2)
    head = sb.plan(q, k, v, method=method).heads[0]
    if head.kind == "exact":
        assert "cost" in head.reason or "within" in head.reason
        return
    assert head.polynomial.error <= 0.05 or head.polynomial.kind != "minimax"


def test_threshold_none_says_so_when_nothing_pays():
    q, k, v = qkv(1, 1, n=64, d=8, scale=30.0)
    head = sb.plan(q, k, v, method=sb.SingleThreshold(None, 1)).heads[0]
    assert head.kind == "exact"
    assert head.reason
    assert sb.plan(q, k, v, method=sb.SingleThreshold(None, 1)).cost == 1.0


@pytest.mark.parametrize(("rows", "keys"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_a_threshold_that_leaves_one_side_nothing_small_costs_what_exact_attention_does(rows, keys):
    q, k, v = qkv(1, 1, n=50, d=3)
    plan = sb.plan(q * rows, k * keys, v, method=sb.SingleThreshold(1e-6, 2))
    head = plan.heads[0]
    assert head.kind == "exact" and "every row" in head.reason
    assert plan.cost == plan.speedup == head.cost == head.speedup == 1.0


def test_methods_without_arguments():
    assert sb.Polynomial() == sb.Polynomial(2, None)
    assert sb.SingleThreshold() == sb.SingleThreshold(None, 2)
    assert sb.MultiThreshold() == sb.MultiThreshold(2.0, 1, None, 0)
    assert sb.PowerAttention() == sb.PowerAttention(4, None, 0)
    assert sb.Auto() == sb.Auto(1e-2, 0)


def test_threshold_rules_of_the_paper():
    q, k, v = qkv(1, 1, n=500, d=4)
    head = sb.plan(q, k, v, method=sb.SingleThreshold("sqrt-log", 2)).heads[0]
    assert head.threshold == pytest.approx(math.sqrt(math.log(500)))
    head = sb.plan(q, k, v, method=sb.SingleThreshold("sub-gaussian", 2)).heads[0]
    expected = sb.analysis.sub_gaussian_threshold(q[0, 0], k[0, 0])
    assert head.threshold == pytest.approx(expected)


def test_a_plan_prints_and_draws(tmp_path):
    q, k, v = qkv(1, 2, n=300, d=4)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(1.8, 2))
    text = str(plan)
    assert "T=1.8" in text
    assert "large rows" in text
    assert "cost" in text
    plan.draw(tmp_path / "supports.png", head=1)
    assert (tmp_path / "supports.png").stat().st_size > 5000
    for head in (2, 0.5):
        with pytest.raises(sb.InputError, match="head must be an integer from 0 to 1"):
            plan.draw(head=head)


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize(("n", "m"), [(300, 300), (300, 200), (200, 300)])
def test_the_picture_of_lists_has_the_pairs_of_the_plan(n, m, window):
    pytest.importorskip("matplotlib")
    settings = ListSettings(1e-3, 32, 16, window)
    head = ListHead(n=n, m=m, cost=0.5, speedup=1.0, lists=settings, keys=20.0)
    figure = draw_supports(head)
    area = {label: 0.0 for _, label in (CLOSED, OPEN, OWN)}
    for patch in figure.axes[0].patches:
        corners = patch.get_patch_transform().transform(patch.get_path().vertices[:4])
        (x, y), (u, w) = corners.T, corners[[1, 2, 3, 0]].T
        area[patch.get_label()] += abs(float((x * w - u * y).sum())) / 2
    closed, opened, own = area.values()
    key, row = torch.arange(m), torch.arange(n).unsqueeze(1)
    far = key < row // window * window if window else torch.ones(n, m)
    near = (key // window == row // window) & (key <= row) if window else torch.zeros(n, m)
    assert opened == pytest.approx(20.0 * n)
    assert opened + closed == pytest.approx(float(far.sum()))
    # half a pair for each row on the diagonal lies beyond the triangles
    assert own == pytest.approx(float(near.sum()) - (min(n, m) / 2 if window else 0.0))


def test_a_plan_that_splits_nothing_serves_any_length():
    q, k, v = qkv(1, 1, n=40)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(1e-6))
    assert plan.heads[0].kind == "exact"
    longer = qkv(1, 1, n=50)
    torch.testing.assert_close(sb.attention(*longer, plan=plan), dense_attention(*longer)[0])


def test_methods_take_numbers_of_other_kinds():
    number, integer = torch.tensor(0.5).item(), True + 1
    assert sb.SingleThreshold(number, integer) == sb.SingleThreshold(0.5, 2)
    numpy = pytest.importorskip("numpy")
    method = sb.SingleThreshold(numpy.float32(0.5), numpy.int64(2))
    assert method == sb.SingleThreshold(0.5, 2)
    assert type(method.threshold) is float
    assert sb.Polynomial(numpy.int64(1), numpy.float64(2.0)) == sb.Polynomial(1, 2.0)
    assert type(sb.Auto(numpy.float32(0.25)).tolerance) is float


def test_causal_attention_waits_for_the_thread_with_the_last_rows(monkeypatch):
    q, k, v = qkv(1, 1, n=4096, d=8, dtype=torch.float32)
    whole, causal = (
        attention_problem(q, k, v, None, 0.0, is_causal, None, False).head(0, 0)
        for is_causal in (False, True)
    )
    for threads, part in ((1, 0.5), (2, 0.75), (4, 0.875)):  # of all pairs, in units of all threads
        monkeypatch.setattr(cost, "threads", lambda count=threads: count)
        ratio = cost.exact_seconds(causal) / cost.exact_seconds(whole)
        assert ratio == pytest.approx(part, rel=0.05)
