"""Effects of heads on the prediction of a model, and allocation of settings."""

from __future__ import annotations

import itertools

import pytest
import torch

import supportbasis as sb
from model_cases import Toy, texts, tiny_llama
from supportbasis.integrations.calls import Call
from supportbasis.integrations.replacing import replaced
from supportbasis.models import effects, ladder
from supportbasis.models.allocation import Option, allocate
from supportbasis.models.predictions import divergences, sample_labels, visible


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is an option, however slow, at any length."""
    monkeypatch.setattr(ladder, "FASTER", 0.0)
    monkeypatch.setattr(ladder, "SHARES", (0.0, 0.05, 0.3))
    monkeypatch.setattr(ladder, "LEAST", 64)


def random_options(seed: int) -> list[list[Option]]:
    generator = torch.Generator().manual_seed(seed)
    heads = []
    for _ in range(4):
        drawn = torch.rand(3, 2, generator=generator).tolist()
        heads.append([Option(1.0, 0.0), *(Option(time, effect**3) for time, effect in drawn)])
    return heads


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [0.0, 1e-3, 0.1, 1.0, 10.0])
def test_allocation_is_within_the_limit_and_close_to_the_best(seed: int, limit: float) -> None:
    heads = random_options(seed)
    chosen = allocate(heads, limit)
    assert sum(x[i].effect for x, i in zip(heads, chosen, strict=True)) <= limit
    time = sum(x[i].time for x, i in zip(heads, chosen, strict=True))
    every = itertools.product(*(range(len(x)) for x in heads))
    pairs = [[x[i] for x, i in zip(heads, all_of, strict=True)] for all_of in every]
    best = min(
        sum(o.time for o in options) for options in pairs if sum(o.effect for o in options) <= limit
    )
    assert best <= time <= best + 1.0  # one head's time: the gap of a multiplier
    if limit in (0.0, 10.0):
        assert time == pytest.approx(best)


def test_infinite_effects_are_never_chosen() -> None:
    heads = [[Option(1.0, 0.0), Option(0.1, float("inf"))]]
    assert allocate(heads, 1e6) == [0]


# ---- effects ---------------------------------------------------------------------------------


def changed(model: torch.nn.Module, x: torch.Tensor, size: float) -> tuple[torch.Tensor, ...]:
    """Exact output of a model and of one whose heads' outputs are changed, and the change."""
    kept = {}

    def handler(call: Call) -> torch.Tensor:
        output = call.exact()
        generator = torch.Generator().manual_seed(3)
        scale = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)  # the second head changes three times
        kept["change"] = size * scale * torch.randn(output.shape, generator=generator)
        return output + kept["change"]

    with torch.no_grad():
        exact = model(x)
        with replaced(model, handler):
            other = model(x)
    return exact, other, kept["change"]


def test_predicted_divergence_is_the_measured_one() -> None:
    """To second order, with enough samples; heads add up, and the second has 9 times the effect."""
    model, x = Toy(), torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(0))
    exact, other, change = changed(model, x, 0.02)
    measured = float(divergences(exact["logits"], other["logits"]).double().mean())
    generator = torch.Generator().manual_seed(0)
    (found,) = effects.sensitivities(model, x, [0], "kl", generator, samples=100)
    predicted = found.effects(found.output + change)
    assert float(predicted.sum()) == pytest.approx(measured, rel=0.1)
    first, second = changed(model, x, 0.0)[2], predicted
    assert float(first.abs().max()) == 0.0
    assert float(second[1] / second[0]) == pytest.approx(9.0, rel=0.5)
    assert found.effects(found.output).tolist() == [0.0, 0.0]


def test_predicted_change_of_an_output_is_the_measured_one() -> None:
    model, x = Toy(False), torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(0))
    exact, other, change = changed(model, x, 0.02)
    measured = float((other - exact).square().sum() / exact.square().sum())
    generator = torch.Generator().manual_seed(0)
    (found,) = effects.sensitivities(model, x, [0], "change", generator, samples=100)
    assert float(found.effects(found.output + change).sum()) == pytest.approx(measured, rel=0.1)


def test_labels_follow_the_distribution_and_padding_does_not_count() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0]).expand(1, 20000, 3)
    labels = sample_labels(logits, torch.Generator().manual_seed(0))
    shares = labels.bincount(minlength=3) / 20000
    torch.testing.assert_close(shares, logits[0, 0].softmax(0), atol=0.015, rtol=0)  # 4 sigma
    mask = torch.tensor([[1, 1, 0]])
    assert visible(logits[:, :3], {"attention_mask": mask}).tolist() == [True, True, False]
    both = {"attention_mask": mask, "decoder_input_ids": mask}  # the mask is the encoder's
    assert visible(logits[:, :3], both).all()
    both["decoder_attention_mask"] = 1 - mask
    assert visible(logits[:, :3], both).tolist() == [False, False, True]


def test_classes_that_cannot_come_have_no_divergence() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    other = torch.tensor([[0.5, 1.0, -torch.inf]])
    torch.testing.assert_close(divergences(logits, other), divergences(logits[:, :2], other[:, :2]))


def test_a_frozen_model_is_restored() -> None:
    model = Toy().train()
    model.maps.weight.requires_grad_(False)
    seen = []

    def look() -> None:
        with effects.frozen(model):
            seen.extend([model.training, *(x.requires_grad for x in model.parameters())])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        look()
    assert not any(seen)
    assert model.training
    assert model.maps.bias.requires_grad
    assert not model.maps.weight.requires_grad


def test_gradient_checkpointing_is_used_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same gradients; layers are computed again for each of them; then all is as it was."""
    model, (ids,) = tiny_llama(), texts(1, 100)

    def found() -> list[effects.Sensitivity]:
        generator = torch.Generator().manual_seed(0)
        return list(effects.sensitivities(model, ids, [0, 1], "kl", generator, samples=2))

    plain, real, runs = found(), effects._sensitivities, []

    def short(*given: object, checkpoint: bool = False) -> list[effects.Sensitivity]:
        if not checkpoint:
            raise torch.OutOfMemoryError
        layer = model.model.layers[1]
        hook = layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
        try:
            return real(*given, checkpoint=True)
        finally:
            hook.remove()

    monkeypatch.setattr(effects, "_sensitivities", short)
    for mine, other in zip(plain, found(), strict=True):
        for one, two in zip(mine.gradients, other.gradients, strict=True):
            torch.testing.assert_close(one, two)
    assert len(runs) == 3  # forward, and in two backward passes
    assert not model.is_gradient_checkpointing
    assert not model.training
    with pytest.raises(sb.InputError, match="do not fit into the device's memory"):
        list(effects.sensitivities(Toy(), torch.zeros(1, 9, 16), [0], "kl", torch.Generator()))


def test_sites_are_grouped_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 8, 4)
    calls = [Call(i, "", x, x, x) for i in range(5)]
    monkeypatch.setattr(effects, "CPU_BYTES", 2 * 6 * x.numel() * 4)
    assert effects.groups(calls, 2) == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr(effects, "CPU_BYTES", 1)
    assert effects.groups(calls, 2) == [[0], [1], [2], [3], [4]]


def test_a_model_that_records_no_gradients_is_refused() -> None:
    class Frozen(Toy):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> object:
            return super().forward(x)

    x = torch.randn(1, 600, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(sb.InputError, match="Frozen records no gradients as it runs"):
        sb.models.plan(Frozen(), [x], kl=0.1, progress=False)
