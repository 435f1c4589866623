"""Attention inside models of diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from host_cases import close


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


def test_calls_of_a_compiled_model_are_counted_in_every_pass(diffusers: Any) -> None:
    """Also those that are exact, whose own attention must not come as another call."""
    from supportbasis.plans import LayerPlan

    torch._dynamo.reset()
    model, given = wan(diffusers)
    layers = []
    for site, method in enumerate(2 * (sb.Polynomial(0), sb.Exact())):
        tokens = torch.randn(3, 1, 2, 192, 32, generator=torch.Generator().manual_seed(site))
        plan = sb.plan(*tokens, method=method)
        layers.append(LayerPlan(f"call {site}", plan, (0.0, 0.0), 0))
    plan = sb.ModelPlan(tuple(layers), "change", 0.1, 192, 0.0)
    with torch.no_grad():
        with sb.models.use(model, plan):
            wanted = model(**given).sample
        compiled = torch.compile(model, backend="eager")
        with sb.models.use(compiled, plan) as answers:
            for passes in (1, 2):
                close(wanted, compiled(**given).sample)
                assert answers.approximated == {0: passes, 2: passes}
                assert answers.exact == {1: passes, 3: passes}


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


@pytest.mark.parametrize("shape", [(2, 1, 1, 50), (50, 50), (1, 3, 50, 50), (2, 50)])
@pytest.mark.parametrize("is_bias", [False, True])
def test_a_call_with_any_mask_has_its_log_sum_exp(
    shape: tuple[int, ...], is_bias: bool, diffusers: Any
) -> None:
    """Masks that no method takes run exactly, as without `return_lse`."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    answers = sb.integrations.diffusers.register(method=sb.Exact(), min_tokens=0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 50, 3, 8, generator=generator)
    mask = torch.randn(shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some run exactly
        found, lse = dispatch_attention_fn(
            q, k, v, attn_mask=mask if is_bias else mask > 0, backend="support_basis",
            attention_kwargs={"return_lse": True},
        )  # fmt: skip
    whole = mask[:, None, None] if shape == (2, 50) else mask
    score = torch.einsum("bshd,bjhd->bhsj", q, k) / 8**0.5
    score = score + whole if is_bias else score.masked_fill(whole <= 0, -torch.inf)
    close(torch.einsum("bhsj,bjhd->bshd", score.softmax(-1), v), found)
    close(score.logsumexp(-1).transpose(1, 2), lse)
    assert answers.calls == 1


def test_names_of_diffusers_are_not_taken(diffusers: Any) -> None:
    with pytest.raises(sb.InputError, match="has a backend 'native' already"):
        sb.integrations.diffusers.register("native")
    for name in ("support basis", "SupportBasis"):  # models look for names in lower case
        with pytest.raises(sb.InputError, match="must be an identifier in lower case"):
            sb.integrations.diffusers.register(name)
    with (
        pytest.raises(sb.InputError, match="every must be"),
        sb.integrations.diffusers.recorded(torch.nn.Linear(2, 2), 0),
    ):
        pass
