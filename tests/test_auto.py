"""Auto: the cheapest plan within the tolerance, else exact."""

import math
from itertools import pairwise

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from supportbasis.accuracy.estimates import RowCheck
from supportbasis.methods import auto
from supportbasis.problem.validation import attention_problem


def relative(output, exact):
    return float((output.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-5])
def test_meets_its_tolerance_on_bounded_inputs(tolerance, causal):
    q, k, v = qkv(1, 1, n=8192, d=16, scale=0.3, dtype=torch.float32)
    result = sb.attention(q, k, v, method=sb.Auto(tolerance), is_causal=causal, return_result=True)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    assert relative(result.output, exact) <= tolerance
    assert result.certificate.holds(tolerance)


def test_is_not_exact_where_a_polynomial_will_do():
    q, k, v = qkv(1, 1, n=16384, d=32, scale=0.1, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Auto(1e-3))
    assert plan.heads[0].kind != "exact"
    assert plan.cost < 0.2
    assert plan.heads[0].degree <= 2
    assert plan.heads[0].measured <= 1e-3


def test_a_threshold_is_found_where_plans_of_smaller_exact_parts_fail():
    """Outliers that a sample of the scores misses: estimates of the first thresholds are wrong."""
    q, k, v = (x.clone() for x in qkv(1, 1, n=16384, d=32, scale=0.4, dtype=torch.float32))
    q[..., ::97, :] *= 3
    k[..., ::89, :] *= 3
    head = sb.plan(q, k, v, is_causal=True, method=sb.Auto(0.02)).heads[0]
    assert head.kind == "single-threshold"
    assert head.measured <= 0.02


def test_a_looser_tolerance_never_costs_more():
    q, k, v = qkv(1, 1, n=16384, d=16, scale=0.4, dtype=torch.float32)
    speeds = [sb.plan(q, k, v, method=sb.Auto(t)).speedup for t in (1e-6, 1e-4, 1e-2, 0.5)]
    assert all(b >= 0.7 * a for a, b in pairwise(speeds))


def test_falls_back_to_exact_where_nothing_else_will_do():
    q, k, v = qkv(1, 1, n=6000, d=16, scale=4.0, dtype=torch.float32)
    result = sb.attention(q, k, v, method=sb.Auto(1e-3), return_result=True)
    head = result.plan.heads[0]
    assert head.kind == "exact"
    assert "within 0.001" in head.reason
    exact, _ = dense_attention(q, k, v)
    assert relative(result.output, exact) <= 1e-5


def test_short_inputs_are_exact_without_a_search():
    q, k, v = qkv(1, 4, n=64, dtype=torch.float32)
    head = sb.plan(q, k, v).heads[0]
    assert head.kind == "exact"
    assert "length" in head.reason


def test_a_plan_that_fails_is_followed_by_its_threshold_one_degree_higher(monkeypatch):
    q, k, v = qkv(1, 1, n=16384, d=8, scale=0.3, dtype=torch.float32)
    q[:, :, :20] *= 20
    k[:, :, :20] *= 20
    head = attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)
    plans: list[sb.plans.ThresholdHead] = []
    monkeypatch.setattr(auto._Search, "verified", lambda search, plan: plans.append(plan))
    assert auto._Search(head, 1e-2, 0).certified(1.0) is None
    found = [(plan.threshold, plan.degree) for plan in plans]
    assert len({threshold for threshold, _ in found}) > 1
    assert found[1::2] == [(threshold, degree + 1) for threshold, degree in found[::2]]


def test_splits_off_outliers():
    q, k, v = qkv(1, 1, n=16384, d=32, scale=0.1, dtype=torch.float32)
    q[:, :, ::200] *= 40
    k[:, :, ::200] *= 40
    result = sb.attention(q, k, v, method=sb.Auto(1e-3), return_result=True)
    head = result.plan.heads[0]
    assert head.kind in ("single-threshold", "fitted")
    assert head.cost < 0.3
    rows = torch.arange(0, 16384, 37)
    rows = torch.cat([rows, torch.arange(0, 16384, 200)])
    exact, _ = dense_attention(q[:, :, rows], k, v)
    assert relative(result.output[:, :, rows], exact) <= 1e-3


