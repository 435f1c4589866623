"""Time and error of methods against PyTorch's exact attention.

Every call is timed whole, planning included. Calls of all methods and of the baseline take turns
in one loop, so that a busy moment of the machine hits all of them; the best time of each counts.
Errors are against float64 attention of sampled query rows over all keys.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from supportbasis import Plan, Result, SupportBasisError, attention
from supportbasis.methods import Method

from ..progress import Tick
from .settings import Setting

SAMPLED_ROWS = 512
LEAST_ROUNDS, MOST_ROUNDS = 3, 20
TURN_SECONDS, TURN_CALLS = 0.5, 3  # a short call is repeated within its turn
ROW_CHUNK = 64


@dataclass(frozen=True)
class Measurement:
    """One method on one input. A number that does not exist is None."""

    name: str
    method: str
    n: int
    d: int
    causal: bool
    seconds: float | None
    baseline: str
    baseline_seconds: float
    ratio: float | None  # baseline time over time: above 1 is faster than the baseline
    relative_error: float | None  # Frobenius, worst head
    max_error: float | None  # largest error over max|V| (kernel density: over the largest density)
    bound: float | None
    cost: float | None
    repeats: int
    ran: str = ""  # what ran
    note: str = ""  # what the library warned about, or why the method failed


@dataclass(eq=False)
class TimedCall:
    """A call to be timed. ``details`` repeats it once, untimed, for its plan and certificate."""

    label: str
    call: Callable[[], Tensor]
    details: Callable[[], Result] | None = None
    ran: str = ""
    seconds: float = math.inf
    output: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def turn(self) -> None:
        """A few calls of a short timed_call, one of a long one."""
        start = time.perf_counter()
        for _ in range(TURN_CALLS):
            self.run()
            if time.perf_counter() - start > TURN_SECONDS:
                break

    def run(self) -> None:
        """Time one call; keep its output, the best time and what was warned about."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            self.output = self.call()
            self.seconds = min(self.seconds, time.perf_counter() - start)
        self.notes = [str(warning.message).removeprefix("supportbasis: ") for warning in caught]


@torch.no_grad()
def interleave(
    timed_calls: list[TimedCall], budget: float, tick: Tick, least: int = LEAST_ROUNDS
) -> int:
    """Let the timed_calls take turns for about ``budget`` seconds; returns the number of rounds.

    torch.utils.benchmark times one call after the other, and warms each up with two more; in turns
    a busy moment of the machine hits all alike.
    """
    racing = list(timed_calls)
    start = time.perf_counter()
    for done in range(1, MOST_ROUNDS + 1):
        for timed_call in list(racing):
            try:
                timed_call.turn()
            except SupportBasisError as error:
                timed_call.notes = [str(error)]
                racing.remove(timed_call)
        used = (time.perf_counter() - start) / budget
        tick(min(1.0, max(used, done / MOST_ROUNDS)))
        if done >= least and used >= 1:
            break
    return done


def sdpa(setting: Setting) -> TimedCall:
    """The baseline."""
    label = "SDPA causal" if setting.is_causal else "SDPA"
    tensors = (setting.query, setting.key, setting.value)
    causal, scale = setting.is_causal, setting.scale
    call = lambda: F.scaled_dot_product_attention(*tensors, is_causal=causal, scale=scale)  # noqa: E731
    return TimedCall(label, call, ran="PyTorch's exact kernel")


def mean_value(setting: Setting) -> TimedCall:
    """Attention with all weights equal: what a method must beat to be worth anything."""

    def call() -> Tensor:
        value = setting.value
        if not setting.is_causal:
            mean = value.mean(-2, keepdim=True)
            return mean.expand(*setting.query.shape[:-1], value.shape[-1])
        count = torch.arange(1, value.shape[-2] + 1, dtype=value.dtype).unsqueeze(1)
        return value.cumsum(-2) / count

    return TimedCall("mean(V)", call, ran="degree 0: every weight equal")


def with_method(setting: Setting, label: str, method: Method) -> TimedCall:
    """A call of `sb.attention`."""
    tensors = (setting.query, setting.key, setting.value)
    causal, scale = setting.is_causal, setting.scale

    def call() -> Tensor:
        output = attention(*tensors, is_causal=causal, scale=scale, method=method)
        assert isinstance(output, Tensor)
        return output

    def details() -> Result:
        result = attention(
            *tensors, is_causal=causal, scale=scale, method=method, return_result=True
        )
        assert isinstance(result, Result)
        return result

    return TimedCall(label, call, details)


