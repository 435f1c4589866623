"""``supportbasis bench --device cuda``: measure what is missing, write, print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console

from supportbasis import InputError

from ..figures import COLOURS, Line, Panel, draw
from ..study import Grid, Machine, Records, Section, Unit, measure, publish, table
from .cases import CASES, CROSSOVER, Case, sweep
from .lists import host_cases, list_cases
from .measure import SAMPLED_ROWS, Bench, GpuRow

MODES = {
    (False, False): "forward",
    (False, True): "forward, causal",
    (True, False): "forward and backward",
    (True, True): "forward and backward, causal",
}


def draw_lengths(rows: Sequence[GpuRow], path: Path) -> None:
    """One panel for each width and mode: PyTorch's fastest backend, degree 2 and degree 1."""

    def panel(d: int, backward: bool, causal: bool) -> Panel:
        mine = [r for r in rows if (r.d, r.backward, r.causal) == (d, backward, causal)]
        mine.sort(key=lambda row: row.n)
        best = {row.n: row.baseline_ms for row in mine}
        lines = [Line("SDPA, fastest backend", list(best), list(best.values()), "-D")]
        names = sorted({row.work for row in mine}, reverse=True)
        for colour, name in zip(COLOURS, names, strict=False):
            line = {row.n: row.ms for row in mine if row.work == name}
            label = name.removeprefix("sweep, ")
            lines.append(Line(label, list(line), list(line.values()), colour=colour))
        title = f"d={d}, {MODES[backward, causal]}"
        return Panel(title, lines, "tokens", "milliseconds")

    grid = [[panel(d, *mode) for mode in MODES] for d in sorted({row.d for row in rows})]
    draw(path, grid, (14.0, 3.8 * len(grid)), sharey="row")


TITLE = "supportbasis bench --device cuda"
LEAD = (
    "Attention with a plan given, bfloat16, batch 1, against the fastest of PyTorch's backends in "
    "the same run. Times are medians of calls, by events on the device. Q and K from N(0, 0.1²) "
    "(the paper's setting) unless a case says otherwise, V from N(0, 1), scale 1/√d."
)
TABLE = (
    f"Errors are relative (Frobenius), against float64 over all keys, of {SAMPLED_ROWS} rows of "
    "each head; red: beyond the limit of the case, so its speed does not count. “rate” is the "
    "plan's multiply-adds over the time, as a share of a large matrix product's rate in the same "
    "run. “first” is the first call, compilation included."
)
QUICK = 8192
LENGTHS = (2048, 8192, 32768, 131072)


def run_gpu_bench(
    only: str | None, out: Path, console: Console, *, quick: bool = False, redraw: bool = False
) -> None:
    """Measure the cases that the folder lacks; then table, picture and report."""
    machine = Machine.here("cpu" if redraw else "cuda")
    records = Records(out / "gpu.csv", GpuRow, machine)
    cases = [*CASES, *list_cases(), *host_cases(), *CROSSOVER, *sweep(LENGTHS)]
    if quick:
        cases = [case for case in cases if case.n <= QUICK]
    chosen = [case for case in cases if only is None or case.unit.startswith(only)]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        raise InputError(f"--only: no case starts with {only!r}; there are {names}")
    bench = cache(Bench)

    def unit(case: Case) -> Unit[GpuRow]:
        return Unit(case.unit, records, lambda tick: _measured(bench, case, console))

    units = [unit(case) for case in chosen]
    if not redraw and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device here")
    measure(units, console, redraw=redraw)
    rows = records.of([unit.name for unit in units])
    publish(out, TITLE, LEAD, _sections(rows, out), machine, console)


def _measured(bench: Callable[[], Bench], case: Case, console: Console) -> list[GpuRow]:
    try:
        return [bench().row(case)]
    except RuntimeError as error:  # out of memory, say; the other cases go on
        console.print(f"{case.unit} failed: {str(error).splitlines()[0]}")
        return []
    finally:
        torch.cuda.empty_cache()


def _sections(rows: Sequence[GpuRow], out: Path) -> list[Section]:
    sections = []
    single = [row for row in rows if not row.work.startswith(("sweep", "crossover"))]
    if single:
        sections.append(Section("Cases", TABLE, grids=[case_table(single)]))
    crossing = [row for row in rows if row.work.startswith("crossover")]
    if crossing:
        said = [f"Degree 2, 16 heads, d=64, both as graph replays: {crossover(crossing)}."]
        grids = [case_table(crossing)]
        sections.append(Section("Where degree 2 starts to pay", findings=said, grids=grids))
    swept = [row for row in rows if row.work.startswith("sweep")]
    if swept:
        path = out / "lengths.png"
        draw_lengths(swept, path)
        shown = [(path, "Time of a call with 8 heads against the number of tokens.")]
        grids = [case_table(swept)]
        sections.append(Section("Time against length", grids=grids, figures=shown, printed=[]))
    return sections


def case_table(rows: Sequence[GpuRow]) -> Grid:
    columns: dict[str, Callable[[GpuRow], str]] = {
        "case": _name,
        "heads, n, d": lambda row: f"{row.heads}, {row.n}, {row.d}",
        "ms": lambda row: _ms(row.ms),
        "flash": lambda row: _ms(row.flash_ms),
        "cuDNN": lambda row: _ms(row.cudnn_ms),
        "efficient": lambda row: _ms(row.efficient_ms),
        "ratio": lambda row: f"{row.ratio:.3g}×",
        "rate": lambda row: "–" if row.rate is None else f"{100 * row.rate:.0f} %",
        "error": lambda row: f"{row.error:.1e}",
        "first": lambda row: f"{row.first_call_s:.1f} s",
    }
    return table("", rows, columns, lost=lambda row: not row.counts)


def _name(row: GpuRow) -> str:
    name = row.work + (", causal" if row.causal else "")
    name += ", forward+backward" if row.backward else ""
    name += f" ({row.note})" if row.note else ""
    return name + ("" if row.implementation == "triton" else f" [{row.implementation}]")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def crossover(rows: Sequence[GpuRow]) -> str:
    """From which length on the first of the two is faster, on a log-log scale."""
    ordered = sorted(rows, key=lambda row: row.n)
    if all(row.ratio >= 1 for row in ordered):
        return f"faster from n≤{ordered[0].n}"
    if ordered[-1].ratio < 1:
        return f"not faster up to n={ordered[-1].n}"
    found = math.nan
    for before, after in pairwise(ordered):
        if before.ratio < 1 <= after.ratio:
            low, high = math.log(before.ratio), math.log(after.ratio)
            found = before.n * (after.n / before.n) ** (-low / (high - low))
    return f"faster from n≈{found:.0f}"
