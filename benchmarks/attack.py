"""Heads made to break `sb.Auto`, and the share of certificates whose limit is exceeded.

    python benchmarks/attack.py plans --heads 300        # tolerances of Auto under attack
    python benchmarks/attack.py confidence --heads 2000  # the stated confidence of limits

Head number i is the same in every run with the same encoder of points, or without one. Rows go to
a CSV file after each head; heads that it holds are not measured again, those recorded in `results/`
among them: give another file as --out. Errors are relative Frobenius errors of all rows against
float64.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis_studies.frontier.encoder import HEADS, LAYERS, Encoder
from supportbasis_studies.study import Machine, Records, Row, models_from_environment

DATE = "2026-11-16"
RESULTS = Path(__file__).parent / "results"
TOLERANCES = (0.01, 0.03, 0.1)
LENGTHS = (4096, 4096, 4096, 4096, 6000, 8192)
LONG = 16384  # every so many heads
EVERY = 25
DIMS = (16, 24, 32, 64)
NEEDLES = (8, 16, 32, 64, 128)
EXCEEDED, BROKEN = 1.25, 2.0  # times the tolerance


@dataclass(frozen=True, eq=False)
class Case:
    """One head, [n, d] each, and how it was made."""

    base: str
    attack: str
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (x[None, None].contiguous() for x in (self.query, self.key, self.value))
        return query, key, value


class Maker:
    """Random numbers of one head, and what is made of them."""

    def __init__(self, seed: int, n: int, dims: Sequence[int] = DIMS):
        self.choice, self.n = random.Random(seed), n
        self.generator = torch.Generator().manual_seed(seed)
        self.d = self.choice.choice(dims)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def unit(self) -> Tensor:
        x = self.normal(self.d)
        return x / x.norm()

    def between(self, low: float, high: float) -> float:
        """Uniform on a logarithmic scale."""
        return math.exp(self.choice.uniform(math.log(low), math.log(high)))

    def places(self, count: int) -> Tensor:
        """Of some tokens: together, or anywhere."""
        if self.choice.random() < 0.3:
            return torch.arange(count) + self.choice.randrange(self.n - count)
        return torch.randperm(self.n, generator=self.generator)[:count]


def to_sigma(query: Tensor, key: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Both sides scaled alike, so that scores have this standard deviation."""
    step = max(1, len(query) // 512)
    scores = query[::step] @ key[::step].T / math.sqrt(query.shape[1])
    factor = math.sqrt(sigma / float(scores.std()))
    return query * factor, key * factor


def small(make: Maker) -> tuple[Tensor, Tensor]:
    """Isotropic, with scores of standard deviation 0.05 to 1."""
    query, key = make.normal(make.n, make.d), make.normal(make.n, make.d)
    return to_sigma(query, key, make.between(0.05, 1.0))


def clusters(make: Maker) -> tuple[Tensor, Tensor]:
    """8 to 64 clusters on each side, or common ones, with scores of standard deviation 1 to 4."""
    count, spread = make.choice.choice((8, 16, 64)), make.between(0.05, 0.3)
    centres = [make.normal(count, make.d) for _ in range(2)]
    if make.choice.random() < 0.5:
        centres[1] = centres[0]
    sides = []
    for centre in centres:
        member = torch.randint(count, (make.n,), generator=make.generator)
        sides.append(centre[member] + spread * make.normal(make.n, make.d))
    return to_sigma(sides[0], sides[1], make.between(1.0, 4.0))


def sinks(make: Maker) -> tuple[Tensor, Tensor]:
    """Scores in at most 8 directions, and four first keys that every query scores 3 to 10."""
    rank = min(8, make.d)
    basis = torch.linalg.qr(make.normal(make.d, rank))[0]
    query, key = (make.normal(make.n, rank) @ basis.T for _ in range(2))
    query, key = to_sigma(query, key, make.between(0.2, 1.5))
    direction = make.unit()
    key[:4] = direction * make.between(3.0, 10.0) * math.sqrt(make.d)
    return query + direction, key


def walks(make: Maker) -> tuple[Tensor, Tensor]:
    """Smooth walks: neighbours are alike."""
    query, key = (make.normal(make.n, make.d) for _ in range(2))
    decay = 0.98
    for x in (query, key):
        for i in range(1, make.n):
            x[i] = decay * x[i - 1] + math.sqrt(1 - decay**2) * x[i]
    return to_sigma(query, key, make.between(0.5, 3.0))


BASES: dict[str, Callable[[Maker], tuple[Tensor, Tensor]]] = {
    "small": small, "clusters": clusters, "sinks": sinks, "walks": walks,
}  # fmt: skip


def needle_rows(make: Maker, q: Tensor, k: Tensor, v: Tensor) -> None:
    """8 to 128 queries of 0.1 to 10 times the usual norm that look for a few needle keys, which
    the others mostly do not see."""
    direction = make.unit()
    if make.choice.random() < 0.5:
        q -= (q @ direction)[:, None] * direction
    rows, keys = (
        make.places(make.choice.choice(NEEDLES)),
        make.places(make.choice.choice((1, 4, 16))),
    )
    usual, norm = float(q.norm(dim=1).median()), float(k.norm(dim=1).median())
    size = make.between(0.1, 10.0) * usual
    score = make.between(3.0, 14.0)
    length = min(score * math.sqrt(make.d) / size, 30 * norm)
    q[rows] = size * direction + 0.05 * size * make.normal(len(rows), make.d) / math.sqrt(make.d)
    k[keys] = length * direction + 0.05 * norm * make.normal(len(keys), make.d) / math.sqrt(make.d)
    v[keys] *= make.between(1.0, 20.0)


def needle_keys(make: Maker, q: Tensor, k: Tensor, v: Tensor) -> None:
    """1 to 32 keys that are longer, or point elsewhere, with larger values."""
    keys = make.places(make.choice.choice((1, 4, 32)))
    norm = float(k.norm(dim=1).median())
    k[keys] = make.between(0.5, 6.0) * norm * make.unit()
    v[keys] *= make.between(1.0, 20.0)


def end_rows(make: Maker, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The first or the last 8 to 128 queries are those of another head."""
    count = make.choice.choice(NEEDLES)
    rows = slice(0, count) if make.choice.random() < 0.5 else slice(-count, None)
    usual = float(q.norm(dim=1).median())
    if make.choice.random() < 0.5:
        q[rows] = q[rows] * make.between(1.5, 8.0)
    else:
        size = make.between(0.5, 8.0) * usual / math.sqrt(make.d)
        q[rows] = size * make.normal(count, make.d)


def huge_value(make: Maker, q: Tensor, k: Tensor, v: Tensor) -> None:
    """One value of 30 to 3000 times the usual norm."""
    v[make.choice.randrange(make.n)] *= make.between(30.0, 3000.0)


ATTACKS = {
    "needle rows": needle_rows, "needle keys": needle_keys, "end rows": end_rows,
    "huge value": huge_value,
}  # fmt: skip
KINDS = ("none", *["needle rows"] * 4, "needle keys", "end rows", "huge value", *["mixture"] * 2)


def make_case(seed: int, n: int, encoder: Encoder | None, dims: Sequence[int] = DIMS) -> Case:
    """The head of a number."""
    make = Maker(seed, n, dims)
    names = [*BASES] if encoder is None else [*BASES, "encoder", "encoder"]
    base, causal = make.choice.choice(names), make.choice.random() < 0.3
    if base == "encoder":
        assert encoder is not None
        number = frozenset([make.choice.randrange(HEADS * LAYERS)])
        found = next(encoder.captures(encoder.points(n, seed), number))
        query, key, value = found.query.clone(), found.key.clone(), found.value.clone()
        base, make.d = f"tsp50 {found.name}", found.d
    else:
        query, key = BASES[base](make)
        value = make.normal(n, make.d) + make.choice.choice((0.0, 0.0, 1.0)) * make.normal(make.d)
    attack = make.choice.choice(KINDS)
    chosen = [] if attack == "none" else [attack]
    if attack == "mixture":
        chosen = make.choice.sample(sorted(ATTACKS), 2)
    for name in chosen:
        ATTACKS[name](make, query, key, value)
    return Case(base, " + ".join(chosen) or "none", query, key, value, causal)


def exact(case: Case) -> Tensor:
    """Output in float64, in pieces of rows."""
    query, key, value = (x.double() for x in (case.query, case.key, case.value))
    pieces = []
    for rows in torch.arange(len(query)).split(512):
        score = query[rows] @ key.T / math.sqrt(query.shape[1])
        if case.causal:
            score.masked_fill_(torch.arange(len(key)) > rows[:, None], -math.inf)
        pieces.append(score.softmax(1) @ value)
    return torch.cat(pieces)


@dataclass(frozen=True)
class PlanRow(Row):
    """A plan of `Auto` and its errors; of one that is exact, none."""

    base: str
    attack: str
    n: int
    d: int
    causal: bool
    tolerance: float
    kind: str
    planned: float | None
    measured: float | None
    limit: float | None
    true: float | None
    plan_seconds: float
    speedup: float


def plan_rows(seed: int, case: Case) -> Iterator[PlanRow]:
    reference: Tensor | None = None
    for tolerance in TOLERANCES:
        start = time.perf_counter()
        plan = sb.plan(*case.tensors, is_causal=case.causal, method=sb.Auto(tolerance))
        seconds, head = time.perf_counter() - start, plan.heads[0]
        errors: list[float | None] = [None] * 4
        if head.kind != "exact":
            if reference is None:
                reference = exact(case)
            result = sb.attention(
                *case.tensors, is_causal=case.causal, plan=plan, return_result=True
            )
            found = result.certificate
            away = (result.output[0, 0].double() - reference).norm() / reference.norm()
            errors = [head.measured, float(found.measured), float(found.limit), float(away)]
        yield PlanRow(
            str(seed), case.base, case.attack, len(case.query), case.query.shape[1], case.causal,
            tolerance, head.kind, *errors, seconds, head.speedup,
        )  # fmt: skip


@dataclass(frozen=True)
class LimitRow(Row):
    """A certificate and the true error."""

    base: str
    attack: str
    n: int
    d: int
    causal: bool
    method: str
    rows: int
    measured: float
    limit: float
    true: float


METHODS: tuple[sb.Method, ...] = (
    sb.Polynomial(1), sb.Polynomial(2), sb.SingleThreshold(None, 1), sb.SingleThreshold(None, 2),
    sb.FittedPolynomial(), sb.BlockSupport(0.3), sb.BlockSupport(0.7),
)  # fmt: skip


def limit_rows(seed: int, case: Case) -> Iterator[LimitRow]:
    method = METHODS[seed % len(METHODS)]
    result = sb.attention(*case.tensors, is_causal=case.causal, method=method, return_result=True)
    reference, found = exact(case), result.certificate
    away = (result.output[0, 0].double() - reference).norm() / reference.norm()
    yield LimitRow(
        str(seed), case.base, case.attack, len(case.query), case.query.shape[1], case.causal,
        f"{method}" if result.plan.heads[0].kind != "exact" else "exact", found.rows,
        float(found.measured), float(found.limit), float(away),
    )  # fmt: skip


def interval(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson)."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, count / total
    centre = (share + z**2 / 2 / total) / (1 + z**2 / total)
    spread = math.sqrt(share * (1 - share) / total + z**2 / 4 / total**2)
    half = z * spread / (1 + z**2 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def share(count: int, total: int) -> str:
    low, high = interval(count, total)
    return f"{count} of {total} ({100 * low:.1f} % to {100 * high:.1f} %)"


def report_plans(rows: Sequence[PlanRow]) -> None:
    taken = [row for row in rows if row.true is not None and row.limit is not None]
    print(f"{len(rows)} plans, {len(taken)} not exact")
    names = ("plans", "worst", f">{EXCEEDED}x", "holds >2x", "> limit")
    print(f"{'attack':32} " + " ".join(f"{name:>9}" for name in names))

    def line(name: str, some: Sequence[PlanRow]) -> None:
        worst = max((row.true / row.tolerance for row in some), default=0.0)
        beyond = sum(row.true > EXCEEDED * row.tolerance for row in some)
        said = sum(row.limit <= row.tolerance and row.true > BROKEN * row.tolerance for row in some)
        above = sum(row.true > row.limit for row in some)
        print(f"{name:32} {len(some):9} {worst:9.2f} {beyond:9} {said:9} {above:9}")

    for name in sorted({row.attack for row in taken}):
        line(name, [row for row in taken if row.attack == name])
    for name in sorted({row.kind for row in taken}):
        line(f"[{name}]", [row for row in taken if row.kind == name])
    line("all", taken)
    beyond = sum(row.true > EXCEEDED * row.tolerance for row in taken)
    above = sum(row.true > row.limit for row in taken)
    print(f"beyond {EXCEEDED} times the tolerance: {share(beyond, len(taken))}")
    print(f"above the limit: {share(above, len(taken))}")
    print(f"planning: {sum(row.plan_seconds for row in rows):.0f} s in all")


def report_limits(rows: Sequence[LimitRow]) -> None:
    # what is exact, but for rounding, has no error to be certain of
    real = [row for row in rows if row.method != "exact" and row.true > 1e-5]
    print(f"{len(rows)} heads, {len(real)} with an error")
    print(f"{'':50} {'heads':>6} {'above the limit':>34} {'limit / true, median':>22}")

    def line(name: str, some: Sequence[LimitRow]) -> None:
        ratios = sorted(row.limit / row.true for row in some)
        above = share(sum(row.true > row.limit for row in some), len(some))
        print(f"{name[:50]:50} {len(some):6} {above:>34} {ratios[len(ratios) // 2]:22.2f}")

    for name in sorted({row.method for row in real}):
        line(name, [row for row in real if row.method == name])
    for name in sorted({row.attack for row in real}):
        line(name, [row for row in real if row.attack == name])
    line("all", real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("plans", "confidence"))
    parser.add_argument("--heads", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first head")
    parser.add_argument("--out", type=Path, default=None, help="CSV file")
    parser.add_argument("--encoder", type=Path, help="folder; default: $SUPPORTBASIS_MODELS/tsp50")
    given = parser.parse_args()
    torch.manual_seed(0)
    folder, models = given.encoder, models_from_environment()
    if folder is None and models is not None and (models / "tsp50").is_dir():
        folder = models / "tsp50"
    encoder = None if folder is None else Encoder.load(folder)
    plans = given.mode == "plans"
    name = f"attack-{DATE}{'' if plans else '-confidence'}.csv"
    path = given.out or RESULTS / name
    records = Records(path, PlanRow if plans else LimitRow, Machine.here())
    units = [str(seed) for seed in range(given.first, given.first + given.heads)]
    start = time.perf_counter()
    for unit in units:
        if records.has(unit):
            continue
        seed = int(unit)
        if plans:
            n = LONG if seed % EVERY == EVERY - 1 else LENGTHS[seed % len(LENGTHS)]
            rows = list(plan_rows(seed, make_case(seed, n, encoder)))
        else:
            n = (1024, 1536, 2048)[seed % 3]
            rows = list(limit_rows(seed, make_case(seed, n, encoder, (4, 8, 16))))
        records.add(rows)
        if seed % 50 == 49:
            print(f"head {seed + 1}, {time.perf_counter() - start:.0f} s", flush=True)
    (report_plans if plans else report_limits)(records.of(units))


if __name__ == "__main__":
    with torch.no_grad():
        main()
