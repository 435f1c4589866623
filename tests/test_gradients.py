"""Gradients of every method against float64 autograd through the dense reference, and gradcheck."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import supportbasis as sb
from cases import METHODS, beyond, dense_attention, list_plan, qkv
from supportbasis.accuracy import reference
from supportbasis.components import exact_sum as exact
from supportbasis.components import streaming
from supportbasis.components.polynomial_sum import rescaled
from supportbasis.components.sketch_sum import Sketched
from supportbasis.engine import autograd
from supportbasis.lists.tables import ListSettings
from supportbasis.methods.fitted import FittedSearch
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials import features
from supportbasis.polynomials.certified import horner
from supportbasis.polynomials.features import FeatureMap
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.validation import attention_problem
from supportbasis.sketch import PolySketch

MASKS = ("none", "causal", "padding", "bias", "causal-bias")
SHAPES = {
    "n!=m": {"leading": (1, 1), "n": 7, "m": 5, "d": 3},
    "dv!=d": {"leading": (1, 1), "n": 6, "d": 3, "dv": 2},
    "gqa": {"leading": (1, 4), "n": 5, "d": 2, "key_heads": 2},
    "leading": {"leading": (2, 1, 2), "n": 4, "d": 2, "dv": 1},
    "no-heads": {"leading": (), "n": 5, "m": 6, "d": 2},
    "length-1": {"leading": (1, 2), "n": 1, "d": 3},
    "no-rows": {"leading": (1, 1), "n": 0, "m": 3, "d": 2},
    "no-keys": {"leading": (1, 1), "n": 3, "m": 0, "d": 2},
}


class Case:
    """A method on small inputs with one mask; its plan is made once and held fixed."""

    def __init__(self, method, mask, shape, seed=0, scale=0.45, dtype=torch.float64):
        shape = dict(shape)
        leading = shape.pop("leading")
        self.tensors = qkv(*leading, scale=scale, seed=seed, dtype=dtype, **shape)
        self.causal = mask.startswith("causal")
        self.gqa = "key_heads" in shape
        m = self.tensors[1].shape[-2]
        generator = torch.Generator().manual_seed(seed + 1)
        self.bias = None
        if mask == "padding":
            self.bias = torch.zeros(m, dtype=dtype)
            self.bias[1::3] = -math.inf
        elif mask.endswith("bias"):
            self.bias = torch.randn(m, generator=generator, dtype=dtype)
        self.plan = sb.plan(
            *self.tensors, attn_mask=self.bias, is_causal=self.causal, enable_gqa=self.gqa,
            method=method,
        )  # fmt: skip

    @property
    def inputs(self):
        """Leaves that require grad: query, key, value and, where there is one, the bias."""
        bias = [] if self.bias is None else [self.bias]
        return [x.clone().requires_grad_() for x in (*self.tensors, *bias)]

    def problem(self, q, k, v, bias=None):
        return attention_problem(q, k, v, bias, 0.0, self.causal, None, self.gqa)

    def run(self, *inputs):
        """Output and lse of the engine; rows without a sum have lse 0, which has no gradient."""
        outcome = autograd.run(self.problem(*inputs), self.plan)
        return outcome.output, _finite(outcome.lse)

    def dense_reference(self, *inputs):
        output, lse = reference.execute(self.problem(*inputs), self.plan)
        return output, _finite(lse)


def _finite(lse):
    return torch.where(lse > -math.inf, lse, 0.0)


def gradients(call, inputs, seed=3):
    """Gradients of a random linear function of output and lse."""
    generator = torch.Generator().manual_seed(seed)
    outputs = call(*inputs)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs
    ]
    total = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def assert_close(given, expected, rtol=1e-9):
    """Equal up to rounding: relative to the largest entry of each gradient."""
    for a, b in zip(given, expected, strict=True):
        assert a.isfinite().all()
        size = float(b.double().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=rtol * size + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_dense_reference(name, mask, shape):
    case = Case(METHODS[name], mask, SHAPES[shape])
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


def assert_slope(call, inputs, seed=7, step=1e-6):
    """The derivative along a random direction of all inputs at once, by central differences: their
    error is of order step^2 and 2^-52 / step, relative to the length of gradient and direction."""
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in inputs]
    directions = [
        torch.where(x > -math.inf, d, 0.0) for x, d in zip(inputs, directions, strict=True)
    ]
    weights = None

    def loss(*x):
        nonlocal weights
        outputs = call(*x)
        if weights is None:
            weights = [torch.randn(y.shape, generator=generator).double() for y in outputs]
        return sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))

    given = torch.autograd.grad(loss(*inputs), inputs)
    assert all(x.isfinite().all() for x in given)
    slope = sum(float((g * d).sum()) for g, d in zip(given, directions, strict=True))
    with torch.no_grad():
        ahead, behind = (
            float(loss(*(x + sign * step * d for x, d in zip(inputs, directions, strict=True))))
            for sign in (1, -1)
        )
    size = math.sqrt(
        sum(
            float(g.square().sum() * d.square().sum())
            for g, d in zip(given, directions, strict=True)
        )
    )
    assert abs((ahead - behind) / (2 * step) - slope) <= 1e-6 * (size + 1)


@pytest.mark.parametrize("shape", ["n!=m", "gqa"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", METHODS)
def test_slopes_are_those_of_central_differences(name, mask, shape):
    case = Case(METHODS[name], mask, SHAPES[shape])
    assert_slope(case.run, case.inputs)


ODD = {"leading": (1, 2), "n": 201, "d": 5, "dv": 3, "key_heads": 1}


def fitted_heads(problem, features=12):
    """Plans of fitted polynomials, whatever they cost."""
    return tuple(FittedSearch.of(head, 0).plan(features) for _, _, head in problem.each_head())


def lists_of(case, strict, price=1e-4):
    return ListSettings(price, 8, 4, 32 if case.causal else 0, strict and case.causal)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["lists", "strict", "fitted", "auto"])
def test_slopes_of_measured_methods(kind, mask):
    """Grouped heads of odd sizes; whatever `Auto` chooses, it is differentiated as it ran."""
    case = Case(sb.Auto(0.1) if kind == "auto" else sb.Exact(), mask, ODD)
    if kind == "fitted":
        heads = fitted_heads(case.problem(*case.tensors, case.bias))
        case.plan = sb.Plan(sb.FittedPolynomial(), 5, heads)
    elif kind in ("lists", "strict"):
        case.plan = list_plan(case.tensors[0], lists_of(case, kind == "strict"))
        kind = "lists"
    if kind != "auto":
        assert {head.kind for head in case.plan.heads} == {kind}
    assert_slope(case.run, case.inputs)


@pytest.mark.parametrize("mask", ["none", "causal-bias"])
@pytest.mark.parametrize(
    "method",
    [
        sb.PowerAttention(4, sketch_size=7),
        sb.MultiThreshold(math.inf, 2, sketch_size=30, seed=1),
        sb.Polynomial(3),
        sb.SingleThreshold(0.9, 2),
    ],
    ids=str,
)
def test_gradcheck_of_every_entry(method, mask):
    """The longest token of a bucket included, which once set the units of a sketch."""
    case = Case(method, mask, {"leading": (1, 1), "n": 6, "d": 3, "dv": 2})
    assert torch.autograd.gradcheck(case.run, case.inputs)


LONG = {"leading": (1, 2), "n": 150, "d": 3, "dv": 2}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, chunks and tiles so short that every loop runs several times, in three lanes."""
    monkeypatch.setattr(streaming, "CAUSAL_CHUNK", 32)
    monkeypatch.setattr(streaming, "lane_count", lambda device: 3)
    monkeypatch.setattr(features, "BUFFER_BYTES", 16 * 8)
    monkeypatch.setattr(exact, "KEY_TILE", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", METHODS)
def test_blocks_of_tokens_add_up(name, mask):
    case = Case(METHODS[name], mask, LONG, seed=4)
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_a_fitted_polynomial(mask):
    """In a transform with centres, and with tokens beyond the radius of the fit."""
    case = Case(sb.Exact(), mask, LONG, seed=5)
    q, k, v = case.tensors
    q += 0.4
    q[..., 70, :] *= 9
    k[..., 40, :] *= 9
    case.plan = sb.Plan(sb.Auto(), 3, fitted_heads(case.problem(q, k, v, case.bias)))
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_lists(mask, strict):
    """Heads that share keys, and values of another dim."""
    case = Case(sb.Exact(), mask, ODD, seed=6, scale=1.2)
    case.plan = list_plan(case.tensors[0], lists_of(case, strict, price=1e-3))
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


def test_rows_on_which_a_polynomial_fails_are_exact():
    """A reused plan meets scores far outside its polynomial's range, in every other row."""
    q, k, v = qkv(1, 1, n=40, d=2, scale=0.1)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(100.0, 1))
    far = q.clone()
    far[:, :, ::2] -= 30
    inputs = [x.requires_grad_() for x in (far, k.abs() + 1, v)]
    problem = attention_problem(*inputs, None, 0.0, False, None, False)
    outcome = autograd.run(problem, plan)
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
    outcome = autograd.run(case.problem(*case.tensors), case.plan)
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
        outcome = autograd.run(problem, plan)
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
        outcome = autograd.run(problem, plan)
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
    outcome = autograd.run(problem, sb.plan(q, k, v, is_causal=causal, method=sb.Polynomial(2)))
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
    sketched = Sketched(head, kernel)
    (x, log_x), (y, log_y) = sketched.query(q), sketched.key(k)
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
        outcome = autograd.run(problem, plan)
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


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["exact", "poly2", "single2", "multi2", "sketch1", "power4"])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["f32", "bf16"]
)
def test_gradients_in_lower_precision(name, mask, dtype, rtol):
    """Float32 rounding through sums of condition about 100; the output of bfloat16 has 8 bits."""
    case = Case(METHODS[name], mask, LONG, dtype=dtype)
    given = gradients(case.run, case.inputs)
    assert all(a.dtype == x.dtype for a, x in zip(given[:3], case.tensors, strict=True))
    wide = [x.detach().double().requires_grad_() for x in case.inputs]
    expected = gradients(case.dense_reference, wide)
    for a, b in zip(given, expected, strict=True):
        assert float((a.double() - b).norm()) <= rtol * float(b.norm())


