"""The tables of the study, for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..numbers import seconds, times
from ..statistics import Interval
from ..study import Grid
from .buying import RATIOS, WAYS, Bought, PowerRow, equal_power
from .dense import NORMS
from .errors import ErrorRow, Summary, Verdict, measures
from .pictures import NAMES, SIGNS, ratio_name
from .sketching import Decay
from .timing import SweepRow, TimeRow, doublings

VACUOUS = 2.0  # outputs are means of the values: no two are further apart
NOTHING = 1e-15  # an error below is rounding
NOT_REACHED = "not reached"


def brief(value: float | None) -> str:
    """Two digits are what these numbers deserve."""
    if value is None:
        return "—"
    return "0" if value < NOTHING else f"{value:.2g}"


def growth(value: float) -> str:
    """A factor, however large."""
    return times(value) if value < 1e4 else f"{value:.1g}×"


def longest(rows: Sequence[ErrorRow]) -> int:
    return max(row.n for row in rows)


# ---- errors ----------------------------------------------------------------------------------


def error_table(
    rows: Sequence[ErrorRow], summaries: Sequence[Summary], name: str, *, parts: Sequence[str]
) -> Grid:
    """Every method on one input at the largest length; red where mean(V) is as good."""
    n = longest(rows)
    mine = [row for row in summaries if (row.input, row.n) == (name, n)]
    errors = {(row.method, row.part, row.norm): row.error.mean for row in mine}
    columns = [(part, norm) for part in parts for norm in NORMS]
    headings = ["method", "powers", "exact", "failed"]
    headings += [f"{NAMES[part].split(' ')[0]} {SIGNS[norm]}" for part, norm in columns]
    lines, lost = [], set()
    for index, method in enumerate(dict.fromkeys(row.method for row in rows)):
        plans = [row for row in rows if (row.input, row.n, row.method) == (name, n, method)]
        cells = [brief(errors[method, part, norm]) for part, norm in columns]
        lines.append([method, *_plan_cells(plans), *cells])
        free, error = (errors[label, "output", "l2"] for label in ("mean(V)", method))
        if index and not error < free:
            lost.add(index)
    return Grid(f"{name}, n={n}: relative errors", headings, lines, frozenset(lost))


def _plan_cells(rows: Sequence[ErrorRow]) -> list[str]:
    """Mean and largest power, share of exact pairs, share of failed rows, over all seeds."""
    largest = max(row.powers.largest_power for row in rows)
    mean = sum(row.powers.mean_power for row in rows) / len(rows)
    exact = 100 * sum(row.powers.exact_share for row in rows) / len(rows)
    gone = 100 * sum(row.errors.failed_rows for row in rows) / len(rows)
    powers = f"{mean:.3g} (≤ {largest})" if largest else "—"
    return [powers, f"{exact:.0f} %" if exact else "—", f"{gone:.1f} %" if gone else "—"]


def verdict_table(verdicts: Sequence[Verdict]) -> Grid:
    """Error with buckets over error without, at the largest length."""
    n = max(verdict.n for verdict in verdicts)
    mine = [verdict for verdict in verdicts if verdict.n == n]
    keys = dict.fromkeys((v.input, v.degree, v.sketch) for v in mine)
    table = {(v.input, v.degree, v.sketch, v.part, v.norm): v for v in mine}
    headings = [f"{NAMES[part].split(' ')[0]} {SIGNS[norm]}" for part, norm in measures()]
    lines = [
        [
            f"{name}, degree {degree}, {sketch}",
            *(_verdict_cell(table[name, degree, sketch, part, norm]) for part, norm in measures()),
        ]
        for name, degree, sketch in keys
    ]
    title = f"Error with buckets of ratio 2 over error with one power, n={n}"
    return Grid(title, ["comparison", *headings], lines)


def _verdict_cell(verdict: Verdict) -> str:
    sign = {"helps": "↓", "hurts": "↑", "unclear": "·"}[verdict.word]
    return f"{brief(verdict.ratio.mean)} {sign}"


def verdict_counts(verdicts: Sequence[Verdict]) -> Grid:
    """How often buckets help, over both degrees, all norms and all lengths."""
    keys = dict.fromkeys((v.sketch, v.input, v.part) for v in verdicts)
    lines = []
    for sketch, name, part in keys:
        mine = [v for v in verdicts if (v.sketch, v.input, v.part) == (sketch, name, part)]
        words = [verdict.word for verdict in mine]
        counts = [str(words.count(word)) for word in ("helps", "unclear", "hurts")]
        middle = Interval.of([verdict.ratio.mean for verdict in mine]).mean
        lines.append([f"{sketch}, {name}, {NAMES[part]}", *counts, brief(middle)])
    headings = ["comparison", "helps", "unclear", "hurts", "ratio"]
    return Grid("Does bucketing help? All lengths, degrees and norms", headings, lines)


# ---- what buckets buy ------------------------------------------------------------------------


def power_table(rows: Sequence[PowerRow]) -> Grid:
    """Powers and errors of each ratio, and the one power that is as accurate."""
    lines = []
    for ratio in RATIOS:
        mine = [row for row in rows if row.chosen and row.ratio == ratio]
        counts = [f"{row.powers.row_buckets} × {row.powers.key_buckets}" for row in mine]
        largest = max(row.powers.largest_power for row in mine)
        mean = sum(row.powers.mean_power for row in mine) / len(mine)
        error = Interval.of([row.output_l2 for row in mine])
        equal = equal_power(rows, ratio) if ratio < math.inf else None
        interval = f"{brief(error.low)} – {brief(error.high)}" if error.count > 1 else "—"
        alone = "—" if equal is None else str(equal)
        line = [ratio_name(ratio), counts[0], str(largest), f"{mean:.3g}", brief(error.mean)]
        lines.append([*line, interval, alone])
    headings = ["basis", "buckets", "largest p", "mean p", "error", "95 %", "one power as accurate"]
    return Grid("Powers, not sketched", headings, lines)


def bought_table(bought: Sequence[Bought], way: str, factor: float) -> Grid:
    """The smallest sketch that reaches each error, and its time."""
    mine = [item for item in bought if (item.way, item.factor) == (way, factor)]
    targets = list(dict.fromkeys(item.target for item in mine))
    lines = []
    for ratio in RATIOS:
        items = {item.target: item for item in mine if item.ratio == ratio}
        lines.append([ratio_name(ratio), *(_bought_cell(items[target]) for target in targets)])
    title = f"Entries × {factor:g}, {way}: smallest sketch that reaches an error, its time and "
    title += f"(share of pairs exact); SDPA takes {seconds(mine[0].sdpa_seconds)}"
    return Grid(title, ["basis", *(f"error ≤ {target:g}" for target in targets)], lines)


def _bought_cell(item: Bought) -> str:
    if item.sketch_size is None or item.seconds is None:
        return NOT_REACHED
    exact = f" ({100 * item.exact_share:.0f} %)" if item.exact_share else ""
    return f"{item.sketch_size}: {seconds(item.seconds)}{exact}"


def says_something(grid: Grid) -> bool:
    """Whether any cell beside the names was reached."""
    return any(cell != NOT_REACHED for line in grid.lines for cell in line[1:])


def bought_tables(bought: Sequence[Bought]) -> list[Grid]:
    factors = dict.fromkeys(item.factor for item in bought)
    return [bought_table(bought, way, factor) for factor in factors for way in WAYS]


# ---- sketches --------------------------------------------------------------------------------


def decay_table(decays: Sequence[Decay]) -> Grid:
    """Measured and predicted error at each size, and the slopes."""
    headings = ["error", *(f"z={size}" for size in decays[0].sizes), "slope"]
    lines = []
    for decay in decays:
        of_output = (("measured", decay.measured), ("predicted", decay.predicted))
        of_inner = (("measured", decay.inner_measured), ("predicted", decay.inner_predicted))
        for part, pair, slopes in (
            ("output", of_output, decay.slopes),
            ("inner products", of_inner, decay.inner_slopes),
        ):
            for (word, values), slope in zip(pair, slopes, strict=True):
                cells = [f"{value:.3g}" for value in values]
                lines.append([f"power {decay.power}, {part}, {word}", *cells, f"{slope:.3f}"])
    return Grid("Relative ℓ2 error of sketched powers against the powers", headings, lines)


# ---- time ------------------------------------------------------------------------------------


def length_table(rows: Sequence[TimeRow]) -> Grid:
    """Times with their errors; the factor is over the line of half the length."""
    factors = doublings(rows)
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        for index, row in enumerate(mine):
            factor = "—" if index == 0 else f"{factors[name][index - 1]:.2f}"
            buckets = f"{row.row_buckets} × {row.key_buckets}" if row.row_buckets else "—"
            cells = [str(row.n), seconds(row.seconds), factor, seconds(row.sdpa_seconds)]
            cells += [times(row.ratio), buckets, brief(row.output_l2), brief(row.mean_v)]
            lines.append([name, *cells])
    headings = ["method, input", "tokens", "time", "per doubling", "SDPA", "speed-up"]
    headings += ["buckets", "error", "mean(V)"]
    return Grid("Time against length, d=64", headings, lines)


def sweep_table(rows: Sequence[SweepRow]) -> Grid:
    """What ran, its time and its error."""
    lines = []
    for row in rows:
        powers = f"{row.powers.mean_power:.2g} (≤ {row.powers.largest_power})"
        cells = [str(row.pairs), powers if row.powers.largest_power else "—"]
        cells += [f"{100 * row.powers.exact_share:.0f} %", seconds(row.attention_seconds)]
        cells += [seconds(row.kernel_sum_seconds), seconds(row.sdpa_seconds)]
        cells += [brief(row.attention_l2), brief(row.kernel_sum_l2)]
        lines.append([row.name, *cells])
    headings = ["sweep", "pairs", "p", "exact", "attention", "kernel_sum", "SDPA"]
    headings += ["error", "error of sums"]
    return Grid("Time against entries, buckets and sketch size", headings, lines)


def growth_table(rows: Sequence[SweepRow]) -> Grid:
    """Times and formulas relative to the first point of each sweep."""
    first: dict[str, SweepRow] = {}
    lines = []
    for row in rows:
        start = first.setdefault(row.sweep, row)
        factors = [
            row.attention_seconds / start.attention_seconds,
            row.kernel_sum_seconds / start.kernel_sum_seconds,
            row.multiply_adds / start.multiply_adds,
            row.lemma / start.lemma,
            row.theorem / start.theorem,
        ]
        lines.append([row.name, *(growth(factor) for factor in factors)])
    headings = ["sweep", "attention", "kernel_sum", "our count", "Lemma I.3", "B⁶ log²(n/δ)/ε⁴"]
    return Grid("Relative to the first point of the sweep", headings, lines)


def bound_table(rows: Sequence[SweepRow]) -> Grid:
    """Theorem I.5 beside what was measured."""
    lines = []
    for row in rows:
        word = "vacuous" if row.bound >= VACUOUS else "says something"
        cells = [f"{row.largest_entry:.2g}", f"{row.epsilon:.2g}", brief(row.bound), word]
        lines.append([row.name, *cells, brief(row.attention_l2)])
    headings = ["sweep", "max|entry|", "ε", "ε₂ exp(3B²)", "", "measured error"]
    return Grid("The bound of Theorem I.5, all constants one", headings, lines)
