"""The bound is never below the true error; the measured limit covers it as often as it says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from cases import beyond, dense_attention, max_error, qkv
from supportbasis.accuracy.certificate import CONFIDENCE, SAMPLED_ROWS
from supportbasis.accuracy.sampling import RowSample
from supportbasis.components import ExactSum, evaluate
from supportbasis.plans import ExactHead
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

pytestmark = pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
METHODS = [
    sb.Exact(),
    sb.Polynomial(0),
    sb.Polynomial(1),
    sb.Polynomial(2),
    sb.Polynomial(4),
    sb.Polynomial(2, bound=0.3),
    sb.SingleThreshold(0.8, 1),
    sb.SingleThreshold(0.8, 2),
    sb.SingleThreshold(None, 2),
    sb.SingleThreshold("sqrt-log", 3),
    sb.MultiThreshold(2.0, 1),
    sb.MultiThreshold(1.5, 3),
    sb.MultiThreshold(2.0, 1, sketch_size=8),
]


@settings(deadline=None, derandomize=True, max_examples=250)
@given(
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 60),
    m=st.integers(1, 60),
    d=st.integers(1, 6),
    log_size=st.floats(-4, 0.7),
    causal=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_bound_is_never_below_the_true_error(
    method, dtype, n, m, d, log_size, causal, biased, seed
):
    q, k, v = qkv(1, 1, n=n, m=m, d=d, scale=10**log_size, dtype=dtype, seed=seed)
    bias = None
    if biased:
        bias = (torch.randn(m, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
        bias[::5] = -math.inf
    call = {"attn_mask": bias, "is_causal": causal}
    result = sb.attention(q, k, v, method=method, return_result=True, **call)
    exact, _ = dense_attention(q, k, v, bias, causal)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)
    given_bound = getattr(method, "bound", None)
    for head in result.plan.heads:
        if all(p.error < 1 for p in head.polynomials) and given_bound is None:
            assert result.certificate.bound.isfinite().all()


def test_bound_is_tight_enough_to_be_useful():
    """On an adversarial pair of keys the polynomial part of the bound is nearly attained."""
    reach = 1.0
    q = torch.tensor([[1.0]], dtype=torch.float64)
    keys = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    poly = sb.plan(q, keys[:, None], method=sb.Polynomial(2), scale=reach).heads[0].polynomial
    ratio = poly(keys) * math.exp(reach) / keys.exp()
    worst = keys[[int(ratio.argmin()), int(ratio.argmax())]]
    v = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    # weights that put the same exact mass on both keys
    result = sb.attention(
        q, worst[:, None], v, attn_mask=-worst, scale=reach,
        method=sb.Polynomial(2, bound=1.0), return_result=True,
    )  # fmt: skip
    exact, _ = dense_attention(q, worst[:, None], v, -worst, scale=reach)
    error = max_error(result.output, exact, v)
    bound = float(result.certificate.bound)
    assert 0.95 * bound <= error <= bound


def test_bound_meets_the_papers_form():
    """2 tanh(ln(rho)/4) is at most 2 eps / (1 - eps), and about half of it."""
    q, k, v = qkv(1, 1, n=64, d=4, scale=0.5)
    for degree in (1, 2, 3, 4):
        result = sb.attention(q, k, v, method=sb.Polynomial(degree), return_result=True)
        error = result.plan.heads[0].polynomial.error
        if error < 1:
            assert float(result.certificate.bound) <= 2 * error / (1 - error) + 1e-9


def test_invalid_rows_are_counted_zeroed_and_warned_about():
    q = torch.tensor([[4.0], [0.1]])
    k = torch.tensor([[-2.0], [-2.0]])
    method = sb.Polynomial(1, bound=1.0)  # linear: negative at score -8
    with pytest.warns(UserWarning, match="rows had no usable denominator"):
        result = sb.attention(q, k, torch.ones(2, 1), method=method, scale=1.0, return_result=True)
    assert result.certificate.invalid_rows.tolist() == [[1]]
    assert result.output[0].item() == 0
    assert result.lse[0].item() == -math.inf
    assert result.certificate.bound.item() == math.inf
    assert result.output[1].item() == pytest.approx(1.0)


def test_single_threshold_rescues_rows_that_its_polynomial_loses():
    """A reused plan can meet scores far outside its polynomial's range."""
    q, k, v = qkv(1, 1, n=40, d=2, scale=0.1)
    plan = beyond(sb.plan(q, k, v, method=sb.SingleThreshold(100.0, 1)))
    far_q, far_k = q - 30, k.abs() + 1
    result = sb.attention(far_q, far_k, v, plan=plan, return_result=True)
    assert int(result.certificate.invalid_rows.sum()) == 40
    assert int(result.certificate.fallback_rows.sum()) == 40
    exact, lse = dense_attention(far_q, far_k, v)
    torch.testing.assert_close(result.output, exact)
    torch.testing.assert_close(result.lse, lse)


