"""Plans of whole models, and their evaluation."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from model_cases import TOKENS, Toy, texts, tiny_llama
from supportbasis.models import ladder, planning
from supportbasis.models.evaluation import CUE, LINE, evaluate, hidden_lines
from supportbasis.models.planning import upper_limit
from supportbasis.models.predictions import divergences
from supportbasis.plans import ExactHead, FittedHead, ListHead
from supportbasis.problem.validation import attention_problem


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is an option, however slow, at any length."""
    monkeypatch.setattr(ladder, "FASTER", 0.0)
    monkeypatch.setattr(ladder, "SHARES", (0.0, 0.05, 0.3))
    monkeypatch.setattr(ladder, "LEAST", 64)


# ---- plans of models -------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap")
def test_a_plan_keeps_to_its_limit_on_batches_that_it_has_not_seen(tmp_path: Path) -> None:
    model, batches = tiny_llama(), texts(4)
    plan = sb.models.plan(model, batches[:3], kl=0.01, progress=False)
    kinds = {head.kind for layer in plan.layers for head in layer.heads}
    assert kinds - {"exact"}
    assert plan.measured is not None
    assert plan.upper is not None
    assert plan.measured <= plan.upper <= 0.01
    assert plan.predicted == pytest.approx(sum(e for layer in plan.layers for e in layer.effects))
    with torch.no_grad():
        exact = model(batches[3]).logits
        with sb.models.use(model, plan, min_tokens=0) as answers:
            other = model(batches[3]).logits
    assert answers.approximated.total() > 0
    kl = float(divergences(exact, other).mean())
    assert 0 < kl <= 0.02
    again = sb.models.plan(model, batches[:3], kl=0.01, progress=False)
    plan.save(tmp_path / "one.json")
    again.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    loaded = sb.ModelPlan.load(tmp_path / "one.json")
    assert str(loaded) == str(plan)
    with torch.no_grad(), sb.models.use(model, loaded, min_tokens=0):
        assert torch.equal(model(batches[3]).logits, other)
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.usefixtures("cheap")
def test_only_the_plan_that_is_returned_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that were tried, and moved the prediction too far."""
    found = iter([(torch.full((2, 8), 9.0), "too far"), (torch.zeros(2, 8), "near enough")])

    def observed(*_: object) -> torch.Tensor:
        values, text = next(found)
        warnings.warn(text, UserWarning, stacklevel=1)
        return values.flatten()

    monkeypatch.setattr(planning, "_observations", observed)
    x = torch.randn(2, 700, 16, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = sb.models.plan(Toy(), list(x.split(1)), kl=0.1, progress=False)
    assert plan.measured == 0
    assert [str(each.message) for each in said] == ["near enough"]


@pytest.mark.usefixtures("cheap")
def test_a_plan_is_measured_also_where_its_layers_would_run_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches too short for the plan to be faster say how far it moves the prediction all the
    same."""
    monkeypatch.setattr(ladder, "min_tokens", lambda problem, heads: 2 * TOKENS)
    model, batches = tiny_llama(), texts(2, 700)
    plan = sb.models.plan(model, batches, kl=0.1, progress=False)
    with torch.no_grad():
        exact = model(batches[1]).logits
        with sb.models.use(model, plan, min_tokens=0):
            other = model(batches[1]).logits
    measured = float(divergences(exact, other).double().mean())
    assert plan.measured == pytest.approx(measured, rel=0.3)  # blocks of tokens weigh alike
    assert measured > 0


@pytest.mark.usefixtures("cheap")
def test_a_tiny_limit_leaves_every_head_exact_and_costs_nothing() -> None:
    model = tiny_llama()
    plan = sb.models.plan(model, texts(2), kl=1e-15, progress=False)
    heads = [head for layer in plan.layers for head in layer.heads]
    assert all(isinstance(head, ExactHead) for head in heads)
    assert plan.predicted == plan.measured == 0
    assert plan.cost == 1


@pytest.mark.usefixtures("cheap")
def test_models_without_logits_are_planned_by_the_change_of_their_output() -> None:
    model = Toy(False)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 700, 16, generator=generator) for _ in range(2)]
    plan = sb.models.plan(model, batches, change=0.1, minimise="cost", progress=False)
    assert plan.unit == "change"
    with torch.no_grad():
        exact = model(batches[0])
        with sb.models.use(model, plan, min_tokens=0):
            other = model(batches[0])
    change = float((other - exact).square().sum() / exact.square().sum())
    assert 0 < change <= 0.1
    assert plan.cost < 1
    with pytest.raises(sb.InputError, match="no logits; give change="):
        sb.models.plan(model, batches, kl=0.1, progress=False)


