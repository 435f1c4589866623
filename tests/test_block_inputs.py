"""BlockSupport on any input: shapes, masks, dtypes and scales against the float64 reference, with
certificates, saved plans, gradients and graphs."""

from __future__ import annotations

import math

import pytest
import torch

import supportbasis as sb
from cases import (
    beyond,
    clustered,
    dense_attention,
    in_turn,
    list_plan,
    max_error,
    qkv,
    quiet,
    relative,
    run_both,
    small_lists,
)
from supportbasis.lists.tables import ListSettings

DTYPES = {
    torch.float64: 2**-53,
    torch.float32: 2**-24,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}


# ---- any input --------------------------------------------------------------------------------


SHAPES = {
    "odd": {"leading": (1, 1), "n": 257, "m": 257},
    "one more than windows": {"leading": (1, 1), "n": 129, "m": 129},
    "fewer keys": {"leading": (1, 2), "n": 201, "m": 111},
    "fewer queries": {"leading": (1, 2), "n": 111, "m": 201},
    "wide values": {"leading": (1, 1), "n": 150, "m": 150, "dv": 7},
    "narrow values": {"leading": (1, 1), "n": 150, "m": 150, "dv": 1},
    "gqa": {"leading": (2, 4), "n": 131, "m": 131, "key_heads": 2},
    "leading dims": {"leading": (2, 1, 2), "n": 100, "m": 100},
    "no heads": {"leading": (), "n": 131, "m": 131},
    "one": {"leading": (1, 1), "n": 1, "m": 1},
    "one query": {"leading": (1, 1), "n": 1, "m": 90},
    "one key": {"leading": (1, 1), "n": 90, "m": 1},
    "no queries": {"leading": (1, 1), "n": 0, "m": 90},
    "no keys": {"leading": (1, 1), "n": 90, "m": 0},
}
MASKS = ("none", "bool", "bias", "bias with -inf", "nothing")


def mask_of(kind, m):
    if kind == "none":
        return None
    bias = torch.randn(m, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    made = {
        "bool": bias < 0.7,
        "bias": bias,
        "bias with -inf": bias.masked_fill(bias > 0.7, -math.inf),
        "nothing": torch.zeros(m, dtype=torch.bool),
    }
    return made[kind]


@pytest.mark.parametrize(("shape", "mask", "causal"), in_turn(SHAPES, MASKS, [False, True]))
def test_every_shape_and_mask_matches_the_reference(shape, mask, causal):
    given = dict(SHAPES[shape])
    leading = given.pop("leading")
    q, k, v = qkv(*leading, d=5, **given)
    heads = q if leading else q.unsqueeze(0)
    call = {"attn_mask": mask_of(mask, given["m"]), "is_causal": causal}
    call |= {"enable_gqa": "key_heads" in given}
    for strict in (False, True) if causal else (False,):
        plan = list_plan(heads, small_lists(causal, strict, price=1e-3))
        result, output, lse = run_both(q, k, v, None, plan=plan, **call)
        assert result.output.shape == (*leading, given["n"], v.shape[-1])
        # sums of some hundred terms, with scores of a few units, in float64
        torch.testing.assert_close(result.output, output, rtol=0, atol=1e4 * 2**-53)
        torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e4 * 2**-53)
        exact, _ = dense_attention(q, k, v, call["attn_mask"], causal)
        bound = result.certificate.bound.max()
        assert not v.numel() or max_error(result.output, exact, v) <= float(bound)


