"""The closed form of the gradient for causal heads, several heads and chained layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from cases import gaussian
from supportbasis.gradient import attention_loss_gradient, closed_form_attention
from supportbasis.plans import PolynomialHead, ThresholdHead

CLOSE = 1e-9  # float64, and sums of a few hundred terms
METHODS = [sb.Polynomial(2), sb.Polynomial(3), sb.SingleThreshold(1.0, 2), sb.Exact()]


def tokens(heads: int = 2, key_heads: int = 2, n: int = 45, d: int = 4) -> list[Tensor]:
    q, k = gaussian(1, heads, n, d, std=0.5), gaussian(1, key_heads, n, d, seed=1, std=0.5)
    return [q, k, gaussian(1, key_heads, n, 3, seed=2)]


def weights(q: Tensor, k: Tensor, plan: sb.Plan, causal: bool, bias: Tensor | float = 0) -> Tensor:
    """Â of every head, dense: exp on exact pairs, p on the others, rows divided by their sums."""
    score = q @ k.mT / math.sqrt(q.shape[-1])
    made = score.exp()
    for number, head in enumerate(plan.heads):
        if not isinstance(head, PolynomialHead):
            continue
        poly = head.polynomial
        value = poly(score[0, number]) * math.exp(poly.bound)
        if isinstance(head, ThresholdHead):
            large = [x[0, number].abs().amax(-1) > head.threshold for x in (q, k)]
            value = torch.where(large[0][:, None] | large[1], made[0, number], value)
        made[0, number] = value
    made = made * torch.as_tensor(bias).exp()
    if causal:
        made = made.tril()
    return made / made.sum(-1, keepdim=True)


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gradients_are_the_closed_form_of_the_weights(method, causal, key_heads) -> None:
    given = tokens(key_heads=key_heads)
    q, k, v = (x.requires_grad_() for x in given)
    plan = sb.plan(q, k, v, is_causal=causal, enable_gqa=key_heads == 1, method=method)
    shared = key_heads == 1
    output = closed_form_attention(q, k, v, None, causal, None, shared, plan=plan)
    upstream = gaussian(*output.shape, seed=3)
    found = torch.autograd.grad(output, given, upstream)
    with torch.no_grad():
        wide_k, wide_v = (x.expand(-1, 2, -1, -1) for x in (k, v))
        a = weights(q, wide_k, plan, causal)
        torch.testing.assert_close(output, a @ wide_v, rtol=0, atol=CLOSE)
        inner = upstream @ wide_v.mT
        of_scores = a * (inner - (a * inner).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        expected = [of_scores @ wide_k, of_scores.mT @ q, a.mT @ upstream]
        expected[1:] = [x.sum(1, keepdim=True) if shared else x for x in expected[1:]]
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_key_bias_has_the_sums_of_columns(method, causal) -> None:
    """∂L/∂S summed over rows and, for a bias of all heads, over heads; p is not p' here."""
    q, k, v = tokens()
    bias = gaussian(1, 1, 1, 45, seed=7, std=0.5).requires_grad_()
    plan = sb.plan(q, k, v, bias.detach(), is_causal=causal, method=method)
    output = closed_form_attention(q, k, v, bias, causal, plan=plan)
    upstream = gaussian(*output.shape, seed=3)
    (found,) = torch.autograd.grad(output, bias, upstream)
    a, inner = weights(q, k, plan, causal, bias.detach()), upstream @ v.mT
    of_scores = a * (inner - (a * inner).sum(-1, keepdim=True))
    torch.testing.assert_close(found, of_scores.sum((1, 2), keepdim=True), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.Exact()], ids=str)
