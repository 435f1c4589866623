"""The pictures of the study, each from the rows of one part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, GREY, INK, Line, Panel, draw, new_figure, plain_axes, save
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
ERROR = "relative error of the output, ℓ2"
FARTHEST = 1e3  # ratios beyond are drawn at the edge


def ratio_name(ratio: float) -> str:
    return "one power" if ratio == math.inf else f"buckets of ratio {ratio:g}"


def _interval_line(
    label: str, x: Sequence[float], errors: Sequence[Interval], style: str, colour: str
) -> Line:
    spans = [(error.low, error.high) for error in errors]
    return Line(label, x, [error.mean for error in errors], style, colour, spans)


# ---- errors ----------------------------------------------------------------------------------


def draw_errors(summaries: Sequence[Summary], path: Path) -> None:
    """The output error against the length: a panel for each input. Intervals of very few seeds
    may leave the picture."""
    rows = [r for r in summaries if (r.part, r.norm) == ("output", "l2") and r.method in LINES]
    lengths, means = sorted({row.n for row in rows}), [row.error.mean for row in rows]

    def line(name: str, label: str) -> Line:
        found = {r.n: r.error for r in rows if (r.input, r.method) == (name, label)}
        return _interval_line(label, lengths, [found[n] for n in lengths], *reversed(LINES[label]))

    panels = [
        Panel(name, [line(name, label) for label in LINES], "tokens", ERROR, ticks=lengths,
              limits=(min(means) / 5, max(means) * 5))
        for name in DRAWS
    ]  # fmt: skip
    draw(path, [panels], (12.4, 6.4), legend=3, sharey=True)


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
    save(figure, path)


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
    found: dict[float, list[float]] = {}
    for row in rows:
        if not row.chosen:
            found.setdefault(row.powers.mean_power, []).append(row.output_l2)
    powers = sorted(found)
    means = [Interval.of(found[power]).mean for power in powers]
    lines = [Line("one power, any p", powers, means, colour=GREY)]
    for ratio, colour in zip(RATIOS, COLOURS, strict=False):
        mine = [row for row in rows if row.chosen and row.ratio == ratio]
        power = Interval.of([row.powers.mean_power for row in mine]).mean
        error = Interval.of([row.output_l2 for row in mine]).mean
        lines.append(Line(f"{ratio_name(ratio)}, p as chosen", [power], [error], "D", colour))
    title = "log-normal, powers not sketched: left and down is better"
    panel = Panel(title, lines, "mean power p, weighted by pairs", ERROR)
    draw(path, [[panel]], (7.2, 5.0), legend=3)


def draw_bought(rows: Sequence[SketchRow], path: Path) -> None:
    """Output error against sketch size: a row for each input, a column for each way."""

    def panel(factor: float, way: str) -> Panel:
        mine = [row for row in rows if (row.factor, row.way) == (factor, way)]
        sizes = sorted({row.sketch_size for row in mine})
        lines = []
        for ratio, colour in zip(RATIOS, COLOURS, strict=False):
            groups = {size: _sketched_errors(mine, ratio, size) for size in sizes}
            shown = {size: group for size, group in groups.items() if group}
            spans = [Interval(_mean(g), min(g), max(g), len(g)) for g in shown.values()]
            lines.append(_interval_line(ratio_name(ratio), list(shown), spans, "-o", colour))
        title, free = f"entries × {factor:g}: {way}", _mean([row.mean_v for row in mine])
        levels = {"mean(V)": free}
        return Panel(title, lines, "sketch size", ERROR, ticks=sizes, levels=levels)

    grid = [[panel(factor, way) for way in WAYS] for factor in FACTORS]
    draw(path, grid, (12.4, 7.4), legend=5, sharey="row")


def _sketched_errors(rows: Sequence[SketchRow], ratio: float, size: int) -> list[float]:
    """Errors of the runs in which something was sketched."""
    mine = [row for row in rows if (row.ratio, row.sketch_size) == (ratio, size)]
    return [row.output_l2 for row in mine if row.powers.exact_share < 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- sketches of powers ----------------------------------------------------------------------


def draw_decays(decays: Sequence[Decay], path: Path) -> None:
    """Measured and predicted errors of sketched powers, of the output and of inner products."""
    output: list[Line] = []
    inner: list[Line] = []
    for decay, colour in zip(decays, COLOURS, strict=False):
        sizes, values = zip(*decay.beyond, strict=True)
        label = f"power {decay.power}, predicted"
        output.append(Line(label, sizes, values, "-", colour))
        inner.append(Line(label, decay.sizes, decay.inner_predicted, "-", colour))
        label = f"power {decay.power}, measured"
        output.append(Line(label, decay.sizes, decay.measured, "o", colour))
        inner.append(Line(label, decay.sizes, decay.inner_measured, "o", colour))
    last = decays[0].beyond[-1]
    ends = [last[0] / 64, last[0]]
    guide = [0.5 * last[1] * math.sqrt(last[0] / size) for size in ends]
    output.append(Line("slope −1/2", ends, guide, "--", GREY))
    panels = [
        Panel("output", output, "sketch size", "relative error, ℓ2"),
        Panel("inner products ⟨φ(q), φ(k)⟩", inner, "sketch size"),
    ]
    draw(path, [panels], (11.4, 5.2))


# ---- time ------------------------------------------------------------------------------------


def draw_lengths(rows: Sequence[TimeRow], path: Path) -> None:
    """Seconds against length, with SDPA in black and a line of slope one."""
    lengths = sorted({row.n for row in rows})
    best = [min(row.sdpa_seconds for row in rows if row.n == n) for n in lengths]
    lines = [Line("SDPA", lengths, best, "-D")]
    for name, colour in zip(dict.fromkeys(row.name for row in rows), COLOURS, strict=False):
        seconds = {row.n: row.seconds for row in rows if row.name == name}
        lines.append(Line(name, lengths, [seconds[n] for n in lengths], colour=colour))
    lowest = min(row.seconds for row in rows)
    guide = [0.6 * lowest * n / lengths[0] for n in lengths]
    lines.append(Line("twice the time for twice the tokens", lengths, guide, "--", GREY))
    panel = Panel("", lines, "tokens", "seconds per call, planning included", ticks=lengths)
    draw(path, [[panel]], (7.6, 5.6), legend=2)


def draw_sweeps(rows: Sequence[SweepRow], path: Path) -> None:
    """Time over the first time of attention in each sweep, formulas over their own first value."""
    labels = {
        "entries": "standard deviation of the entries",
        "buckets": "bucket pairs",
        "sketch size": "sketch size",
    }

    def panel(sweep: str) -> Panel:
        mine = [row for row in rows if row.sweep == sweep]
        x = [row.pairs if sweep == "buckets" else row.value for row in mine]
        first = mine[0]
        unit = first.attention_seconds
        lines = [
            Line("sb.attention", x, [r.attention_seconds / unit for r in mine], "-o", COLOURS[0]),
            Line("sb.kernel_sum", x, [r.kernel_sum_seconds / unit for r in mine], "-s", COLOURS[1]),
            Line("SDPA", x, [r.sdpa_seconds / unit for r in mine], "-D"),
            Line("n Σ C (r z + z²)", x, [r.lemma / first.lemma for r in mine], "--", COLOURS[4]),
            Line("B⁶ log²(n/δ) / ε⁴", x, [r.theorem / first.theorem for r in mine], ":",
                 COLOURS[3]),
        ]  # fmt: skip
        return Panel(sweep, lines, labels[sweep], "time or formula, first = 1", ticks=x)

    draw(path, [[panel(sweep) for sweep in SWEEPS]], (12.4, 5.0), legend=5)
