"""Fourth and fifth part: time against length, and against entries, buckets and sketch size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from supportbasis import Result, kernel_sum
from supportbasis.methods import Method, MultiThreshold, PowerAttention
from supportbasis.plans import HeadPlan

from ..comparison.measure import ExactRows, TimedCall, mean_value, sdpa, with_method
from ..comparison.settings import Setting
from ..progress import Tick
from .errors import Line
from .inputs import Extent, draw, fixed_buckets, normal, only_head
from .variants import Powers, pairs_of

DIM = 64
SIZE = 32
DEVIATION = 0.1  # of the entries in the paper's efficiency setting
MAXIMA = (0.15, 0.35, 0.8)  # of the rows, so that ratio 2 makes three buckets at every length
SDPA_ONCE = 32768  # from this length on, SDPA runs once
DELTA = 0.01  # probability of failure in the paper's formulas

METHOD = MultiThreshold(2.0, 1, SIZE)


def take_turns(timed_calls: Sequence[TimedCall], rounds: int) -> None:
    """Run every timed_call once a round."""
    for _ in range(rounds):
        for timed_call in timed_calls:
            timed_call.run()


# ---- length ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeRow:
    """One method at one length."""

    input: str
    method: str
    n: int
    d: int
    seconds: float
    sdpa_seconds: float
    row_buckets: int
    key_buckets: int
    output_l2: float  # against what the method approximates
    mean_v: float  # error of the mean of V against softmax

    @property
    def name(self) -> str:
        return f"{self.method}, {self.input}"

    @property
    def ratio(self) -> float:
        """SDPA's time over this one: above 1 is faster than SDPA."""
        return self.sdpa_seconds / self.seconds

    def line(self) -> Line:
        return asdict(self) | {"ratio": self.ratio}


def timed_inputs(n: int, seed: int) -> list[tuple[Setting, str, Method]]:
    """What runs at each length."""
    plain = normal(n, DIM, DEVIATION, seed)
    called = f"MultiThreshold(2.0, 1, {SIZE})"
    return [
        (plain, called, METHOD),
        (fixed_buckets(n, DIM, MAXIMA, seed), called, METHOD),
        (plain, f"PowerAttention(4, {SIZE})", PowerAttention(4, SIZE)),
    ]


@torch.no_grad()
def measure_lengths(extent: Extent, seed: int, tick: Tick) -> list[TimeRow]:
    """Every method at every length, and SDPA beside it.

    A round runs all lengths, so that a busy minute of the machine does not hit one of them alone.
    """
    inputs = [item for n in extent.timed_lengths for item in timed_inputs(n, seed)]
    timed_calls = [with_method(setting, name, method) for setting, name, method in inputs]
    baselines = {setting.n: sdpa(setting) for setting, _, _ in inputs}
    for done in range(extent.rounds):
        short = [item for n, item in baselines.items() if n < SDPA_ONCE or done == 0]
        take_turns([*timed_calls, *short], 1)
        tick((done + 1) / (extent.rounds + 1))
    rows = [
        _time_row(setting, timed_call, baselines[setting.n], seed)
        for (setting, _, _), timed_call in zip(inputs, timed_calls, strict=True)
    ]
    return sorted(rows, key=lambda row: row.n)


def _time_row(setting: Setting, timed_call: TimedCall, baseline: TimedCall, seed: int) -> TimeRow:
    assert timed_call.details is not None
    result = timed_call.details()
    made = Powers.of(result.plan.heads[0])
    mean = mean_value(setting)
    mean.run()
    assert mean.output is not None
    return TimeRow(
        input=setting.name,
        method=timed_call.label,
        n=setting.n,
        d=setting.dim,
        seconds=timed_call.seconds,
        sdpa_seconds=baseline.seconds,
        row_buckets=made.row_buckets,
        key_buckets=made.key_buckets,
        output_l2=float(result.certificate.measured.max()),
        mean_v=ExactRows.of(setting, seed).errors(mean.output)[0],
    )


def doublings(rows: Sequence[TimeRow]) -> dict[str, list[float]]:
    """What each doubling of the length multiplies the time by, for each line."""
    names = dict.fromkeys(row.name for row in rows)
    lines = {name: sorted((r for r in rows if r.name == name), key=lambda r: r.n) for name in names}
    return {
        name: [(b.seconds / a.seconds) ** (1 / math.log2(b.n / a.n)) for a, b in pairwise(line)]
        for name, line in lines.items()
    }


# ---- sweeps ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepRow:
    """One point of a sweep: times, errors, and what the paper's formulas say."""

    sweep: str  # "entries", "buckets" or "sketch size"
    value: float  # deviation of the entries, ratio, or size
    n: int
    d: int
    largest_entry: float
    sketch_size: int
    pairs: int  # bucket pairs
    powers: Powers
    attention_seconds: float
    kernel_sum_seconds: float
    sdpa_seconds: float
    attention_l2: float
    kernel_sum_l2: float
    multiply_adds: float  # of the plan, relative to exact attention
    lemma: float  # n sum C (r z + z²) over pairs, of Lemma I.3
    theorem: float  # B^6 z², to which B^6 log²(n/delta) / eps^4 is proportional
    epsilon: float  # the accuracy that the theory grants this sketch size
    bound: float  # eps_2 exp(3 B²) of Theorem I.5

    @property
    def name(self) -> str:
        if self.sweep == "buckets":
            return "one bucket" if self.value == math.inf else f"ratio {self.value:g}"
        return f"{'sketch' if self.sweep == 'sketch size' else self.sweep} {self.value:g}"


