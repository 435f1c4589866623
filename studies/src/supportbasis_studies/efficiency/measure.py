"""The units of the study: each is measured at once, in turns with SDPA, and kept as a whole."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from supportbasis import attention
from supportbasis import plan as make_plan
from supportbasis.methods import Method, SingleThreshold

from ..comparison.measure import (
    TURN_CALLS,
    TURN_SECONDS,
    TimedCall,
    describe,
    interleave,
    mean_value,
    sdpa,
    with_method,
)
from ..comparison.settings import Setting
from ..progress import Tick, part
from ..study import Records, Unit
from . import methods as made
from .inputs import EXPERIMENTS, PAPER_SIGMA, SCALES, Extent, harder_setting, paper_setting
from .rows import EfficiencyRow, Truth, exact_share

THRESHOLDS, MAP = "thresholds", "map"
Run = Callable[[Tick], list[EfficiencyRow]]


@dataclass(frozen=True)
class Common:
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
        common = Common(
            f"n={n}, scale {scale}, lines, seed {seed}", THRESHOLDS, seed, n, scale,
            PAPER_SIGMA * SCALES[scale] / SCALES[EXPERIMENTS], False,
        )  # fmt: skip
        yield common.unit, _lines(common, extent.budget)
        chosen = extent.thresholds
        for start in range(0, len(chosen), extent.together):
            some = chosen[start : start + extent.together]
            name = f"n={n}, scale {scale}, T={some[0]:g} to {some[-1]:g}, seed {seed}"
            yield name, _thresholds(replace(common, unit=name), some, extent.budget)


def _lines(common: Common, budget: float) -> Run:
    """Everything that does not depend on a threshold."""

    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = paper_setting(common.n, common.scale, common.seed)
        methods = made.line_methods(setting)
        plain = [made.naive(setting), mean_value(setting)]
        ours = [with_method(setting, *item) for item in methods.items()]
        return _race(common, setting, plain, ours, [None] * len(ours), budget, tick)

    return run


def _thresholds(common: Common, thresholds: Sequence[float], budget: float) -> Run:
    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = paper_setting(common.n, common.scale, common.seed)
        kinds = {made.SINGLE: "auto", made.SINGLE_CHEBYSHEV: "chebyshev"}
        ours = [
            with_method(
                setting, label, SingleThreshold(threshold, made.DEGREE, polynomial=polynomial)
            )
            for label, polynomial in kinds.items()
            for threshold in thresholds
        ]
        return _race(common, setting, [], ours, [*thresholds] * len(kinds), budget, tick)

    return run


def _race(
    common: Common,
    setting: Setting,
    plain: Sequence[TimedCall],
    ours: Sequence[TimedCall],
    thresholds: Sequence[float | None],
    budget: float,
    tick: Tick,
) -> list[EfficiencyRow]:
    """Time all timed_calls in turns with SDPA; then their plans and errors, untimed."""
    baseline = sdpa(setting)
    interleave([baseline, *plain, *ours], budget, part(tick, 0, 2), least=2)
    truth = Truth.of(setting, common.seed)
    rows = [_plain_row(common, timed_call, baseline, truth) for timed_call in [baseline, *plain]]
    if not plain:
        rows = []  # SDPA has a line of its own beside the other lines
    for index, (timed_call, threshold) in enumerate(zip(ours, thresholds, strict=True)):
        rows.append(_method_row(common, timed_call, threshold, baseline, truth))
        part(tick, 1, 2)((index + 1) / len(ours))
    return rows


def _plain_row(
    common: Common, timed_call: TimedCall, baseline: TimedCall, truth: Truth
) -> EfficiencyRow:
    is_mean = timed_call.label == made.MEAN
    return _row(
        common, timed_call, baseline, truth,
        matrix_error=truth.mean_error() if is_mean else None,
        exact_share=0.0 if is_mean else 1.0,
        cost=None if is_mean else 1.0,
        ran=timed_call.ran,
    )  # fmt: skip


def _method_row(
    common: Common,
    timed_call: TimedCall,
    threshold: float | None,
    baseline: TimedCall,
    truth: Truth,
) -> EfficiencyRow:
    assert timed_call.details is not None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = timed_call.details()
    (plan,) = result.plan.heads
    return _row(
        common, timed_call, baseline, truth,
        threshold=threshold,
        matrix_error=truth.matrix_error(plan),
        bound=float(result.certificate.bound.max()),
        exact_share=exact_share(plan),
        cost=plan.cost,
        ran=describe(result.plan),
    )  # fmt: skip


def _row(
    common: Common, timed_call: TimedCall, baseline: TimedCall, truth: Truth, **known: Any
) -> EfficiencyRow:
    if timed_call.output is not None:
        known["output_error"], known["max_error"] = truth.output.errors(timed_call.output)
        known["seconds"] = timed_call.seconds
        known["ratio"] = baseline.seconds / timed_call.seconds
    return EfficiencyRow(
        **asdict(common),
        d=truth.setting.dim,
        method=timed_call.label,
        sdpa_seconds=baseline.seconds,
        note="; ".join(dict.fromkeys(timed_call.notes)),
        **known,
    )


# ---- the map ---------------------------------------------------------------------------------


def _map_units(n: int, extent: Extent, seed: int) -> Iterator[tuple[str, Run]]:
    for sigma in extent.sigmas:
        for outliers in (False, True):
            kind = "with outliers" if outliers else "no outliers"
            name = f"map: n={n}, σ={sigma:g}, {kind}, seed {seed}"
            yield name, _map(Common(name, MAP, seed, n, EXPERIMENTS, sigma, outliers))


def _map(common: Common) -> Run:
    """Every method once on one of the harder inputs; a plan that cannot win is not run."""

    def run(tick: Tick) -> list[EfficiencyRow]:
        setting = harder_setting(common.n, common.sigma, common.outliers, common.seed)
        methods = made.map_methods()
        baseline, mean = sdpa(setting), mean_value(setting)
        with torch.no_grad():
            baseline.turn()
            mean.turn()
        truth = Truth.of(setting, common.seed)
        rows = [_plain_row(common, timed_call, baseline, truth) for timed_call in (baseline, mean)]
        for index, item in enumerate(methods.items()):
            rows.append(_map_row(common, setting, *item, baseline, truth))
            tick((index + 1) / len(methods))
        return rows

    return run


def _map_row(
    common: Common,
    setting: Setting,
    label: str,
    method: Method,
    baseline: TimedCall,
    truth: Truth,
) -> EfficiencyRow:
    tensors = (setting.query, setting.key, setting.value)
    plan, planning = _best(lambda: make_plan(*tensors, scale=setting.scale, method=method))
    (head,) = plan.heads
    timed_call = TimedCall(label, baseline.call)
    if head.kind == "exact":
        timed_call.output, timed_call.seconds = baseline.output, planning + baseline.seconds
    elif head.cost < 1:
        output, seconds = _best(lambda: attention(*tensors, scale=setting.scale, plan=plan))
        assert isinstance(output, Tensor)
        timed_call.output, timed_call.seconds = output, planning + seconds
    ran = describe(plan) if head.cost < 1 or head.kind == "exact" else "not run: costs more"
    return _row(
        common, timed_call, baseline, truth,
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
