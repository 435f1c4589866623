"""Exact heads by PyTorch's fused kernels: which calls they get, and on a GPU what they answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from cases import dense_attention, qkv
from device_cases import DEVICE, needs_triton, on_device
from supportbasis.cuda.exact import fused
from supportbasis.problem.problem import Problem
from supportbasis.problem.rounding import unit_roundoff
from supportbasis.problem.validation import attention_problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def problem_of(
    heads=2, key_heads=2, n=40, m=40, d=16, dv=16, *,
    dtype=torch.bfloat16, causal=False, scale=None, mask=None,
) -> Problem:  # fmt: skip
    q, k, v = qkv(1, heads, key_heads=key_heads, n=n, m=m, d=d, dv=dv, dtype=dtype)
    return attention_problem(q, k, v, mask, 0.0, causal, scale, heads != key_heads)


class Recorded:
    """A kernel in float64 that knows how often it ran, or that raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    def kernel(self, name: str) -> fused.Kernel:
        return fused.Kernel(name, lambda call: True, self.attend, self.differentiate)

    def attend(self, problem: Problem) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        if self.error is not None:
            raise self.error
        tokens = (problem.query, problem.key, problem.value)
        output, lse = dense_attention(*tokens, is_causal=problem.is_causal)
        return output.to(problem.query.dtype), lse.float()

    def differentiate(self, problem: Problem, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        if self.error is not None:
            raise self.error
        tokens = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        with torch.enable_grad():
            output, _ = dense_attention(*tokens, is_causal=problem.is_causal)
            made = torch.autograd.grad(output, tokens, saved[-1].to(output.dtype))
        return made[0], made[1], made[2]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Two kernels in the place of PyTorch's."""
    found = [Recorded(), Recorded()]
    both = [one.kernel(name) for name, one in zip("ab", found, strict=True)]
    monkeypatch.setattr(fused, "kernels_for", lambda problem: both if is_ours(problem) else [])
    monkeypatch.setattr(fused, "_refused", set())
    is_ours = fused.is_plain
    return found


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"causal": True}, True),
        ({"n": 30}, True),
        ({"heads": 4}, True),
        ({"dtype": torch.float32}, False),
        ({"dv": 8}, False),
        ({"n": 30, "causal": True}, False),
        ({"mask": torch.arange(40) < 30}, False),
    ],
    ids=str,
)
def test_which_calls_are_plain(change, plain):
    assert fused.is_plain(problem_of(**change)) == plain


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive_are_left_to_the_rectangle(scale):
    assert not fused.is_plain(replace(problem_of(), scale=scale))


def test_there_are_no_fused_kernels_on_a_cpu():
    assert fused.kernels_for(problem_of()) == []


def test_the_first_kernel_that_takes_a_call_makes_it(kernels):
    problem = problem_of(causal=True)
    made = fused.attention(problem)
    assert made is not None
    assert fused.gradients(problem, *made, torch.ones_like(made[0])) is not None
    assert kernels[0].calls == ["forward", "backward"]
    assert kernels[1].calls == []


def test_a_kernel_that_refuses_is_asked_once_for_each_kind_of_call(kernels):
    kernels[0].error = RuntimeError("no plan for this shape")
    for _ in range(2):
        assert fused.attention(problem_of()) is not None
    assert kernels[0].calls == ["forward"]
    assert kernels[1].calls == ["forward", "forward"]
    fused.attention(problem_of(n=41, m=41))
    assert kernels[0].calls == ["forward", "forward"]


def test_no_kernel_is_left(kernels):
    for one in kernels:
        one.error = RuntimeError("no plan for this shape")
    assert fused.attention(problem_of()) is None


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError"])
def test_faults_of_the_device_are_raised(kernels, name):
    if not hasattr(torch, name):
        pytest.skip(f"this PyTorch has no {name}")
    kernels[0].error = getattr(torch, name)("no memory")
    with pytest.raises(getattr(torch, name)):
        fused.attention(problem_of())


