"""Attention inside models of ours that call PyTorch's, and in its registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from host_cases import close


class Views(torch.nn.Module):
    """Images of a scene: attention within each, then over all tokens of all of them."""

    def __init__(self, layers: int = 2, heads: int = 2, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = heads * dim
        self.heads, self.layers = heads, layers
        self.maps = torch.nn.ModuleList(
            torch.nn.Linear(width, 3 * width) for _ in range(2 * layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [views, tokens, width]
        views = len(x)
        for number, maps in enumerate(self.maps):
            x = x if number % 2 == 0 else x.flatten(0, 1).unsqueeze(0)
            q, k, v = maps(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = (x + y).view(views, -1, y.shape[-1])
        return x


def test_attention_over_all_views_is_replaced_and_that_within_one_is_not() -> None:
    model, x = Views(), torch.randn(6, 50, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(x)
        with sb.integrations.sdpa.override(sb.Polynomial(1), min_tokens=100) as answers:
            other = model(x)
        with sb.integrations.sdpa.override(sb.Exact()) as every:
            close(exact, model(x))
    assert every.calls == 4
    assert (answers.approximated, answers.exact) == ({1: 1, 3: 1}, {0: 1, 2: 1})
    assert 0 < float((other - exact).norm() / exact.norm()) < 0.1


def test_the_innermost_override_answers_and_the_librarys_own_attention_is_not_overridden() -> None:
    """Neither by an override around another one, nor around calls of this library."""
    model, x = Views(), torch.randn(6, 50, 16, generator=torch.Generator().manual_seed(0))
    override = sb.integrations.sdpa.override
    q = torch.randn(1, 2, 111, 8, generator=torch.Generator().manual_seed(0))
    wanted = F.scaled_dot_product_attention(q, q, q)
    with torch.no_grad():
        exact = model(x)
        with override(sb.Polynomial(0)) as outer:
            with override(sb.Exact()) as inner:
                close(exact, model(x))
            with sb.models.use(model, sb.Exact()) as used:
                close(exact, model(x))
            assert (outer.calls, inner.calls, used.calls) == (0, 4, 4)
            close(wanted, sb.attention(q, q, q, method=sb.Exact()))
            close(wanted, sb.attention(q, q, q, plan=sb.plan(q, q, q, method=sb.Exact())))
            assert outer.calls == 0
            assert float((model(x) - exact).norm() / exact.norm()) > 1e-2
        assert outer.calls == 4


# ---- PyTorch's registry ----------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[Any]:
    found = torch.nn.attention
    if not hasattr(found, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of flash attention")
    yield found
    found.restore_flash_attention_impl(_raise_warn=False)


def test_flash_attention_of_pytorch_is_answered_while_it_is_active(registry: Any) -> None:
    model, x = Views(), torch.randn(6, 50, 16, generator=torch.Generator().manual_seed(0))
    method = sb.Polynomial(1)
    answers = sb.integrations.torch_flash.register(method=method, min_tokens=100)
    with torch.inference_mode():
        exact = model(x)
        registry.activate_flash_attention_impl("support_basis")
        found = model(x)
        assert answers.approximated.total() == 2  # over all views; within one PyTorch's kernel
        with sb.integrations.sdpa.override(method, min_tokens=100):
            close(model(x), found)
        registry.restore_flash_attention_impl()
        close(exact, model(x))
    assert answers.calls == 2
    assert float((found - exact).norm() / exact.norm()) > 1e-4


def test_flash_attention_of_pytorch_by_exact_attention_is_its_own(registry: Any) -> None:
    model, x = Views(), torch.randn(6, 50, 16, generator=torch.Generator().manual_seed(0))
    answers = sb.integrations.torch_flash.register(method=sb.Exact(), min_tokens=0)
    with torch.inference_mode():
        exact = model(x)
        registry.activate_flash_attention_impl("support_basis")
        close(exact, model(x))
    assert answers.calls == 4


def test_flash_attention_with_gradients_masks_or_dropout_is_pytorchs_own(registry: Any) -> None:
    answers = sb.integrations.torch_flash.register(method=sb.Polynomial(1), min_tokens=0)
    q, k, v = torch.randn(3, 1, 2, 111, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(1, 1, 1, 111, generator=torch.Generator().manual_seed(1)) > 0.3
    wanted = F.scaled_dot_product_attention(q, k, v, mask.expand(-1, -1, 111, -1))
    leaf = q.clone().requires_grad_()
    F.scaled_dot_product_attention(leaf, k, v).square().sum().backward()
    gradient, leaf.grad = leaf.grad, None
    registry.activate_flash_attention_impl("support_basis")
    close(wanted, F.scaled_dot_product_attention(q, k, v, mask.expand(-1, -1, 111, -1)))
    F.scaled_dot_product_attention(leaf, k, v).square().sum().backward()
    assert gradient is not None and leaf.grad is not None
    close(gradient, leaf.grad)

    def loss(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, k, v).square().sum()

    leaf.grad = None
    torch.compile(loss, backend="aot_eager")(leaf).backward()  # the operator sees no gradients
    assert leaf.grad is not None
    close(gradient, leaf.grad)
    close(gradient, torch.func.grad(loss)(q))
    with torch.random.fork_rng():
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert answers.calls == 0
    with torch.inference_mode():
        F.scaled_dot_product_attention(q, k, v)
    assert answers.calls == 1


def test_registrations_of_flash_attention_are_checked(registry: Any) -> None:
    with pytest.raises(sb.InputError, match="name must be"):
        sb.integrations.torch_flash.register("a b")
    with pytest.raises(sb.InputError, match=r"plan must be an sb\.Plan"):
        sb.integrations.torch_flash.register(plan=sb.ModelPlan((), "kl", 0.1, 0, 0.0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.nn.attention, "register_flash_attention_impl")
        with pytest.raises(sb.InputError, match="has no registry"):
            sb.integrations.torch_flash.register()
