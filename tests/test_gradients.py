"""Gradients of every method against float64 autograd through the dense reference, and gradcheck."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import supportbasis as sb
from cases import METHODS, dense_attention, in_turn, list_plan, qkv
from gradient_cases import Case, assert_close, gradients
from supportbasis.components import exact_sum as exact
from supportbasis.components import streaming
from supportbasis.lists.tables import ListSettings
from supportbasis.methods.fitted import FittedSearch
from supportbasis.polynomials import features
from supportbasis.polynomials.features import Buffer, FeatureMap

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


@pytest.mark.parametrize(("name", "shape", "mask"), in_turn(METHODS, SHAPES, MASKS))
def test_gradients_are_those_of_the_dense_reference(name, shape, mask):
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


@pytest.mark.parametrize(("name", "mask", "shape"), in_turn(METHODS, MASKS, ["n!=m", "gqa"]))
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


LONG = {"leading": (1, 2), "n": 110, "d": 3, "dv": 2}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, chunks and tiles so short that every loop runs several times, in three lanes."""
    monkeypatch.setattr(streaming, "CAUSAL_CHUNK", 32)
    monkeypatch.setattr(streaming, "lane_count", lambda device: 3)
    monkeypatch.setattr(features, "BUFFER_BYTES", 16 * 8)
    monkeypatch.setattr(exact, "KEY_TILE", 16)
    monkeypatch.setattr(exact, "TILE", 16 * 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "mask",
    ["none", "causal-bias", *(pytest.param(x, marks=pytest.mark.slow) for x in MASKS[1:4])],
)
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


@pytest.mark.parametrize(
    ("mask", "strict"),
    [*((mask, False) for mask in MASKS), ("causal", True), ("causal-bias", True)],
)
def test_gradients_of_lists(mask, strict):
    """Heads that share keys, and values of another dim."""
    case = Case(sb.Exact(), mask, ODD, seed=6, scale=1.2)
    case.plan = list_plan(case.tensors[0], lists_of(case, strict, price=1e-3))
    assert_close(gradients(case.run, case.inputs), gradients(case.dense_reference, case.inputs))


@pytest.mark.parametrize(
    ("name", "mask", "dtype"),
    in_turn(
        ["exact", "poly2", "single2", "multi2", "sketch1", "power4"],
        MASKS,
        [torch.float32, torch.bfloat16],
    ),
)
def test_gradients_in_lower_precision(name, mask, dtype):
    """Float32 rounding through sums of condition about 100; the output of bfloat16 has 8 bits."""
    rtol = 1e-4 if dtype == torch.float32 else 0.05
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
    buffer = Buffer(phi, lanes, rows + 2, x)
    features = buffer.write(x)
    torch.testing.assert_close(features.transpose(1, 2).flatten(0, 1), whole[:, 1:].detach())
    expected = torch.zeros_like(leaf)
    if whole.requires_grad:
        (expected,) = torch.autograd.grad(
            (whole[:, 1:] * grad.transpose(1, 2).flatten(0, 1)).sum(), leaf
        )
    given = buffer.pull_back(lambda out: out.copy_(grad), rows)
    given = given.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(given, expected)