@pytest.mark.parametrize("sigma", [pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_outliers_that_take_all_weight_need_no_accurate_rest(sigma):
    """Long keys outweigh the others by far, so that a polynomial of the others may err by much.
    Buckets leave them exact as well, and cost more."""
    q, k, v = qkv(1, 1, n=16384, d=32, scale=math.sqrt(sigma), dtype=torch.float32)
    q[:, :, ::200] *= 50
    k[:, :, ::200] *= 50
    plan = sb.plan(q, k, v, method=sb.Auto(1e-2))
    assert plan.heads[0].kind == "single-threshold"
    assert plan.cost < 0.05
    assert plan.cost < sb.plan(q, k, v, method=sb.MultiThreshold(2.0, 1, 64)).cost / 3
    rows = torch.arange(0, 16384, 37)
    exact, _ = dense_attention(q[:, :, rows], k, v)
    assert relative(sb.attention(q, k, v, plan=plan)[:, :, rows], exact) <= 1e-2


def test_padded_keys_are_no_outliers():
    """However many and however long: outliers among the others are found beside them."""
    q, k, v = qkv(1, 1, n=8192, d=16, scale=0.3, dtype=torch.float32)
    for x in (q, k):
        x[:, :, ::200] *= 50
    k[:, :, -1000:] *= 1e4
    mask = torch.arange(8192) < 7192
    plan = sb.plan(q, k, v, mask, method=sb.Auto(1e-2))
    assert plan.heads[0].kind == "single-threshold"
    assert 41 <= plan.heads[0].large[0] < 400 and 36 <= plan.heads[0].large[1] < 400


def test_the_small_share_of_weights_is_that_of_the_sampled_rows():
    q, k, v = qkv(1, 1, n=300, d=4, scale=0.8)
    head = attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(1.2, 2)).heads[0]
    check = RowCheck(head, 1e-9, seed=0)
    small = (q[0, 0].abs() <= 1.2).all(1)[check.rows], (k[0, 0].abs() <= 1.2).all(1)
    weight = (q[0, 0, check.rows] @ k[0, 0].T / 2).softmax(1)
    expected = weight[small[0]][:, small[1]].sum(1).square().mean().sqrt()
    assert check.small_share(plan) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.slow
def test_heads_are_planned_one_by_one():
    calm = qkv(1, 1, n=8192, d=16, scale=0.1, dtype=torch.float32)
    wild = qkv(1, 1, n=8192, d=16, scale=6.0, dtype=torch.float32, seed=1)
    q, k, v = (torch.cat(pair, 1) for pair in zip(calm, wild, strict=True))
    plan = sb.plan(q, k, v, method=sb.Auto(1e-3))
    assert plan.heads[0].kind != "exact"
    assert plan.heads[1].kind == "exact"
    output = sb.attention(q, k, v, plan=plan)
    exact, _ = dense_attention(q, k, v)
    assert relative(output, exact) <= 1e-3


def test_is_deterministic():
    q, k, v = qkv(1, 1, n=8192, d=16, scale=0.3, dtype=torch.float32)
    first, second = (sb.plan(q, k, v, method=sb.Auto(1e-3)) for _ in range(2))
    assert first.heads[0].polynomial == second.heads[0].polynomial
    assert first.heads[0].measured == second.heads[0].measured


def test_the_row_check_sees_what_the_plan_does():
    """Error of the sampled rows without running the plan = error of the same rows after it."""
    q, k, v = qkv(1, 1, n=300, d=4, scale=0.8)
    head = attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(1.2, 2))
    assert plan.heads[0].large[0] > 30
    check = RowCheck(head, 1e-9, seed=0)
    rows = check.rows
    output = sb.attention(q, k, v, plan=plan)[0, 0][rows]
    exact = dense_attention(q, k, v)[0][0, 0][rows]
    expected, _ = check.sample.frobenius_limit(
        (output - exact).square().sum(-1), exact.square().sum(-1)
    )
    assert check.error(plan.heads[0])[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_plan_that_is_asked_for_may_take_longer_to_find(monkeypatch):
    """Within a call a search has to pay at once; a plan of its own may serve many calls."""
    monkeypatch.setattr(auto, "PLANNING_SECONDS", {"cpu": math.inf})
    monkeypatch.setattr(auto, "REUSED_SECONDS", {"cpu": 0.0})
    q, k, v = qkv(1, 2, n=8192, d=16, scale=0.1, dtype=torch.float32)
    within = sb.attention(q, k, v, method=sb.Auto(1e-2), return_result=True).plan
    assert {head.reason for head in within.heads} == {
        "below the length where an approximation pays"
    }
    asked = sb.plan(q, k, v, method=sb.Auto(1e-2))
    assert all(head.kind != "exact" for head in asked.heads)
    exact, _ = dense_attention(q, k, v)
    assert relative(sb.attention(q, k, v, plan=asked), exact) <= 1e-2
