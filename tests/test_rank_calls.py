"""Calls on several ranks: plans, dtypes, groups, bytes, and what happens when ranks disagree or
die."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import supportbasis as sb
from rank_cases import on_ranks, outcomes
from supportbasis.plans.files import to_json
from supportbasis.problem.rounding import unit_roundoff

context = sb.distributed


def tokens(n=256, heads=2, dim=8, size=0.4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, heads, n, dim, generator=generator) * size
    return [part.to(dtype) for part in x.unbind(0)]


def sliced(tensors, **more):
    return [context.split_tokens(x, **more).clone() for x in tensors]


# ---- plans -------------------------------------------------------------------------------------

METHODS = [sb.Polynomial(2), sb.SingleThreshold(1.2), sb.BlockSupport(0.4), sb.Auto(0.02)]


def plans() -> list[tuple[dict, torch.Tensor]]:
    found = []
    for method in METHODS:
        own = sliced(tokens(512), layout="zigzag")
        more = {"is_causal": method != METHODS[0], "method": method, "layout": "zigzag"}
        made = context.plan(*own, **more)
        output = context.attention(*own, **more)
        found.append((_settings(made), context.gather_tokens(output, layout="zigzag")))
    return found


def _settings(plan: sb.Plan) -> dict:
    """A plan without predicted times, which depend on the measured speed of the machine."""
    content = to_json(plan)
    for head in content["heads"]:
        head.pop("speedup", None)
    return content


@pytest.mark.filterwarnings("ignore:supportbasis")
def test_plans_are_those_of_one_device_on_all_ranks():
    first, *others = on_ranks(4, plans)
    for method, *found in zip(METHODS, first, *others, strict=True):
        causal = method != METHODS[0]
        expected = sb.plan(*tokens(512), is_causal=causal, method=method)
        whole = sb.attention(*tokens(512), is_causal=causal, method=method)
        for settings, output in found:
            assert settings == _settings(expected)
            torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


def exactly() -> torch.Tensor:
    own = sliced(tokens(101))
    plan = context.plan(*own, method=sb.Exact())
    assert (plan.heads[0].n, plan.heads[0].m) == (101, 101)
    return context.attention(*own, plan=plan)


def test_exact_plans_are_those_of_the_whole_sequence_where_slices_are_uneven():
    whole = sb.attention(*tokens(101), method=sb.Exact())
    found = torch.cat(on_ranks(2, exactly), 2)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def leaving() -> list[str]:
    own = sliced(tokens())
    plan = context.plan(*own, method=sb.Polynomial(2))
    own[1] *= 1 if dist.get_rank() == 0 else 40  # only one rank has long keys
    with pytest.warns(UserWarning, match="leave the range") as found:
        output = context.attention(*own, plan=plan)
    exact = context.attention(*own, method=sb.Exact())
    assert torch.equal(output, exact)
    return [str(each.message) for each in found]


def test_heads_that_leave_their_range_on_one_rank_are_exact_on_all():
    first, second = on_ranks(2, leaving)
    assert first == second and "heads 0, 1 leave" in first[0]


# ---- kinds of calls ----------------------------------------------------------------------------


def half() -> list[float]:
    errors = []
    for method, exchange in ((sb.SingleThreshold(1.2), None), (sb.Exact(), "ring"),
                             (sb.Exact(), "heads")):  # fmt: skip
        whole = tokens(dtype=torch.bfloat16)
        plan = sb.plan(*whole, method=method)
        reference = sb.attention(*(x.double() for x in whole), plan=plan)
        found = context.attention(*sliced(whole), plan=plan, exchange=exchange)
        assert found.dtype == torch.bfloat16
        difference = context.gather_tokens(found).double() - reference
        errors.append(float(difference.abs().max() / reference.abs().max()))
    return errors


def test_half_precision_rounds_as_on_one_device():
    # a ring rounds each of the two parts, and their sum
    limit = 4 * unit_roundoff(torch.bfloat16)
    assert all(error < limit for errors in on_ranks(2, half) for error in errors)


def groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    whole, plan = tokens(), sb.plan(*tokens(), method=sb.Polynomial(2))
    expected = sb.attention(*whole, plan=plan)
    for group in (mesh["context"], mesh.get_group("context")):
        own = sliced(whole, group=group)
        found = context.attention(*own, plan=plan, group=group)
        assert own[0].shape[2] == 128
        found = context.gather_tokens(found, group=group)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(sb.InputError, match=r"2 dims \(data, context\); pass the one"):
        context.attention(*whole, plan=plan, group=mesh)
    with pytest.raises(sb.InputError, match="group must be"):
        context.attention(*whole, plan=plan, group="context")


def test_a_mesh_is_a_group():
    on_ranks(4, groups)


def compiled() -> None:
    whole = tokens()
    plan = sb.plan(*whole, method=sb.Polynomial(2), is_causal=True)
    own = [x.requires_grad_() for x in sliced(whole)]

    def model(*tensors):
        return context.attention(*tensors, plan=plan, is_causal=True).sin()

    outputs, grads = [], []
    for run in (model, torch.compile(model, backend="eager")):
        output = run(*own)
        outputs.append(output.detach())
        grads.append(torch.autograd.grad(output.sum(), own))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile asks for it
def test_compiled_models_leave_the_call_outside_of_their_graph():
    on_ranks(2, compiled)


def alone() -> None:
    whole = tokens()
    for method in (sb.Polynomial(2), sb.SingleThreshold(1.0), sb.Exact()):
        found = context.attention(*whole, method=method)
        torch.testing.assert_close(found, sb.attention(*whole, method=method))
    with context.traffic() as sent:
        context.attention(*whole, method=sb.Polynomial(2))
    assert sent.bytes == 0


def test_one_rank_is_one_device():
    on_ranks(1, alone)


def test_a_call_without_processes_says_so():
    with pytest.raises(sb.InputError, match="start the program by torchrun"):
        context.attention(*tokens())


# ---- bytes -------------------------------------------------------------------------------------


def counted(n: int, method, exchange, causal: bool) -> tuple[int, int]:
    own = [x.requires_grad_() for x in sliced(tokens(n, dim=16), layout="zigzag")]
    plan = sb.plan(*tokens(n, dim=16), method=method, is_causal=causal)
    more = {"plan": plan, "exchange": exchange, "is_causal": causal, "layout": "zigzag"}
    with context.traffic() as forward:
        output = context.attention(*own, **more)
    with context.traffic() as backward:
        output.sum().backward()
    return forward.bytes, backward.bytes


STATE = 4 * 2 * (153 * 17 + 1)  # bytes: 2 heads, C(18, 2) features of 16 entries, values and ones


@pytest.mark.parametrize("causal", [False, True])
def test_bytes_of_a_state_do_not_depend_on_the_number_of_tokens(causal):
    short, long = (on_ranks(4, counted, n, sb.Polynomial(2), None, causal)[0] for n in (256, 1024))
    assert short == long
    forward, backward = short
    chunks = 2 if causal else 1  # for each rank; 3/4 of a state leaves a rank, and comes back
    states = 2 * 3 / 4 * chunks * STATE
    assert states <= backward <= 1.02 * states + 1000
    assert backward <= forward <= backward + 3 * 8 * 40 * chunks * 2  # and what all ranks must know


@pytest.mark.parametrize("exchange", ["heads", "ring"])
def test_bytes_of_tokens(exchange):
    n, heads, dim, size = 512, 2, 16, 2
    forward, backward = on_ranks(size, counted, n, sb.Exact(), exchange, False)[0]
    agreement = 4 * 8 * (size - 1)
    slice_bytes = 4 * heads * n // size * dim
    if exchange == "heads":  # half of query, key, value and output leaves a rank
        assert forward - agreement == 4 * slice_bytes // 2 == backward
    else:  # keys and values to the next rank; then again, and gradients round the whole ring
        assert forward - agreement == 2 * slice_bytes * (size - 1)
        assert backward == 2 * slice_bytes * (size - 1) + 2 * slice_bytes * size


# ---- faults ------------------------------------------------------------------------------------


def wrong(what: str):
    rank, own = dist.get_rank(), sliced(tokens())
    more = {"method": sb.Polynomial(2)}
    if rank == 1:
        if what == "method":
            more = {"method": sb.Polynomial(1)}
        elif what == "causal":
            more["is_causal"] = True
        elif what == "dim":
            own = [x[..., :4] for x in own]
        elif what == "nan":
            own[1][0, 0, 0] = torch.nan
        elif what == "layout":
            more["layout"] = "striped"
        elif what == "grad":
            own[0].requires_grad_()
        elif what == "dtype":
            own = [x.double() for x in own]
    return context.attention(*own, **more)


WRONG = {
    "method": ("method is Polynomial(degree=2, bound=None) on rank 0 and Polynomial(degree=1",) * 2,
    "causal": ("is_causal is False on rank 0 and True on rank 1",) * 2,
    "dim": ("head dims of query and value is (8, 8) on rank 0 and (4, 4) on rank 1",) * 2,
    "dtype": ("the dtype is torch.float32 on rank 0 and torch.float64 on rank 1",) * 2,
    "nan": ("the call failed on rank 1 of 2: key", "key has 8 non-finite"),
    "layout": ("the call failed on rank 1 of 2: layout", "layout must be one of"),
    "grad": ("gradients are recorded is False on rank 0 and True on rank 1",) * 2,
}


def all_wrong() -> dict[str, str]:
    found = {}
    for what in WRONG:
        with pytest.raises(sb.SupportBasisError) as caught:
            wrong(what)
        found[what] = str(caught.value)
    return found


def test_ranks_that_disagree_all_raise_and_say_why():
    for rank, found in enumerate(on_ranks(2, all_wrong)):
        for what, expected in WRONG.items():
            assert re.search(re.escape(expected[rank]), found[what]), found[what]


def dies(how: str) -> None:
    own = sliced(tokens())
    context.attention(*own, method=sb.Exact())
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(3.0)
        return
    context.attention(*own, method=sb.Exact())


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_the_others_end_when_a_rank_dies_or_does_not_come(how):
    start = time.monotonic()
    (error, text), (_, second) = outcomes(2, dies, how, timeout=1.5)
    assert time.monotonic() - start < 10
    assert isinstance(error, sb.SupportBasisError), text
    assert "rank 0 of 2: the exchange failed, because another rank has ended" in str(error)
    assert second is None
