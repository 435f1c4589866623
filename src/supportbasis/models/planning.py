"""`plan`: the cheapest attention of each head that keeps the prediction within a limit.

1. Run the model once to see which modules attend, and how.
2. For each module: the settings that its heads may get (`ladder`), and what each of them does to
   the prediction (`effects`), on the first batches.
3. Choose a setting for each head (`allocation`).
4. Run the model with the whole plan on the last batches; where it moves the prediction too far,
   choose again with a lower limit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..api import attention, autocast
from ..engine.ranges import widened
from ..errors import InputError
from ..integrations.calls import Call
from ..integrations.replacing import replaced
from ..plans import ExactHead, HeadPlan, LayerPlan, ModelPlan
from ..plans.cost import CALL_SECONDS, exact_seconds
from ..problem.problem import Problem
from ..problem.validation import attention_problem
from . import effects, ladder
from .allocation import Option, allocate, pays
from .predictions import Batch, check_batches, divergences, logits_of, output_of, run, visible
from .progress import Progress
from .use import use

ROUNDS = 8  # of verification, each with a lower limit
BLOCK = 256  # tokens whose divergences count as one observation
CONFIDENCE = 0.95
MARGIN = 0.5  # of the limit that a plan aims at: other texts move the prediction further
MINIMISE = ("cost", "time")


def plan(
    model: Any,
    batches: Iterable[Batch],
    *,
    kl: float | None = None,
    change: float | None = None,
    minimise: str = "cost",
    samples: int = effects.SAMPLES,
    seed: int = 0,
    progress: bool = True,
) -> ModelPlan:
    """Plan the attention of a whole model: how far may its prediction move?

    ``kl`` is the mean Kullback-Leibler divergence that is allowed between the distributions that
    the model predicts exactly and with the plan, in nats per token; of models without logits
    ``change`` is the allowed squared change of the output relative to its square. ``batches`` are
    inputs of the model (tensors, or dictionaries of its arguments), of the length that it will run
    at; every third of them, or the second of two, is held back to measure the whole plan (a single
    one is not). The plan is tightened until the upper limit of what is measured (95 % confidence)
    is below half of what is allowed: inputs unlike the batches move the prediction further.

    ``minimise`` is "cost", multiply-adds, or "time", predicted for this device and the batches'
    length. ``samples`` is the number of backward passes of a batch. The same seed gives the same
    plan, where measured speeds admit the same settings. A bar shows the progress if tqdm is
    installed.
    """
    unit, limit = _limit(kl, change)
    search = Search.of(
        model, batches, unit, minimise=minimise, samples=samples, seed=seed, progress=progress
    )
    return search.plan(limit)


def _limit(kl: float | None, change: float | None) -> tuple[str, float]:
    if (kl is None) == (change is None):
        raise InputError("one of kl and change is expected: how far the prediction may move")
    unit, limit = ("kl", kl) if change is None else ("change", change)
    good = isinstance(limit, float | int) and not isinstance(limit, bool)
    if not good or not 0 < limit < math.inf:  # type: ignore[operator]
        raise InputError(f"{unit} must be a finite number > 0, got {limit!r}")
    return unit, float(limit)  # type: ignore[arg-type]


def _calls(model: Any, batch: Batch) -> list[Call]:
    """The calls of attention in a forward pass."""
    found: list[Call] = []

    def watch(call: Call) -> Tensor:
        found.append(replace(call, own=None))
        return call.exact()

    with torch.no_grad(), replaced(model, watch), effects.frozen(model):
        run(model, batch)
    if max(call.n for call in found) < ladder.LEAST:
        raise InputError(
            f"batches: the longest has {max(call.n for call in found)} tokens; approximations pay "
            f"from some thousands on, and plans need {ladder.LEAST} at least"
        )
    return sorted(found, key=lambda call: call.site)


@dataclass(eq=False)
class Layer:
    """A site, the settings of its heads, and their effects."""

    name: str
    problem: Problem  # of the first batch
    settings: list[list[HeadPlan]]
    totals: list[Tensor] = field(default_factory=list)  # effect of each setting, summed
    batches: int = 0

    def options(self, minimise: str) -> list[list[Option]]:
        """What each head may get."""
        head = self.problem.head(0, 0)
        whole = exact_seconds(head) if minimise == "time" else float(head.pairs * head.dim)
        return [
            [
                Option(whole * _relative(plan, minimise), float(total) / max(1, self.batches))
                for plan, total in zip(plans, totals, strict=True)
            ]
            for plans, totals in zip(self.settings, self.totals, strict=True)
        ]

    def site(
        self, chosen: Sequence[int], options: Sequence[Sequence[Option]], minimise: str
    ) -> LayerPlan:
        if minimise == "time" and self.problem.query.is_cuda:
            times = [head[i].time for head, i in zip(options, chosen, strict=True)]
            if not pays(times, options[0][0].time, CALL_SECONDS / self.problem.batch):
                chosen = [0] * len(chosen)
        heads = [plans[i] for plans, i in zip(self.settings, chosen, strict=True)]
        plan = ladder.layer_plan(self.problem, heads)
        moved = tuple(head[i].effect for head, i in zip(options, chosen, strict=True))
        return LayerPlan(self.name, plan, moved, ladder.min_tokens(self.problem, heads))


def _relative(plan: HeadPlan, minimise: str) -> float:
    return 1 / plan.speedup if minimise == "time" else plan.cost


@dataclass(frozen=True, eq=False)
class Search:
    """Settings of all heads of a model and their effects: plans for any limit are chosen from
    them, each verified on the batches that were held back."""

    model: Any
    layers: list[Layer]
    unseen: Sequence[Batch]
    unit: str
    minimise: str

    @staticmethod
    def of(
        model: Any,
        batches: Iterable[Batch],
        unit: str,
        *,
        minimise: str = "cost",
        samples: int = effects.SAMPLES,
        seed: int = 0,
        progress: bool = True,
    ) -> Search:
        """Arguments as of `plan`; ``unit`` is "kl" or "change"."""
        if minimise not in MINIMISE:
            raise InputError(f"minimise must be one of {', '.join(MINIMISE)}, got {minimise!r}")
        if type(samples) is not int or samples < 1:
            raise InputError(f"samples must be an integer > 0, got {samples!r}")
        given = check_batches(batches)
        used, unseen = [x for at, x in enumerate(given) if at % 3 < 2], given[2::3]
        if not unseen:
            used, unseen = given[:1], given[-1:]
        calls = _calls(model, used[0])
        with Progress(progress, len(used) * len(calls)) as bar:
            layers = _layers(model, used, calls, unit, minimise, samples, seed, bar)
        return Search(model, layers, unseen, unit, minimise)

    def plan(self, limit: float) -> ModelPlan:
        """The cheapest plan that keeps the prediction within a limit."""
        found = _verified(self.model, self.layers, self.unseen, self.unit, limit, self.minimise)
        tokens = max(layer.problem.n for layer in self.layers)
        speedups = tuple((n, _speedup(self.layers, found, n)) for n in ladder.LENGTHS)
        name = type(self.model).__name__
        return replace(found, tokens=tokens, model=name, speedups=speedups)


def problem_of(call: Call) -> Problem:
    """A call as the engine sees it, to be planned for many others like it."""
    query, key, value = autocast(call.query, call.key, call.value)
    problem = attention_problem(
        query, key, value, call.attn_mask, 0.0, call.is_causal, call.scale, call.group > 1,
        finite=False,
    )  # fmt: skip
    return replace(problem, is_reused=True)


def _layers(
    model: Any,
    batches: Sequence[Batch],
    calls: Sequence[Call],
    unit: str,
    minimise: str,
    samples: int,
    seed: int,
    bar: Progress,
) -> list[Layer]:
    """Settings and effects of all sites."""
    layers: dict[int, Layer] = {}
    device = calls[0].query.device
    for number, batch in enumerate(batches):
        for sites in effects.groups(calls, samples):
            generator = torch.Generator(device).manual_seed(seed + number)
            found = effects.sensitivities(model, batch, sites, unit, generator, samples)
            for sensitivity in found:
                call = sensitivity.call
                bar.step(f"{call.name}, batch {number + 1}")
                layer = layers.get(call.site)
                if layer is None:
                    layer = layers[call.site] = _layer(call, minimise, seed)
                _add(layer, sensitivity)
    return [layers[call.site] for call in calls]


def _layer(call: Call, minimise: str, seed: int) -> Layer:
    problem = problem_of(call)
    if call.own is not None or call.reason or call.dropout:
        settings: list[list[HeadPlan]] = [
            [ExactHead(reason=call.reason or "dropout", n=call.n, m=call.m)]
            for _ in range(problem.heads)
        ]
    else:
        settings = ladder.rungs(problem, minimise, seed)
    totals = [torch.zeros(len(plans), dtype=torch.float64) for plans in settings]
    return Layer(call.name, problem, settings, totals)


@torch.no_grad()
def _add(layer: Layer, sensitivity: effects.Sensitivity) -> None:
    """Add the effects of all settings on one batch, each on the heads that have it."""
    call, problem = sensitivity.call, problem_of(sensitivity.call)
    _widen(layer, problem)
    most = max(len(plans) for plans in layer.settings)
    for i in range(1, most):
        heads = [h for h, plans in enumerate(layer.settings) if i < len(plans)]
        plan = ladder.layer_plan(problem, [layer.settings[h][i] for h in heads])
        key, value, grouped = call.key, call.value, call.group > 1
        if len(heads) < problem.heads:
            shared = [h // call.group for h in heads]
            key, value, grouped = key[:, shared], value[:, shared], False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that do not suit this head
            output = attention(
                call.query[:, heads], key, value, call.attn_mask, 0.0, call.is_causal, call.scale,
                grouped, plan=plan,
            )  # fmt: skip
        for h, effect in zip(heads, sensitivity.effects(output, heads).tolist(), strict=True):
            layer.totals[h][i] += effect if math.isfinite(effect) else math.inf
    layer.batches += 1


def _widen(layer: Layer, problem: Problem) -> None:
    """Settings whose ranges hold the scores of one more batch: another timestep of a denoiser may
    have larger ones. Polynomials that are not certified for them are no option."""
    for number, (plans, totals) in enumerate(zip(layer.settings, layer.totals, strict=True)):
        heads = [problem.head(b, number) for b in range(problem.batch)]
        for i, plan in enumerate(plans):
            wide = widened(plan, heads)
            plans[i], totals[i] = wide or plan, totals[i] if wide else math.inf


def _verified(
    model: Any,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
    unit: str,
    limit: float,
    minimise: str,
) -> ModelPlan:
    """The plan whose measured effect, at its upper limit, is allowed."""
    options = [layer.options(minimise) for layer in layers]
    with replaced(model, Call.exact):  # whatever its attention is set to
        exact = [_predictions(model, batch, unit) for batch in batches]
    allowed = aim = MARGIN * limit
    for _ in range(ROUNDS):
        made = _allocated(layers, options, unit, limit, allowed, minimise)
        with (
            warnings.catch_warnings(record=True) as said,
            use(model, made, min_tokens=0),  # too short to be faster is not too short to err
        ):
            observed = torch.cat([
                _observations(model, batch, unit, before)
                for batch, before in zip(batches, exact, strict=True)
            ])  # fmt: skip
        mean, upper = upper_limit(observed)
        made = replace(made, measured=mean, upper=upper)
        if upper <= aim or not made.predicted:
            for warning in said:  # not those of plans that did not keep to the limit
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            return made
        allowed *= min(0.9, 0.97 * aim / upper)
    made = _allocated(layers, options, unit, limit, 0.0, minimise)
    return replace(made, measured=0.0, upper=0.0)


def _allocated(
    layers: Sequence[Layer],
    options: Sequence[Sequence[Sequence[Option]]],
    unit: str,
    limit: float,
    allowed: float,
    minimise: str,
) -> ModelPlan:
    chosen = iter(allocate([head for layer in options for head in layer], allowed))
    made = tuple(
        layer.site([next(chosen) for _ in layer.settings], mine, minimise)
        for layer, mine in zip(layers, options, strict=True)
    )
    return ModelPlan(made, unit, limit, 0, sum(sum(layer.effects) for layer in made))


@torch.no_grad()
def _predictions(model: Any, batch: Batch, unit: str) -> Tensor:
    with effects.frozen(model):
        output = run(model, batch)
    logits = logits_of(output) if unit == "kl" else None
    return output_of(output) if logits is None else logits


@torch.no_grad()
def _observations(model: Any, batch: Batch, unit: str, exact: Tensor) -> Tensor:
    """Mean divergence of blocks of tokens; of models without logits the relative squared change of
    each element of the batch."""
    other = _predictions(model, batch, unit)
    if unit == "kl":
        found = divergences(exact, other)[visible(exact, batch)]
        blocks = found.split(BLOCK)
        return torch.stack([block.double().mean() for block in blocks]).cpu()
    wrong = (other.double() - exact.double()).flatten(1).square().sum(1)
    return (wrong / exact.double().flatten(1).square().sum(1).clamp(min=1e-300)).cpu()


def upper_limit(observed: Tensor, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Mean of observations, and its upper limit by a t-distribution (in Fisher's expansion)."""
    mean, count = float(observed.mean()), len(observed)
    if count < 2:
        return mean, 2 * mean
    z, degrees = NormalDist().inv_cdf(confidence), count - 1
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return mean, mean + t * float(observed.std()) / math.sqrt(count)


def _speedup(layers: Sequence[Layer], made: ModelPlan, tokens: int) -> float:
    """Predicted for all attention, with so many tokens."""
    times = [1 / ladder.speedup_at(layer.problem, site.heads, tokens)
             for layer, site in zip(layers, made.layers, strict=True)]  # fmt: skip
    return len(times) / sum(times)
