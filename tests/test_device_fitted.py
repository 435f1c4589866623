"""Fitted polynomials on a device against the component engine in float64, there and back: in
Triton's interpreter, or on the device where there is one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from supportbasis.inputs import attention_problem
from supportbasis.methods.fitted import FittedSearch
from supportbasis.plans import Plan
from test_device_lists import (  # kernels are imported there: see what is set before
    CUDA,
    DEVICE,
    directions,
    dispatch,
    fitted,
    needs_triton,
    planned,
    pytestmark,  # noqa: F401
    record,
    relative,
    rooms_of,
    smooth,
    without_waiting,
)

from supportbasis.device import fitted_chunks, fitted_sums  # isort: skip

METHOD = sb.BlockSupport(0.5, tail="polynomial")


def fit_of(tokens, bias, call, features=40):
    """A plan of fits, whatever they cost: short causal heads gain nothing."""
    problem = attention_problem(*tokens, bias, 0.0, call["is_causal"], None, True)
    heads = tuple(FittedSearch.of(head, 0).plan(features) for _, _, head in problem.each_head())
    return Plan(METHOD, problem.batch, problem.heads, problem.query.shape[-1], heads)


def case(causal, n=200, m=None, biased=True, heads=2, d=6, far=True, dtype=torch.float32):
    """Heads that share keys; far rows and keys, hidden keys and biases."""
    m = m or n
    q, k, v = qkv(1, heads, key_heads=1, n=n, m=m, d=d, dv=5, scale=0.8, dtype=torch.float64)
    k += torch.linspace(-1, 1, d)  # a frame shifts rows
    if far:
        q[0, 0, 150:153] *= 8
        k[0, 0, 40:43] *= 9
    bias = None
    if biased:
        bias = torch.randn(m, generator=torch.Generator().manual_seed(3)).double()
        bias[7::50] = -math.inf
    call = {"is_causal": causal, "enable_gqa": True}
    plan = fit_of((q, k, v), bias, call)
    assert all(bool(head.exact_rows) == causal for head in plan.heads)
    given = [None if x is None else x.to(DEVICE) for x in (q, k, v, bias)]
    return given, [None if x is None else x.to(dtype) for x in given], call, plan


def outcome_of(tokens, call, plan, kind):
    """Outcome of the device or of the component engine, and a function for gradients."""
    problem = attention_problem(*tokens, 0.0, call["is_causal"], None, True)
    batches = [dispatch.Batch(kind, tuple(range(len(plan.heads))), plan)]
    made = dispatch.run(problem, batches)

    def back(grad, grad_lse):
        given = (made.output, made.lse, made.rescued, grad.to(made.output), grad_lse.to(made.lse))
        total = dispatch.gradients(problem, batches, *given, for_weights=True)
        return total.query, total.key, total.value, total.key_log_weight

    return made, back


def compare(wide, tokens, call, plan, limit):
    """Output, lse and all gradients of the device with those of the component engine."""
    theirs, their_back = outcome_of(wide, call, plan, None)
    mine, my_back = outcome_of(tokens, call, plan, "fitted")
    assert torch.equal(mine.rescued, theirs.rescued)
    assert relative(mine.output, theirs.output) < limit
    real = theirs.lse > -math.inf
    assert torch.equal(mine.lse > -math.inf, real)
    assert (mine.lse - theirs.lse)[real].abs().max() < 10 * limit
    grad, grad_lse = directions(theirs.output, theirs.lse)
    grad_lse = grad_lse * real
    wanted = their_back(grad, grad_lse)
    for given, theirs in zip(my_back(grad, grad_lse), wanted, strict=True):
        assert given.dtype == torch.float32 and relative(given, theirs) < 4 * limit
    return wanted


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_there_and_back_as_the_component_engine(monkeypatch, causal, biased):
    """In parts and groups that do not fit into memory at once."""
    wide, tokens, call, plan = case(causal, biased=biased)
    monkeypatch.setattr(fitted_chunks, "CHUNK", 32)
    most = max(head.fitted.features for head in plan.heads)
    entries = 2 * 32 * max(2 * most, 8 * 32) if causal else 256 * most
    monkeypatch.setattr(fitted_sums, "ENTRIES", entries)
    compare(wide, tokens, call, plan, 1e-5)