@needs_triton
@pytest.mark.parametrize("with_lse", [False, True])
def test_exact_heads_run_through_them_unless_lse_is_differentiated(kernels, with_lse):
    problem = problem_of(causal=True)
    leaves = [x.to(DEVICE).requires_grad_() for x in (problem.query, problem.key, problem.value)]
    result = sb.attention(
        *leaves, is_causal=True, method=sb.Exact(), implementation="triton", return_result=True
    )
    assert kernels[0].calls == ["forward"]
    exact_output, exact_lse = dense_attention(*(x.detach() for x in leaves), is_causal=True)
    unit = unit_roundoff(torch.bfloat16)  # of the output, which is at most max |v|
    largest = leaves[2].detach().abs().max()
    assert (result.output.double() - exact_output).abs().max() <= unit * largest
    torch.testing.assert_close(result.lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    loss = result.output.sum() + (result.lse.sum() if with_lse else 0.0)
    made = torch.autograd.grad(loss, leaves)
    assert all(grad.isfinite().all() for grad in made)
    assert kernels[0].calls == (["forward"] if with_lse else ["forward", "backward"])


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tokens on the CPU, in the interpreter")
def test_key_weights_and_float32_are_left_to_the_rectangle(kernels):
    from supportbasis.cuda.exact import (
        exact_heads as exact,  # whose kernels ask for the interpreter on import
    )

    mask = torch.arange(40) < 30
    for problem in (problem_of(mask=mask), problem_of(dtype=torch.float32)):
        plan = sb.plan(problem.query, problem.key, problem.value, method=sb.Exact())
        output, lse, _ = exact.forward(problem, plan)
        assert output.shape == (1, 2, 40, 16)
        assert lse.isfinite().all()
    assert kernels[0].calls == kernels[1].calls == []


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [fused.CUDNN, fused.FLASH], ids=lambda kernel: kernel.name)
def test_operators_take_these_arguments_and_return_these_shapes(kernel, causal, key_heads):
    """By PyTorch's own rules of shapes, without a device."""
    problem = problem_of(4, key_heads, n=64, m=64, d=64, dv=64, causal=causal)
    tokens = {name: getattr(problem, name).to("meta") for name in ("query", "key", "value")}
    problem = replace(problem, **tokens)
    output, lse = kernel.attend(problem)
    assert (output.shape, output.dtype) == (problem.query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 4, 64), torch.float32)
    made = kernel.differentiate(problem, output, lse, torch.empty_like(output))
    for grad, leaf in zip(made, tokens.values(), strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


class TestOnDevice:
    """What only a GPU can show."""

    pytestmark = on_device

    @pytest.mark.parametrize("kernel", [fused.CUDNN, fused.FLASH], ids=lambda kernel: kernel.name)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("key_heads", [4, 2])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("d", [64, 128])
    def test_each_kernel_against_float64(self, kernel, causal, key_heads, dtype, d):
        problem = self.on_cuda(4, key_heads, 513, d, dtype, causal)
        if kernel not in fused.kernels_for(problem):
            pytest.skip(f"this device does not run {kernel.name} here")
        output, lse = kernel.attend(problem)
        self.check(problem, output, lse)
        grad = torch.randn_like(output)
        made = kernel.differentiate(problem, output.contiguous(), lse.contiguous(), grad)
        self.check_gradients(problem, grad, made)

    @pytest.mark.parametrize("first", [fused.CUDNN, fused.FLASH], ids=lambda kernel: kernel.name)
    def test_gradients_take_the_lse_of_any_kernel(self, first):
        problem = self.on_cuda(2, 2, 400, 64, torch.bfloat16, True)
        found = fused.kernels_for(problem)
        if first not in found or len(found) < 2:
            pytest.skip("this device does not run both kernels")
        second = next(kernel for kernel in found if kernel is not first)
        output, lse = (x.contiguous() for x in first.attend(problem))
        grad = torch.randn_like(output)
        self.check_gradients(problem, grad, second.differentiate(problem, output, lse, grad))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("key_heads", [4, 1])
    def test_a_call_stays_within_its_bound(self, causal, key_heads):
        problem = self.on_cuda(4, key_heads, 5000, 64, torch.bfloat16, causal)
        leaves = [x.requires_grad_() for x in (problem.query, problem.key, problem.value)]
        assert fused.kernels_for(problem), "the fused kernels are for this device"
        result = sb.attention(
            *leaves, is_causal=causal, enable_gqa=key_heads != 4, method=sb.Exact(),
            return_result=True,
        )  # fmt: skip
        expected, lse = self.dense(problem)
        error = (result.output.double() - expected).abs().amax((-1, -2))
        error = error / problem.value.detach().double().abs().amax()
        assert (error.cpu() <= result.certificate.bound).all()
        torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=1e-3)
        grad = torch.randn_like(result.output)
        self.check_gradients(problem, grad, torch.autograd.grad(result.output, leaves, grad))

    def test_queries_of_any_layout(self):
        problem = self.on_cuda(4, 4, 300, 64, torch.bfloat16, True)
        tokens = {
            name: getattr(problem, name).transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("query", "key", "value")
        }
        problem = replace(problem, **tokens)
        made = fused.attention(problem)
        assert made is not None
        assert made[0].is_contiguous()
        self.check(problem, *made)
        grad = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(made[0].shape)
        parts = fused.gradients(problem, *made, grad)
        assert parts is not None
        self.check_gradients(problem, grad, parts)

    @staticmethod
    def on_cuda(heads, key_heads, n, d, dtype, causal) -> Problem:
        problem = problem_of(heads, key_heads, n, n, d, d, dtype=dtype, causal=causal)
        names = ("query", "key", "value")
        return replace(problem, **{name: getattr(problem, name).cuda() for name in names})

    @staticmethod
    def dense(problem: Problem) -> tuple[Tensor, Tensor]:
        tokens = (x.detach() for x in (problem.query, problem.key, problem.value))
        return dense_attention(*tokens, is_causal=problem.is_causal)

    def check(self, problem: Problem, output: Tensor, lse: Tensor) -> None:
        """Weights and the output are rounded to the dtype: two units of the largest value."""
        expected, expected_lse = self.dense(problem)
        unit = 2 * unit_roundoff(problem.query.dtype) * problem.value.abs().max()
        assert (output.double() - expected).abs().max() <= unit
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)

    @staticmethod
    def check_gradients(problem: Problem, grad: Tensor, made: tuple[Tensor, ...]) -> None:
        """Weights, their changes, the output and the gradient are rounded to the dtype: some units
        of the root mean square, however the terms cancel."""
        leaves = [x.detach().double() for x in (problem.query, problem.key, problem.value)]
        leaves = [x.requires_grad_() for x in leaves]
        output, _ = dense_attention(*leaves, is_causal=problem.is_causal)
        for mine, theirs in zip(made, torch.autograd.grad(output, leaves, grad.double()),
                                strict=True):  # fmt: skip
            assert mine.dtype == problem.query.dtype
            error = (mine.double() - theirs).square().mean().sqrt()
            assert (
                float(error)
                <= 4 * unit_roundoff(problem.query.dtype) * float(theirs.square().mean()) ** 0.5
            )
            assert not math.isnan(float(error))