SWEEPS = ("entries", "buckets", "sketch size")
DEVIATIONS = (0.05, 0.1, 0.2, 0.4, 0.8)
RATIOS = (math.inf, 4.0, 2.0, 1.5, 1.25)
SIZES = (8, 16, 32, 64, 128)
SWEPT_DEVIATION = 0.2  # where the entries are not swept
SWEPT_FACTOR = 0.2  # of the log-normal entries whose buckets are swept


def sweep_points(n: int, seed: int) -> list[tuple[str, float, Setting, MultiThreshold]]:
    """Name, value, input and method of every point."""
    points = [
        ("entries", deviation, normal(n, DIM, deviation, seed), METHOD) for deviation in DEVIATIONS
    ]
    rows = draw("log-normal", n, seed, dim=DIM, factor=SWEPT_FACTOR)
    points += [("buckets", ratio, rows, MultiThreshold(ratio, 1, SIZE)) for ratio in RATIOS]
    plain = normal(n, DIM, SWEPT_DEVIATION, seed)
    points += [("sketch size", float(z), plain, MultiThreshold(2.0, 1, z)) for z in SIZES]
    return points


@torch.no_grad()
def measure_sweeps(extent: Extent, seed: int, tick: Tick) -> list[SweepRow]:
    """Attention and kernel sums at every point, SDPA beside them."""
    rows = []
    points = sweep_points(extent.swept_length, seed)
    for sweep, value, setting, method in points:
        rows.append(_sweep_row(sweep, value, setting, method, extent.rounds))
        tick(len(rows) / len(points))
    return rows


def _sweep_row(
    sweep: str, value: float, setting: Setting, method: MultiThreshold, rounds: int
) -> SweepRow:
    tensors = (setting.query, setting.key, setting.value)

    def sums() -> Tensor:
        output = kernel_sum(*tensors, method=method)
        assert isinstance(output, Tensor)
        return output

    ours = with_method(setting, "attention", method)
    kernel, baseline = TimedCall("kernel_sum", sums), sdpa(setting)
    take_turns([ours, kernel, baseline], rounds)
    assert ours.details is not None
    result = ours.details()
    of_sums = _quietly(lambda: kernel_sum(*tensors, method=method, return_result=True))
    theory = Theory.of(setting, method)
    return SweepRow(
        sweep=sweep,
        value=value,
        n=setting.n,
        d=setting.dim,
        largest_entry=theory.largest_entry,
        sketch_size=theory.size,
        pairs=len(pairs_of(result.plan.heads[0])),
        powers=Powers.of(result.plan.heads[0]),
        attention_seconds=ours.seconds,
        kernel_sum_seconds=kernel.seconds,
        sdpa_seconds=baseline.seconds,
        attention_l2=float(result.certificate.measured.max()),
        kernel_sum_l2=float(of_sums.certificate.measured.max()),
        multiply_adds=result.plan.cost,
        lemma=theory.lemma,
        theorem=theory.theorem,
        epsilon=theory.epsilon,
        bound=theory.bound,
    )


def _quietly(call: Callable[[], Tensor | Result]) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call()
    assert isinstance(result, Result)
    return result


@dataclass(frozen=True)
class Theory:
    """The paper's formulas for one input, with all constants one.

    The paper's scores carry 1/d, so its B² is the range |scale| d max|entry|² of scores here, and
    its C is the power of a bucket pair, computed or not: it knows no exact pairs.
    """

    n: int
    rank: int  # r, features of the polynomial
    size: int  # z
    largest_entry: float
    reach: float  # B²
    pairs: tuple[tuple[int, float], ...]  # power and range of the scores of each bucket pair
    polynomial_error: float  # eps_0, of the worst pair

    @staticmethod
    def of(setting: Setting, method: MultiThreshold) -> Theory:
        assert method.sketch_size is not None
        head = only_head(setting)
        plan: HeadPlan = MultiThreshold(method.ratio, method.degree).plan_head(head)
        largest = max(float(head.query_maxima.max()), float(head.key_maxima.max()))
        kernels = [(pair.kernel, pair.reach) for pair in pairs_of(plan)]
        polynomials = [kernel.polynomial for kernel, _ in kernels if kernel is not None]
        return Theory(
            n=head.n,
            rank=math.comb(head.dim + method.degree, method.degree),
            size=method.sketch_size,
            largest_entry=largest,
            reach=head.scale * head.dim * largest**2,
            pairs=tuple((kernel.power, reach) for kernel, reach in kernels if kernel is not None),
            polynomial_error=max((poly.error for poly in polynomials if poly), default=0.0),
        )

    @property
    def lemma(self) -> float:
        """The sum inside the O() of Lemma I.3, at this sketch size."""
        z = self.size
        return self.n * sum(power for power, _ in self.pairs) * (self.rank * z + z * z)

    @property
    def theorem(self) -> float:
        """The lemma's conclusion, B^6 log²(n/delta) / eps^4 · n, up to a factor: at a given power
        a sketch of size z has eps^-2 proportional to z."""
        return self.n * self.reach**3 * self.size**2

    def accuracy(self, power: int) -> float:
        """The eps for which z = power · eps^-2 · ln(n / delta)."""
        return math.sqrt(power * math.log(self.n / DELTA) / self.size)

    @property
    def epsilon(self) -> float:
        """Of the largest power."""
        return self.accuracy(max(power for power, _ in self.pairs))

    @property
    def bound(self) -> float:
        """eps_2 exp(3 B²) with eps_2 = B² eps_0 / ln n + sum over pairs of eps |u|^C |w|^C; the
        last factors reach exp(range of the pair's scores), and e^o(B²) counts as 1."""
        sketches = sum(self.accuracy(power) * math.exp(reach) for power, reach in self.pairs)
        error = self.reach * self.polynomial_error / math.log(self.n) + sketches
        log_bound = math.log(error) + 3 * self.reach
        return math.exp(log_bound) if log_bound < 700 else math.inf