def test_autocast_takes_inputs_as_attention_does_and_sums_in_float32(method) -> None:
    given = [x.float().requires_grad_() for x in tokens()]
    narrow = [x.detach().bfloat16().requires_grad_() for x in given]
    upstream = gaussian(1, 2, 45, 3, seed=3).bfloat16()
    expected = closed_form_attention(*narrow, method=method)
    of_narrow = torch.autograd.grad(expected, narrow, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = closed_form_attention(*given, method=method)
        found = torch.autograd.grad(output, given, upstream)  # autocast is still on
    assert torch.equal(output, expected) and output.dtype == torch.bfloat16
    for mine, other in zip(found, of_narrow, strict=True):
        assert torch.equal(mine, other.float())


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_does_not_feel_autocast(several: bool) -> None:
    x, target = (gaussian(20, 4, seed=s, std=0.5).float() for s in (0, 1))
    weight, weight_v = (gaussian(4, 4, seed=s, std=0.5).float() for s in (2, 3))
    call = (x, weight, weight_v, target)
    settings = {"scale": None, "method": sb.Polynomial(2), "is_causal": several}
    expected = attention_loss_gradient(*call, **settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_loss_gradient(*call, **settings)
    for name in ("loss", "output", "weight_qk", "weight_v", "x"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.Exact()], ids=str)
def test_second_and_forward_derivatives_are_refused(method) -> None:
    q, k, v = (x.requires_grad_() for x in tokens())
    loss = closed_form_attention(q, k, v, method=method).square().sum()
    (slope,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(sb.SupportBasisError, match="no second derivatives"):
        slope.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(sb.SupportBasisError, match="no forward-mode derivatives"):
            closed_form_attention(dual, k, v, method=method)


def test_a_mask_of_pairs_runs_exactly_with_a_plan_too() -> None:
    q, k, v = tokens()
    mask = torch.ones(45, 45, dtype=torch.bool).tril(3)
    plan = sb.plan(q, k, v, method=sb.Polynomial(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    with pytest.warns(UserWarning, match="runs exactly"):
        output = closed_form_attention(q, k, v, mask, plan=plan)
    torch.testing.assert_close(output, expected, rtol=0, atol=CLOSE)


def test_it_is_not_the_gradient_of_the_function_that_ran() -> None:
    q, k, v = (x.requires_grad_() for x in tokens())
    plan = sb.plan(q, k, v, method=sb.Polynomial(2))
    one = torch.autograd.grad(sb.attention(q, k, v, plan=plan).square().sum(), [q])[0]
    two = torch.autograd.grad(closed_form_attention(q, k, v, plan=plan).square().sum(), [q])[0]
    assert float((one - two).norm() / two.norm()) > 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_of_several_heads_from_above(causal: bool) -> None:
    """With exact weights: autograd of the layer as it is written."""
    x, upstream = gaussian(30, 6, std=0.5), gaussian(2, 30, 3, seed=5)
    pair, weight_v = [gaussian(2, 6, 4, seed=s) for s in (1, 2)], gaussian(2, 6, 3, seed=3)
    found = attention_loss_gradient(
        x, pair, weight_v, upstream=upstream, scale=None, method=sb.Exact(), is_causal=causal
    )
    leaves = [y.clone().requires_grad_() for y in (x, *pair, weight_v)]
    q, k, v = (leaves[0] @ w for w in leaves[1:])
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    true = torch.autograd.grad(attended, leaves, upstream)
    for mine, other in zip(
        (found.x, found.weight_q, found.weight_k, found.weight_v), true, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=CLOSE)
    torch.testing.assert_close(found.output, attended, rtol=0, atol=CLOSE)
    assert found.loss is None and "from above" in str(found)
    with pytest.raises(sb.InputError, match="one head"):
        _ = found.error


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_one_head_with_a_target_is_the_same_both_ways(method) -> None:
    """The gradient of the loss from above is 2 (output - target): another algorithm for it."""
    x, weight, weight_v = gaussian(50, 5, std=0.4), gaussian(5, 5, seed=1, std=0.5), gaussian(5, 3)
    target = gaussian(50, 3, seed=4)
    one = attention_loss_gradient(x, weight, weight_v, target, scale=1.0, method=method)
    two = attention_loss_gradient(
        x, weight, weight_v, upstream=2 * (one.output - target), scale=1.0, method=method
    )
    for name in ("output", "weight_qk", "weight_v", "x"):
        torch.testing.assert_close(getattr(two, name), getattr(one, name), rtol=0, atol=CLOSE)


def test_layers_chain_by_the_closed_form() -> None:
    """Three layers with skips at degree 4: in every layer closer to the exact gradient by W_Q than
    the gradient of the function that ran, whose p' is one degree less accurate than p."""
    n, d, method = 64, 4, sb.Polynomial(4, polynomial="auto")
    x, target = gaussian(n, d, std=0.3), gaussian(n, d, seed=9)
    layers = [[gaussian(d, d, seed=3 * i + j, std=0.5) for j in range(3)] for i in range(3)]
    leaves = [[w.clone().requires_grad_() for w in layer] for layer in layers]

    def by_autograd(chosen) -> tuple[Tensor, ...]:
        y = x.unsqueeze(0)
        for layer in leaves:
            y = y + sb.attention(*(y @ w for w in layer), method=chosen)
        return torch.autograd.grad((y - target).square().sum(), [layer[0] for layer in leaves])

    inputs = [x]
    for layer in layers:
        output = sb.attention(*((inputs[-1] @ w).unsqueeze(0) for w in layer), method=method)
        inputs.append(inputs[-1] + output[0])
    above, closed = 2 * (inputs[-1] - target), []
    for tokens_in, (wq, wk, wv) in reversed(list(zip(inputs, layers, strict=False))):
        made = attention_loss_gradient(
            tokens_in, (wq, wk), wv, upstream=above, scale=None, method=method
        )
        closed.insert(0, made.weight_q)
        above = above + made.x
    exact, function = by_autograd(sb.Exact()), by_autograd(method)
    for mine, other, true in zip(closed, function, exact, strict=True):
        error, theirs = (float((y - true).norm() / true.norm()) for y in (mine, other))
        assert error < 0.4 * theirs < 0.1


def test_modules_offer_it() -> None:
    torch.manual_seed(0)
    model = sb.nn.SupportBasisEncoder(2, 8, 2, is_causal=True, gradient="closed-form",
                                      method=sb.Polynomial(2), num_key_heads=1)  # fmt: skip
    other = sb.nn.SupportBasisEncoder(2, 8, 2, is_causal=True, method=sb.Polynomial(2),
                                      num_key_heads=1)  # fmt: skip
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 20, 8)
    torch.testing.assert_close(model(x), other(x))
    grads = []
    for one in (model, other):
        one(x).square().sum().backward()
        grads.append(one.layers[0].attention.query_projection.weight.grad)
    assert float((grads[0] - grads[1]).norm()) > 1e-5 * float(grads[0].norm())
    with pytest.raises(sb.InputError, match="gradient must be one of"):
        sb.nn.SupportBasisAttention(8, 2, gradient="paper")
    with pytest.raises(sb.InputError, match="no dropout"):
        sb.nn.SupportBasisAttention(8, 2, gradient="closed-form", dropout=0.1)
    with pytest.raises(sb.InputError, match=r"method must be one of .* for gradient='closed-form'"):
        model.method = sb.BlockSupport(0.5)
    assert model.method == (sb.Polynomial(2),) * 2
    for options in ({}, {"tolerance": 0.1}, {"method": sb.BlockSupport(0.5)}):
        with pytest.raises(sb.InputError, match="method must be one of"):
            sb.nn.SupportBasisAttention(16, 2, gradient="closed-form", **options)


def test_what_is_refused() -> None:
    x, weight, target = gaussian(9, 3), gaussian(3, 3), gaussian(9, 3)
    settings = {"scale": None, "method": sb.Exact()}
    with pytest.raises(sb.InputError, match="neither is given"):
        attention_loss_gradient(x, weight, weight, **settings)
    with pytest.raises(sb.InputError, match="both are given"):
        attention_loss_gradient(x, weight, weight, target, upstream=target, **settings)
    with pytest.raises(sb.InputError, match=r"upstream has shape \(8, 3\)"):
        attention_loss_gradient(x, weight, weight, upstream=target[:8], **settings)
    with pytest.raises(sb.InputError, match="which disagree"):
        attention_loss_gradient(x, gaussian(3, 3, 3), gaussian(2, 3, 3), upstream=x, **settings)
    q = gaussian(1, 1, 9, 3)
    with pytest.raises(sb.InputError, match="a method or a plan"):
        closed_form_attention(q, q, q)
    with pytest.raises(sb.InputError, match=r"plan must be an sb.Plan"):
        closed_form_attention(q, q, q, plan=sb.Exact())
    with pytest.raises(sb.InputError, match="method must be one of"):
        closed_form_attention(q, q, q, plan=sb.plan(q, q, method=sb.BlockSupport(0.5)))
