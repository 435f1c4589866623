"""Rows that a fitted polynomial gets wrong: found by a bound, by groups of keys and by a sample."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from cases import dense_attention, fitted_problem
from supportbasis.accuracy.estimates import RowCheck
from supportbasis.distributed.state_bounds import group_sums, least_lse_with
from supportbasis.engine import jensen
from supportbasis.engine.execute import execute
from supportbasis.engine.jensen import grouped_lse, least_lse, lower_lse
from supportbasis.methods.fitted import FittedSearch
from supportbasis.plans import ExactHead, FittedHead, Plan
from supportbasis.polynomials import fitting as fitted
from supportbasis.polynomials.balancing import balancing_transform, transformed
from supportbasis.polynomials.fitting import FittedKernel, PairSample
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

# ---- rows that go wrong -----------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 20),
    m=st.integers(1, 60),
    d=st.integers(1, 6),
    size=st.sampled_from([0.1, 1.0, 5.0]),
    hidden=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_bound_by_groups_is_one(n, m, d, size, hidden, seed):
    """Below the true sums, and not below the bound by one mean."""
    generator = torch.Generator().manual_seed(seed)
    query, key, weight = (
        size * torch.randn(2, count, d, generator=generator, dtype=torch.float64)
        for count in (n, m, m)
    )
    weight = weight[..., 0].clone()
    if hidden:
        weight[0, ::2] = -math.inf
        weight[1] = -math.inf
    score = query @ key.mT + weight.unsqueeze(1)
    exact = score.logsumexp(2)
    share = weight.softmax(1).nan_to_num(0.0)
    mean = (query @ (share.unsqueeze(1) @ key).mT).squeeze(2) + weight.logsumexp(1, keepdim=True)
    found = grouped_lse(query, key, weight)
    slack = 1e-9 * (1 + exact.abs().nan_to_num(0.0, 0.0, 0.0))
    assert bool((found <= exact + slack).all())
    assert bool((found >= mean - slack).all())


def test_groups_tell_what_one_mean_does_not():
    """Two clusters of keys: the mean lies between them, where no key is."""
    generator = torch.Generator().manual_seed(0)
    key = 0.1 * torch.randn(400, 3, generator=generator, dtype=torch.float64)
    key[::2, 0] += 4.0
    key[1::2, 0] -= 4.0
    query = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.5, 0.0]], dtype=torch.float64)
    exact = (query @ key.T).logsumexp(1)
    zero = torch.zeros(1, 400, dtype=torch.float64)
    assert bool((grouped_lse(query[None], key[None], zero)[0] > exact - 0.1).all())
    assert bool((query @ key.mean(0) + math.log(400) < exact - 2).all())


def skewed(n=8192, wrong=16, reach=1.5, causal=False, far=0):
    """A head whose keys are skewed along an axis, and a plan of degree 3 that is right for nearly
    all rows; the sums of ``wrong`` rows, somewhere, come out too small, and ``far`` keys are so
    long that they are exact."""
    generator = torch.Generator().manual_seed(0)
    key = 0.2 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    key[:, 0] = 1 + torch.rand(n, generator=generator, dtype=torch.float64).log()
    key[:far, 1] = 60.0
    query = 0.1 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    query[torch.randperm(n, generator=generator)[:wrong], 0] = reach
    value = 1 + torch.randn(n, 3, generator=generator, dtype=torch.float64) + key[:, :1]
    tokens = [x[None, None] for x in (query, key, value)]
    problem = attention_problem(*tokens, None, 0.0, causal, 1.0, False)
    head = problem.head(0, 0)
    transform = balancing_transform(head)
    radius = float(transformed(head, transform).key[far:].norm(dim=1).max()) if far else math.inf
    kernel = FittedKernel((1.0, 1.0, 1 / 2, 1 / 6), (4, 4, 4), key_radius=radius)
    plan = FittedHead(n=n, m=n, cost=0.1, speedup=1.0, fitted=kernel, transform=transform)
    return problem, head, Plan(sb.FittedPolynomial(), 4, (plan,))


def error_of(problem, plan):
    exact, _ = dense_attention(
        problem.query, problem.key, problem.value, is_causal=problem.is_causal, scale=1.0
    )
    return float((execute(problem, plan).output - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("wrong", "far"),
    [(2, 0), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((16, 80), (60, 0)))],
)
def test_a_few_wrong_rows_are_found(wrong, far):
    problem, head, plan = skewed(wrong=wrong, far=far)
    error = error_of(problem, plan)
    assert error > 0.04
    measured, limit = RowCheck(head, 1e-2, 0).error(plan.heads[0])
    assert 0.8 * error < measured < 1.25 * error
    assert limit > error


def test_the_most_features_are_the_last_that_are_fast_enough():
    head = fitted_problem(8192, d=16, dtype=torch.float32).head(0, 0)
    search = FittedSearch.of(head, 0)

    def predicted(features):
        return search._work(search._spans(features)).speedup(head)

    for speedup in (predicted(1024) * 0.99, predicted(1024) / 2):
        most = search.most(speedup)
        assert most >= 1024 and predicted(most) > speedup >= predicted(2 * most)
    assert search.most(predicted(8)) == 0


def test_a_fit_with_wrong_rows_is_not_taken():
    problem, head, plan = skewed(wrong=60)
    assert error_of(problem, plan) > 0.2
    search = FittedSearch.of(head, 0)
    assert search._measured(plan.heads[0], RowCheck(head, 0.1, 0)) is None
    assert RowCheck(search.head, 1.0, 0).error(plan.heads[0])[0] > 0.2


@pytest.mark.slow
def test_the_certificate_looks_where_sums_are_small():
    """One row in thousands, which no sample would hold but for its small sum."""
    problem, _, plan = skewed(wrong=1)
    problem.query[..., ::100, 1] = 3.0  # longer, and right
    error = error_of(problem, plan)
    assert error > 0.02
    result = sb.attention(
        problem.query, problem.key, problem.value, scale=1.0, plan=plan, return_result=True
    )
    assert 0.9 * error < float(result.certificate.measured) < 1.1 * error


def test_the_bound_of_a_fit_holds_where_its_weights_are_negative():
    """Values that have the signs of a row's weights give an output beyond all of them."""
    problem, head, plan = skewed(n=1024, wrong=1)
    row = int(head.query[:, 0].argmax())
    signs = reference.weights(head, plan.heads[0])[0][row].sign()
    value = signs[None, None, :, None].expand(1, 1, -1, 3).contiguous()
    result = sb.attention(
        problem.query, problem.key, value, scale=1.0, plan=plan, return_result=True
    )
    largest = float(result.output.abs().max())
    assert largest > 1.01  # and no bound in terms of the values alone can hold
    assert float(result.certificate.bound) == pytest.approx(1 + largest)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_below_half_of_the_bound_are_exact(causal):
    problem, head, plan = skewed(n=1024, wrong=8, reach=2.05, causal=causal)
    outcome = execute(problem, plan)
    failed = outcome.fallback[0, 0]
    if not causal:
        assert int(failed.sum()) == 8
        assert bool((head.query[failed, 0] == 2.05).all())
    least = least_lse(plan.heads[0], head, None)
    assert bool((outcome.lse[0, 0] >= least - 1e-6).all())
    assert bool((least <= (head.query @ head.key.T).logsumexp(1)).all()) or causal