@pytest.mark.parametrize(
    ("dtype", "causal"), list(zip(DTYPES, [False, True, False, True], strict=True)), ids=str
)
def test_every_dtype(dtype, causal):
    q, k, v = clustered(1, 2, n=2048, size=1.5, dtype=dtype)
    method = sb.BlockSupport(tolerance=0.05)
    result = sb.attention(q, k, v, is_causal=causal, method=method, return_result=True)
    assert "lists" in {head.kind for head in result.plan.heads}
    assert result.output.dtype == dtype
    assert result.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    assert relative(result.output, exact) <= 1.25 * 0.05 + DTYPES[dtype]
    assert max_error(result.output, exact, v) <= float(result.certificate.bound.max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_open_leaves_are_exact_in_every_dtype(dtype, causal):
    q, k, v = clustered(1, 1, n=300, size=1.5, dtype=dtype)
    plan = list_plan(q, small_lists(causal, price=0.0))
    result = sb.attention(q, k, v, is_causal=causal, plan=plan, return_result=True)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    # scores within ±12 are rounded 8 + 6 times, and shift weights by as much; then the output is
    unit = DTYPES[torch.float64 if dtype == torch.float64 else torch.float32]
    assert max_error(result.output, exact, v) <= 2 * 12 * 14 * unit + DTYPES[dtype]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q, torch.full_like(k, 0.7)),
        lambda q, k: (q * 0, k),
        lambda q, k: (q * 1e3, k * 1e3),
        lambda q, k: (q * 1e18, k * 1e-18),
        lambda q, k: (q * 1e-8, k * 1e-8),
        lambda q, k: (q * 1e-25, k * 1e-25),
        lambda q, k: (q * 0.01 + 5, k * 0.01 - 3),
        lambda q, k: (q, torch.where(k[..., :1] > 0, 1.0, -1.0) * torch.ones_like(k)),
        lambda q, k: (q[..., :1] * torch.ones_like(q), k[..., :1] * torch.ones_like(k)),
    ],
    ids=[
        *("equal keys", "zero queries", "huge", "huge and tiny", "tiny", "squares vanish"),
        *("one cluster", "two keys", "one line"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_degenerate_data_is_right_and_finite(change, causal):
    """Whether lists are found or not; what is exact for any list is compared with lists too."""
    q, k, v = qkv(1, 1, n=1500, d=6, dtype=torch.float32)
    q, k = change(q, k)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    method = sb.BlockSupport(tolerance=1e-2)
    result = sb.attention(q, k, v, is_causal=causal, method=method, return_result=True)
    assert result.output.isfinite().all()
    rounding = 14 * 2**-24 * float((q.double() @ k.double().mT).abs().max()) / math.sqrt(6)
    assert relative(result.output, exact) <= 1.25e-2 + 2 * rounding
    plan = list_plan(q, small_lists(causal, True))
    output = sb.attention(q, k, v, is_causal=causal, plan=plan)
    assert output.isfinite().all()
    assert float(output.abs().max()) <= float(v.abs().max()) * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 50.0, -0.5, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_any_scale_matches_the_reference(scale, causal):
    q, k, v = clustered(1, 1, n=200, dtype=torch.float64)
    plan = list_plan(q, small_lists(causal, True))
    result, output, lse = run_both(q, k, v, None, plan=plan, is_causal=causal, scale=scale)
    reach = abs(scale) * float((q @ k.mT).abs().max())
    limit = 64 * 2**-53 * max(1.0, reach)  # scores are rounded relative to their reach
    assert max_error(result.output, output, v) <= limit
    assert float((result.lse - lse).abs().max()) <= limit * max(1.0, reach)


# ---- certificates -----------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    ("size", "causal"), [(1e-3, False), (0.02, True), (0.02, False), (0.5, True), (3.0, False)]
)
def test_the_bound_holds_and_is_said_to_be_vacuous_where_it_is(size, causal):
    q, k, v = clustered(1, 1, n=2048, size=size)
    call = {"is_causal": causal, "return_result": True}
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.7), **call)
    assert result.plan.heads[0].kind == "lists"
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    bound = float(result.certificate.bound)
    assert max_error(result.output, exact, v) <= bound
    assert ("(vacuous)" in str(result.certificate)) == (bound >= 1)
    if size <= 0.02:
        assert bound < 1
    error = relative(result.output, exact)
    assert error <= 1.25 * float(result.certificate.limit)


@pytest.mark.slow
def test_a_plan_that_is_used_again_is_checked():
    """On the same tokens the certificate says that it holds; on others it says what is true."""
    tolerance = 0.05
    q, k, v = clustered(1, 1, n=4096, size=2.0)
    plan = beyond(sb.plan(q, k, v, method=sb.BlockSupport(tolerance=tolerance)))
    assert plan.heads[0].kind == "lists"
    assert sb.attention(q, k, v, plan=plan, return_result=True).certificate.holds(1.25 * tolerance)
    for factor in (0.5, 1.5, 2.5):
        result = sb.attention(factor * q, factor * k, v, plan=plan, return_result=True)
        error = relative(result.output, dense_attention(factor * q, factor * k, v)[0])
        assert result.certificate.holds(tolerance) <= (error <= 1.25 * tolerance)


