"""``supportbasis reproduce polynomial-attention``: measure, write, print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..study import Machine, Section, Steps, in_short, publish, write_rows
from . import buying, errors, findings, pictures, sketching, tables, timing
from .inputs import DIM, DRAWS, Extent

TITLE = "supportbasis reproduce polynomial-attention"
LEAD = (
    "Softmax attention against what polynomials and powers make of it. One polynomial: exp is "
    "replaced by a Chebyshev interpolant over the full range of the scores (AS23). One power: "
    "exp(z) = exp(z/p)^p with a polynomial inside. Buckets: rows and keys in buckets by their "
    "largest entry, every pair of buckets with a power of its own (the paper's appendices F to I). "
    "PowerAttention: the power of the score itself. mean(V): every weight equal. Errors are "
    "relative, ‖given − exact‖ / ‖exact‖ in entrywise norms, against float64 softmax; one head, "
    "scale 1/√d."
)


@dataclass(frozen=True)
class Measured:
    """All rows of the study."""

    errors: Sequence[errors.ErrorRow]
    powers: Sequence[buying.PowerRow]
    sketches: Sequence[buying.SketchRow]
    decay: Sequence[sketching.SketchedPower]
    lengths: Sequence[timing.TimeRow]
    sweeps: Sequence[timing.SweepRow]


def run_study(extent: Extent, out: Path, seed: int, console: Console) -> None:
    """The whole study: five parts, a report, tables and pictures."""
    machine = Machine.here()
    measured = _measure(extent, seed, console)
    _write_tables(measured, machine, out)
    publish(out, TITLE, LEAD, _sections(measured, extent, seed, out), machine, console)


def _measure(extent: Extent, seed: int, console: Console) -> Measured:
    with Steps(console, 6) as steps:
        with steps.step("errors in four norms") as tick:
            of_errors = errors.measure(extent, seed, tick)
        with steps.step("powers with and without buckets") as tick:
            powers = buying.measure_powers(extent, seed, tick)
        with steps.step("sketches with and without buckets") as tick:
            sketches = buying.measure_sketches(extent, seed, tick)
        with steps.step("sketched powers") as tick:
            decay = sketching.measure_sketch(extent, seed, tick)
        with steps.step("time against length") as tick:
            lengths = timing.measure_lengths(extent, seed, tick)
        with steps.step("time against entries, buckets, sketches") as tick:
            sweeps = timing.measure_sweeps(extent, seed, tick)
    return Measured(of_errors, powers, sketches, decay, lengths, sweeps)


def _write_tables(measured: Measured, machine: Machine, out: Path) -> None:
    tables: dict[str, Sequence[object]] = {
        "errors": measured.errors,
        "errors-summary": errors.summarise(measured.errors),
        "bucketing": errors.compare_buckets(measured.errors),
        "powers": measured.powers,
        "sketches": measured.sketches,
        "equal-error": buying.equal_error(measured.sketches),
        "sketched-powers": measured.decay,
        "lengths": measured.lengths,
        "sweeps": measured.sweeps,
    }
    for name, rows in tables.items():
        write_rows(out / f"{name}.csv", machine, rows)


# ---- sections --------------------------------------------------------------------------------


def _sections(measured: Measured, extent: Extent, seed: int, out: Path) -> list[Section]:
    decays = sketching.decays(measured.decay, extent, seed)
    summaries = errors.summarise(measured.errors)
    checks = findings.checks(summaries, decays, measured.lengths)
    return [
        in_short("Statements and what was measured", checks),
        _errors(measured, summaries, extent, out),
        _bucketing(measured, summaries, out),
        _bought(measured, extent, out),
        _sketches(decays, extent, out),
        _lengths(measured.lengths, out),
        _sweeps(measured.sweeps, out),
    ]


def _errors(
    measured: Measured, summaries: Sequence[errors.Summary], extent: Extent, out: Path
) -> Section:
    inputs = "; ".join(f"{name}: {text}" for name, (_, text) in DRAWS.items())
    text = (
        f"Inputs, d={DIM}: {inputs}; V from N(0, 1). {extent.seeds} seeds for each length, which "
        "draw inputs and sketches. Numbers are geometric means; bars are 95 % intervals of "
        "Student's t for the mean logarithm. “A” is the matrix exp(score), which the paper's "
        "lemmas are about, “D⁻¹A” the attention matrix. “Nothing exact”: every pair of buckets is "
        "sketched, whatever its power; “shared sketches”: pairs of equal power share one sketch "
        "instead of drawing their own; “as the library runs it”: small pairs, and pairs of high "
        "power where that is affordable, are exact. “Exact” is the share of exact pairs, “failed” "
        "that of rows on which a sketch failed; the library computes them exactly. Equal sketch "
        "budget means equal sketch size: with m buckets of keys a query has m sketches. Red lines "
        "are not better than the mean of V."
    )
    picture = out / "errors.png"
    pictures.draw_errors(summaries, picture)
    rows = measured.errors
    grids = [tables.error_table(rows, summaries, name, parts=errors.PARTS) for name in DRAWS]
    shown = [tables.error_table(rows, summaries, name, parts=("output",)) for name in DRAWS]
    caption = "Output error against length, degree 2, with 95 % intervals over seeds."
    said = findings.error_findings(rows, summaries)
    title = "One polynomial, one power, several"
    return Section(title, text, said, grids, [(picture, caption)], printed=shown)


def _bucketing(measured: Measured, summaries: Sequence[errors.Summary], out: Path) -> Section:
    verdicts = errors.compare_buckets(measured.errors)
    picture = out / "bucketing.png"
    pictures.draw_verdicts(verdicts, picture)
    text = (
        "The error with buckets of ratio 2 over the error with one power, at equal degree and "
        "equal sketch size, seed by seed. ↓: bucketing helps, the whole 95 % interval is below 1; "
        "↑: it hurts, the whole interval is above 1; ·: unclear. In sketched comparisons nothing "
        "is exact; “shared”: buckets share a sketch where their powers agree."
    )
    counts = tables.verdict_counts(verdicts)
    said = [*findings.verdict_findings(verdicts), findings.useful_finding(summaries)]
    grids = [counts, tables.verdict_table(verdicts)]
    caption = "Ratios of errors, degree 2. Left of the line bucketing helps; arrows: beyond."
    title = "Does bucketing help?"
    return Section(title, text, said, grids, [(picture, caption)], printed=[counts])


def _bought(measured: Measured, extent: Extent, out: Path) -> Section:
    powers, sketches = out / "powers.png", out / "bought.png"
    pictures.draw_powers(measured.powers, powers)
    pictures.draw_bought(measured.sketches, sketches)
    bought = buying.equal_error(measured.sketches)
    grids = [tables.power_table(measured.powers), *tables.bought_tables(bought)]
    terminal = [grid for grid in grids if tables.says_something(grid)]
    text = (
        f"Log-normal row scales, n={extent.bought_length}, degree {buying.DEGREE}, "
        f"{extent.bought_seeds} seeds; also with entries × 0.3, where scores are small enough for "
        "sketches of every pair. A sketch reaches an error when it does so with every seed. Time "
        "is the best of the seeds' calls, planning included, SDPA's the best of calls between "
        "them. The library computes failed rows of a sketch exactly: so do errors “as the library "
        "runs it”, and those with nothing exact do not (512 sampled rows)."
    )
    said = [findings.power_finding(measured.powers)]
    said += findings.sketch_findings(measured.sketches, bought)
    captions = (
        "Output error against mean power: one power of any size, and buckets.",
        "Output error against sketch size, mean over seeds; bars from the best to the worst. Runs "
        "that the library made wholly exact are left out.",
    )
    shown = list(zip((powers, sketches), captions, strict=True))
    return Section("What bucketing buys", text, said, grids, shown, printed=terminal)


def _sketches(decays: Sequence[sketching.Decay], extent: Extent, out: Path) -> Section:
    picture = out / "sketched-powers.png"
    pictures.draw_decays(decays, picture)
    text = (
        f"PowerAttention(p, z) against PowerAttention(p): n={extent.sketch_length}, "
        f"d={sketching.DIM}, entries from N(0, 1), {extent.sketch_seeds} sketches of each size, "
        "root mean square. The prediction comes from the exact second and fourth moments of the "
        "sketched inner product X: a weight is X², and the squared error of the output is the sum "
        "of E(X²/ΣE X² − w/Σw)² over that of (w/Σw)², for independent random values."
    )
    grid = tables.decay_table(decays)
    caption = "Measured errors (dots) and predicted ones (lines), beyond the sizes that were run."
    said = findings.decay_findings(decays)
    return Section("Sketched powers", text, said, [grid], [(picture, caption)])


def _lengths(rows: Sequence[timing.TimeRow], out: Path) -> Section:
    picture = out / "lengths.png"
    pictures.draw_lengths(rows, picture)
    maxima = ", ".join(f"{value:g}" for value in timing.MAXIMA)
    text = (
        f"float32, d={timing.DIM}, sketch {timing.SIZE}; “gaussian”: entries from "
        f"N(0, {timing.DEVIATION:g}²); “fixed buckets”: Gaussian rows whose largest entries are "
        f"{maxima} in turn, so that the buckets do not change with the length. Best of several "
        "whole calls, planning included. Errors are measured on sampled rows against softmax, "
        "those of PowerAttention against the power without a sketch; “mean(V)” is against softmax."
    )
    grid = tables.length_table(rows)
    caption = "Seconds for each call against the number of tokens."
    said = findings.length_findings(rows)
    return Section("Time against length", text, said, [grid], [(picture, caption)])


def _sweeps(rows: Sequence[timing.SweepRow], out: Path) -> Section:
    picture = out / "sweeps.png"
    pictures.draw_sweeps(rows, picture)
    text = (
        f"MultiThreshold(2.0, 1, {timing.SIZE}), n={rows[0].n}, d={rows[0].d}, one thing changed "
        f"at a time: the standard deviation of Gaussian entries; the ratio of the buckets, on "
        f"log-normal row scales with entries × {timing.SWEPT_FACTOR:g}; the sketch size, at "
        f"standard deviation {timing.SWEPT_DEVIATION:g}. Lemma I.3 counts n Σ C (r z + z²) over "
        "all bucket pairs and concludes B⁶ log²(n/δ)/ε⁴; here C is the power of a pair, r the "
        "features of the polynomial and ε⁻² is proportional to the sketch size z. “Our count” is "
        "of the multiply-adds of the plan. The paper's scores carry 1/d, so its B² is "
        "√d·max|entry|² here. Its bound is ε₂ exp(3B²), with ε₂ = B²ε₀/ln n + Σ ε exp(range of the "
        f"pair) and ε = √(p ln(n/δ)/z), δ = {timing.DELTA:g}, all constants one."
    )
    said = [*findings.sweep_findings(rows), findings.bound_finding(rows)]
    grids = [tables.sweep_table(rows), tables.growth_table(rows), tables.bound_table(rows)]
    caption = "Time over the first time of sb.attention, beside the paper's formulas."
    title = "Time against entries, buckets and sketch size"
    return Section(title, text, said, grids, [(picture, caption)])
