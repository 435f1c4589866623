"""Attention inside models of diffusers, of TabPFN, and of ours that call PyTorch's attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
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


def test_a_mask_of_two_dimensions_is_of_keys_or_of_queries_and_keys(diffusers: Any) -> None:
    """As diffusers' native backend reads it."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 50, 3, 8, generator=generator)
    for shape in ((2, 50), (50, 50)):
        mask = torch.rand(shape, generator=generator) > 0.3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one of them runs exactly
            native, found = (
                dispatch_attention_fn(q, k, v, attn_mask=mask, backend=name)
                for name in ("native", "support_basis")
            )
        close(native, found)


def test_a_model_whose_backend_is_ours_is_planned_and_used_like_any_other(diffusers: Any) -> None:
    """Planning asks for exact predictions, whatever answers the calls otherwise."""
    from supportbasis.models import ladder

    model, given = wan(diffusers)
    answers = sb.integrations.diffusers.register(method=sb.Polynomial(0), min_tokens=0)

    def made() -> sb.ModelPlan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ladder, "FASTER", 0.0)
            patch.setattr(ladder, "LEAST", 64)
            return sb.models.plan(model, [given] * 2, change=0.05, minimise="cost", progress=False)

    plan = made()
    assert plan.cost < 1
    with torch.no_grad():
        exact = model(**given).sample
        model.set_attention_backend("support_basis")
        with sb.models.use(model, sb.Exact()) as used:
            close(exact, model(**given).sample)
        assert used.calls == 4
        assert str(made()) == str(plan)
        assert answers.calls == 0
        assert float((exact - model(**given).sample).norm() / exact.norm()) > 1e-3
    assert answers.calls == 4


def test_the_largest_timestep_of_tokens_counts(diffusers: Any) -> None:
    """A model that continues a first frame is given 0 for its tokens."""
    model, given = wan(diffusers)
    given["timestep"] = torch.tensor([[0] * 64 + [900] * 128])
    ranges = {(0, 500): sb.Polynomial(0), (500, 1000): sb.Exact()}
    with torch.no_grad():
        native = model(**given).sample
        with sb.models.use(model, ranges, min_tokens=0):
            close(native, model(**given).sample)


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


def test_a_pipeline_samples_by_plans_of_its_timesteps(diffusers: Any) -> None:
    """Wan's pipeline, four steps with guidance: 2 forward passes of 4 calls each. Two ranges of
    timesteps have a plan of their own, the first step is dense."""
    from supportbasis.models import ladder

    model, _ = wan(diffusers)
    pipe = diffusers.WanPipeline(
        None, None, None, diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=model
    )
    pipe.set_progress_bar_config(disable=True)
    words = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1))

    def sample() -> torch.Tensor:
        return pipe(
            prompt_embeds=words, negative_prompt_embeds=-words, height=128, width=128,
            num_frames=9, num_inference_steps=4, guidance_scale=2.0, output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).frames  # fmt: skip

    with sb.integrations.diffusers.recorded(model) as batches:
        exact = sample()
    assert len(batches) == 8
    answers = sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    model.set_attention_backend("support_basis")
    close(exact, sample())
    assert answers.calls == 32
    model.set_attention_backend("native")
    plans = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "FASTER", 0.0)
        patch.setattr(ladder, "LEAST", 64)
        for low, high in [(0, 700), (700, 900)]:
            mine = [batch for batch in batches if low <= batch["timestep"].max() < high]
            assert len(mine) == (4 if low == 0 else 2)
            plans[low, high] = sb.models.plan(
                model, mine, change=0.05, minimise="cost", progress=False
            )
    assert str(plans[0, 700]) != str(plans[700, 900])
    with sb.models.use(model, {**plans, (900, 1000): sb.Exact()}, min_tokens=0) as used:
        other = sample()
    assert used.calls == 32
    rows = [not layer.plan.is_exact for layer in plans[0, 700].layers]
    early = [not layer.plan.is_exact for layer in plans[700, 900].layers]
    wanted = {site: 2 + 2 * early[site] + 4 * rows[site] for site in range(4)}
    assert used.approximated == wanted
    assert 0 < float((other - exact).square().sum() / exact.square().sum()) < 0.05


@pytest.mark.parametrize("name", ["flux", "hunyuan"])
def test_masks_and_joint_attention_reach_a_method(name: str, diffusers: Any) -> None:
    """Text and image attend together; Hunyuan masks words by a key mask."""
    model, given = MAKE[name](diffusers)
    answers = sb.integrations.diffusers.register(method=sb.Polynomial(6), min_tokens=0)
    with torch.no_grad():
        native = model(**given).sample
        model.set_attention_backend("support_basis")
        other = model(**given).sample
    assert answers.approximated.total() == CALLS[name]
    assert 0 < float((other - native).norm() / native.norm()) < 0.1


