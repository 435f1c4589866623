"""`BlockSupport` as a user meets it: budgets, tolerances, reasons, warnings, any input."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import beyond, clustered, dense_attention, list_plan, max_error, qkv, run_both
from supportbasis.lists.tables import ListSettings

DTYPES = {
    torch.float64: 2**-53,
    torch.float32: 2**-24,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}
quiet = pytest.mark.filterwarnings("ignore:supportbasis. .* has a measured error")


def relative(given, exact):
    return float((given.double() - exact).norm() / exact.norm())


def small(causal=False, strict=None, price=1e-4):
    """Lists short enough for a few hundred tokens."""
    return ListSettings(price, 16, 8, 32 if causal else 0, strict if causal else False)


# ---- budgets and tolerances -------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    ("causal", "budget"), [(False, 0.12), (False, 0.2), (False, 0.4), (True, 0.35), (True, 0.6)]
)
def test_a_budget_is_kept_and_used(causal, budget):
    q, k, v = clustered(1, 2, n=4096)
    plan = sb.plan(q, k, v, is_causal=causal, method=sb.BlockSupport(budget))
    assert {head.kind for head in plan.heads} == {"lists"}
    assert plan.cost <= budget
    for head in plan.heads:
        assert 0.8 * budget < head.cost <= budget
        assert f"{head.keys:.0f} of 4096 keys a query" in str(head)
    result = sb.attention(q, k, v, is_causal=causal, plan=plan, return_result=True)
    exact, lse = dense_attention(q, k, v, is_causal=causal)
    for h in range(2):
        error = relative(result.output[0, h], exact[0, h])
        # small errors sit in few blocks
        assert error <= 2 * float(result.certificate.limit[0, h])
        assert error <= 2 * plan.heads[h].measured
    # the weight of a tilted key is at most that of its keys
    assert (result.lse <= lse + 1e-4).all()


@quiet
@pytest.mark.parametrize("causal", [False, True])
def test_a_larger_budget_errs_less(causal):
    q, k, v = clustered(1, 1, n=4096)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    errors = [
        relative(sb.attention(q, k, v, is_causal=causal, method=sb.BlockSupport(b)), exact)
        for b in (0.4, 0.6, 0.9)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_tolerance_is_met(seed, causal):
    q, k, v = clustered(1, 1, n=4096, seed=seed, size=1.0 + seed)
    exact, _ = dense_attention(q, k, v, is_causal=causal)
    kinds = []
    for tolerance in (0.1, 0.03, 0.01):
        method = sb.BlockSupport(tolerance=tolerance)
        result = sb.attention(q, k, v, is_causal=causal, method=method, return_result=True)
        (head,) = result.plan.heads
        kinds.append(head.kind)
        assert relative(result.output, exact) <= 1.25 * tolerance
        if head.kind == "lists":
            assert head.measured <= tolerance and head.cost < 1
    assert "lists" in kinds


def test_a_tighter_tolerance_opens_more():
    q, k, v = clustered(1, 1)
    plans = [
        sb.plan(q, k, v, method=sb.BlockSupport(tolerance=t)).heads[0] for t in (0.01, 1e-3, 1e-4)
    ]
    assert plans[0].keys < plans[1].keys < plans[2].keys
    assert plans[0].lists.price > plans[1].lists.price > plans[2].lists.price


def test_longer_heads_open_a_smaller_share():
    shares = []
    for n in (2048, 8192):
        (head,) = sb.plan(
            *clustered(1, 1, n=n), method=sb.BlockSupport(tolerance=1e-3, block_size=64)
        ).heads
        shares.append(head.keys / n)
    assert shares[1] < 0.7 * shares[0]


def test_the_size_of_blocks_is_that_asked_for():
    q, k, v = clustered(1, 1)
    for size in (32, 128):
        (head,) = sb.plan(q, k, v, method=sb.BlockSupport(0.8, block_size=size)).heads
        assert (head.lists.block, head.lists.leaf) == (size, size // 2)


def test_seeds_choose_the_rows_that_are_measured():
    q, k, v = clustered(1, 1, n=4096, size=2.0)
    measured = [
        sb.plan(q, k, v, method=sb.BlockSupport(0.5, seed=seed)).heads[0].measured
        for seed in (0, 0, 1)
    ]
    assert measured[0] == measured[1] != measured[2]


# ---- exact, and why ---------------------------------------------------------------------------


def reason_of(method, *tensors, **call):
    (head,) = sb.plan(*tensors, method=method, **call).heads
    assert head.kind == "exact" and head.cost == 1 and head.lists is None
    assert head.reason in str(head)
    return head.reason


def test_what_cannot_be_is_exact_and_says_why():
    few, some = clustered(1, 1, n=64), clustered(1, 1, n=1000)
    assert "too few tokens" in reason_of(sb.BlockSupport(0.5), *few)
    assert "too few tokens" in reason_of(
        sb.BlockSupport(0.9), *clustered(1, 1, n=512), is_causal=True
    )
    assert "within a budget of 0.01" in reason_of(sb.BlockSupport(0.01), *some)
    assert "a budget of 1 covers all keys" in reason_of(sb.BlockSupport(1.0), *some)
    noise = qkv(1, 1, n=1000, d=64, scale=4.0, dtype=torch.float32)
    assert "no lists within 0.0001" in reason_of(sb.BlockSupport(tolerance=1e-4), *noise)


def test_a_tolerance_below_rounding_is_exact():
    q, k, v = clustered(1, 1, n=600)
    assert "no lists within 1e-09" in reason_of(sb.BlockSupport(tolerance=1e-9), q, k, v)


def test_lengths_of_nothing_and_of_one():
    method = sb.BlockSupport(0.5)
    for n, m in ((0, 0), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1)):
        q, k, v = qkv(1, 2, n=n, m=m, d=4, dv=3, dtype=torch.float32)
        for causal in (False, True):
            given = sb.attention(q, k, v, is_causal=causal, method=method)
            assert given.shape == (1, 2, n, 3)
            exact, _ = dense_attention(q, k, v, is_causal=causal)
            torch.testing.assert_close(given.double(), exact, rtol=1e-5, atol=1e-5)


def test_kernel_sums_have_no_lists():
    q, k, v = clustered(1, 1, n=600, size=0.5, dtype=torch.float64)
    result = sb.kernel_sum(q, k, v, method=sb.BlockSupport(0.5), return_result=True)
    assert result.plan.heads[0].reason == "kernel sums have no lists"
    expected = (q @ k.mT / math.sqrt(8)).exp() @ v
    given = result.output * result.log_scale.exp()[..., None, None]
    torch.testing.assert_close(given, expected)


def test_a_mask_of_pairs_runs_exactly_and_is_warned_about():
    q, k, v = clustered(1, 1, n=600)
    mask = torch.rand(600, 600, generator=torch.Generator().manual_seed(0)) < 0.8
    with pytest.warns(UserWarning, match=r"BlockSupport.* runs exactly because"):
        given = sb.attention(q, k, v, mask, method=sb.BlockSupport(0.5))
    exact, _ = dense_attention(q, k, v, mask)
    torch.testing.assert_close(given.double(), exact, rtol=1e-4, atol=1e-5)


# ---- warnings and arguments -------------------------------------------------------------------


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, caught


def test_a_large_error_is_warned_about_once_by_name():
    calm = clustered(1, 1, n=1024, size=0.1)
    wild = qkv(1, 2, n=1024, scale=2.0, d=8, dtype=torch.float32)
    q, k, v = (torch.cat(pair, 1) for pair in zip(calm, wild, strict=True))
    method = sb.BlockSupport(0.3)
    plan, (caught,) = warned(lambda: sb.plan(q, k, v, method=method))
    errors = [head.measured for head in plan.heads]
    assert errors[0] < 0.05 < min(errors[1:])
    message = str(caught.message)
    assert caught.filename == __file__ and caught.category is UserWarning
    assert "BlockSupport(budget=0.3" in message and "give a tolerance" in message
    assert f"error of {max(errors):.2g} on head [0, {errors.index(max(errors))}]" in message
    assert "more than 5% on 1 others" in message
    _, (caught,) = warned(lambda: sb.attention(q, k, v, method=method))
    assert caught.filename == __file__ and str(caught.message) == message
    assert not warned(lambda: sb.attention(q, k, v, plan=plan))[1]
    assert not warned(lambda: sb.plan(q, k, v, method=sb.BlockSupport(tolerance=0.2)))[1]
    assert not warned(lambda: sb.plan(*calm, method=method))[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0}, "budget must be a finite number > 0, got 0"),
        ({"budget": math.nan}, "budget must be"),
        ({"budget": "0.1"}, "budget must be .* got '0.1'"),
        ({"tolerance": -1}, "tolerance must be a finite number > 0, got -1"),
        ({"tolerance": math.inf}, "tolerance must be"),
        ({"budget": 0.1, "tolerance": 0.1}, "budget and tolerance are both given"),
        ({"block_size": 0}, "block_size must be a power of two from 2 to 1024, got 0"),
        ({"block_size": 1}, "block_size must be"),
        ({"block_size": 48}, "block_size must be .* got 48"),
        ({"block_size": 2048}, "block_size must be .* got 2048"),
        ({"block_size": 64.0}, "block_size must be .* got 64.0"),
        ({"block_size": True}, "block_size must be .* got True"),
        ({"strict": "yes"}, "strict must be True, False or None, got 'yes'"),
        ({"strict": 1}, "strict must be True, False or None, got 1"),
        ({"seed": -1}, "seed must be"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(sb.InputError, match=message):
        sb.BlockSupport(**arguments)


def test_what_went_away_is_refused():
    for name in ("order", "tail"):
        with pytest.raises(TypeError, match=name):
            sb.BlockSupport(**{name: "auto"})


def test_defaults():
    assert sb.BlockSupport() == sb.BlockSupport(0.1)
    assert sb.BlockSupport(1) == sb.BlockSupport(1.0)
    assert not sb.BlockSupport().promises_error
    assert sb.BlockSupport(tolerance=0.1).promises_error


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


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_mask_matches_the_reference(shape, causal, mask):
    given = dict(SHAPES[shape])
    leading = given.pop("leading")
    q, k, v = qkv(*leading, d=5, **given)
    heads = q if leading else q.unsqueeze(0)
    call = {"attn_mask": mask_of(mask, given["m"]), "is_causal": causal}
    call |= {"enable_gqa": "key_heads" in given}
    for strict in (False, True) if causal else (False,):
        plan = list_plan(heads, small(causal, strict, price=1e-3))
        result, output, lse = run_both(q, k, v, None, plan=plan, **call)
        assert result.output.shape == (*leading, given["n"], v.shape[-1])
        # sums of some hundred terms, with scores of a few units, in float64
        torch.testing.assert_close(result.output, output, rtol=0, atol=1e4 * 2**-53)
        torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e4 * 2**-53)
        exact, _ = dense_attention(q, k, v, call["attn_mask"], causal)
        bound = result.certificate.bound.max()
        assert not v.numel() or max_error(result.output, exact, v) <= float(bound)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    plan = list_plan(q, small(causal, price=0.0))
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
    plan = list_plan(q, small(causal, True))
    output = sb.attention(q, k, v, is_causal=causal, plan=plan)
    assert output.isfinite().all()
    assert float(output.abs().max()) <= float(v.abs().max()) * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 50.0, -0.5, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_any_scale_matches_the_reference(scale, causal):
    q, k, v = clustered(1, 1, n=200, dtype=torch.float64)
    plan = list_plan(q, small(causal, True))
    result, output, lse = run_both(q, k, v, None, plan=plan, is_causal=causal, scale=scale)
    reach = abs(scale) * float((q @ k.mT).abs().max())
    limit = 64 * 2**-53 * max(1.0, reach)  # scores are rounded relative to their reach
    assert max_error(result.output, output, v) <= limit
    assert float((result.lse - lse).abs().max()) <= limit * max(1.0, reach)


# ---- certificates -----------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-3, 0.02, 0.1, 0.5, 3.0])
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [0, 1, 31, 64, 300, 513, 1030, 3001])
def test_a_plan_serves_another_length(n, causal):
    q, k, v = clustered(1, 1, n=3001, size=1.0, dtype=torch.float64)
    method = sb.BlockSupport(0.9)
    plan = sb.plan(*(x[:, :, :2048] for x in (q, k, v)), is_causal=causal, method=method)
    assert plan.heads[0].kind == "lists"
    part = [x[:, :, :n] for x in (q, k, v)]
    result, output, lse = run_both(*part, None, plan=beyond(plan), is_causal=causal)
    torch.testing.assert_close(result.output, output, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e-10)
    exact, _ = dense_attention(*part, is_causal=causal)
    assert not n or relative(result.output, exact) < 0.1


# ---- causality --------------------------------------------------------------------------------


def strict_of(result):
    (strict,) = {head.lists.strict for head in result.plan.heads}
    return strict


def test_the_call_says_whether_it_is_strict():
    """Gradients recorded: strict. The plan leaves it open, the result does not."""
    q, k, v = clustered(1, 2, n=1100, size=1.0)
    call = {"is_causal": True, "return_result": True}
    made = {
        strict: sb.plan(q, k, v, is_causal=True, method=sb.BlockSupport(0.96, strict=strict))
        for strict in (None, True, False)
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for strict, plan in made.items():
        assert [head.lists.strict for head in plan.heads] == [strict] * 2
        recorded, plain = (sb.attention(*x, plan=plan, **call) for x in (leaves, (q, k, v)))
        assert strict_of(recorded) is (True if strict is None else strict)
        assert strict_of(plain) is (False if strict is None else strict)
        with torch.no_grad():
            assert strict_of(sb.attention(*leaves, plan=plan, **call)) is strict_of(plain)
        assert "strict" in str(recorded.plan)
    assert "strict with gradients" in str(made[None])
    one_leaf = sb.attention(q, k, leaves[2], plan=made[None], **call)
    fixed = sb.attention(q, k, v, plan=replaced(made[None], True), **call)
    assert torch.equal(one_leaf.output, fixed.output)
    loose = sb.attention(q, k, v, plan=made[None], **call)
    assert not torch.equal(loose.output, fixed.output)


def replaced(plan, strict):
    heads = tuple(replace(h, lists=replace(h.lists, strict=strict)) for h in plan.heads)
    return plan.with_heads(heads)


def test_a_method_is_resolved_as_a_plan_is():
    q, k, v = clustered(1, 1, n=1100, size=1.0)
    call = {"is_causal": True, "return_result": True, "method": sb.BlockSupport(0.96)}
    assert strict_of(sb.attention(q, k, v, **call)) is False
    assert strict_of(sb.attention(q.requires_grad_(), k, v, **call)) is True
    whole = sb.attention(q, k, v, return_result=True, method=sb.BlockSupport(0.96, strict=True))
    assert strict_of(whole) is False


def test_a_gradient_of_a_transform_is_strict():
    q, k, v = clustered(1, 1, n=300, size=1.0, dtype=torch.float64)
    plans = {strict: list_plan(q, small(True, strict)) for strict in (None, True, False)}
    slope = {
        strict: torch.func.grad(lambda q, p=p: sb.attention(q, k, v, is_causal=True, plan=p).sum())(
            q
        )
        for strict, p in plans.items()
    }
    torch.testing.assert_close(slope[None], slope[True])
    assert (slope[None] - slope[False]).abs().max() > 1e-6


@quiet
@pytest.mark.parametrize("changed", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("t", [1, 511, 700, 1024, 1999])
def test_the_future_does_not_change_the_past(t, strict, changed):
    """Bits of output and lse before t: for any later key, value or bias; with strict for any later
    query, and without for those of later windows."""
    q, k, v = clustered(1, 2, n=2000)
    bias = torch.zeros(2000)
    plan = sb.plan(q, k, v, bias, is_causal=True, method=sb.BlockSupport(0.8, strict=strict))
    assert {head.kind for head in plan.heads} == {"lists"}
    plan, call = beyond(plan), {"is_causal": True, "return_result": True}
    before = sb.attention(q, k, v, bias, plan=plan, **call)
    x = {"query": q, "key": k, "value": v, "bias": bias}[changed]
    later = x[t:] if changed == "bias" else x[:, :, t:]
    later.copy_(2 * torch.randn(later.shape, generator=torch.Generator().manual_seed(t)))
    after = sb.attention(q, k, v, bias, plan=plan, **call)
    window = plan.heads[0].lists.window
    seen = t if strict or changed != "query" else t // window * window
    assert torch.equal(before.output[:, :, :seen], after.output[:, :, :seen])
    assert torch.equal(before.lse[:, :, :seen], after.lse[:, :, :seen])
    assert float((before.output - after.output)[:, :, t:].abs().max()) > 1e-3


# ---- gradients and graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("causal", "strict"), [(False, False), (True, False), (True, True)])
def test_gradcheck(causal, strict, biased):
    """Every entry of the output by every entry of query, key, value and bias."""
    tensors = qkv(1, 2, n=13, d=2, dv=1, key_heads=1)
    bias = [torch.linspace(-1, 1, 13).double()] if biased else []
    plan = list_plan(tensors[0], ListSettings(1e-2, 4, 2, 4 if causal else 0, strict))
    leaves = [x.clone().requires_grad_() for x in (*tensors, *bias)]

    def call(q, k, v, mask=None):
        return sb.attention(q, k, v, mask, is_causal=causal, enable_gqa=True, plan=plan)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("mode", ["whole", "causal", "open", "strict"])
def test_a_graph_holds_a_plan_of_lists(mode):
    """Forward and backward, in one graph, as outside of it."""
    causal, strict = mode != "whole", {"open": None}.get(mode, mode == "strict")
    tensors = clustered(1, 2, n=150, size=1.0, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in tensors]
    plan = list_plan(tensors[0], small(causal, strict))

    def step(q, k, v):
        return sb.attention(q * 0.9, k, v, is_causal=causal, plan=plan).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given, expected = compiled(*leaves), step(*leaves)
    torch.testing.assert_close(given, expected)
    slopes = [torch.autograd.grad(x.square().sum(), leaves) for x in (given, expected)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(compiled(*tensors), step(*tensors))
