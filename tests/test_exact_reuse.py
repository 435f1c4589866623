"""A plan that is exact for all heads, used again: the short way through PyTorch's SDPA."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from cases import dense_attention, in_turn, qkv
from supportbasis import api

pytestmark = pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("query", "key"), [(1e30, 1e30), (1e10, 1e30), (1e30, 1e10)])
def test_scores_that_overflow_are_refused_when_an_exact_plan_is_reused(query, key, dtype):
    """One entry of one query and one of another token's key: NaN from PyTorch."""
    q, k, v = qkv(1, 2, n=20, d=8, dtype=dtype)
    plan = sb.plan(q, k, v, method=sb.Exact())
    q[0, 1, 3, 2], k[0, 1, 5, 2] = query, key
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(q, k, v, plan=plan)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_exact_plan_that_is_reused_names_bad_entries(name, bad, is_causal, dtype):
    tensors = dict(zip(("query", "key", "value"), qkv(1, 2, d=8, dtype=dtype), strict=True))
    plan = sb.plan(**tensors, is_causal=is_causal, method=sb.Exact())
    for at in ((0, 0, 0, 0), (0, 1, 32, 7), (0, 1, 17, 3)):
        spoilt = {key: x.clone() for key, x in tensors.items()}
        spoilt[name][at] = bad
        with pytest.raises(sb.InputError, match=f"{name} has 1 non-finite"):
            sb.attention(**spoilt, is_causal=is_causal, plan=plan)


@pytest.mark.parametrize("scale", [None, 0.3, -0.2, 0.0])
@pytest.mark.parametrize("dv", [8, 5])
def test_an_exact_plan_that_is_reused_is_sdpa(dv, scale):
    q, k, v = qkv(1, 2, n=40, m=33, d=8, dv=dv, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact(), scale=scale)
    expected = dense_attention(q, k, v, scale=scale)[0]
    again = sb.attention(q, k, v, plan=plan, scale=scale)
    torch.testing.assert_close(again.double(), expected.double(), rtol=1e-4, atol=1e-5)
    for wrong in (
        (q[..., :4], k[..., :4], v),
        (q, k[..., :4], v),
        (q, k, v[:, :, :9]),
        (q.double(), k, v),
    ):
        with pytest.raises(sb.InputError):
            sb.attention(*wrong, plan=plan, scale=scale)
    tracked = sb.attention(q.clone().requires_grad_(), k, v, plan=plan, scale=scale)
    assert tracked.requires_grad


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_that_are_broadcast_over_a_batch_keep_no_scores(is_causal):
    """PyTorch's own broadcasting takes the kernel that keeps all of them, with other roundings."""
    q, k, v = qkv(2, 2, n=40, m=33, d=8, dtype=torch.bfloat16)
    plan = sb.plan(q, k, v, is_causal=is_causal, method=sb.Exact())
    for query, key, value in ((q, k[:1], v[:1]), (q[:1], k, v)):
        once = sb.attention(query, key, value, is_causal=is_causal, plan=plan)
        whole = (query.expand_as(q), key.expand_as(k), value.expand_as(v))
        assert torch.equal(once, sb.attention(*whole, is_causal=is_causal, plan=plan))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["query", "key"])
def test_an_infinity_that_leaves_no_trace_in_the_output_is_noticed(name, is_causal):
    """Where all scores of an entry are -inf, its weights vanish."""
    q, k, v = (x.abs() for x in qkv(1, 2, n=20, d=8, dtype=torch.float32))
    plan = sb.plan(q, k, v, is_causal=is_causal, method=sb.Exact())
    tensors = {"query": q, "key": k, "value": v}
    tensors[name][0, 1, 7, 3] = -torch.inf
    with pytest.raises(sb.InputError, match=f"{name} has 1 non-finite"):
        sb.attention(**tensors, is_causal=is_causal, plan=plan)