# ---- plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [None, True])
def test_a_plan_where_no_sampled_row_is_beyond_the_first_window(strict):
    q, k, v = qkv(1, 2, n=513, d=16)
    plan = sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.5, strict=strict))
    output = sb.attention(q, k, v, is_causal=True, plan=plan)
    exact, _ = dense_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(output[..., :512, :], exact[..., :512, :])


@pytest.mark.parametrize(("causal", "strict"), [(False, None), (True, None), (True, True)])
def test_saved_plans_give_the_same_bits(causal, strict, tmp_path):
    q, k, v = clustered(1, 2, n=2048, size=1.0)
    plan = sb.plan(q, k, v, is_causal=causal, method=sb.BlockSupport(0.8, strict=strict))
    assert {head.kind for head in plan.heads} == {"lists"}
    plan.save(tmp_path / "plan.json")
    loaded = sb.Plan.load(tmp_path / "plan.json")
    assert loaded.method == plan.method
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for tensors in ((q, k, v), leaves):
        first, second = (
            sb.attention(*tensors, is_causal=causal, plan=p, return_result=True)
            for p in (plan, loaded)
        )
        assert torch.equal(first.output, second.output) and torch.equal(first.lse, second.lse)
        assert [h.lists for h in first.plan.heads] == [h.lists for h in second.plan.heads]


@pytest.fixture(scope="module", params=[False, True])
def plan_of_2048(request):
    """Longer tokens, a plan of lists for some of them, and whether it is causal."""
    tokens, causal = clustered(1, 1, n=2501, size=1.0, dtype=torch.float64), request.param
    part = [x[:, :, :2048] for x in tokens]
    return tokens, sb.plan(*part, is_causal=causal, method=sb.BlockSupport(0.9)), causal


@pytest.mark.parametrize(
    "n", [0, 1, 31, 64, 300, 513, 1030, pytest.param(2501, marks=pytest.mark.slow)]
)
def test_a_plan_serves_another_length(plan_of_2048, n):
    (q, k, v), plan, causal = plan_of_2048
    assert plan.heads[0].kind == "lists"
    part = [x[:, :, :n] for x in (q, k, v)]
    result, output, lse = run_both(*part, None, plan=beyond(plan), is_causal=causal)
    torch.testing.assert_close(result.output, output, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e-10)
    exact, _ = dense_attention(*part, is_causal=causal)
    assert not n or relative(result.output, exact) < 0.1


# ---- gradients and graphs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "strict", "biased"),
    [
        (True, True, True),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((False, False, True), (True, False, False))
        ),
    ],
)
def test_gradcheck(causal, strict, biased):
    """Every entry of the output by every entry of query, key, value and bias."""
    tensors = qkv(1, 2, n=9, d=2, dv=1, key_heads=1)  # two windows and a token
    bias = [torch.linspace(-1, 1, 9).double()] if biased else []
    plan = list_plan(tensors[0], ListSettings(1e-2, 4, 2, 4 if causal else 0, strict))
    leaves = [x.clone().requires_grad_() for x in (*tensors, *bias)]

    def call(q, k, v, mask=None):
        return sb.attention(q, k, v, mask, is_causal=causal, enable_gqa=True, plan=plan)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize(
    "mode",
    ["open", *(pytest.param(x, marks=pytest.mark.slow) for x in ("whole", "causal", "strict"))],
)
def test_a_graph_holds_a_plan_of_lists(mode):
    """Forward and backward, in one graph, as outside of it."""
    causal, strict = mode != "whole", {"open": None}.get(mode, mode == "strict")
    tensors = clustered(1, 2, n=150, size=1.0, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in tensors]
    plan = list_plan(tensors[0], small_lists(causal, strict))

    def step(q, k, v):
        return sb.attention(q * 0.9, k, v, is_causal=causal, plan=plan).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given, expected = compiled(*leaves), step(*leaves)
    torch.testing.assert_close(given, expected)
    slopes = [torch.autograd.grad(x.square().sum(), leaves) for x in (given, expected)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(compiled(*tensors), step(*tensors))
