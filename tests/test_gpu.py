"""The same components on a CUDA device: run with ``pytest -m gpu`` where there is one."""

import math

import pytest
import torch

import supportbasis as sb
from cases import METHODS, clustered, dense_attention, qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:supportbasis. rows had no usable"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_cuda_equals_cpu(method, masked, causal):
    q, k, v = qkv(2, 4, n=70, m=63, key_heads=2, dv=3)
    mask = torch.rand(2, 1, 1, 63, generator=torch.Generator().manual_seed(0)) < 0.7
    call = {"is_causal": causal, "enable_gqa": True, "return_result": True}
    on_cpu = sb.attention(
        q, k, v, attn_mask=mask if masked else None, method=METHODS[method], **call
    )
    on_cuda = sb.attention(
        q.cuda(), k.cuda(), v.cuda(),
        attn_mask=mask.cuda() if masked else None, method=METHODS[method], **call,
    )  # fmt: skip
    torch.testing.assert_close(on_cuda.output.cpu(), on_cpu.output, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(on_cuda.lse.cpu(), on_cpu.lse, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_cuda_gradients_equal_cpu(method):
    bias = torch.randn(2, 4, 1, 63, generator=torch.Generator().manual_seed(0)).double()
    tokens = [*qkv(2, 4, n=70, m=63, key_heads=2, dv=3), bias]
    plan = sb.plan(*tokens[:3], bias, is_causal=True, enable_gqa=True, method=METHODS[method])
    made = {}
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in tokens]
        result = sb.attention(
            *leaves[:3], leaves[3], is_causal=True, enable_gqa=True, plan=plan, return_result=True
        )
        loss = result.output.square().sum() + result.lse.clamp(min=-30).sum()
        made[device] = torch.autograd.grad(loss, leaves)
    for mine, theirs in zip(made["cuda"], made["cpu"], strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [sb.Exact(), sb.SingleThreshold(0.3, 2), sb.Auto(1e-2)], ids=str)
def test_cuda_stays_within_its_bound(method, dtype):
    q, k, v = qkv(1, 2, n=4096, d=64, scale=0.1, dtype=dtype)
    result = sb.attention(q.cuda(), k.cuda(), v.cuda(), method=method, return_result=True)
    exact, lse = dense_attention(q, k, v)
    error = (result.output.cpu().double() - exact).abs().max() / v.double().abs().max()
    assert float(error) <= float(result.certificate.bound.max())
    torch.testing.assert_close(result.lse.cpu().double(), lse, rtol=0, atol=0.02)


def test_cuda_kernel_sums_and_densities():
    points, data, value = qkv(n=300, m=400, d=3)
    for call in (
        lambda d: sb.gaussian_kde(points.to(d), data.to(d), 0.7),
        lambda d: sb.kernel_sum(points.to(d) / 3, data.to(d) / 3, value.to(d), scale=1.0),
    ):
        torch.testing.assert_close(call("cuda").cpu(), call("cpu"), rtol=1e-9, atol=1e-12)


def test_cuda_rows_that_see_nothing():
    q, k, v = (x.cuda() for x in qkv(1, 1, n=9, dtype=torch.float32))
    mask = torch.zeros(9, dtype=torch.bool, device="cuda")
    result = sb.attention(q, k, v, attn_mask=mask, method=sb.Exact(), return_result=True)
    assert (result.output == 0).all()
    assert (result.lse == -math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
def test_cuda_block_support(causal):
    q, k, v = clustered(1, 1, n=4096, dtype=torch.float64)
    method = sb.BlockSupport(0.5)
    plan = sb.plan(q, k, v, is_causal=causal, method=method)
    on_cpu = sb.attention(q, k, v, is_causal=causal, plan=plan)
    on_cuda = sb.attention(q.cuda(), k.cuda(), v.cuda(), is_causal=causal, plan=plan)
    exact = dense_attention(q, k, v, is_causal=causal)[0]
    assert (on_cuda.cpu() - exact).norm() <= 1.2 * (on_cpu - exact).norm()
    result = sb.attention(
        q.cuda(), k.cuda(), v.cuda(), is_causal=causal, method=method, return_result=True
    )
    assert result.plan.heads[0].kind == "lists"
    assert result.certificate.holds(0.2)


def test_cuda_fitted_polynomials():
    q, k, v = qkv(1, 2, n=2000, d=8, scale=0.7, dtype=torch.float64)
    plan = sb.plan(q, k, v, method=sb.FittedPolynomial())
    assert all(head.kind == "fitted" for head in plan.heads)
    cpu = sb.attention(q, k, v, plan=plan)
    cuda = sb.attention(q.cuda(), k.cuda(), v.cuda(), plan=plan).cpu()
    torch.testing.assert_close(cuda, cpu, rtol=1e-8, atol=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("method", [sb.SingleThreshold(0.5, 2), sb.BlockSupport(0.3)], ids=str)
def test_tokens_need_not_be_on_the_current_device(method):
    tokens = qkv(1, 2, n=4096, d=64, scale=0.3, dtype=torch.bfloat16)
    plan, made = sb.plan(*tokens, method=method), []
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).requires_grad_() for x in tokens]
        for _ in range(3):  # run, captured, replayed
            with torch.no_grad():
                sb.attention(*leaves, plan=plan)
        output = sb.attention(*leaves, plan=plan)
        made.append([x.cpu() for x in (output, *torch.autograd.grad(output.sum(), leaves))])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)
