"""Attention inside models of diffusers, of TabPFN, and of ours that call PyTorch's attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb


def smooth(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tokens [..., n, d] near a curve, which lists approximate well."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(*shape[:-1], 2, generator=generator)
    return torch.cos(3 * place @ torch.randn(2, shape[-1], generator=generator))


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    assert float(one.abs().max()) > 1e-3
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# ---- diffusers -------------------------------------------------------------------------------


@pytest.fixture
def diffusers() -> Iterator[Any]:
    """The package, its default backend restored afterwards."""
    found = pytest.importorskip("diffusers", minversion="0.36")
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    yield found
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def wan(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2,
    )  # fmt: skip
    return model.eval(), {
        "hidden_states": torch.randn(1, 4, 3, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, 16),
    }


def flux(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model.eval(), {
        "hidden_states": torch.randn(1, 64, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(64, 3),
        "txt_ids": torch.randn(8, 3),
    }


def hunyuan(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1,
        guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model.eval(), {
        "hidden_states": torch.randn(1, 4, 3, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "pooled_projections": torch.randn(1, 8),
        "encoder_attention_mask": torch.tensor([[1] * 9 + [0] * 3]),
        "guidance": torch.tensor([1000.0]),
    }


CALLS = {"wan": 4, "flux": 2, "hunyuan": 2}  # through diffusers' backends, a forward pass
MAKE = {"wan": wan, "flux": flux, "hunyuan": hunyuan}


@pytest.mark.parametrize("name", MAKE)
def test_exact_attention_is_the_native_backend(name: str, diffusers: Any) -> None:
    model, given = MAKE[name](diffusers)
    answers = sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    with torch.no_grad():
        native = model(**given).sample
        model.set_attention_backend("support_basis")
        close(native, model(**given).sample)
        assert answers.calls == CALLS[name]
        model.set_attention_backend("native")
        close(native, model(**given).sample)
    assert answers.calls == CALLS[name]


def test_cross_attention_and_short_calls_are_exact(diffusers: Any) -> None:
    """Of 192 tokens and 7 words, with a limit between them."""
    model, given = wan(diffusers)
    answers = sb.integrations.diffusers.register(method=sb.Polynomial(0), min_tokens=100)
    with torch.no_grad():
        native = model(**given).sample
        model.set_attention_backend("support_basis")
        other = model(**given).sample
    assert float((native - other).abs().max()) > 1e-4
    assert (answers.approximated, answers.exact) == ({0: 1, 2: 1}, {1: 1, 3: 1})


@pytest.mark.filterwarnings("ignore:supportbasis. heads")  # of a tiny model, at other timesteps
def test_a_denoiser_is_planned_and_its_first_steps_stay_dense(diffusers: Any) -> None:
    """From the inputs that a loop of steps gives it."""
    from supportbasis.models import ladder

    model, given = wan(diffusers)
    x = given.pop("hidden_states")

    def sample() -> torch.Tensor:
        y = x
        for step in (900, 600, 300, 0):
            y = y - 0.1 * model(y, **{**given, "timestep": torch.tensor([step])}).sample
        return y

    with torch.no_grad(), sb.integrations.diffusers.recorded(model) as batches:
        exact = sample()
    assert [int(batch["timestep"]) for batch in batches] == [900, 600, 300, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "FASTER", 0.0)
        patch.setattr(ladder, "LEAST", 64)
        plan = sb.models.plan(model, batches[1:], change=0.05, minimise="cost", progress=False)
    assert len(plan.layers) == 4
    assert plan.cost < 1
    chosen = {(0, 700): plan, (700, 1000): sb.Exact()}
    with torch.no_grad(), sb.models.use(model, chosen, min_tokens=0) as answers:
        other = sample()
    planned = sum(not layer.plan.is_exact for layer in plan.layers)
    assert answers.approximated.total() == 3 * planned + 4  # the dense step, by `Exact`
    change = float((other - exact).square().sum() / exact.square().sum())
    assert 0 < change < 0.05
    for wrong, message in (
        ({(800, 1000): plan}, "no range holds the timestep 600"),
        ({(1, 0): plan}, "no range of timesteps"),
        ({(0, 1000): "plan"}, "plan must be"),
    ):
        with (
            torch.no_grad(),
            pytest.raises(sb.InputError, match=message),
            sb.models.use(model, wrong),
        ):
            model(x, **{**given, "timestep": torch.tensor([600])})


def test_partial_results_are_merged_by_their_log_sum_exps(diffusers: Any) -> None:
    """As diffusers' ring does, [batch, tokens, heads]."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 50, 3, 8, generator=generator)
    parts = [
        dispatch_attention_fn(
            q, k[:, keys], v[:, keys], backend="support_basis",
            attention_kwargs={"return_lse": True},
        )
        for keys in (slice(0, 20), slice(20, 50))
    ]  # fmt: skip
    (one, one_lse), (two, two_lse) = parts
    assert one_lse.shape == (2, 50, 3)
    share = torch.sigmoid(one_lse - two_lse).unsqueeze(-1)
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    close(exact.transpose(1, 2), share * one + (1 - share) * two)
    mask = torch.rand(2, 50, generator=generator) > 0.3
    other = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="support_basis")
    exact = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask[:, None, None]
    )
    close(exact.transpose(1, 2), other)


