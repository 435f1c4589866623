"""Polynomials fitted to the scores: the kernel, its features, the plans, the twin."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from cases import beyond, dense_attention
from supportbasis import fitted, jensen, reference
from supportbasis.execute import execute
from supportbasis.features import FeatureMap
from supportbasis.fitted import FittedKernel, PairSample, choose_spans, count_features
from supportbasis.frame import balanced, framed, own_frame
from supportbasis.inputs import attention_problem
from supportbasis.jensen import WRONG, grouped_lse, least_lse, lower_lse
from supportbasis.methods.fitted import FittedSearch
from supportbasis.plans import HeadPlan, Plan
from supportbasis.rows import RowCheck


def problem_of(n, m=None, d=8, dv=5, sigma=0.5, causal=False, bias=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n + d)
    size = math.sqrt(sigma / math.sqrt(d)) * d**0.25
    query, key = (
        torch.randn(1, 1, count, d, generator=generator, dtype=dtype) * size
        for count in (n, m or n)
    )
    value = torch.randn(1, 1, m or n, dv, generator=generator, dtype=dtype)
    return attention_problem(query, key, value, bias, 0.0, causal, None, False)


# ---- the kernel -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(spans=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_features_of_spans_give_the_kernel(spans, seed):
    spans = tuple(sorted(spans, reverse=True))
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(7, spans[0], generator=generator, dtype=torch.float64) for _ in range(2))
    coefficient = torch.randn(len(spans) + 1, generator=generator, dtype=torch.float64)
    phi = FeatureMap(spans[0], len(spans), spans)
    weight = phi.multiplicity * coefficient[phi.order]
    by_features = (phi(x.flip(1)) * weight) @ phi(y.flip(1)).T
    kernel = FittedKernel(tuple(coefficient.tolist()), spans)
    torch.testing.assert_close(by_features, kernel(x, y))
    assert phi.count == count_features(spans)


@settings(deadline=None, max_examples=40)
@given(spectrum=st.lists(st.floats(0, 2), min_size=1, max_size=12), features=st.integers(1, 400))
def test_spans_descend_and_keep_to_their_features(spectrum, features):
    spectrum = torch.tensor(sorted(spectrum, reverse=True), dtype=torch.float64)
    spans = choose_spans(spectrum, features)
    assert list(spans) == sorted(spans, reverse=True)
    assert count_features(spans) <= features
    assert all(r <= int((spectrum > 0).sum()) for r in spans)


def test_a_flat_spectrum_gets_all_directions_of_a_degree_before_the_next():
    flat = torch.tensor([0.1] * 16 + [0.0] * 48, dtype=torch.float64)
    assert choose_spans(flat, 153) == (16, 16)
    assert choose_spans(flat, 969) == (16, 16, 16)
    steep = torch.tensor([0.5, 0.01, 0.01], dtype=torch.float64)
    assert len(choose_spans(steep, 8)) >= 4  # high degrees in the one direction that matters


def test_the_fit_beats_taylor_where_the_scores_are():
    problem = problem_of(512, d=16)
    head = next(iter(problem.each_head()))[2]
    inside = framed(head, balanced(head))
    sample = PairSample.draw(inside, 0)
    for degree in (1, 2, 3, 4):
        spans = (16,) * degree
        taylor = tuple(1 / math.factorial(k) for k in range(degree + 1))
        fitted = sample.fit(spans)
        assert fitted is not None
        given, known = (
            sample.expected_error(kernel) for kernel in (fitted, FittedKernel(taylor, spans))
        )
        assert given < 1.01 * known
    assert given < 8e-3


# ---- plans ------------------------------------------------------------------------------------


CASES = [(400, 400, False), (130, 411, False), (400, 90, False), (400, 400, True), (12, 12, False)]


@pytest.mark.parametrize(("n", "m", "causal"), CASES)
@pytest.mark.parametrize("weights", ["none", "bias", "mask"])
def test_the_component_is_its_twin(n, m, causal, weights):
    bias = None
    if weights != "none":
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(1, 1, 1, m, generator=generator, dtype=torch.float64)
        bias[..., ::5] = -math.inf
        bias = bias if weights == "bias" else bias > -math.inf
    problem = problem_of(n, m, causal=causal, bias=bias)
    method = sb.BlockSupport(50.0, tail="polynomial")
    head = next(iter(problem.each_head()))[2]
    from supportbasis.methods.fitted import FittedSearch

    search = FittedSearch.of(head, 0)
    assert not isinstance(search, str)
    plan = search.plan(60)
    assert plan is not None
    whole = sb.Plan(method, 1, 1, problem.query.shape[-1], (plan,))
    outcome = execute(problem, whole)
    output, lse = reference.execute(problem, whole)
    torch.testing.assert_close(outcome.output.double(), output, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(outcome.lse.double(), lse, rtol=1e-9, atol=1e-9)


def diffuse(n, d=32, dv=16, rank=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(d, rank, generator=generator))[0]
    query, key = (torch.randn(1, 1, n, rank, generator=generator) @ basis.T for _ in range(2))
    factor = math.sqrt(0.5 * math.sqrt(d) / math.sqrt(rank))
    value = torch.randn(1, 1, n, dv, generator=generator)
    return (query * factor).to(dtype), (key * factor).to(dtype), value.to(dtype)


def exact_of(query, key, value):
    scale = 1 / math.sqrt(query.shape[-1])
    return (query.double() @ key.double().mT * scale).softmax(-1) @ value.double()


def relative(given, exact):
    return float((given.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_diffuse_head_by_budget(dtype):
    tensors = diffuse(2048, dtype=dtype)
    result = sb.attention(*tensors, method=sb.BlockSupport(0.2), return_result=True)
    (plan,) = result.plan.heads
    assert plan.kind == "fitted" and plan.cost <= 0.2
    assert relative(result.output, exact_of(*tensors)) < (0.03 if dtype != torch.bfloat16 else 0.05)
    assert "directions" in str(plan) and "balanced frame" in str(plan)


def test_far_tokens_are_exact():
    query, key, value = diffuse(2048)
    key[..., 7, :] *= 60.0
    query[..., 3, :] *= 25.0
    result = sb.attention(
        query, key, value, method=sb.BlockSupport(0.3, tail="polynomial"), return_result=True
    )
    (plan,) = result.plan.heads
    assert plan.kind == "fitted"
    exact = exact_of(query, key, value)
    assert relative(result.output, exact) < 0.03
    torch.testing.assert_close(
        result.output[..., 3, :].double(), exact[..., 3, :], rtol=0, atol=1e-4
    )


def test_a_tolerance_is_met_or_the_head_is_exact():
    tensors = diffuse(3000)
    for tolerance in (0.1, 0.02, 1e-9):
        method = sb.BlockSupport(tolerance=tolerance, tail="polynomial")
        result = sb.attention(*tensors, method=method, return_result=True)
        (plan,) = result.plan.heads
        assert plan.kind == ("exact" if tolerance < 1e-6 else "fitted")
        assert relative(result.output, exact_of(*tensors)) < 1.25 * max(tolerance, 1e-6)


def test_nothing_depends_on_what_comes_later():
    query, key, value = diffuse(1024)
    method = sb.BlockSupport(0.9, tail="polynomial")
    plan = beyond(sb.plan(query, key, value, is_causal=True, method=method))
    assert plan.heads[0].kind == "fitted"
    first = sb.attention(query, key, value, is_causal=True, plan=plan)
    at = 600
    for tensor in (query, key, value):
        tensor[..., at:, :] = torch.randn_like(tensor[..., at:, :])
    second = sb.attention(query, key, value, is_causal=True, plan=plan)
    torch.testing.assert_close(first[..., :at, :], second[..., :at, :], rtol=1e-4, atol=1e-5)


def test_a_plan_is_saved_and_read(tmp_path):
    tensors = diffuse(1500)
    plan = sb.plan(*tensors, method=sb.BlockSupport(0.3, tail="polynomial"))
    assert plan.heads[0].kind == "fitted"
    plan.save(tmp_path / "plan.json")
    again = sb.Plan.load(tmp_path / "plan.json")
    assert again.heads[0].fitted == plan.heads[0].fitted
    torch.testing.assert_close(
        sb.attention(*tensors, plan=plan), sb.attention(*tensors, plan=again)
    )


@pytest.mark.parametrize("name", ["order", "tail"])
def test_unknown_choices_are_refused(name):
    with pytest.raises(sb.InputError, match=f"{name} must be one of .*got 'best'"):
        sb.BlockSupport(0.1, **{name: "best"})


def test_rows_that_a_fit_loses_are_exact_and_counted():
    """A plan for small scores, used on large ones: sums far too small are found and mended."""
    query, key, value = diffuse(1500)
    plan = sb.plan(query, key, value, method=sb.BlockSupport(0.4, tail="polynomial"))
    head = replace(plan.heads[0], fitted=replace(plan.heads[0].fitted, query_radius=math.inf))
    plan = beyond(replace(plan, heads=(head,)))
    query = 40 * query
    result = sb.attention(query, key, value, plan=plan, return_result=True)
    lost = int(result.certificate.rescued_rows)
    assert 0 < lost == int(result.certificate.invalid_rows)
    least = math.log(1500) + (query @ key.mean(2, keepdim=True).mT).squeeze(-1) / math.sqrt(32)
    assert bool((result.lse >= least + math.log(WRONG) - 1e-3).all())


def test_far_rows_and_keys_are_those_beyond_the_radius():
    query, key, value = diffuse(1024)
    key[..., :3, :] *= 50.0
    plan = sb.plan(query, key, value, method=sb.BlockSupport(0.5, tail="polynomial"))
    fitted, frame = plan.heads[0].fitted, plan.heads[0].frame
    head = attention_problem(query, key, value, None, 0.0, False, None, False).head(0, 0)
    norms = framed(head, frame).key.norm(dim=1)
    assert (norms > fitted.key_radius).nonzero().flatten().tolist() == [0, 1, 2]
    assert plan.heads[0].keys == fitted.features + 3


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
    frame = own_frame(head)
    radius = float(framed(head, frame).key[far:].norm(dim=1).max()) if far else math.inf
    kernel = FittedKernel((1.0, 1.0, 1 / 2, 1 / 6), (4, 4, 4), key_radius=radius)
    plan = HeadPlan("fitted", "", n, n, 0.1, 1.0, fitted=kernel, frame=frame)
    return problem, head, Plan(sb.BlockSupport(0.5, tail="polynomial"), 1, 1, 4, (plan,))


def error_of(problem, plan):
    exact, _ = dense_attention(
        problem.query, problem.key, problem.value, is_causal=problem.is_causal, scale=1.0
    )
    return float((execute(problem, plan).output - exact).norm() / exact.norm())


@pytest.mark.parametrize(("wrong", "far"), [(2, 0), (16, 0), (60, 0), (16, 80)])
def test_a_few_wrong_rows_are_found(wrong, far):
    problem, head, plan = skewed(wrong=wrong, far=far)
    error = error_of(problem, plan)
    assert error > 0.04
    measured, limit = RowCheck(head, 1e-2, 0).error(plan.heads[0])
    assert 0.8 * error < measured < 1.25 * error
    assert limit > error


def test_a_fit_with_wrong_rows_is_not_taken():
    problem, head, plan = skewed(wrong=60)
    assert error_of(problem, plan) > 0.2
    search = FittedSearch.of(head, 0)
    assert search._measured(plan.heads[0], 0.1, RowCheck(head, 0.1, 0)) is None
    assert search.measured(plan.heads[0]).measured > 0.2


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


@pytest.mark.parametrize("causal", [False, True])
def test_sums_below_half_of_the_bound_are_exact(causal):
    problem, head, plan = skewed(n=1024, wrong=8, reach=2.05, causal=causal)
    outcome = execute(problem, plan)
    lost = outcome.rescued[0, 0]
    if not causal:
        assert int(lost.sum()) == 8
        assert bool((head.query[lost, 0] == 2.05).all())
    least = least_lse(plan.heads[0], head, None)
    assert bool((outcome.lse[0, 0] >= least - 1e-6).all())
    assert bool((least <= (head.query @ head.key.T).logsumexp(1)).all()) or causal


def test_a_fit_that_leaves_many_rows_to_exact_sums_has_failed():
    _, head, plan = skewed(n=2048, wrong=100, reach=2.5)
    assert RowCheck(head, 0.5, 0).error(plan.heads[0]) == (math.inf, math.inf)


def test_the_longest_tokens_are_fitted_to():
    problem = problem_of(4000, d=5)
    head = framed(problem.head(0, 0), balanced(problem.head(0, 0)))
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
    few = PairSample.draw(
        framed(problem_of(100).head(0, 0), balanced(problem_of(100).head(0, 0))), 0
    )
    assert len(few.query) == len(few.key) == 100
    assert bool((few.row_count == 1).all())


def test_a_fit_to_a_sample_is_that_to_all_pairs(monkeypatch):
    """Tokens that were picked for their length count once, others for all that they stand for."""
    head = problem_of(3000, d=5).head(0, 0)
    inside = framed(head, balanced(head))
    sample = PairSample.draw(inside, 0)
    monkeypatch.setattr(fitted, "ROWS", 3000)
    monkeypatch.setattr(fitted, "KEYS", 3000)
    whole = PairSample.draw(inside, 0)
    size = whole.exact.norm(dim=1, keepdim=True)

    def loss(kernel):
        return float(((kernel(whole.query, whole.key) * whole.unit - whole.exact) / size).norm())

    spans = (5, 5, 5)
    least = loss(whole.fit(spans))
    assert least <= loss(sample.fit(spans)) < 1.005 * least


def test_causal_heads_are_fitted_to_keys_that_are_seen():
    head = problem_of(100, m=5000, causal=True).head(0, 0)
    sample = PairSample.draw(framed(head, own_frame(head)), 0)
    assert float(sample.key_count.sum()) <= 100


@pytest.mark.parametrize("hidden", [False, True])
def test_bounds_of_rows_that_lie_apart_are_those_of_all(monkeypatch, hidden):
    monkeypatch.setattr(jensen, "BLOCK", 16)
    bias = torch.zeros(1, 1, 1, 500, dtype=torch.float64)
    bias[..., 3::7] = -math.inf if hidden else -1.0
    problem = problem_of(600, m=500, causal=True, bias=bias)
    head = problem.head(0, 0)
    plan = HeadPlan("fitted", "", 600, 500, 0.1, 1.0, fitted=FittedKernel((1.0,), ()))
    whole = lower_lse(plan, head, None)
    score = head.query @ head.key.T * head.scale + head.key_log_weight
    score = score.masked_fill(torch.ones(600, 500).triu(1).bool(), -math.inf)
    assert bool((whole <= score.logsumexp(1) + 1e-9).all())
    rows = torch.tensor([0, 5, 6, 90, 340, 341, 499, 550, 599])
    torch.testing.assert_close(lower_lse(plan, head, rows), whole[rows], rtol=0, atol=1e-12)