@pytest.mark.parametrize("causal", [False, True])
def test_a_large_bias_overflows_nothing(causal):
    """Log-weights of ±1000 are beyond the range of exp in any dtype."""
    q, k, v = qkv(1, 1, n=90, d=4, scale=0.3, dtype=torch.float32)
    bias = torch.linspace(-1000, 1000, 90)[torch.randperm(90, generator=torch.Generator())]
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]

    def run(*x, method):
        result = sb.attention(*x, is_causal=causal, method=method, return_result=True)
        return result.output, result.lse / 1000

    exact = gradients(lambda *x: dense_attention(*x, is_causal=causal), inputs)
    for method in (sb.Polynomial(2), sb.SingleThreshold(0.5, 2), sb.PowerAttention(2), sb.Exact()):
        given = gradients(lambda *x, method=method: run(*x, method=method), inputs)
        assert all(x.isfinite().all() for x in given)
        assert float((given[2] - exact[2]).norm()) < 0.05 * float(exact[2].norm()) or isinstance(
            method, sb.PowerAttention
        )


@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2), sb.Auto(1e-2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_through_lse_of_a_result(method, causal):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, n=20, scale=0.1))
    result = sb.attention(q, k, v, is_causal=causal, method=method, return_result=True)
    given = torch.autograd.grad(result.lse.sum(), (q, k))
    expected = torch.autograd.grad(dense_attention(q, k, v, is_causal=causal)[1].sum(), (q, k))
    assert_close(given, expected, rtol=1e-9 if isinstance(method, sb.Exact) else 0.02)


