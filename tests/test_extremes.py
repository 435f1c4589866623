"""Huge and tiny scores, degenerate lengths, padded, repeated and constant keys."""

import math

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from supportbasis.problem.validation import attention_problem

METHODS = [
    sb.Exact(),
    sb.SingleThreshold(None, 1),
    sb.SingleThreshold(None, 2),
    sb.SingleThreshold(0.4, 2),
    sb.SingleThreshold("sub-gaussian", 2),
    sb.MultiThreshold(2.0, 2),
    sb.MultiThreshold(2.0, 1, sketch_size=16),
    sb.Auto(1e-2),
]
ids = [str(method) for method in METHODS]


def assert_right(result, q, k, v, bias=None, causal=False, tolerance=1e-2):
    exact, _ = dense_attention(q, k, v, bias, causal)
    assert result.output.isfinite().all()
    error = (result.output.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    bound = float(result.certificate.bound.max())
    assert float(error) <= tolerance or bound > tolerance
    if exact.numel():
        worst = float((result.output.double() - exact).abs().max() / v.double().abs().max())
        assert worst <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_scores_of_any_size(method, size, causal):
    q, k, v = qkv(1, 2, n=120, d=4, dtype=torch.float32)
    q = q * (size / 10)  # the largest scores are near `size`
    result = sb.attention(q, k, v, method=method, is_causal=causal, return_result=True)
    assert_right(result, q, k, v, causal=causal)


@pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")
@pytest.mark.parametrize("degree", [0, 1, 2, 3, 8])
def test_polynomial_never_raises_or_returns_nan(degree):
    cases = [(1e-8, torch.float32), (1e4, torch.float32), (1e30, torch.float32)]
    for size, dtype in [*cases, (1e160, torch.float64)]:
        q, k, v = qkv(1, 1, n=30, d=3, dtype=dtype)
        result = sb.attention(
            q * size, k * max(1.0, size), v, method=sb.Polynomial(degree), return_result=True
        )
        assert result.output.isfinite().all()
        assert not result.lse.isnan().any()
        assert result.plan.heads[0].kind == "polynomial"


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_one_token(method):
    q, k, v = qkv(1, 1, n=1, d=4, dtype=torch.float32)
    torch.testing.assert_close(sb.attention(q, k, v, method=method), v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [*METHODS, sb.Polynomial(2)], ids=[*ids, "Polynomial"])
def test_no_queries_no_keys_no_heads(method):
    q, k, v = qkv(2, 3, n=6, dtype=torch.float32, scale=0.3)
    empty = sb.attention(q[:, :, :0], k, v, method=method, return_result=True)
    assert empty.output.shape == (2, 3, 0, 5)
    assert empty.lse.shape == (2, 3, 0)
    nothing = sb.attention(q, k[:, :, :0], v[:, :, :0], method=method, return_result=True)
    assert (nothing.output == 0).all()
    assert (nothing.lse == -math.inf).all()
    assert sb.attention(q[:0], k[:0], v[:0], method=method).shape == (0, 3, 6, 5)
    assert sb.attention(q[:, :0], k[:, :0], v[:, :0], method=method).shape == (2, 0, 6, 5)
    assert sb.attention(q, k, v[..., :0], method=method).shape == (2, 3, 6, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", [*METHODS, sb.Polynomial(2)], ids=[*ids, "Polynomial"])
def test_all_keys_padded_gives_zeros_and_lse_minus_infinity(method, causal):
    q, k, v = qkv(2, 1, n=9, dtype=torch.float32, scale=0.3)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0] = False
    call = {"attn_mask": mask, "is_causal": causal, "return_result": True}
    result = sb.attention(q, k, v, method=method, **call)
    assert (result.output[0] == 0).all()
    assert (result.lse[0] == -math.inf).all()
    assert result.output[1].abs().sum() > 0
    assert int(result.certificate.invalid_rows.sum()) == 0
    mask = torch.ones(9, dtype=torch.bool)
    mask[:4] = False  # causal rows 0..3 see only padded keys
    result = sb.attention(
        q, k, v, attn_mask=mask, is_causal=True, method=method, return_result=True
    )
    assert (result.output[:, :, :4] == 0).all()
    assert (result.lse[:, :, :4] == -math.inf).all()
    assert (result.lse[:, :, 4:] > -math.inf).all()


@pytest.mark.parametrize("method", [*METHODS, sb.Polynomial(2)], ids=[*ids, "Polynomial"])
def test_padding_is_the_same_as_absence(method):
    q, k, v = qkv(1, 1, n=30, m=40, d=4, scale=0.3)
    mask = torch.arange(40) < 25
    padded = sb.attention(q, k, v, attn_mask=mask, method=method)
    absent = sb.attention(q, k[:, :, :25], v[:, :, :25], method=method)
    torch.testing.assert_close(padded, absent, rtol=1e-6, atol=1e-6)
    huge = k.clone()
    huge[:, :, 25:] = 1e6  # what a padded key holds does not matter
    torch.testing.assert_close(
        sb.attention(q, huge, v, attn_mask=mask, method=method), absent, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_constant_and_duplicated_keys(method):
    q, k, v = qkv(1, 1, n=50, d=4, dtype=torch.float32)
    constant = torch.full_like(k, 0.3)
    result = sb.attention(q, constant, v, method=method, return_result=True)
    assert_right(result, q, constant, v)
    doubled, values = torch.cat([k, k], -2), torch.cat([v, v], -2)
    twice = sb.attention(q, doubled, values, method=method, return_result=True)
    assert_right(twice, q, k, v)
    _, lse = dense_attention(q, k, v)
    if float(twice.certificate.bound) < 0.1:
        torch.testing.assert_close(twice.lse.double(), lse + math.log(2), rtol=0, atol=0.06)


@pytest.mark.parametrize("method", [*METHODS, sb.Polynomial(2)], ids=[*ids, "Polynomial"])
def test_zero_query_key_and_value(method):
    zero = torch.zeros(1, 1, 20, 4)
    _, _, v = qkv(1, 1, n=20, d=4, dtype=torch.float32)
    result = sb.attention(zero, zero, v, method=method, return_result=True)
    expected = v.mean(-2, keepdim=True).expand_as(v)
    torch.testing.assert_close(result.output, expected, rtol=1e-5, atol=1e-5)
    if not result.plan.heads[0].is_sketched:  # a sketch changes the sum of the weights
        torch.testing.assert_close(result.lse, torch.full((1, 1, 20), math.log(20.0)))
    nothing = sb.attention(v, v, zero, method=method, return_result=True)
    assert (nothing.output == 0).all()


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-20, 1.0, 1e20, 1e200, 1e300])
def test_norms_are_those_of_any_size_rounded_up(size):
    """Squares of entries beyond 1e±154 leave float64."""
    x = size * torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    head = attention_problem(x, x, x, None, 0.0, False, None, False).head(0, 0)
    exact = size * torch.tensor([5.0, 1.0], dtype=torch.float64)
    for norms in (head.query_norms, head.key_norms):
        assert (norms >= exact).all() and (norms <= exact * (1 + 1e-14)).all()


@pytest.mark.filterwarnings("ignore:supportbasis")
def test_an_output_of_nearly_cancelling_weights_that_float16_cannot_hold_is_zero():
    """`Polynomial` never raises for finite input: such rows count as those without a result."""
    q = torch.linspace(-6, 6, 400).half().view(1, 1, 400, 1)
    k, v = torch.tensor([[1.0], [-1.5]]).half(), torch.tensor([[3e4], [-3e4]]).half()
    k, v = k.view(1, 1, 2, 1), v.view(1, 1, 2, 1)
    with pytest.warns(UserWarning, match="no usable denominator"):
        result = sb.attention(
            q, k, v, method=sb.Polynomial(1, bound=1.0), scale=1.0, return_result=True
        )
    assert bool(result.output.isfinite().all())
    wide = sb.attention(*(x.double() for x in (q, k, v)), scale=1.0, plan=result.plan)
    overflown = (wide.abs() > 65504).any(-1)
    assert int(overflown.sum()) > 0
    assert not bool(result.output[overflown].any())
    assert bool((result.lse[overflown] == -math.inf).all())
