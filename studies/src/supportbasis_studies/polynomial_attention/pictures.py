"""The pictures of the study, each from the rows of one part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, GREY, INK, length_label, log_lengths, new_figure, plain_axes
from ..statistics import Interval
from .buying import FACTORS, RATIOS, WAYS, PowerRow, SketchRow
from .dense import NORMS
from .errors import PARTS, SIZE, SKETCHES, Summary, Verdict
from .inputs import DRAWS
from .sketching import Decay
from .timing import SWEEPS, SweepRow, TimeRow
from .variants import ALL_SKETCHED, AS_RUN, SHARED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEGREE = 2  # of the lines in the pictures; the tables have both

# label of a line, its colour and style
LINES = {
    "mean(V)": (GREY, "--"),
    f"one polynomial, degree {DEGREE}": ("#c05621", "-v"),
    f"one power, degree {DEGREE}": ("#2f6fab", "-o"),
    f"buckets 2, degree {DEGREE}": ("#2f855a", "-s"),
    f"buckets 1.5, degree {DEGREE}": ("#319795", "-^"),
    f"one power, degree {DEGREE}, sketch {SIZE}, {ALL_SKETCHED}": ("#2f6fab", ":o"),
    f"buckets 2, degree {DEGREE}, sketch {SIZE}, {ALL_SKETCHED}": ("#2f855a", ":s"),
    f"buckets 2, degree {DEGREE}, sketch {SIZE}, {SHARED}": ("#b7791f", ":s"),
    f"buckets 2, degree {DEGREE}, sketch {SIZE}, {AS_RUN}": ("#805ad5", "-.s"),
    "PowerAttention(2)": ("#d53f8c", "-x"),
    "PowerAttention(4)": ("#d53f8c", "-+"),
}
NAMES = {"matrix": "A = exp(score)", "attention": "D⁻¹A", "output": "output"}
SIGNS = {"l1": "ℓ1", "l2": "ℓ2", "l4": "ℓ4", "linf": "ℓ∞"}
MARKS = {"l1": "o", "l2": "s", "l4": "^", "linf": "D"}
FARTHEST = 1e3  # ratios beyond are drawn at the edge


def ratio_name(ratio: float) -> str:
    return "one power" if ratio == math.inf else f"buckets of ratio {ratio:g}"


def _bars(errors: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Means, and how far the intervals reach below and above them."""
    means = [error.mean for error in errors]
    below = [error.mean - error.low for error in errors]
    return means, [below, [error.high - error.mean for error in errors]]


# ---- errors ----------------------------------------------------------------------------------


