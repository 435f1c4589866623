"""`BlockSupport` as a user meets it: budgets, tolerances, reasons, warnings, any input."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch

import supportbasis as sb
from cases import (
    beyond,
    clustered,
    dense_attention,
    in_turn,
    list_plan,
    qkv,
    quiet,
    relative,
    small_lists,
)

# ---- budgets and tolerances -------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    ("causal", "budget"),
    [
        (False, 0.12),
        (True, 0.35),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((False, 0.2), (False, 0.4), (True, 0.6))
        ),
    ],
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
    # sums of weights are as near as outputs: tilted keys have the weight of their keys
    assert (result.lse - lse).exp().sub(1).square().mean().sqrt() <= 0.05


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("seed", "causal"),
    [
        (0, False),
        (1, True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, False), (0, True), (2, True))),
    ],
)
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
        tokens = clustered(1, 1, n=n)
        methods = (sb.BlockSupport(tolerance=1e-3, block_size=64, seed=seed) for seed in range(3))
        heads = [sb.plan(*tokens, method=method).heads[0] for method in methods]
        shares.append(sorted(head.keys / n for head in heads)[1])  # of samples that differ
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
    assert head.kind == "exact" and head.cost == 1
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
    assert f"error of {max(errors):.2g} on head {errors.index(max(errors))} " in message
    assert "more than 5% on 1 more" in message
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
    plans = {strict: list_plan(q, small_lists(True, strict)) for strict in (None, True, False)}
    slope = {
        strict: torch.func.grad(lambda q, p=p: sb.attention(q, k, v, is_causal=True, plan=p).sum())(
            q
        )
        for strict, p in plans.items()
    }
    torch.testing.assert_close(slope[None], slope[True])
    assert (slope[None] - slope[False]).abs().max() > 1e-6


@cache
def causal_lists(strict):
    """Tokens, a plan of lists for them, and what it gives."""
    q, k, v = clustered(1, 2, n=2000)
    bias = torch.zeros(2000)
    plan = sb.plan(q, k, v, bias, is_causal=True, method=sb.BlockSupport(0.8, strict=strict))
    assert {head.kind for head in plan.heads} == {"lists"}
    plan = beyond(plan)
    result = sb.attention(q, k, v, bias, plan=plan, is_causal=True, return_result=True)
    return (q, k, v, bias), plan, result


@quiet
@pytest.mark.parametrize(
    ("t", "changed", "strict"),
    in_turn([1, 511, 700, 1024, 1999], ["query", "key", "value", "bias"], [False, True]),
)
def test_the_future_does_not_change_the_past(t, changed, strict):
    """Bits of output and lse before t: for any later key, value or bias; with strict for any later
    query, and without for those of later windows."""
    tokens, plan, before = causal_lists(strict)
    q, k, v, bias = (x.clone() for x in tokens)
    x = {"query": q, "key": k, "value": v, "bias": bias}[changed]
    later = x[t:] if changed == "bias" else x[:, :, t:]
    later.copy_(2 * torch.randn(later.shape, generator=torch.Generator().manual_seed(t)))
    after = sb.attention(q, k, v, bias, plan=plan, is_causal=True, return_result=True)
    window = plan.heads[0].lists.window
    seen = t if strict or changed != "query" else t // window * window
    assert torch.equal(before.output[:, :, :seen], after.output[:, :, :seen])
    assert torch.equal(before.lse[:, :, :seen], after.lse[:, :, :seen])
    assert float((before.output - after.output)[:, :, t:].abs().max()) > 1e-3
