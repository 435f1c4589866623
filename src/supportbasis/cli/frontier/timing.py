"""What `Auto` makes of each head, and how long its plan takes beside PyTorch's exact attention."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...api import attention
from ...api import plan as make_plan
from ...methods import Auto
from ...plans import Plan
from ..intervals import log_slope
from ..measure import Contender, Tick
from .errors import Truth
from .heads import SYNTHETIC, Capture, Source

TOLERANCE, SYNTHETIC_TOLERANCE = 0.02, 0.05
PROMISED = (0.01, 0.03, 0.1)  # tolerances that every head is held to
TURN_SECONDS = 4.0  # for which the contenders of a head take turns
LEAST_ROUNDS, MOST_ROUNDS = 2, 10


@dataclass(frozen=True)
class AutoRow:
    """One head under `Auto`. Times are the best of ``rounds`` calls with a saved and loaded plan,
    trees and selection included; a number that was not measured is None."""

    model: str
    layer: int
    head: str
    n: int
    d: int
    sigma: float
    tolerance: float
    kind: str  # of the plan
    reason: str  # why it is exact
    cost: float
    keys: float | None  # a query, of lists; features of a fitted polynomial
    predicted: float  # speed-up
    plan_seconds: float
    error: float
    seconds: float | None
    sdpa_seconds: float | None
    rounds: int

    @property
    def name(self) -> str:
        return self.head if self.model == SYNTHETIC else f"{self.layer}.{self.head}"

    @property
    def speedup(self) -> float | None:
        if self.seconds is None or self.sdpa_seconds is None:
            return None
        return self.sdpa_seconds / self.seconds

    def line(self) -> dict[str, object]:
        return asdict(self) | {"speedup": self.speedup}


def tolerance_of(model: str) -> float:
    return SYNTHETIC_TOLERANCE if model == SYNTHETIC else TOLERANCE


def measure_source(source: Source, seed: int, race: Race | None, tick: Tick) -> Iterator[AutoRow]:
    """Every head of a source; without a race nothing is timed."""
    for done, head in enumerate(source.make()):
        yield measure_auto(head, seed, race)
        tick((done + 1) / source.count)


Race = Callable[[Contender, Contender], int]  # lets ours and SDPA run, returns the rounds


@torch.no_grad()
def measure_auto(
    head: Capture, seed: int, race: Race | None = None, tolerance: float | None = None
) -> AutoRow:
    """Plan a head, save and load the plan, run it, and time it where it is not exact."""
    tolerance = tolerance_of(head.model) if tolerance is None else tolerance
    start = time.perf_counter()
    made = make_plan(*head.tensors, is_causal=head.is_causal, method=Auto(tolerance))
    plan_seconds = time.perf_counter() - start
    first = made.heads[0]
    ours = Contender("Auto", partial(_attend, head, _through_a_file(made)))
    baseline = Contender("SDPA", partial(_sdpa, head))
    rounds = 0
    if race is not None and first.kind != "exact":
        rounds = race(ours, baseline)
    output = ours.call() if ours.output is None else ours.output
    truth = Truth.of(head, seed)
    return AutoRow(
        head.model,
        head.layer,
        head.head,
        head.n,
        head.d,
        head.sigma,
        tolerance,
        first.kind,
        first.reason,
        made.cost,
        first.keys if first.kind in ("block", "fitted") else None,
        made.speedup,
        plan_seconds,
        truth.error(output[0, 0, truth.rows]),
        _seconds(ours),
        _seconds(baseline),
        rounds,
    )


def _seconds(contender: Contender) -> float | None:
    return None if contender.output is None else contender.seconds


def in_turns(ours: Contender, baseline: Contender) -> int:
    """Both in one loop, so that a busy moment of the machine hits both."""
    start = time.perf_counter()
    for done in range(1, MOST_ROUNDS + 1):
        ours.run()
        baseline.run()
        if done >= LEAST_ROUNDS and time.perf_counter() - start > TURN_SECONDS:
            break
    return done


def alone(ours: Contender, baseline: Contender) -> int:
    """Ours only: for lengths at which exact attention would take minutes."""
    for _ in range(LEAST_ROUNDS + 1):
        ours.run()
    return LEAST_ROUNDS + 1


def _attend(head: Capture, plan: Plan) -> Tensor:
    output = attention(*head.tensors, is_causal=head.is_causal, plan=plan)
    assert isinstance(output, Tensor)
    return output


def _sdpa(head: Capture) -> Tensor:
    return F.scaled_dot_product_attention(*head.tensors, is_causal=head.is_causal)


def _through_a_file(plan: Plan) -> Plan:
    """What a user has who planned yesterday."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        return Plan.load(path)


# ---- growth ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Seconds of one head at several lengths."""

    head: str  # with its model
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Of the length that the time grows with."""
        return log_slope(self.lengths, self.seconds)


def growths(rows: Iterable[AutoRow]) -> list[Growth]:
    """Heads of trained models that were timed at the greatest length and at another."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.seconds is not None and row.model != SYNTHETIC:
            times.setdefault(f"{row.model} {row.name}", {})[row.n] = row.seconds
    longest = max((n for by_length in times.values() for n in by_length), default=0)
    made = []
    for head, by_length in times.items():
        lengths = tuple(sorted(by_length))
        if len(lengths) > 1 and lengths[-1] == longest:
            made.append(Growth(head, lengths, tuple(by_length[n] for n in lengths)))
    return made
