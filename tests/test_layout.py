"""Layout: tensors of any strides give what contiguous ones give, and a broken kernel is noticed."""

import pytest
import torch

import supportbasis as sb
from cases import dense_attention, in_turn
from supportbasis.components import flash
from supportbasis.problem.problem import in_rows

B, H, N, D = 1, 2, 300, 8
METHODS = [
    sb.Exact(),
    sb.Polynomial(2),
    sb.SingleThreshold(0.5),
    sb.MultiThreshold(),
    sb.MultiThreshold(sketch_size=16),
    sb.PowerAttention(2),
    sb.BlockSupport(0.5),
    sb.FittedPolynomial(),
    sb.Auto(),
]


LAYOUTS = {
    "every other entry": lambda random: random(B, H, N, 2 * D)[..., ::2],
    "every other token": lambda random: random(B, H, 2 * N, D)[:, :, ::2],
    "transposed": lambda random: random(B, H, D, N).mT,
    "heads after tokens": lambda random: random(B, N, H, D).transpose(1, 2),
    "one token": lambda random: random(B, H, 1, D).expand(B, H, N, D),
    "one entry": lambda random: random(B, H, N, 1).expand(B, H, N, D),
    "one head": lambda random: random(B, 1, N, D).expand(B, H, N, D),
    "overlapping windows": lambda random: random(B, H, N + D - 1).unfold(-1, D, 1),
    "flipped": lambda random: random(B, H, N, D).flip(-1, -2),
    "lazily negated": lambda random: torch.view_as_complex(random(B, H, N, D, 2)).conj().imag,
}


def strided(layout):
    """Query, key and value of one layout."""
    generator = torch.Generator().manual_seed(0)
    return [LAYOUTS[layout](lambda *size: torch.randn(size, generator=generator)) for _ in "qkv"]


@pytest.mark.filterwarnings("ignore:supportbasis")  # sketches of a few rows lose some
@pytest.mark.parametrize(
    ("layout", "method", "causal"), in_turn(LAYOUTS, METHODS, [False, True]), ids=str
)
def test_layout_changes_nothing(layout, method, causal):
    inputs = strided(layout)
    plain = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
    mask = torch.arange(2 * N)[::2].view(1, 1, 1, N) % 7 > 0
    plan = sb.plan(*plain, attn_mask=mask, is_causal=causal, method=method)
    given, expected = (
        sb.attention(*x, attn_mask=mask, is_causal=causal, plan=plan, return_result=True)
        for x in (inputs, plain)
    )
    torch.testing.assert_close(given.output, expected.output, rtol=0, atol=0)
    torch.testing.assert_close(given.lse, expected.lse, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_an_exact_plan_used_again_takes_any_layout(layout, causal):
    """Without a mask and a result the call is PyTorch's own, after a look at the entries."""
    inputs = strided(layout)
    plan = sb.plan(*inputs, method=sb.Exact())
    exact, _ = dense_attention(*inputs, is_causal=causal)
    given = sb.attention(*inputs, is_causal=causal, plan=plan).double()
    torch.testing.assert_close(given, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_within_their_bound_whatever_the_layout(layout):
    for method in (sb.Exact(), sb.SingleThreshold(0.5), sb.Auto()):
        inputs = strided(layout)
        result = sb.attention(*inputs, method=method, return_result=True)
        exact, _ = dense_attention(*(x.double() for x in inputs))
        error = (result.output - exact).abs().amax((-2, -1)) / inputs[2].abs().amax((-2, -1))
        assert bool((error <= result.certificate.bound).all())
        assert float(result.certificate.measured.max()) <= 1e-5 or method != sb.Exact()


@pytest.mark.parametrize("method", [sb.Exact(), sb.SingleThreshold(0.5)], ids=str)
@pytest.mark.parametrize("layout", ["every other entry", "transposed", "overlapping windows"])
def test_gradients_are_those_of_contiguous_tensors(layout, method):
    inputs = strided(layout)
    plain = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    found = []
    for tensors in (inputs, plain):
        tensors = [x.detach().requires_grad_() for x in tensors]
        output = sb.attention(*tensors, method=method)
        cotangent = torch.ones(()).expand(output.shape)  # strides of zero, as those of a sum
        found.append(torch.autograd.grad(output, tensors, cotangent))
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


def test_densities_of_transposed_points():
    points, data = torch.randn(2, 500).T, torch.randn(2, 500).T
    distance = torch.cdist(points.double(), data.double())
    expected = (-distance.square() / 2).exp().mean(1) / (2 * torch.pi)
    given = sb.gaussian_kde(points, data, 1.0).double()
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-7)


def test_kernel_sums_of_transposed_tokens():
    q, k, v = (0.3 * torch.randn(4, 90).T for _ in range(3))
    exact = (q.double() @ k.double().T / 2).exp() @ v.double()
    given = sb.kernel_sum(q, k, v, method=sb.SingleThreshold(0.5)).double()
    torch.testing.assert_close(given, exact, rtol=1e-2, atol=1e-2)


def test_tokens_in_rows_are_not_copied():
    x = torch.randn(2, 30, 3, 8).transpose(1, 2)
    assert in_rows(x) is x
    assert in_rows(x[..., ::2]).stride(-1) == 1
    assert in_rows(torch.randn(1, 1, 1, 8).expand(1, 1, 5, 8)).stride(-2) == 8


def test_nothing_else_calls_the_private_operator():
    """It ignores the last stride, so there is one place that calls it, and settles the layout."""
    import pathlib

    source = pathlib.Path(sb.__file__).parent
    callers = [
        path.name
        for path in source.rglob("*.py")
        if "scaled_dot_product_flash_attention_for_cpu" in path.read_text()
    ]
    assert callers == ["flash.py"]


@pytest.mark.parametrize("shape", [(1, 3, 6, 4), (2, 1, 6, 4), (2, 3, 6, 3)])
def test_a_key_that_is_smaller_than_the_query_is_not_read_beyond_its_end(shape):
    """PyTorch's operator does read there."""
    query, key = torch.ones(2, 3, 5, 4), torch.ones(shape)
    full = torch.ones(2, 3, 6, 4)
    pairs = ((key, key), (key, full), (full, key))
    for pair in pairs if shape[3] == 4 else pairs[:2]:  # values may have another dim
        with pytest.raises(AssertionError):
            flash.attend(query, *pair, None, 1.0, False)


@pytest.mark.parametrize(
    ("method", "causal"),
    [(sb.Exact(), False), (sb.Exact(), True), (sb.SingleThreshold(0.7), False), (sb.Auto(), True)],
    ids=str,
)
def test_certificates_notice_a_broken_kernel(method, causal, monkeypatch):
    """Rows that a certificate compares with share nothing with what they are compared to."""
    real = flash.attend

    def broken(query, key, *rest, **settings):
        return real(query, key.flip(-1), *rest, **settings)

    inputs = strided("flipped")
    honest = sb.attention(*inputs, is_causal=causal, method=method, return_result=True)
    assert float(honest.certificate.measured.max()) < 0.05
    monkeypatch.setattr(flash, "attend", broken)
    result = sb.attention(*inputs, is_causal=causal, method=method, return_result=True)
    exact, _ = dense_attention(*(x.double() for x in inputs), is_causal=causal)
    error = (result.output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    assert float(error.max()) > 0.1  # else this call does not use the kernel
    assert not result.certificate.holds(0.1)
    torch.testing.assert_close(result.certificate.measured, error.double(), rtol=0.3, atol=0)
