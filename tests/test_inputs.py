"""Bad input gets an error that names the argument, what came and what was expected."""

import math

import pytest
import torch

import supportbasis as sb
from cases import qkv

q, k, v = qkv(1, 2, n=6, dtype=torch.float32)


def with_entry(x, value):
    x = x.clone()
    x[0, 0, 1, 2] = value
    return x


CASES = {
    "query NaN": (lambda: sb.attention(with_entry(q, math.nan), k, v), "query has 1 non-finite"),
    "key inf": (lambda: sb.attention(q, with_entry(k, math.inf), v), "key has 1 non-finite"),
    "value -inf": (lambda: sb.attention(q, k, with_entry(v, -math.inf)), r"value .*\(0, 0, 1, 2\)"),
    "plan NaN": (lambda: sb.plan(with_entry(q, math.nan), k, v), "query has 1 non-finite"),
    "1-D": (lambda: sb.attention(torch.zeros(4), k, v), "query has shape"),
    "not a tensor": (lambda: sb.attention([1.0], k, v), "query must be a torch.Tensor, got list"),
    "integers": (lambda: sb.attention(q.long(), k, v), "query has dtype torch.int64"),
    "mixed dtype": (lambda: sb.attention(q, k.double(), v), "key has dtype torch.float64"),
    "mixed device": (lambda: sb.attention(q, k.to("meta"), v), "key is on meta"),
    "dims": (lambda: sb.attention(q, k[..., :3], v), "key has head dim 3 but query has 5"),
    "lengths": (lambda: sb.attention(q, k, v[:, :, :4]), "value has 4 tokens but key has 6"),
    "leading": (lambda: sb.attention(q, torch.zeros(3, 5, 6, 5), v), "do not broadcast"),
    "zero dim": (lambda: sb.attention(q[..., :0], k[..., :0], v), "head dim 0"),
    "gqa heads": (
        lambda: sb.attention(q, torch.zeros(1, 3, 6, 5), torch.zeros(1, 3, 6, 5), enable_gqa=True),
        "2 query heads, 3 key heads",
    ),
    "gqa 2-D": (lambda: sb.attention(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True), "heads dim"),
    "scale NaN": (lambda: sb.attention(q, k, v, scale=math.nan), "scale must be a finite"),
    "scale str": (lambda: sb.attention(q, k, v, scale="1"), "scale must be a finite"),
    "dropout": (lambda: sb.attention(q, k, v, dropout_p=1.5), "dropout_p must be in"),
    "is_causal": (lambda: sb.attention(q, k, v, is_causal=1), "is_causal must be True or False"),
    "mask shape": (
        lambda: sb.attention(q, k, v, attn_mask=torch.ones(3, 9)),
        "attn_mask has shape",
    ),
    "mask dtype": (
        lambda: sb.attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.int32)),
        "attn_mask has dtype",
    ),
    "mask NaN": (lambda: sb.attention(q, k, v, attn_mask=torch.full((6,), math.nan)), "attn_mask"),
    "mask inf": (lambda: sb.attention(q, k, v, attn_mask=torch.full((6,), math.inf)), "attn_mask"),
    "mask list": (lambda: sb.attention(q, k, v, attn_mask=[1]), "attn_mask must be a torch.Tensor"),
    "method": (lambda: sb.attention(q, k, v, method="exact"), "method must be a method"),
    "plan type": (lambda: sb.attention(q, k, v, plan=3), "plan must be an sb.Plan"),
    "degree": (lambda: sb.Polynomial(-1), "degree must be an integer >= 0, got -1"),
    "degree float": (lambda: sb.SingleThreshold(0.5, 2.0), "degree must be an integer"),
    "bound": (lambda: sb.Polynomial(2, bound=0), "bound must be a finite number > 0"),
    "threshold": (lambda: sb.SingleThreshold(0.0), "threshold must be a finite number > 0"),
    "threshold rule": (lambda: sb.SingleThreshold("best"), "threshold must be .* 'best'"),
    "threshold nan": (lambda: sb.SingleThreshold(math.nan), "threshold must be"),
    "tolerance": (lambda: sb.Auto(0.0), "tolerance must be a finite number > 0"),
    "seed": (lambda: sb.Auto(0.1, seed=0.5), "seed must be an integer"),
    "seed of Auto": (lambda: sb.Auto(0.1, seed=2**63), "seed .* seed < 2.*63, got 9223372036854"),
    "seed of lists": (lambda: sb.BlockSupport(seed=2**65), "seed must be .* seed < 2"),
    "seed of fits": (lambda: sb.FittedPolynomial(seed=2**65), "seed must be .* seed < 2"),
    "seed of buckets": (lambda: sb.MultiThreshold(seed=2**65), "seed must be .* seed < 2"),
    "seed of powers": (lambda: sb.PowerAttention(seed=2**65), "seed must be .* seed < 2"),
    "bandwidth": (lambda: sb.gaussian_kde(q[0, 0], k[0, 0], -1.0), "bandwidth must be finite"),
    "bandwidth shape": (
        lambda: sb.gaussian_kde(q[0, 0], k[0, 0], torch.ones(2)),
        "bandwidth has shape",
    ),
    "weights sign": (
        lambda: sb.gaussian_kde(q[0, 0], k[0, 0], 1.0, weights=-torch.ones(6)),
        "weights must be finite and >= 0",
    ),
    "weights shape": (
        lambda: sb.gaussian_kde(q[0, 0], k[0, 0], 1.0, weights=torch.ones(4)),
        "weights has shape",
    ),
    "no data": (lambda: sb.gaussian_kde(q[0, 0], k[0, 0, :0], 1.0), "data has no points"),
    "kernel NaN": (lambda: sb.kernel_sum(q, k, with_entry(v, math.nan)), "value has 1 non-finite"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_the_argument(name):
    call, message = CASES[name]
    with pytest.raises(sb.InputError, match=message) as error:
        call()
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, sb.SupportBasisError)


@pytest.mark.parametrize(
    "method",
    [sb.BlockSupport, sb.FittedPolynomial, sb.MultiThreshold, sb.PowerAttention, sb.Auto],
)
def test_the_largest_seed_serves(method):
    """Seeds of generators are this one plus a little."""
    options = {"tolerance": 0.1} if method is sb.BlockSupport else {}
    x = torch.randn(1, 1, 600, 4, generator=torch.Generator().manual_seed(0))
    assert sb.attention(x, x, x, method=method(seed=2**63 - 1, **options)).isfinite().all()


def test_huge_finite_entries_are_not_mistaken_for_infinity():
    big = torch.full((1, 1, 4, 2), 3e38)  # their sum overflows, they do not
    sb.plan(big * 0, big * 0, big, method=sb.Exact())


def test_with_a_plan_non_finite_input_is_still_noticed():
    plan = sb.plan(q, k, v, method=sb.Polynomial(1))
    with pytest.raises(sb.InputError, match="key has 1 non-finite"):
        sb.attention(q, with_entry(k, math.nan), v, plan=plan)