SMALL = [(1, 1, 1), (1, 3, 2), (3, 1, 2), (2, 2, 3), (4, 7, 2), (7, 4, 2), (1, 33, 1), (33, 33, 1)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIGNS = [(0, 0), (1, 1), (1, -1), (1, 0)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "signs"), in_turn(SMALL, DTYPES, SIGNS))
def test_a_bad_entry_in_any_place_is_noticed_when_an_exact_plan_is_reused(
    shape, dtype, is_causal, signs
):
    """Scores of either sign, of one sign and of zero: PyTorch's kernel hides NaN and -inf."""
    n, m, d = shape
    q, k, v = qkv(1, 2, n=n, m=m, d=d, dv=d, dtype=dtype)
    q, k = (x if sign == 0 else sign * x.abs() for x, sign in zip((q, k), signs, strict=True))
    if signs == (1, 0):
        k = torch.zeros_like(k)
    tensors = {"query": q, "key": k, "value": v}
    plan = sb.plan(**tensors, is_causal=is_causal, method=sb.Exact())
    for name, tensor in tensors.items():
        for at, bad in itertools.product(
            range(tensor[0, 1].numel()), (math.nan, math.inf, -math.inf)
        ):
            spoilt = tensor.clone()
            spoilt[0, 1].view(-1)[at] = bad
            with pytest.raises(sb.InputError, match=f"{name} has 1 non-finite"):
                sb.attention(**{**tensors, name: spoilt}, is_causal=is_causal, plan=plan)
    plain = sb.attention(**tensors, is_causal=is_causal, plan=plan)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(plain, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_plan_that_is_reused_takes_groups_of_heads(dtype, monkeypatch):
    q, k, v = qkv(2, 4, n=20, m=9, d=8, dtype=dtype)
    k, v = k[:, :2], v[:, :2]
    plan = sb.plan(q, k, v, enable_gqa=True, method=sb.Exact())
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with monkeypatch.context() as patch:
        patch.setattr(api, "attention_problem", None)  # the careful way is not gone
        plain = sb.attention(q, k, v, enable_gqa=True, plan=plan)
    torch.testing.assert_close(plain, expected, rtol=0, atol=0)
    for grouped, keys in ((False, k), (True, k[:, :1].expand(-1, 3, -1, -1))):
        with pytest.raises(sb.InputError):
            sb.attention(q, keys, keys, enable_gqa=grouped, plan=plan)
    v[1, 1, 3, 2] = math.inf
    with pytest.raises(sb.InputError, match="value has 1 non-finite"):
        sb.attention(q, k, v, enable_gqa=True, plan=plan)


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1"])
def test_an_exact_plan_that_is_reused_refuses_a_scale_that_is_no_number(scale):
    q, k, v = qkv(1, 2, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact())
    with pytest.raises(sb.InputError, match="scale"):
        sb.attention(q, k, v, scale=scale, plan=plan)


def test_an_exact_plan_that_is_reused_takes_large_entries_but_no_overflow():
    q, k, v = qkv(1, 2, n=20, d=8, dtype=torch.float32)
    plan = sb.plan(q, k, v, method=sb.Exact())
    once = sb.attention(q, k, v, plan=plan)
    for power in (100, 125):  # products with the second may overflow, the output does not
        large = sb.attention(q, k, v * 2.0**power, plan=plan)
        torch.testing.assert_close(large, 2.0**power * once)
    huge = sb.attention(q * 2.0**-120, k * 2.0**120, v * 2.0**20, plan=plan)
    torch.testing.assert_close(huge, 2.0**20 * once)
    with pytest.raises(sb.InputError, match="overflows"):
        sb.attention(q.abs() * 1e20, k.abs() * 1e20, v, plan=plan)
    with pytest.raises(sb.InputError, match="key has dtype"):
        sb.attention(q, k.double(), v, plan=plan)
    with pytest.raises(sb.InputError, match="plan was made for"):
        sb.attention(q[:, :1], k[:, :1], v[:, :1], plan=plan)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(sb.attention(*turned, plan=plan), sb.attention(q, k, v, plan=plan))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sb.attention(q, k, v, plan=plan).dtype == torch.bfloat16
