"""Gradients of rows at the edge of what can be computed: failed, underflowing, huge, sketched."""

import math

import pytest
import torch

import supportbasis as sb
from cases import beyond, dense_attention, qkv
from gradient_cases import Case, assert_close, gradients
from supportbasis.components.polynomial_sum import rescaled
from supportbasis.components.sketch_sum import SketchSum
from supportbasis.engine import autograd
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials.certified import horner
from supportbasis.polynomials.features import FeatureMap
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.validation import attention_problem
from supportbasis.sketch import PolySketch


def test_rows_on_which_a_polynomial_fails_are_exact():
    """A reused plan meets scores far outside its polynomial's range, in every other row."""
    q, k, v = qkv(1, 1, n=40, d=2, scale=0.1)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(100.0, 1))
    far = q.clone()
    far[:, :, ::2] -= 30
    inputs = [x.requires_grad_() for x in (far, k.abs() + 1, v)]
    problem = attention_problem(*inputs, None, 0.0, False, None, False)
    outcome = autograd.as_operator(problem, plan)
    assert outcome.fallback[0, 0].tolist() == [True, False] * 20
    weight = torch.zeros(40, 1).double()
    weight[::2] = 1.0
    given, expected = (
        torch.autograd.grad((x.square() * weight).sum(), inputs)
        for x in (outcome.output, dense_attention(*inputs)[0])
    )
    assert_close(given, expected)


def test_rows_on_which_a_sketch_fails_are_exact():
    case = Case(sb.PowerAttention(6, sketch_size=1), "none", {"leading": (1, 1), "n": 40, "d": 8})
    outcome = autograd.as_operator(case.problem(*case.tensors), case.plan)
    assert 0 < int(outcome.fallback.sum()) < 40
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


@pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("degree", [2, 3])
def test_a_wide_range_makes_no_gradient_infinite(degree, causal, dtype):
    """On ±1500 a polynomial divided by e^B is below what float32 holds, and 1 / den is above."""
    results = 0
    for seed in range(12):
        q, _, v = qkv(n=64, d=3, seed=seed, dtype=dtype)
        q[7 * seed % 64] *= 500
        inputs = [x.requires_grad_() for x in (q, torch.ones(64, 3, dtype=dtype), v)]
        problem = attention_problem(*inputs, None, 0.0, causal, None, False)
        plan = sb.plan(*inputs, is_causal=causal, method=sb.Polynomial(degree))
        outcome = autograd.as_operator(problem, plan)
        (given,) = torch.autograd.grad(outcome.output.float().sum(), v, retain_graph=True)
        assert all(
            x.isfinite().all() for x in torch.autograd.grad(outcome.output.float().sum(), inputs)
        )
        rows = (outcome.lse > -math.inf).sum()  # each gives its value weights that add up to one
        assert abs(float(given.double().sum()) / 3 - rows) <= 0.02 * rows
        results += int(rows)
    assert results > 0


@pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")
@pytest.mark.parametrize("causal", [False, True])
def test_a_denominator_that_underflows_is_no_result(causal):
    """Zero queries have p(0) alone, which is (bound / reach)^2 of the largest coefficient: from a
    reach of 1e19 on float32 holds it with few bits, and its reciprocal not at all."""
    for exponent in torch.linspace(17.5, 22.5, 21).tolist():
        q, k, v = qkv(n=20, d=3, dtype=torch.float32)
        q[::3] = 0
        scale = 10**exponent / float(q.norm(dim=1).max() * k.norm(dim=1).max())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        problem = attention_problem(*inputs, None, 0.0, causal, scale, False)
        method = sb.Polynomial(2, bound=1.0)
        plan = sb.plan(*inputs, is_causal=causal, scale=scale, method=method)
        outcome = autograd.as_operator(problem, plan)
        (grad,) = torch.autograd.grad(outcome.output.sum(), v)
        assert grad.isfinite().all()
        means = v.cumsum(0) / torch.arange(1, 21).unsqueeze(1) if causal else v.mean(0, True)
        valid = outcome.lse[0, 0, ::3] > -math.inf
        expected = means.expand(20, 3)[::3][valid]
        torch.testing.assert_close(outcome.output[0, 0, ::3][valid], expected, rtol=0, atol=1e-5)
        assert valid.all() == (exponent < 19)


def test_coefficients_are_rescaled_within_the_range_of_float32():
    """p(z) = e^u sum a_k t^k for ranges far above and below the one it was made for."""
    poly = polynomials.chebyshev(3, 40.0)
    for reach in (1e-200, 3.0, 40.0, 1e4, 1e200):
        coefficients, log_unit = rescaled(poly, reach)
        assert max(abs(a) for a in coefficients) == 1
        if reach < 1e5:
            t = torch.linspace(-1, 1, 9, dtype=torch.float64)
            given = horner(coefficients, t) * math.exp(log_unit - poly.bound)
            torch.testing.assert_close(given, poly(t * reach), rtol=1e-11, atol=0)
    assert rescaled(polynomials.chebyshev(2, 1e5), 1e5) == ((0.0, 0.0, 0.0), 0.0)


@pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")
@pytest.mark.parametrize("causal", [False, True])
def test_values_that_overflow_leave_no_trace_in_the_gradients_of_other_rows(causal):
    """Sums over 64 keys overflow float32, so that no row has a result, nor a gradient."""
    q, k, _ = (x.requires_grad_() for x in qkv(n=64, d=3, scale=0.3, dtype=torch.float32))
    v = torch.full((64, 1), 3e38).requires_grad_()
    problem = attention_problem(q, k, v, None, 0.0, causal, None, False)
    outcome = autograd.as_operator(
        problem, sb.plan(q, k, v, is_causal=causal, method=sb.Polynomial(2))
    )
    assert (outcome.lse > -math.inf).sum() <= int(causal)  # the first row sees one key
    for grad in torch.autograd.grad(outcome.output.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0, 1e6])
def test_a_sketched_weight_is_what_its_definition_says(size):
    """<phi(u), phi(w)>^2 with u, w the features of q / a and k / b, a b = p bound / scale and
    a / b = balance, of tokens that are shorter or longer than a and b."""
    q, k, v = qkv(n=5, m=4, d=3, scale=0.5)
    q = q * size
    poly, scale = polynomials.chebyshev(2, 0.4), 0.7
    kernel = PowerKernel(6, poly, sketch_size=20, seed=3, balance=2.5)
    head = attention_problem(q, k, v, None, 0.0, False, scale, False).head(0, 0)
    sketched = SketchSum(kernel).task(head, None)
    (x, log_x), (y, log_y) = sketched.unit("query", q), sketched.unit("key", k)
    given = log_x.unsqueeze(1) + log_y + (x @ y.T).square().log()

    phi, sketch = FeatureMap(3, 2), PolySketch(6, 20, 3).half
    b = math.sqrt(6 * 0.4 / scale / 2.5)
    c = torch.tensor(poly.coefficients, dtype=torch.float64)[phi.degrees] * phi.multiplicity
    u, w = phi(q / (2.5 * b)) * c.abs().sqrt(), phi(k / b) * c.abs().sqrt() * c.sign()
    expected = (sketch(u) @ sketch(w).T).square().log() + 6 * 0.4
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)


def test_a_sketched_row_depends_on_no_other_row_and_causally_on_no_later_key():
    """Its units are constants of the plan, not lengths of the tokens of a call."""
    method = sb.MultiThreshold(math.inf, 2, sketch_size=64)
    q, k, v = qkv(1, 1, n=20, d=3, scale=0.4)
    for causal in (False, True):
        plan = beyond(sb.plan(q, k, v, is_causal=causal, method=method))
        before = sb.attention(q, k, v, is_causal=causal, plan=plan)
        far, late = q.clone(), k.clone()
        far[..., -1, :] *= 3
        late[..., -1, :] *= 3 if causal else 1
        after = sb.attention(far, late, v, is_causal=causal, plan=plan)
        assert torch.equal(before[..., :-1, :], after[..., :-1, :])


@pytest.mark.filterwarnings("ignore:supportbasis. a sketch or fitted polynomial failed on")
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_sketch_of_tokens_of_any_length_is_finite(size, dtype):
    """Also of those that are far from what its plan was made for."""
    q, k, v = qkv(1, 1, n=20, d=3, scale=0.4, dtype=dtype)
    for method in (sb.MultiThreshold(math.inf, 2, sketch_size=16), sb.PowerAttention(4, 16)):
        plan = beyond(sb.plan(q, k, v, method=method))
        inputs = [x.clone().requires_grad_() for x in (q * size, k, v)]
        problem = attention_problem(*inputs, None, 0.0, False, None, False)
        outcome = autograd.as_operator(problem, plan)
        assert outcome.output.isfinite().all() and outcome.lse.isfinite().all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(outcome.lse.sum(), inputs[:2]))


def test_rows_without_a_result_have_no_gradient():
    """p(z) = 1 + z is negative for the first row alone."""
    q = torch.tensor([[-3.0], [1.0]], dtype=torch.float64)
    k, v = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0], [2.0]]).double()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with pytest.warns(UserWarning, match="no usable denominator"):
        output = sb.attention(q, k, v, scale=1.0, method=sb.Polynomial(1, bound=0.5))
    assert output[0] == 0 and output[1] != 0
    grad_q, grad_v = torch.autograd.grad(output.sum(), (q, v))
    assert grad_q.isfinite().all() and grad_q[0] == 0
    torch.testing.assert_close(grad_v, torch.full_like(v, 0.5))