@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_the_keys_has_gradients(method, causal):
    q, k, v = qkv(2, 2, n=20, scale=0.1)
    bias = torch.randn(2, 1, 1, 20, dtype=torch.float64, generator=torch.Generator())
    bias.requires_grad_()
    output = sb.attention(q, k, v, attn_mask=bias, is_causal=causal, method=method)
    expected = dense_attention(q, k, v, bias, causal)[0]
    given, exact = (torch.autograd.grad(x.square().sum(), bias) for x in (output, expected))
    assert_close(given, exact, rtol=1e-9 if isinstance(method, sb.Exact) else 0.01)


def test_a_bias_of_pairs_that_requires_grad_is_refused():
    q, k, v = qkv(1, 1, n=6)
    bias = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(sb.InputError, match="attn_mask requires grad"):
        sb.attention(q, k, v, attn_mask=bias, method=sb.Exact())


def test_a_mask_of_pairs_runs_exactly_with_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, n=9))
    mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    with pytest.warns(UserWarning, match="runs exactly"):
        output = sb.attention(q, k, v, attn_mask=mask, method=sb.Polynomial(1))
    with pytest.warns(UserWarning, match="runs exactly"):
        result = sb.attention(q, k, v, attn_mask=mask, method=sb.Polynomial(1), return_result=True)
    expected = torch.autograd.grad(dense_attention(q, k, v, mask)[0].square().sum(), (q, k, v))
    for x in (output, result.output):
        assert_close(torch.autograd.grad(x.square().sum(), (q, k, v)), expected)


