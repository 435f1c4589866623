"""Ranges of scores on a device: in Triton's interpreter, and end to end on a GPU."""

from __future__ import annotations

import math
import time
import warnings

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv
from device_cases import DEVICE, needs_triton, on_device, planned, smooth
from supportbasis.engine import ranges
from supportbasis.problem.validation import attention_problem

# after the interpreter is chosen, which is read when a kernel is decorated
from supportbasis.cuda.exact.split import first, large, rounded_down  # isort: skip
from supportbasis.cuda.runtime.range_check import SECONDS, RangeCheck, checked, lengths  # isort: skip
from supportbasis.cuda.runtime.reporting import Report  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 2, 3), (63, 130, 16), (300, 7, 40)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sizes_are_those_of_the_tokens_that_count(n, m, d, dtype, weighted):
    batch, heads, key_heads = 2, 4, 2
    q, k, _ = qkv(batch, heads, key_heads=key_heads, n=n, m=m, d=d, dtype=dtype)
    q, k = (x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    limit = torch.tensor([0.5, 1.0, 2.0, math.inf] * batch, device=DEVICE)
    weight = torch.zeros(batch, heads, m, device=DEVICE) if weighted else None
    if weighted:
        weight[..., ::3] = -math.inf
    for x, hidden in ((q, None), (k, weight)):
        found = lengths(x, heads, limit, hidden)
        wide = x.double().repeat_interleave(heads // x.shape[1], 1).flatten(0, 1)
        within = wide.abs().amax(2) <= limit.unsqueeze(1)
        live = torch.ones_like(within) if hidden is None else hidden.flatten(0, 1) == 0
        assert torch.equal(large(x, heads, limit, hidden), ~within & live)
        counted = within & live
        size = torch.where(counted, wide.norm(dim=2), 0.0)
        close = {"rtol": 1e-5, "atol": 1e-6}  # sums of d squares and of n lengths in float32
        expected = [size.amax(1), size.sum(1), counted.sum(1)]
        torch.testing.assert_close(found.double(), torch.stack(expected, 1), **close)


@needs_triton
@pytest.mark.parametrize(("n", "most"), [(1, 1), (50, 7), (5000, 3000), (5000, 0)])
def test_flagged_tokens_are_listed_in_order(n, most):
    flags = torch.rand(3, n, generator=torch.Generator().manual_seed(n)) < 0.4
    flags[1] = False
    tokens, count = first(flags.to(DEVICE), most)
    assert count.tolist() == flags.sum(1).tolist()
    assert tokens.count.tolist() == flags.sum(1).clamp(max=most).tolist()
    for row, flag in zip(tokens.index.cpu(), flags, strict=True):
        expected = flag.nonzero().squeeze(1)[:most]
        assert row[: len(expected)].tolist() == expected.tolist()


def test_limits_are_rounded_so_that_no_entry_changes_sides():
    exact = [0.1, 0.3, 1.0, 1e-50, math.inf]
    for limit, given in zip(exact, rounded_down(exact), strict=True):
        assert float(given) <= limit
        above = torch.nextafter(given, torch.tensor(math.inf))
        assert float(above) > limit or limit == math.inf


@needs_triton
@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.SingleThreshold(0.9, 2)], ids=str)
def test_the_next_call_reports_which_heads_left_their_range(method):
    tensors = qkv(1, 2, n=70, d=5, scale=0.3, dtype=torch.float32)
    plan = sb.plan(*tensors, method=method)

    def call(factor):
        """The plan that a call uses."""
        q, k, v = (x.to(DEVICE) for x in tensors)
        q, k = q.clone(), k.clone()
        q[:, 1], k[:, 1] = (x[:, 1].sign() * 0.29 * factor for x in (q, k))
        if plan.heads[0].kind == "single-threshold":
            q[:, 0, 3], k[:, 0, 5] = 50.0, -50.0  # large tokens are exact, and do not count
        problem = attention_problem(q, k, v, None, 0.0, False, None, False)
        RangeCheck.of(problem, plan).last = -math.inf
        used = checked(problem, plan)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return used

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(1.0) is plan and call(3.0) is plan
    with pytest.warns(UserWarning, match=r"heads 1 leave .*in an earlier call"):
        instead = call(1.0)
    assert [head.kind for head in instead.heads] == [plan.heads[0].kind, "exact"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(3.0) is instead


@needs_triton
def test_causal_lists_are_reported_too(monkeypatch):
    """What runs is another plan, with ``strict`` settled for the call."""
    monkeypatch.setattr(ranges, "reports_later", lambda *call: True)
    q, k, v = smooth(1, 2048)
    plan = planned(q / 2, k / 2, v, is_causal=True, method=sb.BlockSupport(0.5))
    assert plan.resolved(False) is not plan
    sb.attention(q, k, v, is_causal=True, plan=plan)
    with pytest.warns(UserWarning, match=r"heads 0 leave .*in an earlier call"):
        sb.attention(q, k, v, is_causal=True, plan=plan)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("marks", [pytest.param((), marks=on_device)])
def test_a_call_on_the_device_is_reported_at_the_next(compiled, marks):
    tensors = [x.cuda() for x in qkv(1, 2, n=3000, d=64, scale=0.3, dtype=torch.bfloat16)]
    plan = sb.plan(*tensors, method=sb.Polynomial(2))
    assert plan.heads[0].polynomial.positive
    call = lambda *x: sb.attention(*x, plan=plan)  # noqa: E731
    call = torch.compile(call, backend="aot_eager") if compiled else call
    far = [4 * tensors[0], 4 * tensors[1], tensors[2]]
    for _ in range(2):
        call(*tensors)
        torch.cuda.synchronize()
        time.sleep(2 * SECONDS)
    call(*far)
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="in an earlier call"):
        given = call(*far)
    if compiled:  # forward and backward of a graph must agree, so there it is only said
        return
    exact, _ = dense_attention(*far)
    assert float((given.double() - exact).norm() / exact.norm()) < 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        call(*far)


def test_reports_of_calls_in_and_outside_of_inference_mode_share_their_memory():
    report, counts = Report(), torch.arange(3, device=DEVICE)
    for number, inside in enumerate((True, False, True)):
        with torch.inference_mode(inside):
            report.send(counts + number)
            while (found := report.read()) is None:
                pass
            assert found.tolist() == (counts + number).tolist()
