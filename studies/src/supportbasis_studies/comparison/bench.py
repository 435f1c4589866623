"""``supportbasis bench``: the benchmarks that the project reports, each with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from supportbasis import Auto, InputError, Polynomial, SingleThreshold
from supportbasis.methods import Method

from ..figures import COLOURS, INK, length_label, new_figure, plain_axes
from ..numbers import small, times
from ..progress import Steps, Tick, part
from ..study import Grid, Machine, Records, Section, publish
from .cases import measure_density, measure_training
from .measure import Measurement, compare
from .settings import Setting, gaussian, outliers
from .tables import EXPLAINED, is_approximate, is_lost, measurement_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = Callable[[str, int, float, Tick], list[Measurement]]


@dataclass(frozen=True)
class Sizes:
    """How long the inputs are, and how long each is timed."""

    single: tuple[int, ...]
    long: int
    kde: int
    sweep: tuple[int, int]  # lengths of the crossover sweep: from, to
    budget: float  # seconds of timing for each benchmark
    sweep_budget: float


FULL = Sizes((8192, 32768, 131072), 32768, 100_000, (512, 65536), 15.0, 1.5)
QUICK = Sizes((2048, 8192), 8192, 8192, (512, 8192), 1.5, 0.3)
LEAD = (
    "float32, one head, d=64, scale 1/√d, Q and K from N(0, 0.1²), V from N(0, 1), unless a "
    "benchmark says otherwise (outliers: 1 % of queries and keys times 50; kde: standard normal "
    "points in 3 dimensions, bandwidth 1, errors over the largest density; training: forward and "
    f"backward, errors of the gradients). {EXPLAINED}"
)
PANELS = {
    "SDPA": "Attention",
    "SDPA causal": "Causal attention",
    "chunked exact sum": "Gaussian kernel density",
}


@dataclass(frozen=True)
class Job:
    """A named benchmark: one length, or the sweep that looks for the crossover."""

    name: str
    run: Run
    lengths: tuple[int, ...]
    budget: float
    is_sweep: bool = False


@dataclass(frozen=True)
class Crossover:
    """The length from which a method is faster than its baseline; None: not up to ``longest``."""

    name: str
    method: str
    baseline: str
    n: float | None
    shortest: int
    longest: int

    def __str__(self) -> str:
        if self.n is None:
            return f"not faster than {self.baseline} up to n={self.longest}"
        if self.n <= self.shortest:
            return f"faster than {self.baseline} from n≤{self.shortest}"
        return f"faster than {self.baseline} from n≈{self.n:.0f}"


def _on(make: Callable[..., Setting], methods: dict[str, Method], is_causal: bool = False) -> Run:
    def run(name: str, n: int, budget: float, tick: Tick) -> list[Measurement]:
        setting = make(n, is_causal=is_causal)
        return compare(setting, methods, name=name, budget=budget, tick=tick)

    return run


SINGLE: dict[str, Method] = {"SingleThreshold(0.4, degree=2)": SingleThreshold(0.4, 2)}
OUTLIERS: dict[str, Method] = {
    "SingleThreshold(degree=2)": SingleThreshold(degree=2),
    "Polynomial(2)": Polynomial(2),
}
CASES: dict[str, Run] = {
    "single": _on(gaussian, SINGLE),
    "degree1": _on(
        gaussian,
        {
            "SingleThreshold(degree=1)": SingleThreshold(degree=1),
            "SingleThreshold(0.4, degree=1)": SingleThreshold(0.4, 1),
        },
    ),
    "auto": _on(gaussian, {"Auto(1e-3)": Auto(1e-3)}),
    "causal": _on(gaussian, SINGLE, is_causal=True),
    "outliers": _on(outliers, OUTLIERS),
    "training": measure_training,
    "kde": measure_density,
}


def jobs(sizes: Sizes) -> list[Job]:
    """All benchmarks, shortest first within a work, then the sweeps."""
    made = []
    for name, run in CASES.items():
        lengths = {"single": sizes.single, "kde": (sizes.kde,)}.get(name, (sizes.long,))
        made += [Job(_job_name(name, n), run, (n,), sizes.budget) for n in lengths]
    start, end = sizes.sweep
    doubling = tuple(start * 2**i for i in range(int(math.log2(end / start)) + 1))
    for name, run in CASES.items():
        made.append(Job(f"crossover-{name}", run, doubling, sizes.sweep_budget, is_sweep=True))
    return made


def _job_name(work: str, n: int) -> str:
    if work != "kde":
        return f"{work}-n{n}"
    return f"kde-{n // 1000}k" if n >= 1000 else f"kde-{n}"


def run_bench(sizes: Sizes, only: str | None, out: Path, console: Console) -> None:
    """Measure, append to the CSV, write the report, and print a table last."""
    chosen = [job for job in jobs(sizes) if only is None or job.name.startswith(only)]
    if not chosen:
        names = ", ".join(job.name for job in jobs(sizes))
        raise InputError(f"--only: no benchmark starts with {only!r}; there are {names}")
    machine = Machine.here()
    results: Records[Any] = Records(out / "results.csv", Measurement, machine)
    found: Records[Any] = Records(out / "crossover.csv", Crossover, machine)
    rows: list[Measurement] = []
    crossovers: list[Crossover] = []
    with Steps(console, len(chosen)) as steps:
        for job in chosen:
            measured = _run_job(job, steps)
            results.add(measured)
            rows += measured
            if job.is_sweep:
                crossovers.append(crossover(job.name, measured))
    if crossovers:
        found.add(crossovers)
    sections = list(_sections(rows, crossovers, out / "times.png"))
    publish(out, "supportbasis bench", LEAD, sections, machine, console)


def _run_job(job: Job, steps: Steps) -> list[Measurement]:
    rows: list[Measurement] = []
    wins = 0
    with steps.step(job.name) as tick:
        for index, n in enumerate(job.lengths):
            measured = job.run(job.name, n, job.budget, part(tick, index, len(job.lengths)))
            rows += measured
            wins = wins + 1 if is_win(measured[0]) else 0
            if job.is_sweep and wins == 2:
                break
    return rows


# ---- crossover -------------------------------------------------------------------------------


def is_win(row: Measurement) -> bool:
    """Whether an approximation ran and was faster than the baseline."""
    return is_approximate(row) and (row.ratio or 0.0) >= 1


def crossover(name: str, rows: Sequence[Measurement]) -> Crossover:
    """The first length from which the first method of a sweep always wins, interpolated."""
    method, baseline = rows[0].method, rows[0].baseline
    sweep = sorted((row for row in rows if row.method == method), key=lambda row: row.n)
    first = len(sweep)
    while first and is_win(sweep[first - 1]):
        first -= 1
    ends = (sweep[0].n, sweep[-1].n)
    if first == len(sweep):
        return Crossover(name, method, baseline, None, *ends)
    n = float(sweep[0].n) if first == 0 else _between(sweep[first - 1], sweep[first])
    return Crossover(name, method, baseline, n, *ends)


def _between(before: Measurement, after: Measurement) -> float:
    """Where the ratio passes 1 on a log-log scale."""
    assert after.ratio is not None
    if before.ratio is None or before.ratio >= 1 or not is_approximate(before):
        return float(after.n)
    low, high = math.log(before.ratio), math.log(after.ratio)
    share = -low / (high - low)
    return math.exp(math.log(before.n) + share * math.log(after.n / before.n))


# ---- the report ------------------------------------------------------------------------------


def bench_findings(rows: Sequence[Measurement]) -> str:
    """Two sentences: how many lines beat their baseline, and which gave no useful answer."""
    wins = [row for row in rows if is_win(row) and not is_lost(row)]
    text = f"{len(wins)} of {len(rows)} lines gave an answer faster than their baseline"
    if wins:
        best = max(wins, key=lambda row: row.ratio or 0.0)
        text += (
            f", the largest gain being {times(best.ratio)} over {best.baseline} in {best.name} "
            f"({best.method}), with a relative error of {small(best.relative_error)}"
        )
    lost = [f"{row.name} ({row.method})" for row in rows if is_lost(row)]
    if lost:
        return f"{text}. More than 10 % off, or without an answer: {', '.join(lost)}."
    worst = max(rows, key=lambda row: row.relative_error or 0.0)
    error = small(worst.relative_error)
    return f"{text}. The largest relative error of all is {error}, in {worst.name}."


def _sections(
    rows: Sequence[Measurement], crossovers: Sequence[Crossover], picture: Path
) -> Iterator[Section]:
    single = [row for row in rows if not row.name.startswith("crossover-")]
    if single:
        grid = measurement_table("", single, named=True)
        yield Section("Results", findings=[bench_findings(single)], grids=[grid])
    if crossovers:
        lines = [[f"{item.name}, {item.method}", str(item)] for item in crossovers]
        grid = Grid("", ["method", "crossover"], lines)
        yield Section("Where the methods start to pay", grids=[grid])
    plot_times(rows, picture)
    caption = "Seconds for each call against the number of tokens."
    yield Section("Time against length", figures=[(picture, caption)])


def plot_times(rows: Sequence[Measurement], path: Path) -> None:
    """Time against length, log-log: one panel for each baseline, its time in black."""
    timed = sorted((row for row in rows if row.seconds), key=lambda row: (row.baseline, row.n))
    panels = [(name, list(group)) for name, group in groupby(timed, lambda row: row.baseline)]
    panels.sort(key=lambda panel: list(PANELS).index(panel[0]))
    figure = new_figure(0.6 + 3.9 * max(1, len(panels)), 5.2)
    drawn = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (baseline, panel) in zip(drawn, panels, strict=False):
        _time_panel(axes, baseline, panel)
    figure.savefig(path, dpi=150)


def _time_panel(axes: Axes, baseline: str, rows: Sequence[Measurement]) -> None:
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    best: dict[int, float] = {}
    lines: dict[str, dict[int, float]] = {}
    for row in rows:  # sorted by length
        best[row.n] = min(best.get(row.n, math.inf), row.baseline_seconds)
        name = f"{row.method}, outliers" if "outliers" in row.name else row.method
        lines.setdefault(name, {})[row.n] = row.seconds or math.nan
    axes.plot(list(best), list(best.values()), "-D", color=INK, markersize=4, label=baseline)
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(list(line), list(line.values()), "-o", color=colour, markersize=4, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds per call")
    axes.set_title(PANELS[baseline], loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(length_label)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.05, -0.13))