def test_scale_and_shared_keys_are_those_of_the_call(diffusers: Any) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 50, heads, 8, generator=generator) for heads in (4, 2))
    found = dispatch_attention_fn(q, k, k, scale=0.7, enable_gqa=True, backend="support_basis")
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, k)), scale=0.7, enable_gqa=True
    )
    close(wanted.transpose(1, 2), found)


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
def test_exact_attention_of_every_length_is_that_of_the_table_model(tabpfn: Any) -> None:
    """Every call of the model, within columns, within rows and over rows, by `Exact`."""
    from tabpfn.architectures.shared.attention_backends import recorded_attention_backends

    model, x = table_model(), torch.randn(90, 1, 5, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (70, 1), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        with recorded_attention_backends() as own:
            native = model(x, y)
        backend = sb.integrations.tabpfn.register(min_tokens=0, method=sb.Exact())
        with recorded_attention_backends() as ran:
            close(native, model(x, y))
        assert own == [None] * len(own)
        assert ran == [backend] * len(own)
        assert backend.calls == backend.exact == len(own) >= 6


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


@pytest.mark.parametrize(
    ("layers", "planned"),
    [
        ("abc", [3, 0, 0]),
        ("aaa", [1, 0, 0]),
        ("-ab", [3, 1, 0]),  # after the exact layer it is seen that the layers begin again
        ("--ab", [4, 2, 0]),
        ("a--b-", [5, 0, 0]),
        ("-a-b-", [5, 1, 0]),
        (24 * "-", [24, 24, 16, 0]),
        ("-" + "abcdefgh" * 2 + "-" * 7, [24, 1, 0]),
    ],
)
def test_plans_come_again_in_the_sequence_of_layers(layers: str, planned: list[int]) -> None:
    """Exact layers are "-"; a plan serves the layer that it was made for, an exact one any."""
    from supportbasis.integrations.tabpfn import Sequence

    kept, found = Sequence(), []
    for _ in planned:
        found.append(0)
        for layer in layers:
            number = kept.next()
            if number is not None and kept.plans[number].layer in ("-", layer):
                kept.served(number)
            else:
                kept.put(SimpleNamespace(layer=layer, is_exact=layer == "-"))  # type: ignore[arg-type]
                found[-1] += 1
    assert found == planned


def test_half_precision_and_one_shared_key_head_run(tabpfn: Any) -> None:
    """As TabPFN stores keys of in-context learning: fp16, all heads share one."""
    backend = sb.integrations.tabpfn.register(0.05, min_tokens=4096)
    q, k = (smooth(1, heads, 6000, 16, seed=heads).transpose(1, 2).half() for heads in (4, 1))
    with torch.no_grad():
        found = backend.run(q, k, k)
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, k)), enable_gqa=True
    ).transpose(1, 2)
    assert found.dtype == torch.float16
    assert backend.planned == 1
    assert backend.exact == 0
    assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.06


def test_calls_that_would_not_pay_are_declined(tabpfn: Any) -> None:
    from tabpfn.architectures.shared.attention_backends import (
        AttentionSpec,
        register_attention_backend,
        registered_attention_backends,
        unregister_attention_backend,
    )
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    taken = SimpleNamespace(name="taken", is_preferred=lambda spec: False)
    register_attention_backend(taken)  # type: ignore[arg-type]
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
    with sb.integrations.sdpa.override(sb.Exact()) as answers:
        assert not backend.is_preferred(AttentionSpec(**plain))
        scaled_dot_product_attention(*(3 * [torch.randn(1, 128, 4, 16)]))
    assert (answers.calls, backend.calls) == (1, 0)
    for message, given in (
        ("min_tokens must be", {"min_tokens": -1}),
        ("tolerance must be", {"tolerance": 0.0}),
        ("method must be", {"method": "exact"}),
        ("has a backend 'taken' already", {"name": "taken"}),
    ):
        with pytest.raises(sb.InputError, match=message):
            sb.integrations.tabpfn.register(**given)
    assert registered_attention_backends()[:2] == (backend, taken)
    unregister_attention_backend("taken")


def test_compiled_calls_are_left_to_the_table_model(tabpfn: Any) -> None:
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    backend = sb.integrations.tabpfn.register(min_tokens=0, method=sb.Exact())
    x = torch.randn(1, 128, 4, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(x, x, x), scaled_dot_product_attention(x, x, x))
    assert backend.calls == 1


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
        with sb.integrations.sdpa.override(sb.Exact()) as every:
            close(exact, model(x))
    assert every.calls == 4
    assert (answers.approximated, answers.exact) == ({1: 1, 3: 1}, {0: 1, 2: 1})
    assert 0 < float((other - exact).norm() / exact.norm()) < 0.1


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
