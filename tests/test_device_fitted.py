"""Fitted polynomials on a device against the component engine in float64, there and back: in
Triton's interpreter, or on the device where there is one."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from supportbasis.basis import split_of
from supportbasis.inputs import attention_problem
from supportbasis.methods.fitted import FittedSearch
from supportbasis.plans import Plan
from test_device_lists import (  # kernels are imported there: see what is set before
    DEVICE,
    directions,
    dispatch,
    fitted,
    followed,
    needs_triton,
    relative,
    smooth,
)

from test_device_lists import pytestmark as marks  # isort: skip
from supportbasis.device import fitted_chunks, fitted_sums  # isort: skip

pytestmark = [*marks, pytest.mark.filterwarnings("ignore:supportbasis. the last call")]
METHOD = sb.BlockSupport(0.5, tail="polynomial")


def fit_of(tokens, bias, call, features=40):
    """A plan of fits, whatever they cost: short causal heads gain nothing."""
    problem = attention_problem(*tokens, bias, 0.0, call["is_causal"], None, True)
    heads = tuple(FittedSearch.of(head, 0).plan(features) for _, _, head in problem.each_head())
    return Plan(METHOD, problem.batch, problem.heads, problem.query.shape[-1], heads)


def case(causal, n=136, m=None, biased=True, scale=0.6):
    """Two heads that share keys; far rows and keys, hidden keys and biases. In float64, and as the
    device has them."""
    m = m or n
    q, k, v = qkv(1, 2, key_heads=1, n=n, m=m, d=6, dv=5, scale=scale, dtype=torch.float64)
    k += torch.linspace(-1, 1, 6)  # frames shift rows
    q[0, 0, 100] *= 8
    k[0, 0, 40] *= 9
    bias = None
    if biased:
        bias = torch.randn(m, generator=torch.Generator().manual_seed(3)).double()
        bias[7::50] = -math.inf
    call = {"is_causal": causal, "enable_gqa": True}
    plan = fit_of((q, k, v), bias, call)
    assert all(bool(head.exact_rows) == causal for head in plan.heads)
    problem = attention_problem(q, k, v, bias, 0.0, causal, None, True)
    rows, keys = split_of(plan.heads[0], problem.head(0, 0))
    assert 100 in rows.large and keys.large.tolist() == [40]
    wide = [None if x is None else x.to(DEVICE) for x in (q, k, v, bias)]
    return wide, short(wide), call, plan


def short(tokens):
    return [None if x is None else x.float() for x in tokens]


def outcome_of(tokens, call, plan, kind):
    """What the device or the component engine (None) gives, and a function for gradients."""
    problem = attention_problem(*tokens, 0.0, call["is_causal"], None, True)
    batches = [dispatch.Batch(kind, tuple(range(len(plan.heads))), plan)]
    made = dispatch.run(problem, batches)

    def back(grad, grad_lse):
        given = (made.output, made.lse, made.rescued, grad.to(made.output), grad_lse.to(made.lse))
        total = dispatch.gradients(problem, batches, *given, for_weights=True)
        return total.query, total.key, total.value, total.key_log_weight

    return made, back


def compare(wide, tokens, call, plan, limit=1e-5):
    """Output, lse and all gradients of the device with those of the component engine."""
    theirs, their_back = outcome_of(wide, call, plan, None)
    mine, my_back = outcome_of(tokens, call, plan, "fitted")
    assert torch.equal(mine.rescued, theirs.rescued)
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
    """Short chunks, in parts and groups of two: what does not fit into memory at once."""
    monkeypatch.setattr(fitted_chunks, "CHUNK", 16)
    monkeypatch.setattr(fitted_sums, "PRODUCTS", 32)
    monkeypatch.setattr(fitted_sums, "ENTRIES", 4 * 16 * max(2 * 40, 8 * 16))


@needs_triton
@pytest.mark.parametrize(
    ("causal", "biased", "keys"),
    [(False, False, 136), (False, True, 136), (True, False, 150), (True, True, 120)],
)
def test_there_and_back_as_the_component_engine(small, causal, biased, keys):
    compare(*case(causal, m=keys, biased=biased))


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_are_lost_go_back_exactly(small, causal):
    """A plan reused on other queries, none of which are far."""
    wide, _, call, plan = case(causal, biased=False)
    kernels = [replace(head.fitted, query_radius=math.inf) for head in plan.heads]
    heads = [replace(x, fitted=y) for x, y in zip(plan.heads, kernels, strict=True)]
    plan = replace(plan, heads=tuple(heads))
    wide[0] = 6 * wide[0]
    made = compare(wide, short(wide), call, plan, 1e-3)  # rows whose sums nearly cancel are left
    assert 0 < int(made.rescued_rows.sum()) < 100


@needs_triton
def test_a_plan_for_all_pairs_is_causal_where_the_call_is(small):
    wide, tokens, call, plan = case(False, biased=False)
    compare(wide, tokens, {**call, "is_causal": True}, plan, 1e-4)


@needs_triton
def test_weights_that_grow_along_the_sequence_lose_nothing(small):
    """By far more than float32 holds: every chunk and row has a unit of its own."""
    wide, _, call, _ = case(True)
    for slope in (3.0, -3.0):
        wide[3] = slope * torch.arange(136.0, device=DEVICE, dtype=torch.float64)
        plan = fit_of([x.cpu() for x in wide[:3]], wide[3].cpu(), call)
        made = compare(wide, short(wide), call, plan, 3 * 136 * 2.0**-23)  # rounding of these
        assert int(made.rescued_rows.sum()) < 5


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_keys_are_zero(small, causal):
    _, tokens, call, plan = case(causal)
    tokens[3] = torch.full_like(tokens[3], -math.inf)
    tokens[1] = 1e9 * tokens[1]  # hidden keys may hold anything
    made, back = outcome_of(tokens, call, plan, "fitted")
    assert not made.output.any() and (made.lse == -math.inf).all() and not made.rescued.any()
    for part in back(*directions(made.output, torch.zeros_like(made.lse))):
        assert not part.any()


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_what_did_not_fit_goes_back_exactly(small, causal):
    """A plan with room for nothing: there and back everything is exact."""
    wide, tokens, call, plan = case(causal)
    problem = attention_problem(*tokens, 0.0, causal, None, True)
    room = fitted.run_of(problem, plan).room
    room.sizes, room.known = (1, 1) if causal else (0, 1), True
    made, back = outcome_of(tokens, call, plan, "fitted")
    leaves = [x.requires_grad_() for x in wide]
    results = dense_attention(*leaves, causal)
    assert relative(made.output, results[0].detach()) < 2e-6
    grads = directions(*results)
    wanted = torch.autograd.grad(results, leaves, grads)
    *given, weight = back(*grads)
    for mine, theirs in zip((*given, weight.sum((0, 1))), wanted, strict=True):
        assert relative(mine, theirs) < 5e-6


@needs_triton
def test_lost_rows_are_warned_of_at_the_next_call():
    """Once for each plan, and only where they are many."""
    _, tokens, call, plan = case(False, biased=False)
    kernels = [replace(head.fitted, query_radius=math.inf) for head in plan.heads]
    heads = [replace(x, fitted=y) for x, y in zip(plan.heads, kernels, strict=True)]
    far = [6 * tokens[0], *tokens[1:]]

    def warned(given, plan):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outcome_of(given, call, plan, "fitted")
        return [x for x in said if "lost more than 1 %" in str(x.message)]

    first = replace(plan, heads=tuple(heads))
    assert len(warned(far, first)) == 1  # the first call waits anyway
    later = replace(plan, heads=tuple(heads))
    assert not warned(tokens, later) and not warned(far, later)
    assert len(warned(tokens, later)) == 1
    assert not warned(far, later) and not warned(tokens, later)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_short_dtypes_there_and_back(causal, dtype):
    wide, _, call, plan = case(causal, n=3000, m=2900, scale=0.4)
    tokens = [x.to(dtype) for x in wide[:3]]
    limit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    compare([x.double() for x in tokens] + wide[3:], [*tokens, wide[3].float()], call, plan, limit)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # a graph has its own
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_waits_there_and_back(masked, causal):
    q, k, v = smooth(4, 4096, d=16, dtype=torch.bfloat16)
    tokens = [x.requires_grad_() for x in (q / 4, k[:, ::2] / 4, v[:, ::2].contiguous())]
    mask = torch.arange(4096, device=DEVICE) % 7 != 3 if masked else None
    how = {"is_causal": causal, "enable_gqa": True}
    plan = fit_of([x.detach().cpu() for x in tokens], None, how, features=200)
    grad = torch.randn_like(tokens[0])

    def call():
        output = sb.attention(*tokens, mask, **how, plan=plan)
        return [output, *torch.autograd.grad(output, tokens, grad)]

    graph, results = followed(call, tokens)
    with torch.no_grad():
        tokens[0][:, :, ::2] *= 9  # rows that are far: there is no room for them
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in tokens]
    bias = None if mask is None else torch.zeros(4096, device=DEVICE).double()
    bias = None if bias is None else bias.masked_fill(~mask, -math.inf)
    output = dense_attention(*exact, bias, causal)[0]
    wanted = torch.autograd.grad(output, exact, grad.double())
    for mine, theirs in zip(results, (output, *wanted), strict=True):
        assert relative(mine.detach(), theirs.detach()) < 2.0**-6
