"""Attention is replaced in the whole of a model or not at all, and by calls of PyTorch's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import supportbasis as sb
from supportbasis.integrations.replacing import has_interface
from transformer_cases import GROUPED, both, close, ids, model_plan, tiny

transformers = pytest.importorskip("transformers")


class OwnAttention(torch.nn.Module):
    """A model that attends in its own way: by PyTorch's attention, or by hand."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3
        self.by_hand, self.weight = by_hand, torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = (x @ self.weight).unflatten(-1, (2, 4)).transpose(1, 2)
            if self.by_hand:
                y = (q @ q.mT / 2).softmax(-1) @ q
            else:
                y = F.scaled_dot_product_attention(q, q, q)
            x = y.transpose(1, 2).flatten(2)
        return x


class Renamed(transformers.LlamaPreTrainedModel):
    """A model of transformers with code of its own, and no class named ...Attention."""

    def __init__(self, config: Any, by_hand: bool) -> None:
        super().__init__(config)
        self.block = OwnAttention(by_hand)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_replaced_attention_that_is_never_called_is_an_error(renamed: bool) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    x = torch.randn(1, 40, 8)
    for by_hand in (False, True):
        model = Renamed(config, by_hand) if renamed else OwnAttention(by_hand)
        assert not has_interface(model)
        with torch.no_grad(), sb.models.use(model, sb.Exact()) as answers:
            if by_hand:
                with pytest.raises(sb.InputError, match=r"no attention of \w+ arrived"):
                    model(x)
            else:
                close(model(x), model(x))
                assert answers.calls == 4


def test_the_models_own_attention_comes_back_after_an_exception() -> None:
    model = tiny("Llama")

    def fail() -> None:
        with sb.models.use(model, sb.Exact()):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    exact, other, _ = both(model, lambda: model(ids()).logits)  # and can be replaced again
    close(exact, other)


def test_a_model_is_replaced_once_at_a_time() -> None:
    model = tiny("Llama")
    with (
        sb.models.use(model, sb.Exact()),
        pytest.raises(sb.InputError, match="replaced already"),
        sb.models.use(model, sb.Exact()),
    ):
        pass
    with pytest.raises(sb.InputError, match=r"must be a torch\.nn\.Module"), sb.models.use(3):
        pass
    with (
        pytest.raises(sb.InputError, match="expected one"),
        sb.models.use(model, sb.Exact(), method=sb.Exact()),
    ):
        pass


