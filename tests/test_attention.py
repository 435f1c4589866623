"""Every method against its dense float64 reference, over shapes, masks, lengths and dtypes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from cases import METHODS, dense_attention, in_turn, max_error, qkv, run_both

pytestmark = pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")

SHAPES = {
    "T1": {"n": 1},
    "T33": {"n": 33},
    "H3-T17": {"leading": (3,), "n": 17},
    "B2-H3-T40-d3": {"leading": (2, 3), "n": 40, "d": 3},
    "B2x2-H1-T9": {"leading": (2, 2, 1), "n": 9},
    "T20-S37": {"leading": (1, 1), "n": 20, "m": 37},
    "T37-S20": {"leading": (1, 2), "n": 37, "m": 20},
    "dv9": {"leading": (2,), "n": 21, "dv": 9},
    "dv1": {"n": 21, "dv": 1},
    "d1": {"n": 21, "d": 1, "dv": 3},
}


def make(shape: dict, **more):
    shape = dict(shape)
    return qkv(*shape.pop("leading", ()), **shape, **more)


def assert_reference(result, output, lse, tolerance=1e-9):
    """Equal to the reference except in rows that the certificate counts as failed."""
    lost = int(result.certificate.invalid_rows.sum() - result.certificate.fallback_rows.sum())
    if lost:
        good = result.lse > -math.inf
        assert int((~good).sum()) >= lost
        output, lse = output[good], lse[good]
        result = sb.Result(
            result.output[good], result.lse[good], result.log_scale, result.plan, None
        )
    torch.testing.assert_close(result.output, output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result.lse, lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("method", "shape", "causal"), in_turn(METHODS, SHAPES, [False, True]))
def test_equals_its_dense_reference(method, shape, causal):
    q, k, v = make(SHAPES[shape])
    result, output, lse = run_both(q, k, v, METHODS[method], is_causal=causal)
    assert result.output.shape == (*q.shape[:-1], v.shape[-1])
    assert result.lse.shape == q.shape[:-1]
    assert result.lse.dtype == torch.float64
    assert_reference(result, output, lse)


@pytest.mark.parametrize(
    ("method", "kind", "causal"),
    in_turn(METHODS, ["bool", "bias", "bool-heads", "wild-bias"], [False, True]),
)
def test_key_masks_and_biases_are_native(method, kind, causal):
    q, k, v = qkv(2, 3, n=45, m=41)
    generator = torch.Generator().manual_seed(3)
    if kind == "bool":
        mask = torch.rand(2, 1, 1, 41, generator=generator) < 0.6
    elif kind == "bool-heads":
        mask = torch.rand(2, 3, 1, 41, generator=generator) < 0.6
    else:
        spread = 1.0 if kind == "bias" else 100.0
        mask = torch.randn(1, 3, 1, 41, generator=generator, dtype=torch.float64) * spread
        mask[..., 5] = -math.inf
    call = {"attn_mask": mask, "is_causal": causal}
    result, output, lse = run_both(q, k, v, METHODS[method], **call)
    assert all(head.reason == "" or "query" not in head.reason for head in result.plan.heads)
    assert_reference(result, output, lse)
    if method == "exact":
        expected = dense_attention(q, k, v, mask, causal)
        assert_reference(result, *expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_grouped_query_heads(method, causal):
    q, k, v = qkv(2, 6, n=25, m=31, key_heads=2, dv=3)
    call = {"is_causal": causal, "enable_gqa": True}
    result, output, lse = run_both(q, k, v, METHODS[method], **call)
    assert_reference(result, output, lse)
    repeated = sb.attention(
        q,
        k.repeat_interleave(3, 1),
        v.repeat_interleave(3, 1),
        method=METHODS[method],
        is_causal=causal,
    )
    torch.testing.assert_close(result.output, repeated, rtol=1e-9, atol=1e-9)


def test_gqa_through_sdpa_with_lse_when_value_dim_equals_dim():
    q, k, v = qkv(2, 6, n=25, m=31, key_heads=2)
    result = sb.attention(q, k, v, method=sb.Exact(), enable_gqa=True, return_result=True)
    output, lse = dense_attention(q, k, v)
    assert_reference(result, output, lse)


@pytest.mark.parametrize(
    ("method", "dtype", "causal"),
    in_turn(METHODS, [torch.float32, torch.bfloat16, torch.float16], [False, True]),
)
def test_low_precision_stays_within_the_derived_rounding(method, dtype, causal):
    q, k, v = qkv(2, 2, n=50, d=6, scale=0.3, dtype=dtype)
    result, output, lse = run_both(q, k, v, METHODS[method], is_causal=causal)
    assert result.output.dtype == dtype
    assert result.lse.dtype == torch.float32
    assert int(result.certificate.invalid_rows.sum()) == 0
    # accumulated in float32: far better than the narrow dtype would do, but for its own rounding
    narrow = torch.finfo(dtype).eps
    assert max_error(result.output, output, v) <= 2 * narrow + 2e-5
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-4, atol=1e-4)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    n=st.integers(0, 40),
    m=st.integers(0, 40),
    d=st.integers(1, 6),
    dv=st.integers(1, 4),
    causal=st.booleans(),
    log_size=st.floats(-8, 1),
    name=st.sampled_from(sorted(METHODS)),
    seed=st.integers(0, 999),
)
def test_any_length_dim_and_magnitude(n, m, d, dv, causal, log_size, name, seed):
    q, k, v = qkv(1, 1, n=n, m=m, d=d, dv=dv, scale=10**log_size, seed=seed)
    result, output, lse = run_both(q, k, v, METHODS[name], is_causal=causal)
    assert result.output.isfinite().all()
    assert_reference(result, output, lse, tolerance=1e-7)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1 / 5, 3.0])
@pytest.mark.parametrize("method", METHODS)
def test_any_scale(method, scale):
    q, k, v = qkv(2, n=30)
    result, output, lse = run_both(q, k, v, METHODS[method], scale=scale)
    assert_reference(result, output, lse)


def test_agrees_with_sdpa_on_its_own_arguments():
    q, k, v = qkv(2, 3, n=29, m=18, dtype=torch.float32)
    mask = torch.rand(2, 1, 29, 18, generator=torch.Generator().manual_seed(0)) < 0.7
    for call in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}):
        expected = F.scaled_dot_product_attention(q, k, v, **call)
        got = sb.attention(q, k, v, method=sb.Exact(), **call)
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(sb.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_any_other_mask_runs_exactly_and_says_so(kind, causal):
    q, k, v = qkv(2, 2, n=19, m=23)
    mask = torch.rand(19, 23, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[4] = False
    if kind == "float":
        mask = torch.where(mask, torch.randn(19, 23).double(), -math.inf)
    for method in (None, sb.SingleThreshold(1.0), sb.Polynomial(2)):
        with pytest.warns(UserWarning, match="runs exactly because the mask"):
            result = sb.attention(
                q, k, v, attn_mask=mask, is_causal=causal, method=method, return_result=True
            )
        assert "mask" in result.plan.heads[0].reason
        output, lse = dense_attention(q, k, v, mask, causal)
        assert_reference(result, output, lse)
        assert (result.output[..., 4, :] == 0).all()
        assert (result.lse[..., 4] == -math.inf).all()


def test_an_expanded_key_mask_is_seen_to_be_a_key_mask():
    q, k, v = qkv(2, 2, n=19, m=23)
    mask = torch.rand(2, 1, 1, 23, generator=torch.Generator().manual_seed(0)) < 0.5
    expanded = mask.expand(2, 1, 19, 23)
    method = sb.Polynomial(2)
    torch.testing.assert_close(
        sb.attention(q, k, v, attn_mask=expanded, method=method),
        sb.attention(q, k, v, attn_mask=mask, method=method),
    )


def test_dropout_runs_exactly_and_says_so():
    q, k, v = qkv(1, 1, n=64, dtype=torch.float32)
    with pytest.warns(UserWarning, match="dropout"):
        result = sb.attention(q, k, v, dropout_p=0.5, method=sb.Polynomial(2), return_result=True)
    assert "dropout" in result.plan.heads[0].reason
    assert result.certificate.rows == 0
    assert not result.certificate.holds(1e9)
    assert not result.certificate.bound_holds(1e9)
    assert result.output.isfinite().all()
    exact = sb.attention(q, k, v, method=sb.Exact())
    assert not torch.allclose(result.output, exact)


def test_leading_dims_broadcast_as_in_sdpa():
    q, _, _ = qkv(2, 3, n=8)
    _, k, v = qkv(1, 3, n=8, seed=1)
    expected = dense_attention(q, k.expand(2, 3, 8, 5), v.expand(2, 3, 8, 5))[0]
    for method in (sb.Exact(), sb.SingleThreshold(1e-6, 1)):
        torch.testing.assert_close(sb.attention(q, k, v, method=method), expected)


@pytest.mark.parametrize("dv", [5, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_exact_has_gradients_with_key_masks(causal, dv):
    mask = torch.tensor([True] * 7 + [False] * 5)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, n=12, dv=dv))
    exact, _ = dense_attention(q, k, v, mask, causal)
    expected = torch.autograd.grad(exact.square().sum(), (q, k, v))
    for wants_result in (False, True):
        given = sb.attention(
            q, k, v, attn_mask=mask, is_causal=causal,
            method=sb.Exact(), return_result=wants_result,
        )  # fmt: skip
        output = given.output if wants_result else given
        got = torch.autograd.grad(output.square().sum(), (q, k, v))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_the_global_generator_is_untouched():
    q, k, v = qkv(1, 1, n=3000, d=8, scale=0.1, dtype=torch.float32)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    for method in (sb.SingleThreshold(0.2), sb.Auto(1e-2), sb.Polynomial(2), sb.Exact()):
        sb.attention(q, k, v, method=method, return_result=True)
    sb.plan(q, k, method=sb.Auto(1e-2))
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_are_not_modified():
    q, k, v = qkv(1, 2, n=60, dtype=torch.float32)
    copies = [x.clone() for x in (q, k, v)]
    for method in METHODS.values():
        sb.attention(q, k, v, method=method, is_causal=True, return_result=True)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


def test_non_contiguous_inputs():
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 14, n=3))  # [2, 3, 14, 5] with strides swapped
    assert not q.is_contiguous()
    for method in METHODS.values():
        given = sb.attention(q, k, v, method=method)
        packed = sb.attention(*(x.contiguous() for x in (q, k, v)), method=method)
        torch.testing.assert_close(given, packed)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("method", [None, sb.Exact(), sb.SingleThreshold(1.0), sb.Polynomial(2)])
def test_causal_with_a_scale_of_zero_or_less(method, scale):
    """PyTorch's CPU kernel returns NaN here; the sign goes to the query instead."""
    q, k, v = qkv(1, 2, n=40, scale=0.2, dtype=torch.float32)
    result = sb.attention(q, k, v, is_causal=True, scale=scale, method=method, return_result=True)
    exact, lse = dense_attention(q, k, v, is_causal=True, scale=scale)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound.max()) < 2
    if method is None:
        torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [20.0, 1e5])
