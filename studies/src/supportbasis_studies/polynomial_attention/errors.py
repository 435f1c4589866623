"""First part: how far each way of replacing exp is from softmax, in four norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from supportbasis.problem.problem import Head

from ..progress import Tick
from ..statistics import Interval
from .dense import NORMS, Errors, Exact, measure_errors
from .inputs import DRAWS, Extent, draw, only_head
from .variants import ALL_SKETCHED, AS_RUN, CHEBYSHEV, SHARED, Powers, Variant, compared

DEGREES = (1, 2)
SIZE = 32
PARTS = ("matrix", "attention", "output")  # A = exp(score), D^-1 A, and D^-1 A V

Line = dict[str, object]


@dataclass(frozen=True)
class ErrorRow:
    """One way on one input: relative errors, and what the plan was."""

    input: str
    n: int
    d: int
    seed: int
    method: str
    way: str
    powers: Powers
    errors: Errors

    def error(self, part: str, norm: str) -> float:
        values: tuple[float, ...] = getattr(self.errors, part)
        return values[NORMS.index(norm)]

    def line(self) -> Line:
        """For the CSV: one column for each part and norm."""
        columns: Line = {name: getattr(self, name) for name in ("input", "n", "d", "seed")}
        columns |= {"method": self.method, "way": self.way} | asdict(self.powers)
        columns["failed_rows"] = self.errors.failed_rows
        return columns | {f"{part}_{norm}": self.error(part, norm) for part, norm in measures()}


def measures() -> Iterator[tuple[str, str]]:
    """What is measured, in which norm."""
    return ((part, norm) for part in PARTS for norm in NORMS)


def measure(extent: Extent, first_seed: int, tick: Tick) -> list[ErrorRow]:
    """All inputs, lengths and seeds."""
    jobs = [
        (name, n, first_seed + repetition)
        for name in DRAWS
        for n in extent.lengths
        for repetition in range(extent.seeds)
    ]
    rows, work = [], sum(n * n for _, n, _ in jobs)
    done = 0
    for name, n, seed in jobs:
        rows += measure_input(name, n, seed)
        done += n * n
        tick(done / work)
    return rows


def measure_input(name: str, n: int, seed: int) -> list[ErrorRow]:
    """Every way on one input. The seed also draws the sketches."""
    head = only_head(draw(name, n, seed))
    exact = Exact.of(head)
    return [_row(variant, name, head, seed, exact) for variant in compared(DEGREES, SIZE)]


def _row(variant: Variant, name: str, head: Head, seed: int, exact: Exact) -> ErrorRow:
    plan = variant.plan(head, seed)
    errors = measure_errors(head, plan, exact, fallback=variant.way == AS_RUN)
    return ErrorRow(
        name, head.n, head.dim, seed, variant.label, variant.way, Powers.of(plan), errors
    )


# ---- over seeds ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """An error over all seeds."""

    input: str
    n: int
    method: str
    part: str
    norm: str
    error: Interval


def summarise(rows: Iterable[ErrorRow]) -> list[Summary]:
    """One line for each input, length, method, part and norm."""

    def key(row: ErrorRow) -> tuple[str, int, str]:
        return row.input, row.n, row.method

    return [
        Summary(*name, part, norm, Interval.of([row.error(part, norm) for row in group]))
        for name, seeds in groupby(sorted(rows, key=key), key)
        for group in [list(seeds)]
        for part, norm in measures()
    ]


@dataclass(frozen=True)
class Verdict:
    """The error with buckets over that without, seed by seed, at equal degree and sketch size."""

    input: str
    n: int
    degree: int
    sketch: str  # one of `SKETCHES`
    part: str
    norm: str
    ratio: Interval

    @property
    def word(self) -> str:
        """What the interval allows to say; one seed allows nothing."""
        if self.ratio.count < 2:
            return "unclear"
        if self.ratio.high < 1:
            return "helps"
        return "hurts" if self.ratio.low > 1 else "unclear"

    def line(self) -> Line:
        return asdict(self) | {"bucketing": self.word}


# the sketches of a comparison, and how the labels of its two lines end: buckets, one power
SKETCHES = {
    "no sketch": ("", ""),
    "no sketch, Chebyshev": (CHEBYSHEV, CHEBYSHEV),
    f"sketch {SIZE}": (f", sketch {SIZE}, {ALL_SKETCHED}",) * 2,
    f"sketch {SIZE}, shared": (
        f", sketch {SIZE}, {SHARED}",
        f", sketch {SIZE}, {ALL_SKETCHED}",
    ),
}


def compare_buckets(rows: Sequence[ErrorRow]) -> list[Verdict]:
    """Buckets of ratio 2 against one power, for each input, length, degree and kind of sketch."""
    table = {(row.input, row.n, row.method, row.seed): row for row in rows}
    seeds = dict.fromkeys(row.seed for row in rows)
    verdicts = []
    for name, n in dict.fromkeys((row.input, row.n) for row in rows):
        for degree in DEGREES:
            for sketch, (buckets, one) in SKETCHES.items():
                labels = (
                    f"buckets 2, degree {degree}{buckets}",
                    f"one power, degree {degree}{one}",
                )
                pairs = [
                    (table[name, n, labels[0], s], table[name, n, labels[1], s]) for s in seeds
                ]
                verdicts += [
                    Verdict(name, n, degree, sketch, part, norm, _ratio(pairs, part, norm))
                    for part, norm in measures()
                ]
    return verdicts


def _ratio(pairs: Sequence[tuple[ErrorRow, ErrorRow]], part: str, norm: str) -> Interval:
    return Interval.of([a.error(part, norm) / b.error(part, norm) for a, b in pairs])