def test_a_compiled_model_is_replaced_like_the_one_it_was_made_of() -> None:
    torch._dynamo.reset()
    model, x = OwnAttention(), torch.randn(1, 40, 8)
    compiled: Any = torch.compile(model, backend="eager")
    exact, other, answers = both(compiled, lambda: compiled(x))
    close(exact, other)
    assert answers.approximated == {0: 1, 1: 1}
    language = tiny("Llama")
    with sb.models.use(torch.compile(language), sb.Exact()) as answers, torch.no_grad():
        language(ids())
    assert answers.calls == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_modules_of_pytorch_are_replaced(recorded: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(recorded)
    x = torch.randn(2, 40, 16)
    with torch.set_grad_enabled(recorded):
        exact = model(x)
        with sb.models.use(model, sb.Exact()) as answers:
            close(exact.detach(), model(x).detach())
        with sb.models.use(model, sb.Polynomial(0)):
            assert not torch.allclose(exact, model(x), rtol=1e-4, atol=1e-4)
    assert answers.approximated == {0: 1, 1: 1}


class Checkpointed(torch.nn.Module):
    """Two layers, each computed again in the backward pass or not."""

    def __init__(self, again: bool, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(OwnAttention() for _ in range(2))
        self.again, self.reentrant = again, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.again:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = x + layer(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_attention_again(reentrant: bool) -> None:
    x = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for again in (False, True):
        model = Checkpointed(again, reentrant)
        with sb.models.use(model, sb.Polynomial(1)) as answers:
            model(x.clone().requires_grad_()).square().sum().backward()
        found.append(torch.stack([layer.weight.grad for layer in model.layers]))
    assert answers.calls == 8
    torch.testing.assert_close(*found)


def test_checkpoints_do_not_know_the_sites_of_a_plan() -> None:
    x = torch.randn(1, 40, 8, requires_grad=True)
    q = torch.randn(1, 2, 40, 4)
    plan = model_plan([sb.plan(q, q, q, method=sb.Polynomial(0))] * 4)
    for again in (False, True):
        model = Checkpointed(again)
        for replaced in (sb.models.use(model, plan), sb.integrations.sdpa.override(plan=plan)):
            with replaced:
                loss = model(x).square().sum()
                if again:
                    with pytest.raises(sb.InputError, match="computed again in a backward pass"):
                        loss.backward()
                else:
                    loss.backward()


# ---- sdpa.override ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "given"),
    [
        (((2, 4, 1, 8), (2, 4, 30, 8), (2, 4, 30, 8)), {"is_causal": True}),
        (((1, 4, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8)), {}),
        (((2, 1, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8)), {}),
        (((4, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8)), {}),
        (((2, 4, 20, 8), (2, 2, 30, 8), (2, 1, 30, 8)), {"enable_gqa": True}),
    ],
)  # fmt: skip
def test_broadcast_and_single_queries_are_answered_as_by_pytorch(
    shapes: tuple[tuple[int, ...], ...], given: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(shape, generator=generator) for shape in shapes]
    exact = F.scaled_dot_product_attention(*tokens, **given)
    with warnings.catch_warnings(), sb.integrations.sdpa.override(sb.Exact()) as answers:
        warnings.simplefilter("ignore")
        other = F.scaled_dot_product_attention(*tokens, **given)
    torch.testing.assert_close(exact, other)
    assert answers.calls == 1


def test_sites_are_numbered_by_their_order_in_a_forward_pass() -> None:
    torch.manual_seed(0)
    model, x = OwnAttention(), torch.randn(1, 40, 8)
    q = torch.randn(1, 2, 40, 4)
    mean, exact = (sb.plan(q, q, q, method=m) for m in (sb.Polynomial(0), sb.Exact()))
    plan = model_plan([mean, exact], ["call 0", "call 1"])
    with torch.no_grad(), sb.integrations.sdpa.override(plan=plan) as answers:
        model(x)
        model(x)
    assert (answers.approximated, answers.exact) == ({0: 2}, {1: 2})
    with (
        pytest.raises(sb.InputError, match="no multiple"),
        sb.integrations.sdpa.override(plan=plan),
    ):
        F.scaled_dot_product_attention(q, q, q)
    with pytest.raises(sb.InputError, match="was not called"), sb.integrations.sdpa.override():
        pass


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_shapes_and_masks_of_sdpa_are_answered(dims: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, *(2,) * (dims - 2), 20, 8, generator=generator)
    mask = torch.rand(20, 20, generator=generator) > 0.4
    key_mask = mask[:1].expand(*(1,) * (dims - 2), 1, 20)
    for given in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": key_mask},
                  {"scale": 0.3}, {"attn_mask": mask.float()}):  # fmt: skip
        exact = F.scaled_dot_product_attention(q, k, v, **given)
        with (
            warnings.catch_warnings(),
            sb.integrations.sdpa.override(sb.Exact()) as answers,
        ):
            warnings.simplefilter("ignore")
            other = F.scaled_dot_product_attention(q, k, v, **given)
        torch.testing.assert_close(exact, other)
        assert answers.calls == 1


def test_short_calls_are_exact_where_min_tokens_says_so() -> None:
    q = torch.randn(1, 2, 64, 8)
    for least, approximated in ((64, 1), (65, 0)):
        with sb.integrations.sdpa.override(sb.Polynomial(0), min_tokens=least) as answers:
            F.scaled_dot_product_attention(q, q, q)
        assert answers.approximated.total() == approximated


def test_dropout_runs_exactly_and_says_so() -> None:
    q = torch.randn(1, 2, 64, 8)
    with (
        pytest.warns(UserWarning, match="it has dropout"),
        sb.integrations.sdpa.override(sb.Polynomial(0)) as answers,
    ):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert answers.exact.total() == 1