def test_measured_error_of_all_rows_is_the_true_error():
    q, k, v = qkv(2, 2, n=SAMPLED_ROWS, d=4, scale=0.8)
    result = sb.attention(q, k, v, method=sb.Polynomial(2), return_result=True)
    exact, _ = dense_attention(q, k, v)
    true = (result.output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    torch.testing.assert_close(result.certificate.measured, true, rtol=1e-6, atol=0)
    assert torch.equal(result.certificate.limit, result.certificate.measured)
    assert result.certificate.confidence == 1.0
    assert result.certificate.rows == SAMPLED_ROWS


@pytest.mark.parametrize("tail", ["gaussian", "lognormal"])
def test_the_limit_covers_the_true_error_as_often_as_it_says(tail):
    """Coverage over 400 row choices: at least the nominal 95 %, less binomial slack."""
    generator = torch.Generator().manual_seed(5)
    n, covered, trials = 4000, 0, 400
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    squared = noise.square() if tail == "gaussian" else (1.0 * noise).exp()
    size = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    true = math.sqrt(float(squared.sum() / size.sum()))
    limits = []
    for _ in range(trials):
        rows = torch.randperm(n, generator=generator)[:SAMPLED_ROWS].sort().values
        sample = RowSample(rows, torch.full((len(rows),), n / len(rows), dtype=torch.float64))
        _, limit = sample.frobenius_limit(squared[rows], size[rows])
        covered += limit >= true
        limits.append(limit)
    slack = 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / trials)
    assert covered / trials >= CONFIDENCE - slack
    assert sum(limits) / trials <= 1.3 * true  # and it is not trivially loose


@pytest.mark.slow
def test_coverage_end_to_end_over_many_seeds():
    """sb.attention's own limit against the true error of all rows, 60 data seeds."""
    covered = 0
    for seed in range(60):
        q, k, v = qkv(1, 1, n=700, d=3, scale=0.6, seed=seed, dtype=torch.float32)
        result = sb.attention(q, k, v, method=sb.Polynomial(2), return_result=True)
        assert result.certificate.rows == SAMPLED_ROWS
        exact, _ = dense_attention(q, k, v)
        true = float((result.output - exact).norm() / exact.norm())
        covered += float(result.certificate.limit) >= true
        assert float(result.certificate.measured) == pytest.approx(true, rel=0.5)
    assert covered >= 60 * CONFIDENCE - 3 * math.sqrt(60 * 0.05 * 0.95)


def test_holds_and_bound_holds():
    q, k, v = qkv(1, 2, n=300, d=4, scale=0.3)
    certificate = sb.attention(q, k, v, method=sb.Polynomial(2), return_result=True).certificate
    assert certificate.bound.shape == certificate.measured.shape == (1, 2)
    limit, bound = float(certificate.limit.max()), float(certificate.bound.max())
    assert certificate.holds(limit * 1.01)
    assert not certificate.holds(limit * 0.99)
    assert certificate.bound_holds(bound * 1.01)
    assert not certificate.bound_holds(bound * 0.99)
    assert "bound" in str(certificate)


def test_reusing_a_plan_on_wilder_data_recomputes_the_bound():
    q, k, v = qkv(1, 1, n=50, d=4, scale=0.3)
    plan = beyond(sb.plan(q, k, v, method=sb.Polynomial(2)))
    calm = sb.attention(q, k, v, plan=plan, return_result=True)
    wild = sb.attention(2.5 * q, k, v, plan=plan, return_result=True)
    assert float(wild.certificate.bound) > 5 * float(calm.certificate.bound)
    exact, _ = dense_attention(2.5 * q, k, v)
    assert max_error(wild.output, exact, v) <= float(wild.certificate.bound)