def compare(
    setting: Setting,
    methods: Mapping[str, Method],
    *,
    name: str = "",
    budget: float,
    seed: int = 0,
    tick: Tick,
    everything: bool = False,
) -> list[Measurement]:
    """Measure methods on a setting; ``everything`` adds lines for mean(V) and SDPA itself."""
    baseline = sdpa(setting)
    timed_calls = [with_method(setting, *item) for item in methods.items()]
    if everything:
        racing = [mean_value(setting), baseline, *timed_calls]
    else:
        racing = [baseline, *timed_calls]
    rounds = interleave(racing, budget, tick)
    exact = ExactRows.of(setting, seed)
    name = name or setting.name
    return [
        _measured(timed_call, name, setting, baseline, exact, rounds)
        for timed_call in (racing if everything else timed_calls)
    ]


def _measured(
    timed_call: TimedCall,
    name: str,
    setting: Setting,
    baseline: TimedCall,
    exact: ExactRows,
    rounds: int,
) -> Measurement:
    ran, bound, cost = timed_call.ran, None, 1.0 if timed_call is baseline else None
    if timed_call.details is not None and timed_call.output is not None:
        ran, bound, cost = _details(timed_call.details)
    sizes = (name, setting.n, setting.dim, setting.is_causal)
    return measurement(timed_call, baseline, exact.errors, sizes, rounds, ran, bound, cost)


def measurement(
    timed_call: TimedCall,
    baseline: TimedCall,
    errors: Callable[[Tensor], tuple[float, float]],
    sizes: tuple[str, int, int, bool],  # name, n, d, causal
    rounds: int,
    ran: str,
    bound: float | None,
    cost: float | None,
) -> Measurement:
    """What was timed, with its error; a call that failed has no numbers."""
    name, n, d, causal = sizes
    output = timed_call.output
    relative, largest = (None, None) if output is None else errors(output)
    return Measurement(
        name=name,
        method=timed_call.label,
        n=n,
        d=d,
        causal=causal,
        seconds=None if output is None else timed_call.seconds,
        baseline=baseline.label,
        baseline_seconds=baseline.seconds,
        ratio=None if output is None else baseline.seconds / timed_call.seconds,
        relative_error=relative,
        max_error=largest,
        bound=bound,
        cost=cost,
        repeats=rounds,
        ran="failed" if output is None else ran,
        note="; ".join(dict.fromkeys(timed_call.notes)),
    )


def _details(call: Callable[[], Result]) -> tuple[str, float, float]:
    """What ran, the certified bound of the worst head, and the cost."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call()
    return describe(result.plan), float(result.certificate.bound.max()), result.plan.cost


def describe(plan: Plan) -> str:
    """What the heads of a plan do, and why, in the plan's own words."""
    if len(plan.heads) == 1:
        return str(plan.heads[0]).splitlines()[0]
    kinds = Counter(head.kind for head in plan.heads)
    return ", ".join(f"{count} heads {kind}" for kind, count in kinds.most_common())


@dataclass(frozen=True, eq=False)
class ExactRows:
    """Float64 attention of sampled query rows over all keys."""

    rows: Tensor
    output: Tensor  # [batch, heads, rows, dv]
    largest_value: Tensor  # [batch, heads]

    @staticmethod
    def of(setting: Setting, seed: int) -> ExactRows:
        rows = sampled_rows(setting.n, SAMPLED_ROWS, seed)
        tensors = (setting.query, setting.key, setting.value)
        output = exact_rows(*tensors, rows, setting.factor, setting.is_causal)
        return ExactRows(rows, output, setting.value.double().abs().amax((-1, -2)))

    def errors(self, output: Tensor) -> tuple[float, float]:
        """Relative Frobenius error, and largest error over max|V|, of the worst head."""
        wrong = output[..., self.rows, :].double() - self.output
        relative = wrong.norm(dim=(-1, -2)) / self.output.norm(dim=(-1, -2))
        largest = wrong.abs().amax((-1, -2)) / self.largest_value
        return float(relative.max()), float(largest.max())


def sampled_rows(n: int, count: int, seed: int) -> Tensor:
    """Up to ``count`` of n rows, in their order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator, device="cpu")[:count].sort().values


def exact_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float, is_causal: bool
) -> Tensor:
    """Softmax attention of some query rows, as it is written down in the books, in float64.

    Shapes [..., tokens, dim]; the output is [..., rows, dv].
    """
    outputs = []
    columns = torch.arange(key.shape[-2], device=key.device)
    for chunk in rows.to(key.device).split(ROW_CHUNK):
        score = query[..., chunk, :].double() @ key.double().mT * scale
        if is_causal:
            score = score.masked_fill(columns > chunk.unsqueeze(1), -math.inf)
        outputs.append(score.softmax(-1) @ value.double())
    return torch.cat(outputs, -2)
