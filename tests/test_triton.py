"""Triton kernels against float64: in Triton's interpreter, or on the device where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from device_cases import DEVICE, UNIT, inputs, needs_triton, on_device, relative, slow_case
from supportbasis.components.cotangent import SavedForward
from supportbasis.cuda.polynomial import sums as polynomial

pytestmark = [  # NumPy's, of the interpreter
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TAYLOR = (1.0, 1.0, 0.5)


def dense_weights(q, k, coefficients, scale, log_weight=None, lengths=None, causal=False) -> Tensor:
    """w_j p(scale <q_i, k_j>) of every pair in float64."""
    group = q.shape[1] // k.shape[1]
    z = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) * scale
    table = torch.tensor(coefficients, dtype=torch.float64, device=z.device)
    table = table.expand(q.shape[1], table.shape[-1])
    weight = sum(table[:, power, None, None] * z**power for power in range(table.shape[-1]))
    if log_weight is not None:
        factor = log_weight.double().expand(k.shape[:3]).exp()
        weight = weight * factor.repeat_interleave(group, 1).unsqueeze(2)
    if lengths is not None:
        weight = weight * (torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1, 1, 1))
    if causal:
        weight = weight * torch.ones_like(weight[0, 0]).tril()
    return weight


def dense_sums(q, k, v, *args, **kwargs) -> tuple[Tensor, Tensor]:
    weight = dense_weights(q, k, *args, **kwargs)
    group = q.shape[1] // k.shape[1]
    return weight @ v.double().repeat_interleave(group, 1), weight.sum(-1)


def polynomials(
    q, k, coefficients, scale, *, log_weight=None, lengths=None, causal=False, **how
) -> polynomial.Polynomials:
    """The same for the kernels; coefficients of one head, or [heads, ...] of all."""
    heads, degree = q.shape[0] * q.shape[1], torch.tensor(coefficients).shape[-1] - 1
    table = torch.zeros(heads, 3, device=DEVICE)
    powers = torch.arange(degree + 1)
    given = torch.tensor(coefficients).expand(q.shape[1], degree + 1) * scale**powers
    table[:, : degree + 1] = given.repeat(q.shape[0], 1).to(DEVICE)
    unit, weight = torch.zeros(heads, device=DEVICE), None
    if lengths is not None:
        log_weight = torch.zeros(k.shape[:3], device=DEVICE) if log_weight is None else log_weight
        past = torch.arange(k.shape[2], device=DEVICE) >= lengths.view(-1, 1, 1)
        log_weight = log_weight.masked_fill(past, -math.inf)
    if log_weight is not None:
        weight, shift = polynomial.key_weights(log_weight)
        unit = shift.repeat_interleave(q.shape[1] // k.shape[1], 1).flatten()
    return polynomial.Polynomials(table, unit, degree, weight, causal, **how)


def sums(q, k, v, coefficients, scale, **call) -> tuple[Tensor, Tensor]:
    """Numerators and denominators of the kernels in units of 1."""
    given = polynomials(q, k, coefficients, scale, precision="ieee", **call)
    num, den = polynomial.polynomial_sums(q, k, v, given)
    unit = given.unit.exp().view(*q.shape[:2], 1)
    return num * unit.unsqueeze(-1), den * unit


# heads, key heads, batch, n, m, d, dv, degree, causal, weighted
SMALL = {
    "square": (1, 1, 1, 80, 70, 16, 16, 2, False, False),
    "odd-weighted-gqa": (2, 1, 2, 40, 70, 17, 20, 2, False, True),
    "degree1-weighted": (2, 1, 1, 70, 80, 20, 16, 1, False, True),
    "causal-gqa": (2, 1, 1, 70, 90, 16, 20, 2, True, False),
    "causal-weighted": (1, 1, 1, 150, 100, 18, 16, 2, True, True),
    "causal-degree1": (1, 1, 1, 70, 70, 16, 16, 1, True, False),
}


@needs_triton
@pytest.mark.parametrize("case", SMALL)
def test_sums_equal_dense_sums(case):
    heads, key_heads, batch, n, m, d, dv, degree, causal, weighted = SMALL[case]
    (q, k, v), call = inputs(heads, key_heads, batch=batch, n=n, m=m, d=d, dv=dv, weighted=weighted)
    coefficients = [(1.1, 0.9, -0.6)[: degree + 1], (0.9, 1.2, 0.3)[: degree + 1]][:heads]
    num, den = sums(q, k, v, coefficients, 0.3, causal=causal, chunk=64, **call)
    expected_num, expected_den = dense_sums(q, k, v, coefficients, 0.3, causal=causal, **call)
    assert relative(num, expected_num) < 64 * UNIT[torch.float32]
    assert relative(den, expected_den) < 64 * UNIT[torch.float32]


@needs_triton
@pytest.mark.parametrize(
    "case", ["odd-weighted-gqa", slow_case("causal-gqa"), slow_case("causal-weighted")]
)
def test_gradients_equal_those_of_dense_sums(case):
    heads, key_heads, batch, n, m, d, dv, _, causal, weighted = SMALL[case]
    (q, k, v), call = inputs(heads, key_heads, batch=batch, n=n, m=m, d=d, dv=dv, weighted=weighted)
    coefficients = [TAYLOR, (1.1, 0.8, 0.4)][:heads]  # z^2/2 + z + 1 > 0.4
    made, wanted = gradients(
        q, k, v, coefficients, 0.3, causal=causal, chunk=64, precision="ieee", **call
    )
    for mine, theirs in zip(made, wanted, strict=True):
        assert relative(mine, theirs) < 128 * UNIT[torch.float32]


def gradients(q, k, v, coefficients, scale, *, chunk=256, precision="tf32x3", **call):
    """Output and gradients of query, key, value and log-weights: of the kernels, in float64."""
    log_weight = call.pop("log_weight", torch.zeros(k.shape[:3], device=DEVICE)).double()
    inputs = [x.double().requires_grad_() for x in (q, k, v, log_weight)]
    num, den = dense_sums(*inputs[:3], coefficients, scale, log_weight=inputs[3], **call)
    expected = num / den.unsqueeze(-1)
    given = polynomials(
        q, k, coefficients, scale,
        log_weight=log_weight, chunk=chunk, precision=precision, **call,
    )  # fmt: skip
    output, lse = polynomial.polynomial_sums(q, k, v, given, divide=True)
    assert (lse.double() - den.log()).abs().max() < (1e-5 if q.dtype == torch.float32 else 0.02)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(output.shape, generator=generator).to(DEVICE, q.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(DEVICE)
    made = of_sums(q, k, v, given, output, lse, grad, grad_lse)
    loss = (expected * grad).sum() + (den.log() * grad_lse).sum()
    wanted = torch.autograd.grad(loss, inputs)
    return (output, *made), (expected.detach(), *(x.nan_to_num(0.0) for x in wanted))


def of_sums(q, k, v, given, output, lse, grad, grad_lse) -> list[Tensor]:
    """Gradients of query, key, value and log-weights."""
    saved = SavedForward(output, lse, torch.zeros_like(lse).bool(), grad, grad_lse, True)
    made = polynomial.polynomial_gradients(q, k, v, given, saved, q.dtype)
    return [made.query, made.key, made.value, made.key_log_weight]


@needs_triton
def test_keys_without_weight_may_hold_anything():
    (q, k, v), _ = inputs(1, n=70, m=80, d=16)
    log_weight = torch.zeros(1, 1, 80, device=DEVICE)
    log_weight[..., 60:] = -math.inf
    expected = sums(q, k[:, :, :60], v[:, :, :60], TAYLOR, 0.3)
    k[:, :, 60:] = math.nan
    v[:, :, 60:] = math.inf
    for mine, theirs in zip(
        sums(q, k, v, TAYLOR, 0.3, log_weight=log_weight), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    given = polynomials(q, k, TAYLOR, 0.3, log_weight=log_weight)
    output, lse = polynomial.polynomial_sums(q, k, v, given, divide=True)
    made = of_sums(q, k, v, given, output, lse, torch.ones_like(output), None)
    assert all(grad.isfinite().all() for grad in made)
    assert all((grad[:, :, 60:] == 0).all() for grad in made[1:])


@needs_triton
def test_transposed_memory():
    (q, k, v), _ = inputs(2, n=70, d=16)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # [b, n, h, d]
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    expected = sums(q, k, v, TAYLOR, 0.3)[0]
    assert torch.equal(sums(*apart, TAYLOR, 0.3)[0], expected)
    assert torch.equal(sums(*columns, TAYLOR, 0.3)[0], expected)


class TestOnDevice:
    """The matrix of shapes and dtypes, and what only a device can show."""

    pytestmark = on_device

    @staticmethod
    def plain(q, k, v, scale, dtype) -> tuple[Tensor, Tensor]:
        """Degree 2 with features, values and states rounded to ``dtype``, products in float64."""

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).double()

        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q, k, v = rounded(q), rounded(k), rounded(v)
        num = v.sum(2, keepdim=True) + q @ rounded(scale * k.transpose(-1, -2) @ v)
        den = k.shape[2] + (q @ (scale * k.sum(2)).unsqueeze(-1)).squeeze(-1)
        for i in range(q.shape[-1]):
            state = k[..., i : i + 1] * k
            den += torch.einsum("bhn,bhnd,bhd->bhn", q[..., i], q, scale**2 / 2 * state.sum(2))
            state = rounded(scale**2 / 2 * rounded(state).transpose(-1, -2) @ v)
            num += rounded(q[..., i : i + 1] * q) @ state
        return num, den

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("d", "dv"),
        [(16, 16), (32, 64), (40, 40), (64, 64), (64, 128), (80, 72), (96, 96), (128, 128),
         (160, 128), (192, 64), (256, 256), (65, 33)],
    )  # fmt: skip
    def test_low_precision_is_as_good_as_its_features(self, d, dv, dtype):
        (q, k, v), _ = inputs(4, 2, n=1000, m=1500, d=d, dv=dv, dtype=dtype)
        scale = 1 / d
        num, den = dense_sums(q, k, v, TAYLOR, scale)
        given = polynomials(q, k, TAYLOR, scale)
        mine, mine_den = polynomial.polynomial_sums(q, k, v, given)
        plain, _ = self.plain(q, k, v, scale, torch.bfloat16)
        assert relative(mine, num) <= 1.5 * relative(plain, num)
        assert relative(mine_den, den) < (1e-5 if dtype == torch.bfloat16 else 1e-4)  # rounded
        output, _ = polynomial.polynomial_sums(q, k, v, given, divide=True)
        limit = 1.5 * relative(plain / den.unsqueeze(-1), num / den.unsqueeze(-1)) + UNIT[dtype]
        assert relative(output, num / den.unsqueeze(-1)) <= limit

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("d", "dv"), [(24, 40), (64, 64), (128, 128)])
    def test_causal_low_precision_is_as_good_as_its_features(self, d, dv, dtype):
        """Plainly: states of the chunks before, and rounded weights within the chunk."""
        (q, k, v), _ = inputs(2, n=1000, m=1000, d=d, dv=dv, dtype=dtype)
        scale, chunk = 1 / d, 256
        num, den = dense_sums(q, k, v, TAYLOR, scale, causal=True)
        plain = []
        for start in range(0, q.shape[2], chunk):
            now = slice(start, start + chunk)
            before = [x[:, :, :start] for x in (k, v)]
            part = self.plain(q[:, :, now], *before, scale, torch.bfloat16)[0]
            weight = dense_weights(q[:, :, now], k[:, :, now], TAYLOR, scale, causal=True)
            plain.append(part + weight.bfloat16().double() @ v[:, :, now].bfloat16().double())
        plain = torch.cat(plain, 2)
        given = polynomials(q, k, TAYLOR, scale, causal=True, chunk=chunk)
        mine, mine_den = polynomial.polynomial_sums(q, k, v, given)
        assert relative(mine, num) <= 1.5 * relative(plain, num)
        assert relative(mine_den, den) < (1e-5 if dtype == torch.bfloat16 else 1e-4)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("d", "dv"), [(24, 40), (64, 64), (128, 128)])
    def test_degree_one(self, d, dv, causal):
        (q, k, v), _ = inputs(4, 2, n=700, m=900, d=d, dv=dv, dtype=torch.bfloat16)
        call = {"causal": causal, "chunk": 256} if causal else {}
        num, den = dense_sums(q, k, v, (3.0, 1.0), d**-0.5, causal=causal)
        given = polynomials(q, k, (3.0, 1.0), d**-0.5, **call)
        mine, mine_den = polynomial.polynomial_sums(q, k, v, given)
        assert relative(mine, num) < 2 * UNIT[torch.bfloat16]
        assert relative(mine_den, den) < 1e-4

    @pytest.mark.parametrize(("weighted", "causal"), [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize(
        ("dtype", "d", "dv"),
        [(torch.bfloat16, 24, 40), (torch.bfloat16, 64, 64), (torch.bfloat16, 128, 128),
         (torch.bfloat16, 256, 128), (torch.float16, 24, 40), (torch.float16, 128, 128),
         (torch.float32, 24, 40), (torch.float32, 64, 64)],
    )  # fmt: skip
    def test_attention_and_gradients(self, d, dv, dtype, weighted, causal):
        (q, k, v), call = inputs(
            4, 2, batch=2, n=700, m=900, d=d, dv=dv, dtype=dtype, weighted=weighted
        )
        made, wanted = gradients(q, k, v, TAYLOR, 0.7 / d**0.5, causal=causal, **call)
        unit = 2.0**-9 if dtype == torch.float16 else UNIT[dtype]  # tokens become bfloat16
        limits = [2, 4, 4, 4, 4] if dtype != torch.float32 else [16, 32, 32, 32, 32]
        for mine, theirs, limit in zip(made, wanted, limits, strict=True):
            assert relative(mine, theirs) < limit * unit

    def test_a_million_tokens_and_memory_beyond_two_gigabytes(self):
        n, heads, d = 2**20, 40, 64  # 2.7e9 entries: offsets do not fit in 32 bits
        generator = torch.Generator("cuda").manual_seed(0)

        def normal() -> Tensor:
            x = torch.empty(1, n, heads, d, dtype=torch.bfloat16, device="cuda")
            return x.normal_(generator=generator).mul_(0.3).transpose(1, 2)

        q, k, v = normal(), normal(), normal()
        output, _ = polynomial.polynomial_sums(
            q, k, v, polynomials(q, k, TAYLOR, d**-0.5), divide=True
        )
        rows = torch.tensor([0, 1234, n - 1], device="cuda")
        for head in (0, heads - 1):
            part = [x[:, head : head + 1] for x in (q[:, :, rows], k, v)]
            num, den = dense_sums(*part, TAYLOR, d**-0.5)
            mine = output[:, head : head + 1, rows]
            assert relative(mine, num / den.unsqueeze(-1)) < 4 * UNIT[torch.bfloat16]

    @pytest.mark.parametrize("causal", [False, True])
    def test_captured_in_a_graph(self, causal):
        (q, k, v), call = inputs(2, n=512, d=64, dtype=torch.bfloat16, weighted=True)

        given = polynomials(q, k, TAYLOR, 0.3, causal=causal, **call)

        def run() -> Tensor:
            return polynomial.polynomial_sums(q, k, v, given, divide=True)[0]

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        q.mul_(0.5)
        graph.replay()
        assert torch.equal(output, run())

    def test_runs_are_equal_bit_by_bit(self):
        (q, k, v), _ = inputs(2, n=3000, d=64, dtype=torch.bfloat16)
        given = polynomials(q, k, TAYLOR, 0.3)
        first = polynomial.polynomial_sums(q, k, v, given)[0]
        assert all(
            torch.equal(first, polynomial.polynomial_sums(q, k, v, given)[0]) for _ in range(5)
        )
