"""Error, cost and time of all methods on heads of one layer.

Ours are run and timed on whole heads, with the plan given: everything else, sorting and selection,
is part of every call. All of them take turns with SDPA in one loop, so that a busy moment of the
machine hits all; the best time of each counts. Baselines are written to be compared, not to be
fast: their cost is counted, and their outputs are computed at the sampled rows alone.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from supportbasis import Plan, attention, methods
from supportbasis import plan as make_plan

from ..comparison.measure import exact_rows, sampled_rows
from ..progress import Tick
from .baselines import BASELINES, ORACLES, Case
from .heads import SYNTHETIC, Capture, stacked

ROWS = 512
OURS, BASELINE, ORACLE, FREE = "ours", "baseline", "oracle", "free"
LISTS, LISTS_WITHIN = "BlockSupport(budget)", "BlockSupport(tolerance)"
AUTO, FITTED = "Auto(tolerance)", "FittedPolynomial(tolerance)"
MEAN, EXACT = "mean(V)", "exact"
ROUNDING = 1e-9  # by which a cost may exceed its budget
TURN_SECONDS = 8.0  # for which the methods of a layer take turns
LEAST_ROUNDS, MOST_ROUNDS = 3, 20

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """One method at one setting on one head. A number that was not measured is None."""

    model: str
    layer: int
    head: str
    n: int
    d: int
    dtype: str
    causal: bool
    sigma: float  # standard deviation of the scores
    method: str
    kind: str  # ours, baseline, oracle, or free: the mean of V
    setting: float  # budget or tolerance
    cost: float  # multiply-adds relative to exact attention, everything counted
    error: float  # relative Frobenius error of the sampled rows against float64
    ran: str
    seconds: float | None = None  # of the best call, with all heads of the layer that are measured
    sdpa_seconds: float | None = None  # of the best call of SDPA with the same heads
    ratio: float | None = None  # sdpa_seconds / seconds: above 1 is faster
    together: int = 1  # heads in a call
    rounds: int = 0
    plan: str = ""  # what kind of plan the head has; "exact" where nothing else would do
    plan_seconds: float | None = None

    @property
    def name(self) -> str:
        return self.head if self.model == SYNTHETIC else f"{self.layer}.{self.head}"

    @property
    def is_within(self) -> bool:
        """Whether the cost is within the budget; a method that ran exactly instead is not."""
        return self.cost <= self.setting * (1 + ROUNDING)

    @property
    def is_exact(self) -> bool:
        return self.plan == EXACT

    @property
    def time(self) -> float:
        """Relative to SDPA; where it was not measured, the cost: as if work ran at SDPA's rate."""
        return self.cost if self.ratio is None else 1 / self.ratio


@dataclass(frozen=True, eq=False)
class Truth:
    """A head, sampled query rows and their exact output in float64."""

    head: Capture
    rows: Tensor
    output: Tensor

    @staticmethod
    def of(head: Capture, seed: int) -> Truth:
        rows = sampled_rows(head.n, ROWS, seed).to(head.query.device)
        tensors = (head.query, head.key, head.value)
        return Truth(head, rows, exact_rows(*tensors, rows, head.scale, head.is_causal))

    def error(self, output: Tensor) -> float:
        """Of an output at the rows, [rows, dv]."""
        return float((output.double() - self.output).norm() / self.output.norm())

    def row(
        self, method: str, kind: str, setting: float, cost: float, error: float, ran: str
    ) -> Row:
        head = self.head
        return Row(
            head.model, head.layer, head.head, head.n, head.d, str(head.query.dtype)[6:],
            head.is_causal, head.sigma, method, kind, setting, cost, error, ran,
        )  # fmt: skip


Tokens = tuple[Tensor, Tensor, Tensor]
Setting = tuple[str, float, methods.Method]


def our_settings(budgets: Sequence[float], tolerances: Sequence[float]) -> list[Setting]:
    """What is run of ours: name, budget or tolerance, method."""
    made: list[Setting] = [
        (LISTS, budget, methods.BlockSupport(budget=budget)) for budget in budgets
    ]
    for tolerance in tolerances:
        made += [
            (LISTS_WITHIN, tolerance, methods.BlockSupport(tolerance=tolerance)),
            (FITTED, tolerance, methods.FittedPolynomial(tolerance=tolerance)),
            (AUTO, tolerance, methods.Auto(tolerance)),
        ]
    return made