def test_names_of_diffusers_are_not_taken(diffusers: Any) -> None:
    with pytest.raises(sb.InputError, match="has a backend 'native' already"):
        sb.integrations.diffusers.register("native")
    with pytest.raises(sb.InputError, match="must be an identifier"):
        sb.integrations.diffusers.register("support basis")
    with (
        pytest.raises(sb.InputError, match="every must be"),
        sb.integrations.diffusers.recorded(torch.nn.Linear(2, 2), 0),
    ):
        pass


# ---- TabPFN ----------------------------------------------------------------------------------


@pytest.fixture
def tabpfn() -> Iterator[Any]:
    found = pytest.importorskip("tabpfn", minversion="8.3")
    yield found
    sb.integrations.tabpfn.unregister()


def table_model() -> Any:
    from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config

    torch.manual_seed(0)
    config = TabPFNV3Config(
        max_num_classes=4, num_buckets=100, nlayers=3, embed_dim=64, icl_num_heads=4
    )
    model = TabPFNV3(config=config, task_type="multiclass", n_out=4).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if not bool(weight.any()):
                weight.normal_(0, 0.1)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning:tabpfn.*")
def test_a_table_model_predicts_the_same_with_exact_attention(tabpfn: Any) -> None:
    model, x = table_model(), torch.randn(600, 1, 5, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (512, 1), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        native = model(x, y)
        backend = sb.integrations.tabpfn.register(min_tokens=512)
        close(native, model(x, y))
        calls = backend.calls
        assert calls >= 3  # the layers of in-context learning
        assert backend.exact == calls  # too short for anything else
        model(x, y)
    assert backend.calls == 2 * calls


def test_plans_are_kept_in_the_order_of_layers_and_checked(tabpfn: Any) -> None:
    """Two layers in turn, then one that no plan serves."""
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    backend = sb.integrations.tabpfn.register(0.05, min_tokens=4096)
    layers = [smooth(1, 2, 6000, 16, seed=seed).transpose(1, 2) for seed in (0, 1)]
    layers[1] = 2 * layers[1]
    exact = [
        F.scaled_dot_product_attention(*(3 * [x.transpose(1, 2)])).transpose(1, 2) for x in layers
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for x, wanted in zip(layers, exact, strict=True):
                found = scaled_dot_product_attention(x, x, x)
                assert float((found - wanted).norm() / wanted.norm()) < 0.06
        assert backend.calls == 6
        assert backend.exact == 0
        assert backend.planned == 2
        other = torch.randn(1, 6000, 2, 16, generator=torch.Generator().manual_seed(0)) * 3
        found = scaled_dot_product_attention(other, other, other)
    wanted = F.scaled_dot_product_attention(*(3 * [other.transpose(1, 2)])).transpose(1, 2)
    assert float((found - wanted).norm() / wanted.norm()) < 0.06
    assert backend.planned == 3


def test_calls_that_would_not_pay_are_declined(tabpfn: Any) -> None:
    from tabpfn.architectures.shared.attention_backends import AttentionSpec

    backend = sb.integrations.tabpfn.register(min_tokens=100)
    plain = {
        "seq_len_q": 100, "seq_len_kv": 100, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16,
        "dtype": torch.float16, "device": torch.device("cpu"), "batch_size": 1,
    }  # fmt: skip
    assert backend.is_preferred(AttentionSpec(**plain))
    for changed in (
        {"seq_len_q": 99}, {"seq_len_kv": 99}, {"seq_len_kv": None}, {"head_dim": 512},
        {"quantized_kv_dtype": torch.int8}, {"is_grad_enabled": True},
    ):  # fmt: skip
        assert not backend.is_preferred(AttentionSpec(**{**plain, **changed}))
    with pytest.raises(sb.InputError, match="quantised cache"):
        backend.run(torch.zeros(1, 2, 1, 4), None, None)
    with pytest.raises(sb.InputError, match="min_tokens must be"):
        sb.integrations.tabpfn.register(min_tokens=-1)


# ---- many views ------------------------------------------------------------------------------


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
        with sb.integrations.sdpa.override(sb.Exact()):
            close(exact, model(x))
    assert (answers.approximated, answers.exact) == ({1: 1, 3: 1}, {0: 1, 2: 1})
    assert 0 < float((other - exact).norm() / exact.norm()) < 0.1