def test_a_coarser_matmul_precision_widens_the_bound():
    q, k, v = qkv(1, 1, n=40, dtype=torch.float32, scale=0.1)
    strict = sb.attention(q, k, v, method=sb.Polynomial(2), return_result=True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        loose = sb.attention(q, k, v, method=sb.Polynomial(2), return_result=True)
    finally:
        torch.set_float32_matmul_precision(before)
    assert float(loose.certificate.bound) > 10 * float(strict.certificate.bound)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    degree=st.integers(0, 4),
    threshold=st.floats(0.3, 2.0),
    shift=st.floats(-3.0, 3.0),
    seed=st.integers(0, 999),
)
def test_weights_and_denominators_are_within_epsilon(degree, threshold, shift, seed):
    """Definition A.1 entrywise, Lemmas C.1 and C.2 for the denominators, also on rows whose scores
    are all very negative (there the paper's "-1" would cancel)."""
    q, k, v = qkv(1, 1, n=25, m=30, d=3, scale=0.5, seed=seed)
    k = k + shift  # with q shifted the other way, every score of those rows is far below zero
    q[:, :, ::2] -= 2 * shift
    result = sb.attention(q, k, v, method=sb.SingleThreshold(threshold, degree), return_result=True)
    head = attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)
    plan = result.plan.heads[0]
    epsilon = max((polynomial.error for polynomial in plan.polynomials), default=0.0)
    exact = ExactHead(n=25, m=30, cost=1.0, speedup=1.0)
    used, true = reference.weights(head, plan)[0], reference.weights(head, exact)[0]
    assert ((used - true).abs() <= epsilon * true * (1 + 1e-9) + 1e-15).all()
    if epsilon < 1:
        _, lse = dense_attention(q, k, v)
        relative = (result.lse - lse).expm1().abs().max()
        assert float(relative) <= epsilon * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_one_wild_query_does_not_escape(seed):
    """A query that carries most of the error is in the census, however rare it is."""
    q, k, v = qkv(1, 1, n=5000, d=8, scale=1.0, dtype=torch.float32, seed=seed)
    q = q * 0.1
    q[0, 0, 7] = 3 * k[0, 0, 3]
    method = sb.Polynomial(2, bound=2.0)
    result = sb.attention(q, k, v, method=method, return_result=True)
    exact, _ = dense_attention(q, k, v)
    true = float((result.output - exact).norm() / exact.norm())
    assert true > 0.02
    assert float(result.certificate.limit) >= true
    assert float(result.certificate.measured) == pytest.approx(true, rel=0.2)  # counted once
    auto = sb.attention(q, k, v, method=sb.Auto(1e-2), return_result=True)
    assert float((auto.output - exact).norm() / exact.norm()) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1.0, 1e4])
@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(4), sb.SingleThreshold(0.5)], ids=str)
def test_bound_holds_for_values_of_any_size(method, size, dtype):
    q, k, v = qkv(1, 1, n=40, scale=0.3)
    q, k, v = q.to(dtype), k.to(dtype), (v * size).to(dtype)
    result = sb.attention(q, k, v, method=method, return_result=True)
    exact, _ = dense_attention(q, k, v)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e4])
@pytest.mark.parametrize("through", ["sdpa", "kernel", "tiles"])
def test_exact_work_bounds_the_rounding_of_large_scores(through, size, monkeypatch):
    """Float32 scores near 1e4 are wrong in their third digit; the bound must say so."""
    if through == "tiles":
        monkeypatch.setattr("supportbasis.components.exact_sum._kernel_takes", lambda *_: False)
    worst = 0.0
    for seed in range(6):
        q, k, v = qkv(1, 1, n=64, d=64, dtype=torch.float32, seed=seed)
        k = (k + 10 * k[:, :, :1]) * size / 80  # nearly parallel keys: large scores, close together
        method = sb.Exact() if through == "sdpa" else sb.SingleThreshold(1e-3)
        result = sb.attention(q, k, v, method=method, return_result=True)
        exact, _ = dense_attention(q, k, v)
        error = max_error(result.output, exact, v)
        worst = max(worst, error)
        assert error <= float(result.certificate.bound)
        if through != "sdpa":
            eta = 2 * evaluate([ExactSum(None)], _head(q, k, v), None).noise
            assert float(eta.max()) >= error / 2
    assert worst > 1e-7


def _head(q, k, v):
    return attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernel_sum_bound_is_relative_to_each_row_even_the_smallest(dtype):
    for size in (0.3, 3.0, 60.0):
        q, k, v = qkv(1, 1, n=40, d=6, dtype=dtype)
        q = (q * size).to(dtype)
        result = sb.kernel_sum(q, k, v, method=sb.Exact(), return_result=True)
        score = q.double() @ k.double().mT / math.sqrt(6) - result.log_scale.double()
        exact, mass = score.exp() @ v.double(), score.exp().sum(-1, keepdim=True)
        error = ((result.output.double() - exact).abs() / mass).max() / v.double().abs().max()
        assert float(error) <= float(result.certificate.bound)


def test_padded_keys_do_not_loosen_the_bound():
    q, k, v = qkv(1, 1, n=40, scale=0.3, dtype=torch.float32)
    mask = torch.arange(40) < 30
    huge = k.clone()
    huge[:, :, 30:] = 1e6
    for method in (sb.Exact(), sb.SingleThreshold(0.5), sb.Polynomial(2)):
        bounds = [
            float(
                sb.attention(
                    q, x, v, attn_mask=mask, method=method, return_result=True
                ).certificate.bound
            )
            for x in (k, huge)
        ]
        assert bounds[1] == pytest.approx(bounds[0], rel=0.3)