@pytest.mark.usefixtures("cheap")
def test_a_plan_holds_the_range_of_all_its_batches() -> None:
    """As of a denoiser, whose scores grow from step to step: no head leaves the range of its plan,
    which would be a warning, on batches that it was made from."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.weight * x, x, x)

    model, generator = Plain(), torch.Generator().manual_seed(0)
    place = torch.rand(2, 2, 1024, 2, generator=generator)
    x = torch.cos(3 * place @ torch.randn(2, 16, generator=generator))
    batches = [size * x for size in (0.7, 1.2, 1.0)]
    plan = sb.models.plan(model, batches, change=0.01, progress=False)
    assert {type(head) for head in plan.layers[0].heads} == {ListHead, FittedHead}
    with torch.no_grad(), sb.models.use(model, plan, min_tokens=0) as answers:
        for batch in batches:
            model(batch)
    assert answers.approximated.total() == 3


@pytest.mark.usefixtures("cheap")
def test_padding_of_batches_is_respected() -> None:
    model, (ids,) = tiny_llama(), texts(1, 700)
    ids = ids.expand(2, -1).clone()
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    plan = sb.models.plan(
        model, [{"input_ids": ids, "attention_mask": mask}], kl=0.05, progress=False
    )
    assert plan.upper is not None
    assert plan.upper <= 0.05


def test_what_a_plan_needs_is_said() -> None:
    model, batches = tiny_llama(), texts(1, 600)
    for given, message in (
        ({}, "one of kl and change"),
        ({"kl": 0.1, "change": 0.1}, "one of kl and change"),
        ({"kl": -1.0}, "kl must be a finite number > 0"),
        ({"kl": float("nan")}, "kl must be a finite number > 0"),
        ({"kl": 0.1, "minimise": "heat"}, "minimise must be one of"),
        ({"kl": 0.1, "samples": 0}, "samples must be an integer > 0"),
    ):
        with pytest.raises(sb.InputError, match=message):
            sb.models.plan(model, batches, **given, progress=False)
    for wrong, message in (
        ([], "batches is empty"),
        (batches[0], "put it in a list"),
        (["text"], "batches: each must be"),
        ([[1, 2, 3]], "got a list of numbers"),
        ([batches[0][0]], r"a tensor of shape \(600,\) on cpu; expected"),
        ([batches[0].to("meta")], r"a tensor of shape \(1, 600\) on meta"),
        (texts(1, 100), "the longest has 100 tokens"),
    ):
        with pytest.raises(sb.InputError, match=message):
            sb.models.plan(model, wrong, kl=0.1, progress=False)
    with pytest.raises(sb.InputError, match=r"must be a torch\.nn\.Module"):
        sb.models.plan("model", batches, kl=0.1, progress=False)


@pytest.mark.parametrize("unit", ["kl", "change"])
def test_outputs_that_are_no_numbers_are_refused(unit: str) -> None:
    model, batches = Toy(unit == "kl"), [torch.randn(1, 520, 16) for _ in range(2)]
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(sb.InputError, match="its output for a batch has NaN"):
        sb.models.plan(model, batches, **{unit: 0.1}, progress=False)


class Mixed(Toy):
    """Its queries and keys are wider than its values within autocast."""

    def forward(self, x: torch.Tensor) -> object:
        q, k, v = self.maps(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q.float(), k.float(), v, is_causal=True)
        return {"logits": self.head(y.transpose(1, 2).flatten(2))}


def test_a_model_is_planned_within_autocast() -> None:
    batches = [torch.randn(1, 520, 16) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        plan = sb.models.plan(Mixed(), batches, kl=0.1, samples=1, progress=False)
    assert plan.measured is not None


@pytest.mark.usefixtures("cheap")
def test_a_plan_of_another_model_is_refused() -> None:
    model, batches = tiny_llama(), texts(1, 600)
    plan = sb.models.plan(model, batches, kl=0.1, progress=False)
    for other, message in (
        (tiny_llama(heads=4), "another model"),
        (tiny_llama(layers=3), "another model"),
    ):
        with (
            torch.no_grad(),
            pytest.raises(sb.InputError, match=message),
            sb.models.use(other, plan),
        ):
            other(batches[0])
        assert other.config._attn_implementation == "sdpa"


def test_damaged_model_plans_are_refused(tmp_path: Path) -> None:
    plan = sb.models.plan(Toy(), [torch.randn(1, 600, 16)], kl=0.1, progress=False)
    path = tmp_path / "plan.json"
    plan.save(path)
    with pytest.raises(sb.InputError, match=r"is read by sb\.ModelPlan\.load"):
        sb.Plan.load(path)
    content = json.loads(path.read_text())
    for damage, message in (
        ({"format": "x"}, "no model plan of this version"),
        ({"unit": "metres"}, "damaged"),
        ({"layers": [{**content["layers"][0], "effects": []}]}, "damaged"),
        ({"layers": [{"name": "x"}]}, "damaged"),
        ({"more": 1}, "damaged"),
    ):
        path.write_text(json.dumps(content | damage))
        with pytest.raises(sb.InputError, match=message):
            sb.ModelPlan.load(path)


# ---- evaluation ------------------------------------------------------------------------------


def test_an_exact_plan_evaluates_to_nothing() -> None:
    model, batches = tiny_llama(), texts(2)
    plan = sb.models.plan(model, texts(1, 600), kl=1e-15, progress=False)
    found = evaluate(model, plan, batches, copies=1, progress=False)
    assert found.tokens == 2 * TOKENS
    assert found.kl == found.kl_tail == 0
    assert found.agreement == 1
    assert found.loss_exact == found.loss_planned
    labels = torch.cat([ids[0, 1:] for ids in batches])
    with torch.no_grad():
        logits = torch.cat([model(ids).logits[0, :-1] for ids in batches])
    assert found.loss_exact == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert [copy.distance for copy in found.copies] == [1024]
    assert found.copies[0].exact == found.copies[0].planned
    assert "copy from   1024" in str(found)
    for wrong in ([], [torch.zeros(1, 4)], ["text"]):
        with pytest.raises(sb.InputError, match="batches"):
            evaluate(model, plan, wrong, progress=False)


@pytest.mark.usefixtures("cheap")
def test_exact_predictions_are_exact_whatever_attention_a_model_is_set_to() -> None:
    model, batches = tiny_llama(), texts(2, 600)

    def seen() -> str:
        plan = sb.models.plan(model, batches, kl=0.05, progress=False)
        return f"{plan}\n{evaluate(model, plan, batches, progress=False)}"

    before = seen()
    sb.integrations.transformers.register("sb_rough", sb.Polynomial(0))
    model.set_attn_implementation("sb_rough")
    assert seen() == before


@pytest.mark.parametrize("tokens", [1600, 5000, 33000])
def test_hidden_lines_come_again_at_their_distance(tokens: int) -> None:
    ids = torch.arange(tokens).unsqueeze(0)
    text, spans = hidden_lines(ids, 0)
    assert text.shape == ids.shape
    assert spans
    for distance, first in spans.items():
        assert torch.equal(text[0, first : first + LINE], text[0, first - distance :][:LINE])
        assert first + LINE <= tokens
    assert 0 < CUE < LINE
    with pytest.raises(sb.InputError, match="too short"):
        hidden_lines(ids[:, :1000], 0)


def test_upper_limits_are_those_of_the_t_distribution() -> None:
    observed = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    mean, upper = upper_limit(observed)
    assert mean == 5.5
    wanted = 5.5 + 1.833 * float(observed.std()) / 10**0.5  # t of 9 degrees of freedom
    assert upper == pytest.approx(wanted, rel=1e-3)
    assert upper_limit(observed[:1]) == (1.0, 2.0)


def test_the_ladder_has_two_block_sizes_and_only_what_saves() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (x.cumsum(-2) * 0.01 for x in torch.randn(3, 1, 1, 8192, 16, generator=generator))
    problem = attention_problem(q, k, v, None, 0.0, True, None, False)
    (by_cost,), (by_time,) = (ladder.rungs(problem, x, 0) for x in ("cost", "time"))
    assert by_cost[0].kind == by_time[0].kind == "exact"
    assert {plan.lists.block for plan in by_cost[1:] if plan.kind == "lists"} == {32, 64}
    assert all(plan.cost < 1 for plan in by_cost[1:])
    assert all(plan.speedup > ladder.FASTER for plan in by_time[1:])
    assert len(by_cost) > len(by_time)  # more of them pay at the longest length
