"""The units of the study: each is measured at once, in turns with SDPA, and kept as a whole."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from supportbasis.api import attention
from supportbasis.api import plan as make_plan
from supportbasis.cli.measure import (
    TURN_CALLS,
    TURN_SECONDS,
    Contender,
    Tick,
    describe,
    interleave,
    mean_value,
    part,
    sdpa,
    with_method,
)
from supportbasis.cli.settings import Setting
from supportbasis.methods import Method, SingleThreshold

from ..study import Records, Unit
from . import contenders as made
from .inputs import EXPERIMENTS, PAPER_SIGMA, SCALES, Extent, harder_setting, paper_setting
from .rows import EfficiencyRow, Truth, exact_share

THRESHOLDS, MAP = "thresholds", "map"
Run = Callable[[Tick], list[EfficiencyRow]]


@dataclass(frozen=True)
class Place:
    """What all rows of a unit have in common."""

    unit: str
    part: str
    seed: int
    n: int
    scale: str
    sigma: float
    outliers: bool


def units(records: Records[EfficiencyRow], extent: Extent, seed: int) -> list[Unit[EfficiencyRow]]:
    """All units, shortest first."""
    found = [item for n in extent.lengths for item in _paper_units(n, extent, seed)]
    found += [item for n in extent.map_lengths for item in _map_units(n, extent, seed)]
    return [Unit(name, records, run) for name, run in found]


# ---- the paper's setting ---------------------------------------------------------------------


def _paper_units(n: int, extent: Extent, seed: int) -> Iterator[tuple[str, Run]]:
    for scale in SCALES:
        place = Place(
            f"n={n}, scale {scale}, lines, seed {seed}", THRESHOLDS, seed, n, scale,
            PAPER_SIGMA * SCALES[scale] / SCALES[EXPERIMENTS], False,
        )  # fmt: skip
        yield place.unit, _lines(place, extent.budget)
        chosen = extent.thresholds
        for start in range(0, len(chosen), extent.together):
            some = chosen[start : start + extent.together]
            name = f"n={n}, scale {scale}, T={some[0]:g} to {some[-1]:g}, seed {seed}"
            yield name, _thresholds(replace(place, unit=name), some, extent.budget)


def _lines(place: Place, budget: float) -> Run:
    """Everything that does not depend on a threshold."""

    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = paper_setting(place.n, place.scale, place.seed)
        methods = made.line_methods(setting)
        plain = [made.naive(setting), mean_value(setting)]
        ours = [with_method(setting, *item) for item in methods.items()]
        return _race(place, setting, plain, ours, [None] * len(ours), budget, tick)

    return run


def _thresholds(place: Place, thresholds: Sequence[float], budget: float) -> Run:
    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = paper_setting(place.n, place.scale, place.seed)
        ours = [
            with_method(setting, made.SINGLE, SingleThreshold(threshold, made.DEGREE))
            for threshold in thresholds
        ]
        return _race(place, setting, [], ours, thresholds, budget, tick)

    return run


def _race(
    place: Place,
    setting: Setting,
    plain: Sequence[Contender],
    ours: Sequence[Contender],
    thresholds: Sequence[float | None],
    budget: float,
    tick: Tick,
) -> list[EfficiencyRow]:
    """Time all contenders in turns with SDPA; then their plans and errors, untimed."""
    baseline = sdpa(setting)
    interleave([baseline, *plain, *ours], budget, part(tick, 0, 2), least=2)
    truth = Truth.of(setting, place.seed)
    rows = [_plain_row(place, contender, baseline, truth) for contender in [baseline, *plain]]
    if not plain:
        rows = []  # SDPA has a line of its own beside the other lines
    for index, (contender, threshold) in enumerate(zip(ours, thresholds, strict=True)):
        rows.append(_method_row(place, contender, threshold, baseline, truth))
        part(tick, 1, 2)((index + 1) / len(ours))
    return rows


def _plain_row(
    place: Place, contender: Contender, baseline: Contender, truth: Truth
) -> EfficiencyRow:
    is_mean = contender.label == made.MEAN
    return _row(
        place, contender, baseline, truth,
        matrix_error=truth.mean_error() if is_mean else None,
        exact_share=0.0 if is_mean else 1.0,
        cost=None if is_mean else 1.0,
        ran=contender.ran,
    )  # fmt: skip


def _method_row(
    place: Place,
    contender: Contender,
    threshold: float | None,
    baseline: Contender,
    truth: Truth,
) -> EfficiencyRow:
    assert contender.details is not None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = contender.details()
    (plan,) = result.plan.heads
    return _row(
        place, contender, baseline, truth,
        threshold=threshold,
        matrix_error=truth.matrix_error(plan),
        bound=float(result.certificate.bound.max()),
        exact_share=exact_share(plan),
        cost=plan.cost,
        ran=describe(result.plan),
    )  # fmt: skip


def _row(
    place: Place,
    contender: Contender,
    baseline: Contender,
    truth: Truth,
    *,
    ran: str,
    threshold: float | None = None,
    matrix_error: float | None = None,
    bound: float | None = None,
    exact_share: float | None = None,
    cost: float | None = None,
) -> EfficiencyRow:
    has_run = contender.output is not None
    errors = (None, None) if contender.output is None else truth.output.errors(contender.output)
    return EfficiencyRow(
        unit=place.unit,
        part=place.part,
        seed=place.seed,
        n=place.n,
        d=truth.setting.dim,
        scale=place.scale,
        sigma=place.sigma,
        outliers=place.outliers,
        method=contender.label,
        threshold=threshold,
        seconds=contender.seconds if has_run else None,
        sdpa_seconds=baseline.seconds,
        ratio=baseline.seconds / contender.seconds if has_run else None,
        output_error=errors[0],
        matrix_error=matrix_error,
        max_error=errors[1],
        bound=bound,
        exact_share=exact_share,
        cost=cost,
        ran=ran,
        note="; ".join(dict.fromkeys(contender.notes)),
    )


# ---- the map ---------------------------------------------------------------------------------


def _map_units(n: int, extent: Extent, seed: int) -> Iterator[tuple[str, Run]]:
    for sigma in extent.sigmas:
        for outliers in (False, True):
            kind = "with outliers" if outliers else "no outliers"
            name = f"map: n={n}, σ={sigma:g}, {kind}, seed {seed}"
            yield name, _map(Place(name, MAP, seed, n, EXPERIMENTS, sigma, outliers))


def _map(place: Place) -> Run:
    """Every method once on one of the harder inputs; a plan that cannot win is not run."""

    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = harder_setting(place.n, place.sigma, place.outliers, place.seed)
        methods = made.map_methods()
        baseline, mean = sdpa(setting), mean_value(setting)
        with torch.no_grad():
            baseline.turn()
            mean.turn()
        truth = Truth.of(setting, place.seed)
        rows = [_plain_row(place, contender, baseline, truth) for contender in (baseline, mean)]
        for index, item in enumerate(methods.items()):
            rows.append(_map_row(place, setting, *item, baseline, truth))
            tick((index + 1) / len(methods))
        return rows

    return run


def _map_row(
    place: Place,
    setting: Setting,
    label: str,
    method: Method,
    baseline: Contender,
    truth: Truth,
) -> EfficiencyRow:
    tensors = (setting.query, setting.key, setting.value)
    plan, planning = _best(lambda: make_plan(*tensors, scale=setting.scale, method=method))
    (head,) = plan.heads
    contender = Contender(label, baseline.call)
    if head.kind == "exact":
        contender.output, contender.seconds = baseline.output, planning + baseline.seconds
    elif head.cost < 1:
        output, seconds = _best(lambda: attention(*tensors, scale=setting.scale, plan=plan))
        assert isinstance(output, Tensor)
        contender.output, contender.seconds = output, planning + seconds
    ran = describe(plan) if head.cost < 1 or head.kind == "exact" else "not run: costs more"
    return _row(
        place, contender, baseline, truth,
        matrix_error=truth.matrix_error(head),
        exact_share=exact_share(head),
        cost=head.cost,
        ran=ran,
    )  # fmt: skip


T = TypeVar("T")


@torch.no_grad()
def _best(call: Callable[[], T]) -> tuple[T, float]:
    """What a call gives and its seconds: the best of three where it is short."""
    best, start = math.inf, time.perf_counter()
    for _ in range(TURN_CALLS):
        before = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call()
        best = min(best, time.perf_counter() - before)
        if time.perf_counter() - start > TURN_SECONDS:
            break
    return result, best
