"""Fitted polynomials on a device against the component engine in float64, forward and backward: in
Triton's interpreter, or on the device where there is one."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import beyond, dense_attention, qkv
from device_cases import (  # before kernels are imported
    DEVICE,
    capacities_of,
    directions,
    followed,
    marks,
    needs_triton,
    planned,
    record,
    relative,
    smooth,
    without_synchronising,
)
from supportbasis.components.cotangent import SavedForward
from supportbasis.cuda.fitted import fitted_heads as fitted
from supportbasis.cuda.fitted import fitted_sums
from supportbasis.cuda.runtime import replay
from supportbasis.cuda.runtime.capacity import Capacity, with_spare
from supportbasis.engine import dispatch, jensen
from supportbasis.methods.fitted import FittedSearch
from supportbasis.plans import Plan
from supportbasis.problem.validation import attention_problem

pytestmark = [*marks, pytest.mark.filterwarnings("ignore:supportbasis. in an earlier call")]
METHOD = sb.FittedPolynomial()
FITTED = dispatch.EVALUATORS["fitted"]


def fit_of(tokens, bias, call, features=40):
    """A plan of fits, whatever they cost: short causal heads gain nothing."""
    problem = attention_problem(*tokens, bias, 0.0, call["is_causal"], None, True)
    heads = tuple(FittedSearch.of(head, 0).plan(features) for _, _, head in problem.each_head())
    return Plan(METHOD, problem.query.shape[-1], heads)


def case(n=136, m=None, biased=True, scale=0.6):
    """Two heads that share keys; far rows and keys, hidden keys and biases. In float64, and as the
    device has them."""
    m = m or n
    q, k, v = qkv(1, 2, key_heads=1, n=n, m=m, d=6, dv=5, scale=scale, dtype=torch.float64)
    k += torch.linspace(-1, 1, 6)  # transforms shift rows
    q[0, 0, 100] *= 8
    k[0, 0, 40] *= 9
    bias = None
    if biased:
        bias = torch.randn(m, generator=torch.Generator().manual_seed(3)).double()
        bias[7::50] = -math.inf
    call = {"is_causal": False, "enable_gqa": True}
    plan = fit_of((q, k, v), bias, call)
    problem = attention_problem(q, k, v, bias, 0.0, False, None, True)
    rows, keys = plan.heads[0].split(problem.head(0, 0))
    assert 100 in rows.large and keys.large.tolist() == [40]
    wide = [None if x is None else x.to(DEVICE) for x in (q, k, v, bias)]
    return wide, short(wide), call, plan


def short(tokens):
    return [None if x is None else x.float() for x in tokens]


def outcome_of(tokens, call, plan, kind):
    """What the device or the component engine (None) gives, and a function for gradients."""
    problem = attention_problem(*tokens, 0.0, call["is_causal"], None, True)
    batches = [dispatch.Group(kind, tuple(range(len(plan.heads))), plan)]
    made = dispatch.run(problem, batches)

    def back(grad, grad_lse):
        given = (made.output, made.lse, made.fallback, grad.to(made.output), grad_lse.to(made.lse))
        total = dispatch.gradients(problem, batches, SavedForward(*given, for_weights=True))
        return total.query, total.key, total.value, total.key_log_weight

    return made, back


def compare(wide, tokens, call, plan, limit=1e-5):
    """Output, lse and all gradients of the device with those of the component engine."""
    theirs, their_back = outcome_of(wide, call, plan, None)
    mine, my_back = outcome_of(tokens, call, plan, FITTED)
    assert torch.equal(mine.fallback, theirs.fallback)
    assert relative(mine.output, theirs.output) < limit
    real = theirs.lse > -math.inf
    assert torch.equal(mine.lse > -math.inf, real)
    assert (mine.lse - theirs.lse)[real].abs().max() < 10 * limit
    grad, grad_lse = directions(theirs.output, theirs.lse)
    for given, wanted in zip(my_back(grad, grad_lse), their_back(grad, grad_lse), strict=True):
        assert given.dtype == torch.float32 and relative(given, wanted) < 4 * limit
    return theirs


@pytest.fixture
def small(monkeypatch):
    """In parts: what does not fit into memory at once."""
    monkeypatch.setattr(fitted_sums, "PRODUCTS", 32)
    monkeypatch.setattr(fitted_sums, "ENTRIES", 4 * 16 * max(2 * 40, 8 * 16))
    monkeypatch.setattr(jensen, "ENTRIES", 16 * 136)


@needs_triton
@pytest.mark.parametrize(("biased", "keys"), [(False, 136), (True, 136), (True, 120)])
def test_there_and_back_as_the_component_engine(small, biased, keys):
    compare(*case(m=keys, biased=biased))


@needs_triton
def test_failed_rows_have_exact_gradients(small):
    """A plan reused on other queries, none of which are far."""
    wide, _, call, plan = case(biased=False)
    kernels = [replace(head.fitted, query_radius=math.inf) for head in plan.heads]
    heads = [replace(x, fitted=y) for x, y in zip(plan.heads, kernels, strict=True)]
    plan = replace(plan, heads=tuple(heads))
    wide[0] = 6 * wide[0]
    made = compare(wide, short(wide), call, plan, 1e-3)  # rows whose sums nearly cancel are left
    assert 0 < int(made.fallback_rows.sum()) < 100


@needs_triton
def test_the_first_rows_are_exact_in_a_plan_of_a_causal_head(small):
    wide, tokens, call, _ = case(biased=False)
    plan = fit_of([x.cpu() for x in wide[:3]], None, {"is_causal": True})
    assert all(head.exact_rows for head in plan.heads)
    compare(wide, tokens, call, plan)


@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_causal_heads_run_through_the_component_engine(implementation, monkeypatch):
    """Whatever call the plan was made for; who asks for kernels is told that there are none."""
    _, tokens, _, plan = case(biased=False)
    monkeypatch.setattr(dispatch, "refusal", lambda problem, how: how if how == "eager" else None)
    for causal in (False, True):
        problem = attention_problem(*tokens, 0.0, causal, None, True)
        if implementation == "triton":
            with pytest.raises(sb.InputError, match="fitted heads have no kernels"):
                dispatch.groups(problem, plan, implementation)
        else:
            (group,) = dispatch.groups(problem, plan, implementation)
            assert group.kind == (None if causal else FITTED)
            assert dispatch.label([group]) == "eager"


@needs_triton
def test_rows_without_keys_are_zero(small):
    _, tokens, call, plan = case()
    tokens[3] = torch.full_like(tokens[3], -math.inf)
    tokens[1] = 1e9 * tokens[1]  # hidden keys may hold anything
    made, back = outcome_of(tokens, call, plan, FITTED)
    assert not made.output.any() and (made.lse == -math.inf).all() and not made.fallback.any()
    for part in back(*directions(made.output, torch.zeros_like(made.lse))):
        assert not part.any()


@pytest.mark.slow
@needs_triton
def test_what_did_not_fit_goes_back_exactly(small):
    """A plan without capacity: forward and backward everything is exact."""
    wide, tokens, call, plan = case()
    problem = attention_problem(*tokens, 0.0, False, None, True)
    capacity = Capacity.of(plan, problem)
    capacity.sizes, capacity.known = (0, 1), True
    made, back = outcome_of(tokens, call, plan, FITTED)
    leaves = [x.requires_grad_() for x in wide]
    results = dense_attention(*leaves)
    assert relative(made.output, results[0].detach()) < 2e-6
    grads = directions(*results)
    wanted = torch.autograd.grad(results, leaves, grads)
    *given, weight = back(*grads)
    for mine, theirs in zip((*given, weight.sum((0, 1))), wanted, strict=True):
        assert relative(mine, theirs) < 5e-6


@pytest.mark.slow
@needs_triton
def test_failed_rows_are_warned_of_at_the_next_call():
    """Once for each plan, and only where they are many."""
    _, tokens, call, plan = case(biased=False)
    kernels = [replace(head.fitted, query_radius=math.inf) for head in plan.heads]
    heads = [replace(x, fitted=y) for x, y in zip(plan.heads, kernels, strict=True)]
    far = [6 * tokens[0], *tokens[1:]]

    def warned(given, plan):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome_of(given, call, plan, FITTED)
        return [x for x in caught if "failed on more than 1 %" in str(x.message)]

    first = replace(plan, heads=tuple(heads))
    assert len(warned(far, first)) == 1  # the first call synchronises
    later = replace(plan, heads=tuple(heads))
    assert not warned(tokens, later) and not warned(far, later)
    assert len(warned(tokens, later)) == 1
    assert not warned(far, later) and not warned(tokens, later)


@needs_triton
@pytest.mark.parametrize("masked", [False, True])
def test_fitted_polynomials_equal_those_of_blocks_of_tokens(masked):
    q, k, v = (x.to(DEVICE) for x in qkv(1, 2, n=600, d=8, scale=0.9, dtype=torch.float32))
    q[0, 0, :5] *= 8  # rows that are far
    k[0, 1, :4] *= 9  # and keys
    mask = torch.rand(600, generator=torch.Generator().manual_seed(0)) < 0.8 if masked else None
    mask = None if mask is None else mask.to(DEVICE)
    plan = planned(q, k, v, mask, method=sb.FittedPolynomial(tolerance=0.3))
    assert all(head.kind == "fitted" for head in plan.heads)
    wanted = sb.attention(q, k, v, mask, plan=plan, return_result=True)
    problem = attention_problem(q, k, v, mask, 0.0, False, None, False)
    output, lse, failed = fitted.forward(problem, plan)
    assert not failed.any()
    assert relative(output, wanted.output) < 1e-5
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=1e-4)


@needs_triton
def test_rows_on_which_a_fitted_polynomial_fails_are_exact_and_counted():
    """A plan reused on other data, against the component engine: output, counts, gradients."""
    q, k, v = (x.to(DEVICE) for x in qkv(1, 1, n=600, d=4, scale=0.5, dtype=torch.float32))
    plan = planned(q, k, v, method=METHOD)
    kernel = replace(plan.heads[0].fitted, query_radius=math.inf)
    plan = replace(plan, heads=(replace(plan.heads[0], fitted=kernel),))
    q = 30 * q
    problem = attention_problem(q, k, v, None, 0.0, False, None, False)
    mine = dispatch.run(problem, [dispatch.Group(FITTED, (0,), plan)])
    theirs = dispatch.run(problem, [dispatch.Group(None, (0,), plan)])
    assert 0 < int(theirs.fallback_rows) < 600
    for name in ("fallback", "fallback_rows", "invalid_rows"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert relative(mine.output, theirs.output) < 1e-3
    grad, none = torch.ones_like(mine.output), None
    given = (theirs.output, theirs.lse, theirs.fallback, grad, none, False)
    made = [
        dispatch.gradients(problem, [dispatch.Group(kind, (0,), plan)], SavedForward(*given))
        for kind in (FITTED, None)
    ]
    for name in ("query", "key", "value"):
        assert relative(getattr(made[0], name), getattr(made[1], name)) < 1e-3, name


@needs_triton
@pytest.mark.parametrize("masked", [False, True])
def test_what_does_not_fit_is_exact(masked):
    """A plan reused on tokens that need more capacity than before, with keys that heads share."""
    q, k, v = smooth(2, 128)
    q, k, v, scale = q / 2, k[:, :1] / 2, v[:, :1], 0.3
    bias = None
    if masked:
        bias = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[::5] = -math.inf
    plan = beyond(planned(q, k, v, bias, scale=scale, enable_gqa=True, method=METHOD))
    assert all(head.kind == "fitted" for head in plan.heads)
    problem = attention_problem(q, k, v, bias, 0.0, False, scale, True)
    first = fitted.forward(problem, plan)[0]
    (capacity,) = capacities_of(plan)
    assert torch.equal(fitted.forward(problem, plan)[0], first)
    assert relative(first, dense_attention(q, k, v, bias, scale=scale)[0]) > 1e-5
    capacity.sizes = (capacity.sizes[0], 0, *capacity.sizes[2:])
    q = torch.cat([40 * q[:, :, :9], q[:, :, 9:]], 2)  # rows that are far
    problem = attention_problem(q, k, v, bias, 0.0, False, scale, True)
    exact, exact_lse = dense_attention(q, k, v, bias, scale=scale)
    capacity._report.pending = False
    output, lse, _ = fitted.forward(problem, plan)
    assert relative(output, exact) < 2e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
    output = fitted.forward(problem, plan)[0]  # the capacity has grown
    assert capacity.sizes[1] > 0
    assert relative(output, exact) > 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes_there_and_back(dtype):
    wide, _, call, plan = case(n=3000, m=2900, scale=0.4)
    tokens = [x.to(dtype) for x in wide[:3]]
    limit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    compare([x.double() for x in tokens] + wide[3:], [*tokens, wide[3].float()], call, plan, limit)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # a graph has its own
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_waits_there_and_back(masked):
    q, k, v = smooth(4, 4096, d=16, dtype=torch.bfloat16)
    tokens = [x.requires_grad_() for x in (q / 4, k[:, ::2] / 4, v[:, ::2].contiguous())]
    mask = torch.arange(4096, device=DEVICE) % 7 != 3 if masked else None
    how = {"is_causal": False, "enable_gqa": True}
    plan = fit_of([x.detach().cpu() for x in tokens], None, how, features=200)
    grad = torch.randn_like(tokens[0])

    def call():
        output = sb.attention(*tokens, mask, **how, plan=plan)
        return [output, *torch.autograd.grad(output, tokens, grad)]

    graph, results = followed(call, tokens)
    with torch.no_grad():
        tokens[0][:, :, ::2] *= 9  # far rows, more than the capacity
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in tokens]
    bias = None if mask is None else torch.zeros(4096, device=DEVICE).double()
    bias = None if bias is None else bias.masked_fill(~mask, -math.inf)
    output = dense_attention(*exact, bias)[0]
    wanted = torch.autograd.grad(output, exact, grad.double())
    for mine, theirs in zip(results, (output, *wanted), strict=True):
        assert relative(mine.detach(), theirs.detach()) < 2.0**-6


@pytest.mark.gpu
def test_replays_do_what_first_calls_do():
    """The same shapes again and again, with other tokens each time: run, captured, replayed."""
    replay._graphs.clear()
    replay._uncaptured.clear()
    q, k, v = smooth(2, 4096, d=16, dtype=torch.bfloat16)
    q, k = q / 4, k / 4
    made = [(q, k, v), (q.flip(2), k, v.flip(3)), (q, k.roll(7, 2), v)]  # scores of one range
    plan = planned(*made[0], method=METHOD)
    assert all(head.kind == "fitted" for head in plan.heads)
    for number, (q, k, v) in enumerate([*made, made[0]]):
        output = sb.attention(q, k, v, plan=plan)
        assert min(1, number) <= len(replay._graphs) <= number  # others may need more capacity
        plain = sb.attention(q, k, v, plan=plan, implementation="eager")
        exact = dense_attention(q, k, v)[0]
        assert relative(output, exact) <= 1.2 * relative(plain, exact) + 2e-3
    assert torch.equal(output, sb.attention(*made[0], plan=plan))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_no_call_synchronises_and_a_graph_can_be_captured():
    q, k, v = smooth(2, 4096, d=16, dtype=torch.bfloat16)
    tokens = (q / 4, k / 4, v)
    plan = planned(*tokens, method=METHOD)
    assert all(head.kind == "fitted" for head in plan.heads)

    def call():
        return sb.attention(*tokens, plan=plan)

    with pytest.raises(sb.InputError, match="call once before a CUDA graph"):
        record(call)  # which PyTorch warns about, too
    torch.cuda.synchronize()
    for _ in range(3):  # the first synchronises, the second is captured
        call()
    without_synchronising(call)
    graph, output = record(call)
    for x in tokens:
        x.copy_(x.flip(2))
    graph.replay()
    assert relative(output, call()) < 1e-3


def test_capacity_grows_to_what_was_needed_and_never_shrinks():
    """The first call is made again until it fits; a later one trusts its capacity, and the next one
    has the capacity that it lacked."""
    capacity, needs = Capacity((4, 4)), [(3, 9), (3, 10), (2, 2), (40, 1), (1, 1)]
    calls = []

    def work(sizes, trusted):
        calls.append((sizes, trusted))
        return len(calls), torch.tensor(needs[len(calls) - 1])

    assert [capacity.run(work) for _ in range(4)] == [2, 3, 4, 5]
    assert calls == [
        ((4, 4), False), ((4, 16), False), ((4, 16), True), ((4, 16), True), ((64, 16), True),
    ]  # fmt: skip


def test_capacity_has_a_quarter_to_spare_in_coarse_steps():
    for need in (1, 15, 16, 100, 1000, 1001, 123456):
        size = with_spare(need)
        assert need + need // 4 <= size <= 1.55 * need + 16
    assert with_spare(100_000) == with_spare(101_000)
