"""Appendix I without a sketch: what is proved of the errors of bucketed attention, and Jensen's
lower bound of a row's sum."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import supportbasis as sb
from cases import dense_attention, max_error, qkv
from paper_cases import DTYPES, EPS, dense_power, head_of, log_weights, matrix_errors, norm
from supportbasis.accuracy.certificate import distortion
from supportbasis.engine import jensen
from supportbasis.plans import ExactHead, HeadPlan, PowerHead, supports
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import Head
from supportbasis.problem.validation import attention_problem


def exact_head_plan(head: Head) -> HeadPlan:
    return ExactHead(n=head.n, m=head.m, cost=1.0, speedup=1.0)


# --- Definition I.1, Lemmas I.2 and I.4, Theorem I.5, without a sketch ------------------------


@st.composite
def call(draw) -> dict:
    """A small head: any dtype, scale, causality, biases and padding."""
    n, m, d = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 5))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    size = 10 ** draw(st.floats(-3, 0.9))
    q, k, v = qkv(1, 1, n=n, m=m, d=d, scale=size, dtype=dtype, seed=seed)
    if draw(st.booleans()):
        q[..., ::4, :] *= 3  # another bucket
        k[..., ::5, :] = 0.0
    bias = None
    if draw(st.booleans()):
        bias = 3 * torch.randn(m, generator=torch.Generator().manual_seed(seed))
        bias = bias.to(dtype)
        bias[::4] = -math.inf
    return {"q": q, "k": k, "v": v, "attn_mask": bias, "is_causal": draw(st.booleans())}


UNSKETCHED = [
    sb.MultiThreshold(2.0, 0),
    sb.MultiThreshold(2.0, 1),
    sb.MultiThreshold(3.0, 2),
    sb.MultiThreshold(math.inf, 3),
]


@settings(derandomize=True, deadline=None, max_examples=120)
@given(call(), st.sampled_from(UNSKETCHED))
def test_bound_is_never_below_the_true_error(case, method):
    """Theorem I.5 with numbers: max|P - D^-1 A V| <= bound max|V|, in every dtype."""
    q, k, v = case.pop("q"), case.pop("k"), case.pop("v")
    result = sb.attention(q, k, v, method=method, return_result=True, **case)
    exact, _ = dense_attention(q, k, v, case["attn_mask"], case["is_causal"])
    bound = float(result.certificate.bound)
    assert max_error(result.output, exact, v) <= bound <= 2 + 1e-3
    assert int(result.certificate.invalid_rows) == 0


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_bound_is_nearly_attained(degree):
    """Two keys with the smallest and the largest distortion, as far below as above in mass."""
    one = torch.ones(1, 1, dtype=torch.float64)
    keys = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    plan = sb.plan(one, keys[:, None], scale=3.0, method=sb.MultiThreshold(math.inf, degree))
    ratio = plan.heads[0].pairs[0].kernel.log(3 * keys) - 3 * keys
    at = [int(ratio.argmin()), int(ratio.argmax())]
    k, v = keys[at, None], torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    bias = -3 * keys[at] - ratio[at] / 2
    result = sb.attention(one, k, v, attn_mask=bias, scale=3.0, plan=plan, return_result=True)
    exact, _ = dense_attention(one, k, v, bias, scale=3.0)
    bound = float(result.certificate.bound)
    assert 0.95 * bound <= max_error(result.output, exact, v) <= bound


@settings(derandomize=True, deadline=None, max_examples=80)
@given(call(), st.sampled_from(UNSKETCHED))
def test_kernel_sums_are_within_the_bound_of_their_row_sums(case, method):
    """Lemma I.4, row by row: |S - AV|_i <= bound (A1)_i max|V|."""
    q, k, v = case["q"], case["k"], case["v"]
    result = sb.kernel_sum(q, k, v, method=method, return_result=True)
    mean, lse = dense_attention(q, k, v)  # (AV)_i / (A1)_i and ln (A1)_i
    output = result.output.double()
    log_size = output.abs().log() + result.log_scale.double().reshape(1, 1, 1, 1)
    relative = output.sign() * (log_size - lse.unsqueeze(-1)).exp()
    bound = float(result.certificate.bound)
    assert max_error(relative, mean, v) <= bound + 64 * EPS * (1 + float(lse.abs().max()))


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_errors_follow_from_that_of_the_matrix(degree):
    """Lemmas I.2 and I.4 and Theorem I.5 from eps2 = max|A~ - A|, with the paper's scale 1/d.

    I.5 assumes D~ >= n e^(-B^2), which is not proved. It is not needed: weights are non-negative,
    so |A~ V| <= D~ max|V|, and the error is at most 2 eps2 n / min D <= 2 eps2 e^(B^2) max|V|.
    """
    for seed, size in itertools.product(range(3), (0.5, 1.0)):
        q, k, v = qkv(1, 1, n=35, d=4, scale=size, seed=seed)
        method = sb.MultiThreshold(2.0, degree)
        error, _ = matrix_errors(q, k, method)
        eps2, largest = norm(error, math.inf), norm(v, math.inf)
        mass = (q @ k.mT / 4).exp()
        b_squared = float(q.abs().max() * k.abs().max())
        head = head_of(q, k, v, scale=1 / 4)
        certified = distortion(head, method.plan_head(head)).error
        assert eps2 <= certified * float(mass.max()) * (1 + 1e-9)  # I.2
        sums = sb.kernel_sum(q, k, v, scale=1 / 4, method=method)
        assert norm(sums - mass @ v, math.inf) <= 35 * eps2 * largest * (1 + 1e-9)  # I.4
        output = sb.attention(q, k, v, scale=1 / 4, method=method)
        exact, _ = dense_attention(q, k, v, scale=1 / 4)
        wrong = norm(output - exact, math.inf)
        least = float(mass.sum(-1).min())
        assert least >= 35 * math.exp(-b_squared)
        assert 0 < wrong <= 2 * eps2 * 35 / least * largest
        assert 2 * eps2 * 35 / least <= 2 * eps2 * math.exp(b_squared)


def test_a_bound_that_says_nothing_is_called_vacuous():
    q, k, v = qkv(1, 1, n=40, d=3, scale=4.0)
    loose = sb.attention(q, k, v, method=sb.MultiThreshold(2.0, 0), return_result=True)
    assert float(loose.certificate.bound) >= 1
    assert "vacuous" in str(loose.certificate)
    tight = sb.attention(0.05 * q, 0.1 * k, v, method=sb.MultiThreshold(), return_result=True)
    assert float(tight.certificate.bound) < 0.1
    assert "vacuous" not in str(tight.certificate)


def distorted(head: Head, plan: HeadPlan) -> Tensor:
    """Values of log(given / exact) at the live pairs, row by row (NaN: no pair)."""
    exact = log_weights(head, exact_head_plan(head))
    return torch.where(exact > -600, log_weights(head, plan) - exact, math.nan)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(call(), st.sampled_from(UNSKETCHED), st.sampled_from([1.0, 1.0, 0.3]))
def test_distortion_bounds_every_weight(case, method, shrink):
    """Lemma I.2 entry by entry, relatively; also of a plan that was made for larger scores."""
    q, k, v = (case[name].double() for name in "qkv")
    mask, causal = case["attn_mask"], case["is_causal"]
    mask = None if mask is None else mask.double()
    plan = method.plan_head(head_of(q, k, v, mask, causal))
    head = head_of(shrink * q, k, v, mask, causal)
    spread, error, nonnegative = distortion(head, plan)
    assert nonnegative
    ratio = distorted(head, plan)
    seen = ~ratio.isnan()
    rounding = 1e-11
    assert float(ratio[seen].expm1().abs().max() if seen.any() else 0.0) <= error + rounding
    low, high = ratio.nan_to_num(math.inf).amin(1), ratio.nan_to_num(-math.inf).amax(1)
    rows = seen.any(1)
    assert (high - low)[rows].le(spread + rounding).all()


@pytest.mark.parametrize("growth", [1.5, 8.0])
def test_distortion_bounds_every_weight_of_a_plan_made_for_smaller_scores(growth):
    """Beyond the range of its polynomial a plan may be far off, and says how far."""
    q, k, v = qkv(1, 1, n=30, d=3, scale=0.6)
    plan = sb.MultiThreshold(2.0, 1).plan_head(head_of(q, k, v))
    head = head_of(growth * q, k, v)
    ratio = distorted(head, plan)
    worst = float(ratio.expm1().abs().max())
    assert worst > 1e-3
    # at growth 8 the inner 1 + z / p is far below zero
    assert worst <= distortion(head, plan).error * (1 + 1e-9)


def test_norms_of_tiny_rows_are_not_lost():
    """Scores of order one from entries of order 1e180 and 1e-180: the certified range is theirs."""
    q, k, v = qkv(1, 1, n=6, d=4, scale=3.0)
    huge, tiny = q * 1e180, k * 1e-180
    head = head_of(huge, tiny, v)
    # squares of 1e-180 vanish: with norms of 0 every score would be "within 0"
    assert supports.score_reach(head, None, None) >= float((q @ k.mT).abs().max()) / 2
    result = sb.attention(huge, tiny, v, method=sb.MultiThreshold(), return_result=True)
    exact, _ = dense_attention(huge, tiny, v)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)


# --- the lower bound of a row's sum -----------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(call(), st.sampled_from([None, 2, 4, 10]), st.booleans(), st.sampled_from([3, 4096]))
def test_jensen_is_below_every_row_sum(case, power, some_rows, block):
    """sum_j w_j f(z_ij) >= W f(<q_i, kbar> scale) for f = exp and even powers."""
    q, k, v = (case[name].double() for name in "qkv")
    mask, causal = case["attn_mask"], case["is_causal"]
    mask = None if mask is None else mask.double()
    head = head_of(q, k, v, mask, causal)
    plan = exact_head_plan(head)
    if power is None:
        _, exact = dense_attention(q, k, v, mask, causal)
    else:
        plan = PowerHead(n=head.n, m=head.m, kernel=PowerKernel(power, None))
        _, exact = dense_power(q, k, v, power, mask, causal)
    rows = torch.arange(1, head.n, 2) if some_rows else None
    exact = exact[0, 0] if rows is None else exact[0, 0, rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jensen, "BLOCK", block)
        lower = jensen.lower_lse(plan, head, rows)
    assert lower.shape == exact.shape
    assert not lower.isnan().any()
    reach = head.scale * float(head.query_norms.max() * head.key_norms.max())
    rounding = 64 * EPS * (power or 1) * (10 + reach)
    blank = exact == -math.inf
    assert (lower[blank] == -math.inf).all()
    assert (lower <= exact + rounding)[~blank].all()


@pytest.mark.parametrize("power", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [2, 5, 4096])
def test_jensen_is_attained_by_equal_keys(power, causal, block, monkeypatch):
    """With one key repeated every weight is the mean's; causal rows count the keys so far."""
    q, k, v = qkv(1, 1, n=12, m=9, d=3)
    k = k[..., :1, :].expand_as(k)
    bias = torch.linspace(-2, 1, 9, dtype=torch.float64)
    bias[2] = -math.inf
    head = head_of(q, k, v, bias, causal)
    plan = exact_head_plan(head)
    if power is None:
        _, exact = dense_attention(q, k, v, bias, causal)
    else:
        plan = PowerHead(n=head.n, m=head.m, kernel=PowerKernel(power, None))
        _, exact = dense_power(q, k, v, power, bias, causal)
    monkeypatch.setattr(jensen, "BLOCK", block)
    some = torch.tensor([0, 3, 4, 11])
    for rows, expected in ((None, exact[0, 0]), (some, exact[0, 0, some])):
        lower = jensen.lower_lse(plan, head, rows)
        torch.testing.assert_close(lower, expected, rtol=0, atol=1e-12)


def test_jensen_of_a_kernel_sum_is_of_its_plain_weights():
    q, k, v = qkv(1, 1, n=14, d=3)
    problem = attention_problem(q, k, v, None, 0.0, False, None, False)
    head = replace(problem, normalise=False).head(0, 0)
    _, exact = dense_attention(q, k, v)
    lower = jensen.lower_lse(exact_head_plan(head), head, None)
    assert (lower <= exact[0, 0]).all()
    assert (lower >= exact[0, 0] - 3).all()