def test_rows_without_keys_on_any_rank_have_no_bound():
    """All keys are hidden, so that no group has any weight."""
    _, head, plan = skewed(n=256)
    hidden = replace(head, key_log_weight=torch.full((head.m,), -math.inf))
    sums, top = group_sums(plan.heads[0], hidden)
    assert bool((least_lse_with(plan.heads[0], hidden, None, sums, top) == -math.inf).all())


def test_a_fit_that_leaves_many_rows_to_exact_sums_has_failed():
    _, head, plan = skewed(n=2048, wrong=100, reach=2.5)
    assert RowCheck(head, 0.5, 0).error(plan.heads[0]) == (math.inf, math.inf)


def test_the_longest_tokens_are_fitted_to():
    problem = fitted_problem(4000, d=5)
    head = transformed(problem.head(0, 0), balancing_transform(problem.head(0, 0)))
    sample = PairSample.draw(head, 0)
    for tokens, all_tokens, count in (
        (sample.query, head.query, sample.row_count),
        (sample.key, head.key, sample.key_count),
    ):
        assert float(count.sum()) == pytest.approx(4000)
        longest = all_tokens.norm(dim=1).topk(len(tokens) // 4).values
        assert torch.allclose(tokens.norm(dim=1)[: len(longest)].sort().values,
                              longest.sort().values)  # fmt: skip
        assert bool((count[: len(longest)] == 1).all())
    mass = (sample.log_weight - head.key_log_weight.logsumexp(0)).logsumexp(0)
    assert float(mass) == pytest.approx(0, abs=0.1)
    few_head = fitted_problem(100).head(0, 0)
    few = PairSample.draw(transformed(few_head, balancing_transform(few_head)), 0)
    assert len(few.query) == len(few.key) == 100
    assert bool((few.row_count == 1).all())


@pytest.mark.slow
def test_a_fit_to_a_sample_is_that_to_all_pairs(monkeypatch):
    """Tokens that were picked for their length count once, others for all that they stand for."""
    head = fitted_problem(3000, d=5).head(0, 0)
    balanced = transformed(head, balancing_transform(head))
    sample = PairSample.draw(balanced, 0)
    monkeypatch.setattr(fitted, "ROWS", 3000)
    monkeypatch.setattr(fitted, "KEYS", 3000)
    whole = PairSample.draw(balanced, 0)
    size = whole.exact.norm(dim=1, keepdim=True)

    def loss(kernel):
        return float(((kernel(whole.query, whole.key) * whole.unit - whole.exact) / size).norm())

    spans = (5, 5, 5)
    least = loss(whole.fit(spans))
    assert least <= loss(sample.fit(spans)) < 1.005 * least


def test_causal_heads_are_fitted_to_keys_that_are_seen():
    head = fitted_problem(100, m=5000, causal=True).head(0, 0)
    sample = PairSample.draw(transformed(head, balancing_transform(head)), 0)
    assert float(sample.key_count.sum()) <= 100


@pytest.mark.parametrize("hidden", [False, True])
def test_bounds_of_rows_that_lie_apart_are_those_of_all(monkeypatch, hidden):
    monkeypatch.setattr(jensen, "BLOCK", 16)
    bias = torch.zeros(1, 1, 1, 500, dtype=torch.float64)
    bias[..., 3::7] = -math.inf if hidden else -1.0
    problem = fitted_problem(600, m=500, causal=True, bias=bias)
    head = problem.head(0, 0)
    plan = ExactHead(n=600, m=500)
    whole = lower_lse(plan, head, None)
    score = head.query @ head.key.T * head.scale + head.key_log_weight
    score = score.masked_fill(torch.ones(600, 500).triu(1).bool(), -math.inf)
    assert bool((whole <= score.logsumexp(1) + 1e-9).all())
    rows = torch.tensor([0, 5, 6, 90, 340, 341, 499, 550, 599])
    torch.testing.assert_close(lower_lse(plan, head, rows), whole[rows], rtol=0, atol=1e-12)