@torch.no_grad()
def measure_heads(
    heads: Sequence[Capture], budgets: Sequence[float], tolerances: Sequence[float], seed: int,
    tick: Tick,
) -> list[Row]:  # fmt: skip
    """The mean of V, every baseline and every setting of ours, on heads of one layer."""
    truths = [Truth.of(head, seed) for head in heads]
    rows = []
    for done, truth in enumerate(truths):
        rows += [_mean(truth), *_baselines(truth, budgets, seed)]
        tick((done + 1) / len(truths) / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors are what is measured here
        return rows + measure_ours(truths, our_settings(budgets, tolerances), tick)


# ---- ours ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """A plan, the call that follows it, and its error on each head."""

    name: str
    setting: float
    plan: Plan
    plan_seconds: float
    call: Call
    errors: list[float]

    @property
    def is_exact(self) -> bool:
        return all(head.kind == EXACT for head in self.plan.heads)


def measure_ours(truths: Sequence[Truth], settings: Sequence[Setting], tick: Tick) -> list[Row]:
    """Plans and first calls one after the other, then all in turns with SDPA."""
    tokens, causal = stacked([truth.head for truth in truths]), truths[0].head.is_causal
    runs = []
    for done, setting in enumerate(settings):
        runs.append(_run(setting, tokens, causal, truths))
        tick((1 + (done + 1) / len(settings)) / 3)
    exact = next((run for run in runs if run.is_exact), None)  # all of these do the same
    timed = [run for run in runs if not run.is_exact or run is exact]
    baseline = list(_sdpa_calls(*tokens, causal))
    best, rounds = in_turns([*baseline, *(run.call for run in timed)], tokens[0].device)
    sdpa = min(best[: len(baseline)])
    seconds = dict(zip(timed, best[len(baseline) :], strict=True))
    rows = []
    for run in runs:
        took = seconds[exact if exact is not None and run.is_exact else run]
        for truth, planned, error in zip(truths, run.plan.heads, run.errors, strict=True):
            ran = str(planned).splitlines()[0]
            row = truth.row(run.name, OURS, run.setting, planned.cost, error, ran)
            row = replace(row, plan=planned.kind, plan_seconds=run.plan_seconds)
            row = replace(row, seconds=took, sdpa_seconds=sdpa, ratio=sdpa / took)
            rows.append(replace(row, together=len(truths), rounds=rounds))
    tick(1.0)
    return rows


def _run(setting: Setting, tokens: Tokens, causal: bool, truths: Sequence[Truth]) -> Run:
    """Plan, and call once: on a GPU that compiles the kernels."""
    name, number, method = setting
    start = time.perf_counter()
    made = make_plan(*tokens, is_causal=causal, method=method)
    _wait(tokens[0].device)
    plan_seconds = time.perf_counter() - start
    call = partial(_attend, *tokens, causal, made)
    output = call()[0]
    errors = [truth.error(x[truth.rows]) for truth, x in zip(truths, output, strict=True)]
    return Run(name, number, made, plan_seconds, call, errors)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, plan: Plan) -> Tensor:
    output = attention(query, key, value, is_causal=causal, plan=plan)
    assert isinstance(output, Tensor)
    return output


def _sdpa_calls(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Iterator[Call]:
    """PyTorch's exact attention; on a GPU by every backend that takes these inputs."""

    def call() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    if not query.is_cuda:
        yield call
        return
    from ..gpu.measure import BACKENDS

    def by(backend: object) -> Tensor:
        with sdpa_kernel(backend):  # type: ignore[arg-type]
            return call()

    for backend in BACKENDS.values():
        try:
            by(backend)
        except RuntimeError:  # it does not take these inputs
            continue
        yield partial(by, backend)


def in_turns(calls: Sequence[Call], device: torch.device) -> tuple[list[float], int]:
    """The best time of each call that has run before, and the number of rounds."""
    best = [math.inf] * len(calls)
    start = time.perf_counter()
    for done in range(1, MOST_ROUNDS + 1):
        for index, call in enumerate(calls):
            _wait(device)
            before = time.perf_counter()
            call()
            _wait(device)
            best[index] = min(best[index], time.perf_counter() - before)
        if done >= LEAST_ROUNDS and time.perf_counter() - start > TURN_SECONDS:
            break
    return best, done


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- baselines -------------------------------------------------------------------------------


def _baselines(truth: Truth, budgets: Sequence[float], seed: int) -> Iterator[Row]:
    case = Case(truth.head.to(torch.float32), truth.rows)
    for name, method in (BASELINES | ORACLES).items():
        kind = BASELINE if name in BASELINES else ORACLE
        for budget in budgets:
            answer = method(case, budget, seed)
            if answer is not None:
                error = truth.error(answer.output)
                yield truth.row(name, kind, budget, answer.cost, error, answer.sizes)


def _mean(truth: Truth) -> Row:
    """What every method must beat."""
    head, value = truth.head, truth.head.value.double()
    if head.is_causal:
        output = value.cumsum(0)[truth.rows] / (truth.rows + 1).unsqueeze(1)
    else:
        output = value.mean(0).expand(len(truth.rows), -1)
    cost = head.m * head.dv / Case(head, truth.rows).exact_work
    return truth.row(MEAN, FREE, cost, cost, truth.error(output), "every weight equal")
