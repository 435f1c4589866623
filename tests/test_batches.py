"""One entry for each head, whatever the batch; and costs from a table."""

import warnings

import pytest
import torch

import supportbasis as sb
from cases import beyond, clustered, dense_attention, qkv
from supportbasis.methods import planning
from supportbasis.plans import calibration
from supportbasis.plans.supports import score_reach
from supportbasis.problem.validation import attention_problem

METHODS = [
    sb.Exact(),
    sb.Polynomial(2),
    sb.SingleThreshold(1.2, 2),
    sb.MultiThreshold(1.5, 2),
    sb.PowerAttention(2),
    sb.PowerAttention(4, sketch_size=12, seed=4),
    sb.FittedPolynomial(20),
    sb.Auto(0.1),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_plan_serves_any_batch(method):
    """Made for one batch element, for two, and used on three: each gets what it would get alone."""
    q, k, v = qkv(3, 2, n=40, scale=0.5)
    for made_for in (1, 2):
        plan = beyond(sb.plan(*(x[:made_for] for x in (q, k, v)), method=method))
        assert len(plan.heads) == 2
        whole = sb.attention(q, k, v, plan=plan, return_result=True)
        for b in range(3):
            alone = sb.attention(*(x[b : b + 1] for x in (q, k, v)), plan=plan, return_result=True)
            torch.testing.assert_close(whole.output[b : b + 1], alone.output)
            torch.testing.assert_close(whole.lse[b : b + 1], alone.lse)


def test_a_polynomial_covers_the_scores_of_all_batch_elements():
    q, k, v = qkv(3, 2, n=40, scale=0.3)
    q[1] *= 3  # the middle element has the largest scores
    plan = sb.plan(q, k, v, method=sb.Polynomial(3))
    for h, head in enumerate(plan.heads):
        alone = sb.plan(q[1:2], k[1:2], v[1:2], method=sb.Polynomial(3)).heads[h]
        assert head.bound == alone.bound
        assert head.scores.largest == alone.scores.largest
    result = sb.attention(q, k, v, plan=plan, return_result=True)
    assert [head.kind for head in result.plan.heads] == ["polynomial"] * 2  # no one left its range


def test_a_threshold_of_a_batch_is_the_smallest():
    q, k, v = qkv(2, 1, n=300, d=4, scale=0.4)
    q[1], k[1] = 1.3 * q[1], 1.3 * k[1]
    method = sb.SingleThreshold(None, 2)
    alone = [sb.plan(*(x[b : b + 1] for x in (q, k, v)), method=method).heads[0] for b in (0, 1)]
    (head,) = sb.plan(q, k, v, method=method).heads
    assert {each.kind for each in alone} == {"single-threshold"}
    assert head.threshold == min(each.threshold for each in alone)
    for b in (0, 1):  # certified for the small tokens of both
        problem = attention_problem(q, k, v, None, 0.0, False, None, False)
        assert score_reach(problem.head(b, 0), *head.smooth(problem.head(b, 0))) <= head.bound


def test_lists_of_a_batch_keep_the_tolerance_of_every_element():
    q, k, v = clustered(2, 1, n=2048)
    q[1] *= 3  # sharper: it needs longer lists
    method, tokens = sb.BlockSupport(tolerance=0.01), (q, k, v)
    alone = [sb.plan(*(x[b : b + 1] for x in tokens), method=method).heads[0] for b in (0, 1)]
    first, second = (each.lists.price for each in alone)
    assert first != second
    (head,) = sb.plan(*tokens, method=method).heads
    assert head.lists.price == min(first, second)
    output = sb.attention(*tokens, method=method)
    exact, _ = dense_attention(*tokens)
    errors = (output - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert float(errors.max()) <= 0.0125


def test_lists_of_a_batch_keep_the_budget_for_every_element():
    q, k, v = clustered(2, 1, n=2048)
    q[1] *= 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = [
            sb.plan(*(x[b : b + 1] for x in (q, k, v)), method=sb.BlockSupport(0.4)).heads[0]
            for b in (0, 1)
        ]
        (head,) = sb.plan(q, k, v, method=sb.BlockSupport(0.4)).heads
    first, second = (each.lists.price for each in alone)
    assert first != second and head.lists.price == max(first, second)
    assert head.cost <= 0.4 * 1.05  # measured on sampled rows


def test_a_head_that_is_exact_in_one_element_has_its_reason():
    q, k, v = qkv(2, 1, n=2000, d=4, scale=0.1)
    q[1] *= 3000
    method = sb.SingleThreshold(None, 1)
    first, second = (sb.plan(*(x[b : b + 1] for x in (q, k, v)), method=method) for b in (0, 1))
    assert first.heads[0].kind == "single-threshold"
    (second,), (head,) = second.heads, sb.plan(q, k, v, method=method).heads
    assert second.kind == head.kind == "exact" and head.reason == second.reason


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_plan_of_one_element_is_checked_on_the_others(limit, monkeypatch):
    """Its error there is that of the certificate; beyond the tolerance the head is exact."""
    tokens = qkv(2, 1, n=4096, d=16, scale=0.2, dtype=torch.float32)
    tokens[0][1] *= 1.3  # so that the second element has the wider range
    true_error, found = planning._error, []

    def error(method, plan, head):
        found.append(true_error(method, plan, head))
        return limit

    monkeypatch.setattr(planning, "_error", error)
    (head,) = sb.plan(*tokens, method=sb.Auto(1e-2)).heads
    (second,) = sb.plan(*(x[1:] for x in tokens), method=sb.Auto(1e-2)).heads
    assert second.kind == "polynomial" and len(found) == 1
    if limit:
        assert head.kind == "exact" and "no plan of one batch element" in head.reason
        return
    assert head.polynomial == second.polynomial
    plan = sb.Plan(sb.Auto(1e-2), 16, (head,), 0.25, False)
    result = sb.attention(*(x[:1] for x in tokens), plan=plan, return_result=True)
    assert found == [pytest.approx(float(result.certificate.limit))]


def test_costs_come_from_a_table_in_deterministic_mode(monkeypatch):
    def refuse(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(calibration, "calibrate", refuse)
    q, k, v = qkv(1, 1, n=4096, d=16, scale=0.2, dtype=torch.float32)
    assert sb.plan(q, k, v, method=sb.Auto(1e-2)).speedup > 1  # asked for in conftest
    monkeypatch.setenv("SUPPORTBASIS_DETERMINISTIC", "0")
    with pytest.raises(AssertionError, match="timed"):
        sb.plan(q, k, v, method=sb.Auto(1e-2))
    torch.use_deterministic_algorithms(True)
    try:
        assert sb.plan(q, k, v, method=sb.Auto(1e-2)).speedup > 1
    finally:
        torch.use_deterministic_algorithms(False)
