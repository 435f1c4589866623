"""Second part: what buckets buy in power, in sketch size and in time, on log-normal row scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from supportbasis import Plan, attention, plan
from supportbasis.methods import MultiThreshold
from supportbasis.plans import HeadPlan
from supportbasis.problem.problem import Head

from ..comparison.measure import TimedCall, sdpa
from ..comparison.settings import Setting
from ..progress import Tick
from ..statistics import Interval
from .dense import Exact, measure_errors
from .inputs import Extent, draw, only_head
from .variants import ALL_SKETCHED, AS_RUN, SHARED, Powers, all_sketched, one_power

DEGREE = 2
RATIOS = (math.inf, 4.0, 2.0, 1.5)
POWERS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one power without buckets
FACTORS = (1.0, 0.3)  # the entries as they are, and so small that sketches have a chance
WAYS = (AS_RUN, ALL_SKETCHED, SHARED)
SAMPLED_ROWS = 512
TARGETS = (0.5, 0.2, 0.1, 0.05)


@dataclass(frozen=True)
class PowerRow:
    """The output error of powers that are not sketched; ``chosen``: as the method makes them."""

    ratio: float
    chosen: bool
    seed: int
    powers: Powers
    output_l2: float


@dataclass(frozen=True)
class SketchRow:
    """The output error of sketched buckets, and the time of a call, planning included."""

    factor: float
    ratio: float
    way: str
    sketch_size: int
    seed: int
    powers: Powers
    output_l2: float
    failed_rows: float  # share of rows on which the sketches failed
    seconds: float
    sdpa_seconds: float
    mean_v: float  # the error of the mean of V on this input


@dataclass(frozen=True, eq=False)
class Case:
    """An input with its exact output, and some of its rows for dense float64 errors."""

    setting: Setting
    exact: Exact
    part: Head  # the sampled rows, all keys
    of_part: Exact

    @staticmethod
    def of(n: int, seed: int, factor: float = 1.0) -> Case:
        setting = draw("log-normal", n, seed, factor=factor)
        head = only_head(setting)
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:SAMPLED_ROWS]
        part = replace(head, query=head.query[rows])
        return Case(setting, Exact.of(head), part, Exact.of(part))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.setting.query, self.setting.key, self.setting.value

    def error(self, output: Tensor) -> float:
        """Relative l2 error of an output of all rows."""
        exact = self.exact.output
        return float((output.reshape(exact.shape).double() - exact).norm() / exact.norm())

    def run(self, plan: Plan) -> Tensor:
        output = attention(*self.tensors, plan=plan)
        assert isinstance(output, Tensor)
        return output


# ---- powers ----------------------------------------------------------------------------------


def measure_powers(extent: Extent, first_seed: int, tick: Tick) -> list[PowerRow]:
    """Buckets of each ratio with the powers they need, and one power of every size."""
    rows = []
    for repetition in range(extent.bought_seeds):
        seed = first_seed + repetition
        case = Case.of(extent.bought_length, seed)
        head = only_head(case.setting)
        plans = [(ratio, True, MultiThreshold(ratio, DEGREE).plan_head(head)) for ratio in RATIOS]
        plans += [(math.inf, False, one_power(head, DEGREE, power)) for power in POWERS]
        for ratio, chosen, made in plans:
            error = case.error(case.run(_whole(made, case)))
            rows.append(PowerRow(ratio, chosen, seed, Powers.of(made), error))
        tick((repetition + 1) / extent.bought_seeds)
    return rows


def _whole(head: HeadPlan, case: Case) -> Plan:
    return Plan(MultiThreshold(degree=DEGREE), case.setting.dim, (head,))


def equal_power(rows: Sequence[PowerRow], ratio: float) -> int | None:
    """The smallest power without buckets that is as accurate as buckets of this ratio."""
    target = Interval.of([row.output_l2 for row in rows if row.chosen and row.ratio == ratio]).mean
    for power in POWERS:
        errors = [r.output_l2 for r in rows if not r.chosen and r.powers.largest_power == power]
        if errors and Interval.of(errors).mean <= target:
            return power
    return None


# ---- sketches --------------------------------------------------------------------------------


def measure_sketches(extent: Extent, first_seed: int, tick: Tick) -> list[SketchRow]:
    """Every ratio, size and way of using sketches, with the time of each call."""
    rows: list[SketchRow] = []
    cases = [(factor, seed) for factor in FACTORS for seed in range(extent.bought_seeds)]
    for done, (factor, repetition) in enumerate(cases):
        case = Case.of(extent.bought_length, first_seed + repetition, factor)
        baseline = sdpa(case.setting)
        baseline.turn()
        lines = [(r, z, way) for z in extent.bought_sizes for r in RATIOS for way in WAYS]
        for index, (ratio, size, way) in enumerate(lines):
            rows.append(
                _sketch_row(case, baseline, factor, first_seed + repetition, ratio, size, way)
            )
            tick((done + (index + 1) / len(lines)) / len(cases))
    return rows


def _sketch_row(
    case: Case, baseline: TimedCall, factor: float, seed: int, ratio: float, size: int, way: str
) -> SketchRow:
    """One way, timed beside SDPA, which takes a turn now and then."""
    make = partial(_sketch_plan, case, ratio, size, way, seed)
    timed_call = TimedCall(way, lambda: case.run(make()))
    timed_call.run()
    baseline.run()
    assert timed_call.output is not None
    head = make().heads[0]
    sampled = measure_errors(case.part, head, case.of_part, fallback=way == AS_RUN)
    mean = case.setting.value.mean(-2, keepdim=True).expand_as(case.setting.value)
    return SketchRow(
        factor=factor,
        ratio=ratio,
        way=way,
        sketch_size=size,
        seed=seed,
        powers=Powers.of(head),
        # the library computes failed rows exactly: only then is its output what is asked for
        output_l2=case.error(timed_call.output) if way == AS_RUN else sampled.output[1],
        failed_rows=sampled.failed_rows,
        seconds=timed_call.seconds,
        sdpa_seconds=baseline.seconds,
        mean_v=case.error(mean),
    )


def _sketch_plan(case: Case, ratio: float, size: int, way: str, seed: int) -> Plan:
    """The plan of a way, made anew for each call."""
    method = MultiThreshold(ratio, DEGREE, size if way == AS_RUN else None, seed)
    whole = plan(*case.tensors, method=method)
    if way == AS_RUN:
        return whole
    return _whole(all_sketched(whole.heads[0], size, seed, share=way == SHARED), case)


@dataclass(frozen=True)
class Bought:
    """The smallest sketch with which a ratio reaches an error, and what it takes then."""

    factor: float
    way: str
    ratio: float
    target: float
    sketch_size: int | None  # None: not reached up to the largest size
    error: float | None  # of the worst seed
    seconds: float | None
    sdpa_seconds: float
    exact_share: float | None


def equal_error(rows: Sequence[SketchRow], targets: Sequence[float] = TARGETS) -> list[Bought]:
    """For each input, way, ratio and target: the smallest sketch that reaches it with all seeds."""
    keys = dict.fromkeys((row.factor, row.way, row.ratio) for row in rows)
    return [_smallest(rows, key, target) for key in keys for target in targets]


def _smallest(rows: Sequence[SketchRow], key: tuple[float, str, float], target: float) -> Bought:
    mine = [row for row in rows if (row.factor, row.way, row.ratio) == key]
    baseline = min(row.sdpa_seconds for row in rows if row.factor == key[0])
    for size in sorted({row.sketch_size for row in mine}):
        group = [row for row in mine if row.sketch_size == size]
        error = max(row.output_l2 for row in group)
        if error <= target:
            seconds = min(row.seconds for row in group)
            share = sum(row.powers.exact_share for row in group) / len(group)
            return Bought(*key, target, size, error, seconds, baseline, share)
    return Bought(*key, target, None, None, None, baseline, None)
