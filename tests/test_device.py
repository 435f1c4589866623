"""The kernels behind `sb.attention`, against float64 references: interpreted, or on a GPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from cases import beyond, qkv
from device_cases import (
    CUDA,
    DEVICE,
    HAS_TRITON,
    UNIT,
    needs_triton,
    on_device,
    relative,
    slow_case,
)
from supportbasis.engine import dispatch
from supportbasis.methods import Method
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

METHODS: dict[str, Method] = {
    "single2": sb.SingleThreshold(1.2, 2),
    "single1": sb.SingleThreshold(1.2, 1),
    "polynomial2": sb.Polynomial(2, bound=1.0),
    "polynomial0": sb.Polynomial(0, bound=1.0),
    "exact": sb.Exact(),
}


def tokens(batch, heads, key_heads, n, m, d, dv, dtype=torch.float32) -> list[Tensor]:
    """Scores of standard deviation 0.25, and a few tokens that are four times as large."""
    q, k, v = qkv(batch, heads, key_heads=key_heads, n=n, m=m, d=d, dv=dv, scale=0.5)
    size = (16 / d) ** 0.25
    q[:, 1:, 3::17] *= 4
    k[:, :, 5::19] *= 4
    return [x.to(DEVICE, dtype) for x in (q * size, k * size, v)]


def bias_of(kind: str, batch: int, heads: int, m: int) -> Tensor | None:
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(1)
    if kind == "padding":
        return (torch.rand(batch, 1, 1, m, generator=generator) < 0.7).to(DEVICE)
    bias = torch.randn(batch, heads if kind == "heads" else 1, 1, m, generator=generator)
    bias[..., 4] = -math.inf
    return bias.to(DEVICE)


def call_of(bias: Tensor | None, causal: bool, gqa: bool) -> dict[str, object]:
    return {"attn_mask": bias, "is_causal": causal, "enable_gqa": gqa}


def dense_reference(q, k, v, plan, call) -> tuple[Tensor, Tensor]:
    """The whole weight matrix in float64."""
    mask, causal, gqa = call["attn_mask"], call["is_causal"], call["enable_gqa"]
    problem = attention_problem(q, k, v, mask, 0.0, causal, None, gqa)
    return reference.execute(problem, plan)


def check(method, bias_kind, causal, shape, dtype, output_limit, gradient_limit) -> None:
    batch, heads, key_heads, _, m, _, _ = shape
    q, k, v = tokens(*shape, dtype=dtype)
    bias = bias_of(bias_kind, batch, heads, m)
    call = call_of(bias, causal, heads != key_heads)
    plan = sb.plan(q, k, v, **call, method=method)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if bias is not None and bias.dtype != torch.bool:
        leaves.append(bias.requires_grad_())
    result = sb.attention(q, k, v, **call, plan=plan, implementation="triton", return_result=True)
    assert result.implementation == "triton"
    expected, lse = dense_reference(*(x.detach() for x in (q, k, v)), plan, _detached(call))
    seen = result.lse > -math.inf
    assert torch.equal(seen, lse > -math.inf)
    assert relative(result.output, expected) < output_limit
    near = 1e-5 if dtype == torch.float32 else 2.0**-6
    assert (result.lse - lse)[seen].abs().max() < near
    largest = float(v.detach().abs().max())
    plain = [x.detach() for x in (q, k, v)]
    exact = sb.plan(*plain, **_detached(call), method=sb.Exact())
    exact = dense_reference(*plain, exact, _detached(call))[0]
    error = (result.output.detach() - exact).abs().amax((-1, -2)) / largest
    assert (error.cpu() <= result.certificate.bound).all()

    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(result.output.shape, generator=generator).to(DEVICE, dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(DEVICE) * seen
    outputs = [result.output, torch.where(seen, result.lse, 0.0)]
    made = torch.autograd.grad(outputs, leaves, [grad, grad_lse])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    call["attn_mask"] = wide[3] if len(wide) > 3 else bias
    slow = sb.attention(*wide[:3], **call, plan=plan, implementation="eager", return_result=True)
    outputs = [slow.output, torch.where(seen, slow.lse, 0.0)]
    wanted = torch.autograd.grad(outputs, wide, [grad.double(), grad_lse.double()])
    for mine, theirs in zip(made, wanted, strict=True):
        assert (mine - theirs).norm() <= gradient_limit * theirs.norm()


def _detached(call):
    mask = call["attn_mask"]
    return {**call, "attn_mask": None if mask is None else mask.detach()}


@needs_triton
@pytest.mark.parametrize(
    ("method", "bias", "causal"),
    [
        ("single2", "heads", False), ("single1", "padding", True), ("polynomial2", "shared", False),
        ("exact", "none", True), slow_case("single2", "shared", True),
        slow_case("polynomial2", "heads", True), slow_case("polynomial0", "none", False),
        slow_case("exact", "shared", False),
    ],
)  # fmt: skip
def test_kernels_equal_the_dense_reference(method, bias, causal):
    shape = (1, 2, 1, 70, 60, 16, 18)
    unit = UNIT[torch.float32]
    check(METHODS[method], bias, causal, shape, torch.float32, 64 * unit, 256 * unit)


@needs_triton
@pytest.mark.skipif(CUDA, reason="the device has its own matrix")
def test_half_precision():
    shape, unit = (1, 2, 2, 40, 50, 16, 16), UNIT[torch.float16]
    check(METHODS["single2"], "none", False, shape, torch.float16, 4 * unit, 16 * unit)


def mixed_plan(q, k, v, call) -> sb.Plan:
    """Exact, degree 2, a sketch-free power, degree 1: three kinds of kernels and one without."""
    methods = [sb.Exact(), sb.Polynomial(2, 1.0), sb.MultiThreshold(), sb.SingleThreshold(1.2, 1)]
    heads = [sb.plan(q, k, v, **call, method=m).heads[i] for i, m in enumerate(methods)]
    return sb.Plan(sb.Auto(), q.shape[-1], tuple(heads))


@needs_triton
def test_heads_of_several_kinds(monkeypatch):
    monkeypatch.setattr(dispatch, "refusal", lambda problem, how: how if how == "eager" else None)
    leaves = [x.requires_grad_() for x in tokens(1, 4, 2, 50, 40, 16, 16)]
    call = call_of(bias_of("heads", 1, 4, 40).requires_grad_(), True, True)
    plan = mixed_plan(*(x.detach() for x in leaves), _detached(call))
    results = {
        how: sb.attention(*leaves, **call, plan=plan, implementation=how, return_result=True)
        for how in ("auto", "eager")
    }
    assert results["auto"].implementation == "triton for 3 of 4 heads, eager for the others"
    assert results["eager"].implementation == "eager"
    made = {
        how: [
            result.output,
            *torch.autograd.grad(result.output.square().sum(), [*leaves, call["attn_mask"]]),
        ]
        for how, result in results.items()
    }
    for mine, theirs in zip(made["auto"], made["eager"], strict=True):
        assert relative(mine, theirs.double()) < 256 * UNIT[torch.float32]
    with pytest.raises(sb.InputError, match=r"cannot run head 2: multi-threshold heads"):
        sb.attention(*leaves, **call, plan=plan, implementation="triton")


def saved(plan: sb.Plan, folder: Path) -> sb.Plan:
    """The plan as it comes from a file: without index sets."""
    plan.save(folder / "plan.json")
    return sb.Plan.load(folder / "plan.json")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("causal", "bias"), [(True, "heads"), (False, "none")])
def test_a_loaded_plan_splits_again(tmp_path, causal, bias):
    """Calls with no large token, with some (beyond the capacity: all rows are exact), with as many,
    and with more than the capacity."""
    q, k, v = tokens(1, 2, 1, 50, 40, 16, 16)
    call = call_of(bias_of(bias, 1, 2, 40), causal, True)
    plan = saved(sb.plan(q, k, v, **call, method=sb.SingleThreshold(1.2, 2)), tmp_path)
    exact = sb.plan(q, k, v, **call, method=sb.Exact())
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(q.shape, generator=generator).to(DEVICE)
    small = [0.9 * x / x.abs().amax() for x in (q, k)]
    for change, all_exact in ((small, False), ([q, k], True), ([q.flip(2), k.flip(2)], False),
                              ([2 * q, 2 * k], True)):  # fmt: skip
        leaves = [x.clone().requires_grad_() for x in (*change, v)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        output = sb.attention(*leaves, **call, plan=plan, implementation="triton")
        what = exact if all_exact else plan
        wanted = sb.attention(*wide, **call, plan=what, implementation="eager")
        assert relative(output, wanted) < 64 * UNIT[torch.float32]
        made = torch.autograd.grad(output, leaves, grad)
        slow = torch.autograd.grad(wanted, wide, grad.double())
        for mine, theirs in zip(made, slow, strict=True):
            assert (mine - theirs).norm() <= 256 * UNIT[torch.float32] * theirs.norm()


@needs_triton
def test_a_polynomial_plan_takes_other_lengths():
    q, k, v = tokens(1, 1, 1, 50, 40, 16, 16)
    call = call_of(None, True, False)
    plan = sb.plan(q, k, v, **call, method=METHODS["polynomial2"])
    for n, m in ((50, 40), (30, 33)):
        part = q[:, :, :n], k[:, :, :m], v[:, :, :m]
        output = sb.attention(*part, **call, plan=plan, implementation="triton")
        assert relative(output, dense_reference(*part, plan, call)[0]) < 64 * UNIT[torch.float32]


@needs_triton
def test_failed_rows_are_counted():
    """A plan reused far beyond its range: rows without a positive denominator return zeros."""
    q, k, v = tokens(1, 1, 1, 50, 40, 16, 16)
    plan = beyond(sb.plan(q, k, v, method=sb.Polynomial(1, bound=0.5)))
    with pytest.warns(UserWarning, match="no usable denominator"):
        result = sb.attention(q * 30, k, v, plan=plan, implementation="triton", return_result=True)
    failed = result.lse[0, 0] == -math.inf
    assert 0 < int(failed.sum()) == int(result.certificate.invalid_rows)
    assert (result.output[0, 0, failed] == 0).all()


def test_what_cannot_run_is_refused_in_words(monkeypatch):
    q, k, v = tokens(1, 1, 1, 20, 20, 16, 16)

    def refused(match: str, *inputs: Tensor, method: Method = METHODS["polynomial2"]) -> None:
        with pytest.raises(sb.InputError, match=match):
            sb.attention(*inputs, method=method, implementation="triton")

    with pytest.raises(sb.InputError, match="'auto', 'eager', 'triton', got 'cuda'"):
        sb.attention(q, k, v, implementation="cuda")
    if HAS_TRITON:
        refused("dtype is torch.float64", q.double(), k.double(), v.double())
        refused("257 entries", q, k, v[..., :1].expand(1, 1, 20, 257))
        refused("degree 3", q, k, v, method=sb.Polynomial(3, bound=1.0))
        refused("not positive", q, k, v, method=sb.Polynomial(1, bound=3.0))
        refused("power heads have no kernels", q, k, v, method=sb.PowerAttention(2))
        with (
            pytest.warns(UserWarning, match="runs exactly"),
            pytest.raises(sb.InputError, match="depends on the query"),
        ):
            sb.attention(
                q, k, v, attn_mask=torch.zeros(20, 20, device=DEVICE),
                method=METHODS["polynomial2"], implementation="triton",
            )  # fmt: skip
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    refused("Triton is not installed", q, k, v)


def test_results_say_what_ran():
    q, k, v = (x.cpu() for x in tokens(1, 1, 1, 20, 20, 16, 16))
    ran = sb.attention(q, k, v, method=sb.Exact(), return_result=True)
    assert ran.implementation == "sdpa"
    ran = sb.attention(q, k, v, method=METHODS["single2"], return_result=True)
    assert ran.implementation == "eager"
    assert "computed by eager" in repr(ran)


class TestOnDevice:
    """What only a GPU can show."""

    pytestmark = on_device

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        ("method", "bias", "causal"),
        [("single2", "heads", True), ("single2", "padding", False), ("single1", "none", True),
         ("polynomial2", "heads", False), ("polynomial2", "padding", True),
         ("exact", "heads", True)],
    )  # fmt: skip
    def test_the_matrix(self, method, dtype, bias, causal):
        unit = {torch.float32: 2.0**-20}.get(dtype, 2.0**-9)
        shape = (2, 4, 2, 700, 900, 64, 64)
        check(METHODS[method], bias, causal, shape, dtype, 2 * unit, 8 * unit)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("d", "dv"), [(24, 40), (80, 72), (128, 128), (256, 128)])
    def test_widths(self, d, dv, causal):
        shape = (1, 2, 1, 500, 600, d, dv)
        check(METHODS["single2"], "none", causal, shape, torch.bfloat16, 2.0**-8, 2.0**-6)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("bias", ["none", "padding", "heads"])
    @pytest.mark.parametrize("method", ["single2", "loaded", "polynomial2", "exact"])
    def test_a_call_with_a_plan_waits_for_nothing(self, method, bias, causal, tmp_path):
        leaves = [x.requires_grad_() for x in tokens(1, 4, 2, 600, 500, 64, 64, torch.bfloat16)]
        call = call_of(bias_of(bias, 1, 4, 500), causal, True)
        chosen = METHODS["single2" if method == "loaded" else method]
        plan = sb.plan(*(x.detach() for x in leaves), **call, method=chosen)
        plan = saved(plan, tmp_path) if method == "loaded" else plan
        grad = torch.randn_like(leaves[0])

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [sb.attention(*leaves, **call, plan=plan)]

        def both() -> list[Tensor]:
            output = sb.attention(*leaves, **call, plan=plan)
            return [output, *torch.autograd.grad(output, leaves, grad)]

        with warnings.catch_warnings():  # the mode that forbids synchronisation warns about itself
            warnings.simplefilter("ignore")
            for run in (forward, both):
                self.captured(run, leaves)

    @staticmethod
    def captured(run: Callable[[], list[Tensor]], leaves: list[Tensor]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(0.9)
        graph.replay()
        for mine, theirs in zip(kept, run(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)

    def test_auto_takes_kernels(self):
        q, k, v = tokens(1, 2, 2, 600, 500, 64, 64, torch.bfloat16)
        ran = sb.attention(q, k, v, method=METHODS["single2"], return_result=True)
        assert ran.implementation == "triton"
        ran = sb.attention(q, k, v, method=sb.Exact(), return_result=True)
        assert ran.implementation == "triton"
        ran = sb.attention(
            q.double(), k.double(), v.double(), method=METHODS["single2"], return_result=True
        )
        assert ran.implementation == "eager"

    def test_compiled(self):
        q, k, v = tokens(1, 2, 2, 600, 500, 64, 64, torch.bfloat16)
        plan = sb.plan(q, k, v, method=METHODS["single2"])
        compiled = torch.compile(lambda q, k, v: sb.attention(q, k, v, plan=plan), fullgraph=True)
        assert torch.equal(compiled(q, k, v), sb.attention(q, k, v, plan=plan))