def test_masks_keep_their_precision_with_half_inputs(size):
    q, k, v = qkv(1, 1, n=24, dtype=torch.float16)
    mask = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)) * size
    result = sb.attention(q, k, v, attn_mask=mask, method=sb.Exact(), return_result=True)
    exact, lse = dense_attention(q, k, v, mask)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=0.1)
    bias = mask[:1]
    result = sb.attention(q, k, v, attn_mask=bias, method=sb.Exact(), return_result=True)
    exact, _ = dense_attention(q, k, v, bias)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)


def test_a_plan_with_a_mask_it_cannot_serve_runs_exactly_and_says_so():
    q, k, v = qkv(1, 1, n=30, scale=0.3)
    plan = sb.plan(q, k, v, method=sb.Polynomial(1))
    mask = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.8
    with pytest.warns(UserWarning, match="runs exactly"):
        output = sb.attention(q, k, v, attn_mask=mask, plan=plan)
    torch.testing.assert_close(output, dense_attention(q, k, v, mask)[0])


def test_gradients_that_do_not_exist_are_refused():
    q, k, v = qkv(1, 1, n=9)
    weights = torch.ones(9, dtype=torch.float64, requires_grad=True)
    for call in (
        lambda: sb.kernel_sum(q.requires_grad_(), k, v, method=sb.Exact()),
        lambda: sb.gaussian_kde(k[0, 0], v[0, 0], 1.0, weights=weights),
    ):
        with pytest.raises(sb.InputError, match="requires grad"):
            call()


def test_values_that_overflow_a_sum_are_refused():
    q, k, v = qkv(1, 1, n=200, scale=0.1, dtype=torch.float32)
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(q, k, torch.full_like(v, 1e38), method=sb.Exact())
    huge = q * 1e30
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(huge, huge, v, scale=1.0, method=sb.Exact())
