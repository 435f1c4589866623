"""A plan remembers what it was made for: scale, causality and the range of the scores."""

import warnings

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv, relative
from supportbasis.engine import ranges, sdpa

METHODS = [
    sb.Polynomial(2),
    sb.SingleThreshold(0.8, 2),
    sb.MultiThreshold(),
    sb.BlockSupport(tolerance=0.1),
    sb.FittedPolynomial(),
]
FEW = {"n": 200, "d": 6, "scale": 0.3}


def planned(method, causal=False):
    return sb.plan(*qkv(1, 2, **FEW), is_causal=causal, method=method)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_another_scale_or_causality_is_refused(method):
    tensors, plan = qkv(1, 2, **FEW), planned(method)
    with pytest.raises(sb.InputError, match=r"scale=0\.408.*scale=10"):
        sb.attention(*tensors, scale=10.0, plan=plan)
    with pytest.raises(sb.InputError, match="is_causal=False"):
        sb.attention(*tensors, is_causal=True, plan=plan)
    causal = planned(method, causal=True)
    if not causal.is_exact:
        with pytest.raises(sb.InputError, match="is_causal=True"):
            sb.attention(*tensors, plan=causal)
    rounded = float(torch.tensor(6**-0.5))
    sb.attention(*tensors, scale=rounded, plan=plan)


def test_an_exact_plan_serves_every_scale():
    tensors, plan = qkv(1, 2, **FEW), planned(sb.Exact())
    expected, _ = dense_attention(*tensors, scale=3.0, is_causal=True)
    given = sb.attention(*tensors, scale=3.0, is_causal=True, plan=plan)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("change", ["longer", "shifted"])
def test_heads_that_leave_their_range_are_exact_and_said_to_be(method, change):
    """Only the second head leaves it; the first does what it did."""
    (q, k, v), plan = qkv(1, 2, **FEW), planned(method)
    before = sb.attention(q, k, v, plan=plan)
    new = [x.clone() for x in (q, k)]
    for x in new:
        x[:, 1] = 2.5 * x[:, 1] if change == "longer" else x[:, 1] + 0.6
    if method == METHODS[1]:  # long tokens are exact anyway, so let none be long
        new[0][:, 1], new[1][:, 1] = q[:, 1].clamp(-0.8, 0.8).sign() * 0.79, k[:, 1].sign() * 0.79
    with pytest.warns(UserWarning, match=r"heads 1 leave the range of their plan"):
        result = sb.attention(*new, v, plan=plan, return_result=True)
    exact, lse = dense_attention(*new, v)
    assert result.plan.heads[1].kind == "exact" and "made for" in result.plan.heads[1].reason
    assert result.plan.heads[0] is plan.heads[0]
    torch.testing.assert_close(result.output[:, 1], exact[:, 1])
    torch.testing.assert_close(result.lse[:, 1], lse[:, 1])
    torch.testing.assert_close(result.output[:, 0], before[:, 0])
    leaves = [x.requires_grad_() for x in (*new, v)]
    with pytest.warns(UserWarning, match="leave the range"):
        given = torch.autograd.grad(sb.attention(*leaves, plan=plan)[:, 1].sum(), leaves)
    expected = torch.autograd.grad(dense_attention(*leaves)[0][:, 1].sum(), leaves)
    for x, y in zip(given, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_new_tokens_of_the_same_kind_stay_in_range(method):
    plan = sb.plan(*qkv(1, 1, n=1000, d=16, scale=0.3), method=method)
    for seed in range(1, 6):
        q, k, v = qkv(1, 1, n=1500, d=16, scale=0.3, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = sb.attention(q, k, v, plan=plan, return_result=True)
        assert result.plan is plan


def test_a_threshold_finds_its_large_tokens_again():
    """Outliers of new data are exact, wherever they stand: a plan holds no index sets."""
    q, k, v = qkv(1, 1, n=300, d=8, scale=0.1)
    q[0, 0, :3], k[0, 0, 5:9] = 5.0, -4.0
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(0.6, 2))
    assert plan.heads[0].large == (3, 4)
    q, k = q.roll(50, -2), k.roll(99, -2)
    result = sb.attention(q, k, v, plan=plan, return_result=True)
    assert result.plan is plan
    assert relative(result.output, dense_attention(q, k, v)[0]) < 1e-4
    longer = qkv(1, 1, n=411, m=350, d=8, scale=0.1, seed=3)
    assert relative(sb.attention(*longer, plan=plan), dense_attention(*longer)[0]) < 1e-4


def test_a_compiled_call_leaves_its_range_too():
    (q, k, v), plan = qkv(1, 2, **FEW), planned(sb.Polynomial(2))
    compiled = torch.compile(
        lambda q, k, v: sb.attention(q, k, v, plan=plan), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v), sb.attention(q, k, v, plan=plan))
    with pytest.warns(UserWarning, match="leave the range"):
        given = compiled(4 * q, k, v)
    torch.testing.assert_close(given, dense_attention(4 * q, k, v)[0])


def test_compiled_exact_calls_refuse_nan():
    (q, k, v), plan = qkv(1, 2, **FEW), planned(sb.Exact())
    compiled = torch.compile(
        lambda q, k, v: sb.attention(q, k, v, plan=plan), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v), dense_attention(q, k, v)[0])
    q[0, 1, 3, 2] = torch.nan
    with pytest.raises(sb.InputError, match="query has 1 non-finite"):
        compiled(q, k, v)