def test_only_what_is_asked_for_gets_a_gradient():
    q, k, v = qkv(1, 1, n=9)
    v.requires_grad_()
    sb.attention(q, k, v, method=sb.Polynomial(1)).sum().backward()
    assert v.grad is not None and q.grad is None
    with torch.no_grad():
        assert not sb.attention(q, k, v, method=sb.Polynomial(1)).requires_grad


def test_broadcast_leading_dims_and_the_sign_of_the_scale():
    q, _, _ = qkv(2, 3, n=8)
    _, k, v = qkv(1, 3, n=8, seed=1)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    full = (q, k.expand(2, 3, 8, 5), v.expand(2, 3, 8, 5))
    exact = dense_attention(*full, scale=-0.3)[0]
    output = sb.attention(q, k, v, scale=-0.3, method=sb.SingleThreshold(1e-6, 1))
    given, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (output, exact))
    assert_close(given, expected)


@given(
    dim=st.integers(1, 20),
    degree=st.integers(0, 3),
    rows=st.integers(1, 5),
    lanes=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_features_pull_gradients_back(dim, degree, rows, lanes, seed):
    phi = FeatureMap(dim, degree)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(lanes, rows, dim, generator=generator, dtype=torch.float64)
    grad = torch.randn(lanes, phi.count - 1, rows, generator=generator, dtype=torch.float64)
    leaf = x.flatten(0, 1).requires_grad_()
    whole = phi(leaf)
    buffer = phi.buffer(lanes, rows + 2, x)
    features = phi.write(x, buffer)
    torch.testing.assert_close(features.transpose(1, 2).flatten(0, 1), whole[:, 1:].detach())
    expected = torch.zeros_like(leaf)
    if whole.requires_grad:
        (expected,) = torch.autograd.grad(
            (whole[:, 1:] * grad.transpose(1, 2).flatten(0, 1)).sum(), leaf
        )
    given = phi.pull_back(buffer, lambda a, b, out: out.copy_(grad[:, a:b]), rows)
    given = given.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(given, expected)
