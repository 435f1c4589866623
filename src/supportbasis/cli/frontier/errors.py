"""Errors of all methods on one head at given budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ...api import attention
from ...api import plan as make_plan
from ...methods import BlockSupport
from ..measure import Tick
from .baselines import BASELINES, VARIANTS, Case
from .heads import Capture

ROWS, ROW_CHUNK = 256, 64
OURS, BASELINE, VARIANT, FREE = "ours", "baseline", "variant", "free"
NAME = "BlockSupport"
MEAN = "mean(V)"
ROUNDING = 1e-9  # by which a cost may exceed its budget


@dataclass(frozen=True)
class Row:
    """One method on one head at one budget."""

    model: str
    layer: int
    head: str
    n: int
    d: int
    causal: bool
    sigma: float  # standard deviation of the scores
    method: str
    kind: str  # ours, baseline, variant, or free: the mean of V
    budget: float
    cost: float  # multiply-adds relative to exact attention, everything counted
    error: float  # relative Frobenius error of the sampled rows
    keys: float  # a query
    seconds: float  # ours: of the plan and the attention; baselines: of the sampled rows
    ran: str

    @property
    def name(self) -> str:
        return self.head if self.model == "synthetic" else f"{self.layer}.{self.head}"

    @property
    def is_within(self) -> bool:
        """Whether the cost is within the budget; a method that ran exactly instead is not."""
        return self.cost <= self.budget * (1 + ROUNDING)

    def line(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Truth:
    """A head, sampled query rows and their exact output in float64."""

    head: Capture
    rows: Tensor
    output: Tensor

    @staticmethod
    def of(head: Capture, seed: int) -> Truth:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(head.n, generator=generator)[:ROWS].sort().values
        key, value = head.key.double() * head.scale, head.value.double()
        outputs = []
        for chunk in rows.split(ROW_CHUNK):
            score = head.query[chunk].double() @ key.T
            if head.is_causal:
                score.masked_fill_(torch.arange(head.m) > chunk.unsqueeze(1), -torch.inf)
            outputs.append(score.softmax(1) @ value)
        return Truth(head, rows, torch.cat(outputs))

    def error(self, output: Tensor) -> float:
        """Of an output at the rows, [rows, dv]."""
        return float((output.double() - self.output).norm() / self.output.norm())


def measure_head(
    head: Capture, budgets: Sequence[float], ours: Sequence[float], seed: int, tick: Tick
) -> list[Row]:
    """The mean of V, every baseline at ``budgets`` and our method at ``ours``."""
    truth = Truth.of(head, seed)
    rows = [] if head.is_causal else [_mean(truth), *_baselines(truth, budgets, seed)]
    for done, budget in enumerate(ours):
        rows.append(measure_ours(truth, budget))
        tick((done + 1) / len(ours))
    return rows


def measure_ours(truth: Truth, budget: float) -> Row:
    """Our method, planned and run on the whole head; errors are of the sampled rows."""
    head = truth.head
    start = time.perf_counter()
    with torch.no_grad():
        made = make_plan(*head.tensors, is_causal=head.is_causal, method=BlockSupport(budget))
        output = attention(*head.tensors, is_causal=head.is_causal, plan=made)
    seconds = time.perf_counter() - start
    assert isinstance(output, Tensor)
    error = truth.error(output[0, 0, truth.rows])
    first = made.heads[0]
    keys = float(head.m) if first.kind == "exact" else first.keys
    words = {"exact": f"exact: {first.reason}", "fitted": f"fitted: {first.fitted}"}
    ran = words.get(first.kind, "lists of keys")
    return _row(truth, NAME, OURS, budget, made.cost, error, keys, seconds, ran)


def _baselines(truth: Truth, budgets: Sequence[float], seed: int) -> list[Row]:
    case, rows = Case(truth.head, truth.rows), []
    for name, method in (BASELINES | VARIANTS).items():
        kind = BASELINE if name in BASELINES else VARIANT
        for budget in budgets:
            start = time.perf_counter()
            with torch.no_grad():
                answer = method(case, budget, seed)
            seconds = time.perf_counter() - start
            if answer is not None:
                error = truth.error(answer.output)
                numbers = (answer.cost, error, answer.keys, seconds, answer.sizes)
                rows.append(_row(truth, name, kind, budget, *numbers))
    return rows


def _mean(truth: Truth) -> Row:
    """What every method must beat."""
    head = truth.head
    error = truth.error(head.value.mean(0).expand(len(truth.rows), -1))
    cost = head.dv / (head.n * (head.d + head.dv))
    return _row(truth, MEAN, FREE, cost, cost, error, 1.0, 0.0, "every weight equal")


def _row(
    truth: Truth,
    method: str,
    kind: str,
    budget: float,
    cost: float,
    error: float,
    keys: float,
    seconds: float,
    ran: str,
) -> Row:
    head = truth.head
    return Row(
        head.model, head.layer, head.head, head.n, head.d, head.is_causal, head.sigma, method, kind,
        budget, cost, error, keys, seconds, ran,
    )  # fmt: skip