@pytest.mark.parametrize("hostile", ["opposite keys", "values of zero"])
@pytest.mark.parametrize("with_plan", [False, True])
def test_overflow_is_refused_with_a_plan_and_without(hostile, with_plan):
    """Sums of entries that cancel, or meet zeros, must not hide that scores overflow."""
    q, k, v = qkv(1, 2, n=64, d=8, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact()) if with_plan else None
    if hostile == "opposite keys":
        q, k, v = 1e6 * q, 1e38 * k.sign(), torch.ones_like(v)
    else:
        k, v = torch.full_like(k, 3e38), torch.zeros_like(v)
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(q, k, v, plan=plan, method=None if with_plan else sb.Exact())


def test_ranges_are_those_of_norms():
    q, k, v = qkv(1, 1, n=50, d=4)
    lengths = [x.norm(dim=-1) for x in (q, k)]
    largest, mean = (0.5 * float(of(lengths[0]) * of(lengths[1])) for of in (torch.max, torch.mean))
    found = sb.plan(q, k, v, scale=0.5, method=sb.Polynomial(1)).heads[0].scores
    assert found.largest == pytest.approx(largest) and found.mean is None
    found = sb.plan(q, k, v, scale=0.5, method=sb.FittedPolynomial(tolerance=0.5)).heads[0].scores
    assert found.mean == pytest.approx(mean) and found.largest is None


@pytest.mark.parametrize("degree", [0, 1, 2, 4])
def test_a_polynomial_is_used_beyond_its_range_while_it_is_certified_there(degree):
    q, k, v = qkv(1, 1, n=50, d=4, scale=0.4)
    plan = sb.plan(q, k, v, method=sb.Polynomial(degree))
    poly, ratio = plan.heads[0].polynomial, 1.0
    while poly.on((ratio + ranges.STEP) * poly.bound).error <= ranges.GROWTH * poly.error:
        ratio += ranges.STEP
    assert ratio > 1.05
    largest = min(ratio, ranges.FURTHEST) - 1e-6
    assert sb.attention(largest * q, k, v, plan=plan, return_result=True).plan is plan
    with pytest.warns(UserWarning, match="leave the range"):
        sb.attention((largest + 2e-6) * q, k, v, plan=plan)


def test_a_fit_notices_other_directions_of_the_same_length():
    shape = torch.logspace(0, -1.5, 16, dtype=torch.float64)
    q, k, v = qkv(1, 1, n=2048, d=16)
    q, k = q * shape, k * shape.flip(0)
    plan = sb.plan(q, k, v, method=sb.FittedPolynomial())
    assert plan.heads[0].kind == "fitted"
    with pytest.warns(UserWarning, match="mean balanced"):
        result = sb.attention(q.flip(-1), k.flip(-1), v, plan=plan, return_result=True)
    assert result.plan.is_exact


def test_a_plan_remembers_the_sign_of_its_scale():
    tensors = qkv(1, 2, **FEW)
    plan = sb.plan(*tensors, scale=-0.4, method=sb.Polynomial(2))
    sb.attention(*tensors, scale=-0.4, plan=plan)
    with pytest.raises(sb.InputError, match=r"scale=-0\.4, but the call has scale=0\.4"):
        sb.attention(*tensors, scale=0.4, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2)], ids=str)
@pytest.mark.filterwarnings("ignore:supportbasis")
def test_compiled_gradients_of_tokens_before_heads(method, backend):
    """Strides of outputs and gradients are those that the compiler was told."""
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 3, n=40, d=4)]
    plan = sb.plan(*tensors, method=method)
    call = torch.compile(lambda *x: sb.attention(*x, plan=plan), backend=backend, fullgraph=True)
    for factor in (1.0, 9.0):  # the second leaves the range of the polynomial
        leaves = [(factor * x).requires_grad_() for x in tensors]
        cotangent = torch.ones(()).expand(2, 3, 40, 4)
        given, expected = (
            torch.autograd.grad(f(*leaves), leaves, cotangent)
            for f in (call, lambda *x: sb.attention(*x, plan=plan))
        )
        for x, y in zip(given, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_an_exact_plan_refuses_scores_of_16_bits_that_overflow():
    q, k, v = (x.bfloat16() for x in qkv(1, 4, n=64, d=16))
    plan = sb.plan(q, k, v, method=sb.Exact())
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(1e14 * q, 1e14 * k, v, scale=1e10, plan=plan)


@pytest.mark.parametrize("scale", [1e-46, 1e-320, 5e-324])
def test_an_exact_plan_takes_the_smallest_scales(scale):
    q, k, v = qkv(1, 2, n=20, d=4, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact())
    expected, _ = dense_attention(q, k, v, is_causal=True, scale=scale)
    given = sb.attention(q, k, v, is_causal=True, scale=scale, plan=plan)
    torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_exact_plan_under_autocast_attends_once(monkeypatch):
    calls, real = [], sdpa.SDPA
    monkeypatch.setattr(sdpa, "SDPA", lambda *x, **y: calls.append(1) or real(*x, **y))
    q, k, v = qkv(1, 2, n=64, d=8, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sb.attention(q, k, v, plan=plan).dtype == torch.bfloat16
    assert len(calls) == 1