def draw_errors(summaries: Sequence[Summary], path: Path) -> None:
    """The output error against the length: a panel for each input."""
    rows = [row for row in summaries if (row.part, row.norm) == ("output", "l2")]
    figure = new_figure(12.4, 6.4)
    panels = figure.subplots(1, len(DRAWS), sharey=True)
    for axes, name in zip(panels, DRAWS, strict=True):
        plain_axes(axes)
        for label, (colour, style) in LINES.items():
            line = sorted((r for r in rows if (r.input, r.method) == (name, label)), key=_by_length)
            means, bars = _bars([row.error for row in line])
            lengths = [row.n for row in line]
            axes.errorbar(
                lengths, means, bars, fmt=style, color=colour, label=label, ms=5, lw=1.4, capsize=2
            )
        log_lengths(axes, sorted({row.n for row in rows}))
        axes.set_ylim(*_limits([row.error.mean for row in rows if row.method in LINES]))
        axes.set_title(name, loc="left", fontsize=11)
        axes.set_xlabel("tokens")
    panels[0].set_ylabel("relative error of the output, ℓ2")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _by_length(row: Summary) -> int:
    return row.n


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Room for the means; intervals of very few seeds may leave the picture."""
    return min(values) / 5, max(values) * 5


def draw_verdicts(verdicts: Sequence[Verdict], path: Path) -> None:
    """Error with buckets over error without: a panel for each part, a mark for each norm."""
    longest = max(verdict.n for verdict in verdicts)
    mine = [v for v in verdicts if v.n == longest and v.degree == DEGREE]
    lines = [(name, sketch) for name in DRAWS for sketch in SKETCHES]
    figure = new_figure(12.4, 5.6)
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for axes, part in zip(panels, PARTS, strict=True):
        plain_axes(axes)
        axes.axvspan(1 / (3 * FARTHEST), 1, color="#f0faf4", zorder=0)
        axes.axvline(1.0, color=INK, linewidth=1)
        for index, norm in enumerate(NORMS):
            chosen = {(v.input, v.sketch): v for v in mine if (v.part, v.norm) == (part, norm)}
            for height, line in enumerate(lines):
                at = height + (index - 1.5) * 0.17
                _mark_ratio(axes, chosen[line].ratio, at, norm, COLOURS[index])
        axes.set_xscale("log")
        axes.set_xlim(1 / (3 * FARTHEST), 3 * FARTHEST)
        axes.set_title(NAMES[part], loc="left", fontsize=11)
        axes.set_xlabel("error with buckets / with one power")
    panels[0].set_yticks(range(len(lines)), [f"{name}, {sketch}" for name, sketch in lines])
    panels[0].invert_yaxis()
    handles = [
        axes.plot([], [], MARKS[norm], color=COLOURS[index], label=SIGNS[norm])[0]
        for index, norm in enumerate(NORMS)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _mark_ratio(axes: Axes, ratio: Interval, at: float, norm: str, colour: str) -> None:
    """A mark with its interval, or an arrow at the edge for what lies beyond it."""
    edge = 2 * FARTHEST
    if not 1 / FARTHEST <= ratio.mean <= FARTHEST:
        high = ratio.mean > 1
        axes.plot(edge if high else 1 / edge, at, ">" if high else "<", color=colour, ms=5)
        return
    axes.plot([max(ratio.low, 1 / edge), min(ratio.high, edge)], [at, at], color=colour, lw=1.2)
    axes.plot(ratio.mean, at, MARKS[norm], color=colour, ms=4)


# ---- what buckets buy ------------------------------------------------------------------------


def draw_powers(rows: Sequence[PowerRow], path: Path) -> None:
    """Output error against the mean power: one power of every size, and buckets."""
    figure = new_figure(7.2, 4.6)
    axes = figure.add_subplot()
    plain_axes(axes)
    line: dict[float, list[float]] = {}
    for row in rows:
        if not row.chosen:
            line.setdefault(row.powers.mean_power, []).append(row.output_l2)
    means = [Interval.of(line[power]).mean for power in sorted(line)]
    axes.plot(sorted(line), means, "-o", color=GREY, ms=4, label="one power, any p")
    for ratio, colour in zip(RATIOS, COLOURS, strict=False):
        mine = [row for row in rows if row.chosen and row.ratio == ratio]
        power = Interval.of([row.powers.mean_power for row in mine]).mean
        error = Interval.of([row.output_l2 for row in mine]).mean
        label = f"{ratio_name(ratio)}, p as chosen"
        axes.plot(power, error, "D", color=colour, ms=8, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("mean power p, weighted by pairs")
    axes.set_ylabel("relative error of the output, ℓ2")
    axes.set_title("log-normal, powers not sketched: left and down is better", loc="left", size=11)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def draw_bought(rows: Sequence[SketchRow], path: Path) -> None:
    """Output error against sketch size: a row for each input, a column for each way."""
    figure = new_figure(12.4, 7.4)
    grid = figure.subplots(len(FACTORS), len(WAYS), sharex=True, sharey="row", squeeze=False)
    for axes_row, factor in zip(grid, FACTORS, strict=True):
        for axes, way in zip(axes_row, WAYS, strict=True):
            mine = [row for row in rows if (row.factor, row.way) == (factor, way)]
            _bought_panel(axes, mine)
            axes.set_title(f"entries × {factor:g}: {way}", loc="left", fontsize=10)
        axes_row[0].set_ylabel("relative error of the output, ℓ2")
    for axes in grid[-1]:
        axes.set_xlabel("sketch size")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _bought_panel(axes: Axes, rows: Sequence[SketchRow]) -> None:
    plain_axes(axes)
    sizes = sorted({row.sketch_size for row in rows})
    for ratio, colour in zip(RATIOS, COLOURS, strict=False):
        groups = {size: _sketched_errors(rows, ratio, size) for size in sizes}
        shown = {size: group for size, group in groups.items() if group}
        spans = [Interval(_mean(g), min(g), max(g), len(g)) for g in shown.values()]
        means, bars = _bars(spans)
        label = ratio_name(ratio)
        axes.errorbar(
            list(shown), means, bars, fmt="-o", color=colour, ms=4, capsize=2, label=label
        )
    free = _mean([row.mean_v for row in rows])
    axes.axhline(free, color=GREY, linestyle="--", linewidth=1, label="mean(V)")
    log_lengths(axes, sizes)


def _sketched_errors(rows: Sequence[SketchRow], ratio: float, size: int) -> list[float]:
    """Errors of the runs in which something was sketched."""
    mine = [row for row in rows if (row.ratio, row.sketch_size) == (ratio, size)]
    return [row.output_l2 for row in mine if row.powers.exact_share < 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- sketches of powers ----------------------------------------------------------------------


def draw_decays(decays: Sequence[Decay], path: Path) -> None:
    """Measured and predicted errors of sketched powers, of the output and of inner products."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = new_figure(11.4, 4.8)
    left, right = figure.subplots(1, 2)
    for decay, colour in zip(decays, COLOURS, strict=False):
        sizes, values = zip(*decay.beyond, strict=True)
        name = f"power {decay.power}"
        left.plot(sizes, values, "-", color=colour, lw=1.2, label=f"{name}, predicted")
        left.plot(decay.sizes, decay.measured, "o", color=colour, ms=6, label=f"{name}, measured")
        right.plot(decay.sizes, decay.inner_predicted, "-", color=colour, lw=1.2)
        right.plot(decay.sizes, decay.inner_measured, "o", color=colour, ms=6)
    last = decays[0].beyond[-1]
    ends = [last[0] / 64, last[0]]
    guide = [0.5 * last[1] * math.sqrt(last[0] / size) for size in ends]
    left.plot(ends, guide, "--", color=GREY, lw=1, label="slope −1/2")
    for axes, title in ((left, "output"), (right, "inner products ⟨φ(q), φ(k)⟩")):
        plain_axes(axes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(length_label)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("sketch size")
        axes.set_ylabel("relative error, ℓ2")
        axes.set_title(title, loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


# ---- time ------------------------------------------------------------------------------------


def draw_lengths(rows: Sequence[TimeRow], path: Path) -> None:
    """Seconds against length, with SDPA in black and a line of slope one."""
    figure = new_figure(7.6, 5.2)
    axes = figure.add_subplot()
    plain_axes(axes)
    lengths = sorted({row.n for row in rows})
    best = [min(row.sdpa_seconds for row in rows if row.n == n) for n in lengths]
    axes.plot(lengths, best, "-D", color=INK, ms=5, label="SDPA")
    for name, colour in zip(dict.fromkeys(row.name for row in rows), COLOURS, strict=False):
        seconds = [row.seconds for n in lengths for row in rows if (row.name, row.n) == (name, n)]
        axes.plot(lengths, seconds, "-o", color=colour, ms=5, label=name)
    lowest = min(row.seconds for row in rows)
    guide = [0.6 * lowest * n / lengths[0] for n in lengths]
    axes.plot(lengths, guide, "--", color=GREY, lw=1, label="twice the time for twice the tokens")
    log_lengths(axes, lengths)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds per call, planning included")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def draw_sweeps(rows: Sequence[SweepRow], path: Path) -> None:
    """Time relative to the first point of each sweep, beside the paper's formulas."""
    figure = new_figure(12.4, 5.0)
    panels = figure.subplots(1, len(SWEEPS))
    labels = {
        "entries": "standard deviation of the entries",
        "buckets": "bucket pairs",
        "sketch size": "sketch size",
    }
    for axes, sweep in zip(panels, SWEEPS, strict=True):
        plain_axes(axes)
        mine = [row for row in rows if row.sweep == sweep]
        x = [row.pairs if sweep == "buckets" else row.value for row in mine]
        for label, style, colour, values in _sweep_lines(mine):
            axes.plot(x, values, style, color=colour, ms=5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(x)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel(labels[sweep])
        axes.set_title(sweep, loc="left", fontsize=11)
    panels[0].set_ylabel("time, first sb.attention = 1; formulas, first = 1")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _sweep_lines(rows: Sequence[SweepRow]) -> list[tuple[str, str, str, list[float]]]:
    """Times over the first time of attention, formulas over their own first value."""
    unit = rows[0].attention_seconds
    return [
        ("sb.attention", "-o", COLOURS[0], [row.attention_seconds / unit for row in rows]),
        ("sb.kernel_sum", "-s", COLOURS[1], [row.kernel_sum_seconds / unit for row in rows]),
        ("SDPA", "-D", INK, [row.sdpa_seconds / unit for row in rows]),
        ("n Σ C (r z + z²)", "--", COLOURS[4], [row.lemma / rows[0].lemma for row in rows]),
        ("B⁶ log²(n/δ) / ε⁴", ":", COLOURS[3], [row.theorem / rows[0].theorem for row in rows]),
    ]
