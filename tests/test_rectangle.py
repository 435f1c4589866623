"""The exact rectangles of the kernels against float64: in the interpreter, or on the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from device_cases import (  # before kernels are imported
    CUDA,
    DEVICE,
    UNIT,
    inputs,
    needs_triton,
    on_device,
    relative,
)  # fmt: skip

from supportbasis.cuda.exact import rectangle as exact  # isort: skip
from supportbasis.problem.validation import attention_problem  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def sets(heads: int, total: int, most: int, seed: int) -> tuple[exact.Tokens, Tensor]:
    """Sets of different sizes, the last of them empty, and the same as a mask."""
    generator = torch.Generator().manual_seed(seed)
    index, count = torch.zeros(heads, most, dtype=torch.int32), torch.zeros(heads).int()
    mask = torch.zeros(heads, total, dtype=torch.bool)
    for head in range(heads):
        size = 0 if head == heads - 1 and heads > 1 else most - head
        chosen = torch.randperm(total, generator=generator)[:size].sort().values
        index[head, :size], count[head], mask[head, chosen] = chosen.int(), size, True
    return exact.Tokens(most, index.to(DEVICE), count.to(DEVICE)), mask.to(DEVICE)


def dense(q, k, v, log_weight, pairs, scale) -> tuple[Tensor, Tensor]:
    """Numerators and denominators of the given pairs in float64."""
    group = q.shape[1] // k.shape[1]
    z = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale + log_weight.unsqueeze(2)
    weight = z.exp() * pairs
    return weight @ v.repeat_interleave(group, 1), weight.sum(-1)


def check(shape, dtype, rough, *, causal, listed_rows, listed_keys, started, weighted=True):
    batch, heads, key_heads, n, m, d, dv, most = shape
    (q, k, v), _ = inputs(heads, key_heads, batch=batch, n=n, m=m, d=d, dv=dv, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    log_weight = torch.randn(batch, heads, m, generator=generator).to(DEVICE)
    log_weight = log_weight if weighted else torch.zeros_like(log_weight)
    log_weight[..., 2] = -math.inf if weighted else 0.0
    total, scale, shape4 = batch * heads, 0.4, (batch, heads, n, m)
    rows, row_mask = sets(total, n, most, 3) if listed_rows else (exact.Tokens(n), None)
    keys, key_mask = sets(total, m, most, 4) if listed_keys else (exact.Tokens(m), None)
    pairs = torch.ones(shape4, device=DEVICE, dtype=torch.bool)
    pairs = pairs.tril() if causal else pairs
    written = torch.ones(shape4[:3], device=DEVICE, dtype=torch.bool)
    if key_mask is not None:
        pairs = pairs & key_mask.view(batch, heads, 1, m)
    if row_mask is not None:
        written = row_mask.view(batch, heads, n)
    start, apart = None, torch.zeros_like(written)  # rows with no part in the gradients
    extra_num = extra_den = torch.zeros((), dtype=torch.float64, device=DEVICE)
    if started:
        unit = torch.randn(total, generator=generator).to(DEVICE)
        num = torch.randn(batch, heads, n, dv, generator=generator).to(DEVICE)
        den = 1 + torch.rand(batch, heads, n, generator=generator).to(DEVICE)
        start = exact.Start(num, den, unit)
        factor = unit.double().exp().view(batch, heads, 1)
        extra_num, extra_den = num.double() * factor.unsqueeze(-1), den.double() * factor
        apart = (torch.rand(batch, heads, n, generator=generator) < 0.2).to(DEVICE)
    bias = log_weight.unsqueeze(2) if weighted else None
    problem = attention_problem(q, k, v, bias, 0.0, causal, scale, heads != key_heads)
    given = exact.Rectangle(problem, rows, keys, "ieee")
    output = torch.full((batch, heads, n, dv), 7.0, dtype=dtype, device=DEVICE)
    lse = torch.full((batch, heads, n), 7.0, device=DEVICE)
    exact.exact_rows(given, output, lse, start)
    assert (output[~written] == 7).all() and (lse[~written] == 7).all()

    tokens = [x.double().requires_grad_() for x in (q, k, v, log_weight)]
    sums = dense(*tokens, pairs, scale)
    num, den = sums[0] + extra_num, sums[1] + extra_den
    seen = written & (den > 0)
    safe = torch.where(seen, den, 1.0)
    expected = torch.where(seen.unsqueeze(-1), num / safe.unsqueeze(-1), 0.0)
    expected_lse = safe.log()
    assert relative(output[written], expected[written]) < rough
    assert (output[written & ~seen] == 0).all() and (lse[written & ~seen] == -math.inf).all()
    assert (lse[seen].double() - expected_lse[seen]).abs().max() < max(1e-5, rough)

    output, lse = (
        output.masked_fill(~written.unsqueeze(-1), 0),
        lse.masked_fill(~written, -math.inf),
    )
    grad = torch.randn(output.shape, generator=generator).to(DEVICE, dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(DEVICE)
    made = exact.Totals(
        *(torch.zeros(x.shape[0], heads, *x.shape[2:], device=DEVICE) for x in tokens)
    )
    slope = exact.slopes(grad, grad_lse, output)
    exact.add_gradients(made, grad, slope, lse.masked_fill(apart, math.inf), given)
    loss = expected * grad.masked_fill(apart.unsqueeze(-1), 0)
    loss = loss.sum() + torch.where(seen & ~apart, expected_lse * grad_lse, 0.0).sum()
    wanted = torch.autograd.grad(loss, tokens)
    for mine, theirs in zip(made, wanted, strict=True):
        mine = mine.unflatten(1, (theirs.shape[1], -1)).sum(2)
        assert relative(mine, theirs) < 2 * rough


@needs_triton
@pytest.mark.parametrize(
    ("listed_rows", "listed_keys", "started"),
    [(True, False, False), (False, True, True), (False, False, False), (True, True, False)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_rectangles_equal_dense_attention(listed_rows, listed_keys, started, causal, monkeypatch):
    monkeypatch.setattr(exact, "LEAST_SPLIT", 32)
    shape = (1, 2, 1, 70, 50, 17, 20, 20) if listed_rows else (1, 4, 2, 40, 50, 16, 16, 20)
    check(
        shape, torch.float32, 64 * UNIT[torch.float32],
        causal=causal, listed_rows=listed_rows, listed_keys=listed_keys, started=started,
    )  # fmt: skip


@needs_triton
@pytest.mark.skipif(CUDA, reason="the device has its own matrix")
def test_rectangles_in_half_precision():
    shape = (1, 2, 1, 40, 50, 16, 20, 20)
    how = {"causal": True, "listed_rows": True, "listed_keys": False, "started": False}
    check(shape, torch.float16, 4 * UNIT[torch.float16], weighted=False, **how)


class TestOnDevice:
    """The matrix of shapes and dtypes."""

    pytestmark = on_device

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(("d", "dv"), [(24, 40), (64, 64), (128, 128), (256, 128)])
    @pytest.mark.parametrize(
        ("listed_rows", "listed_keys", "started"), [(True, False, False), (False, True, True)]
    )
    def test_rectangles(self, listed_rows, listed_keys, started, d, dv, dtype, causal):
        rough = 1e-4 if dtype == torch.float32 else 4 * UNIT[dtype]
        check(
            (2, 4, 2, 700, 3000, d, dv, 150), dtype, rough, weighted=not causal,
            causal=causal, listed_rows=listed_rows, listed_keys=listed_keys, started=started,
        )  # fmt: skip
