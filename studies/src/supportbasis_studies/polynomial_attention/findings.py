"""What the numbers say, in sentences: none of them knows its numbers beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ..numbers import seconds, times
from ..statistics import Interval
from ..study import Check
from .buying import FACTORS, Bought, PowerRow, SketchRow, equal_power
from .errors import SIZE, SKETCHES, ErrorRow, Summary, Verdict
from .pictures import ratio_name
from .sketching import Decay
from .tables import VACUOUS, brief, growth, longest
from .timing import SWEEPS, SweepRow, TimeRow, doublings
from .variants import ALL_SKETCHED, AS_RUN, SHARED

DEGREE = 2
MOST_PER_DOUBLING = 2.3
SLOPE_MARGIN, PREDICTION_MARGIN = 0.1, 1.5
CHECKED_SIZE = 64
ACCURATE, USELESS = 0.1, 1.0


# ---- errors ----------------------------------------------------------------------------------


def error_findings(rows: Sequence[ErrorRow], summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each input, and one on powers of the score itself."""
    n = longest(rows)
    errors = {
        (row.input, row.method): row.error.mean
        for row in summaries
        if (row.n, row.part, row.norm) == (n, "output", "l2")
    }
    names = list(dict.fromkeys(row.input for row in rows))
    said = [_input_sentence(name, n, errors) for name in names]
    powers = [errors[name, f"PowerAttention({p})"] for name in names for p in (2, 4)]
    free = [errors[name, "mean(V)"] for name in names]
    worse = sum(power >= mean for power, mean in zip(powers, _each(free, 2), strict=True))
    said.append(
        f"PowerAttention, untrained, is no substitute for softmax: its output errors are "
        f"{brief(min(powers))} to {brief(max(powers))}, not better than mean(V) in {worse} of "
        f"{len(powers)} cases."
    )
    return said


def _each(values: Sequence[float], count: int) -> list[float]:
    return [value for value in values for _ in range(count)]


def _input_sentence(name: str, n: int, errors: dict[tuple[str, str], float]) -> str:
    def error(label: str) -> float:
        return errors[name, label]

    free = error("mean(V)")
    one, power = (error(f"{way}, degree {DEGREE}") for way in ("one polynomial", "one power"))
    buckets = error(f"buckets 2, degree {DEGREE}")
    sketch = f"degree {DEGREE}, sketch {SIZE}"
    sketched = {
        "one power": error(f"one power, {sketch}, {ALL_SKETCHED}"),
        "buckets": error(f"buckets 2, {sketch}, {ALL_SKETCHED}"),
        "buckets with shared sketches": error(f"buckets 2, {sketch}, {SHARED}"),
    }
    best = min(sketched, key=lambda key: sketched[key])
    verb = "stays above" if sketched[best] >= free else "comes below"
    return (
        f"On {name} inputs (n={n}, degree {DEGREE}, output, ℓ2) the mean of V errs by "
        f"{brief(free)}, one polynomial by {brief(one)}, one power by {brief(power)} and buckets "
        f"of ratio 2 by {brief(buckets)}. With every pair sketched at size {SIZE} the best, "
        f"{best}, has {brief(sketched[best])} and {verb} the mean of V; as the library runs it, "
        f"with high powers exact, buckets have "
        f"{brief(error(f'buckets 2, {sketch}, {AS_RUN}'))}."
    )


def verdict_findings(verdicts: Sequence[Verdict]) -> list[str]:
    """For each kind of sketch: where buckets help, and where they do not."""
    said = []
    for sketch in SKETCHES:
        parts = []
        for name in dict.fromkeys(verdict.input for verdict in verdicts):
            mine = [v for v in verdicts if (v.sketch, v.input) == (sketch, name)]
            words = [verdict.word for verdict in mine]
            helps, hurts = words.count("helps"), words.count("hurts")
            rest = len(mine) - helps - hurts
            parts.append(f"{name}: helps in {helps}, hurts in {hurts}, unclear in {rest}")
        said.append(f"Bucketing at equal degree, {sketch}, counts of cases. {'; '.join(parts)}.")
    said.append(chebyshev_finding(verdicts))
    plain = [v for v in verdicts if v.sketch == "no sketch"]
    hurts = sum(verdict.word == "hurts" for verdict in plain)
    if hurts > len(plain) / 2:
        ratios = Interval.of([verdict.ratio.mean for verdict in plain])
        said.append(
            "Without a sketch it mostly hurts, by a factor of "
            f"{brief(ratios.mean)} in the geometric mean: one power takes the largest p for all "
            "pairs, and the larger p, the closer s(z/p)^p is to exp(z)."
        )
    return said


def chebyshev_finding(verdicts: Sequence[Verdict]) -> str:
    """Several against one, with the paper's polynomials and with the best ones."""

    def ratios(sketch: str) -> list[float]:
        chosen = (sketch, "matrix", "l1")
        return [v.ratio.mean for v in verdicts if (v.sketch, v.part, v.norm) == chosen]

    parts = []
    for sketch, kind in (("no sketch, Chebyshev", "Chebyshev"), ("no sketch", "the best")):
        found = ratios(sketch)
        lower = sum(ratio < 1 for ratio in found)
        parts.append(
            f"with {kind} polynomials it is lower in {lower} of {len(found)} cases (ratio "
            f"{brief(min(found))} to {brief(max(found))})"
        )
    return (
        "Several polynomial attentions against one, the ℓ1 error of A, no sketch: "
        f"{'; '.join(parts)}. What is compared is one power for all pairs with a power for each "
        "pair of buckets, at equal degree."
    )


def useful_finding(summaries: Sequence[Summary]) -> str:
    """Whether sketches of every pair are of any use, with buckets or without."""
    n = max(row.n for row in summaries)
    errors = [row for row in summaries if (row.n, row.part, row.norm) == (n, "output", "l2")]
    free = {row.input: row.error.mean for row in errors if row.method == "mean(V)"}
    sketched = [row for row in errors if row.method.endswith((ALL_SKETCHED, SHARED))]
    useful = [row for row in sketched if row.error.mean < free[row.input]]
    text = (
        f"With nothing exact, {len(useful)} of {len(sketched)} sketched lines at n={n} and size "
        f"{SIZE} are closer to softmax than the mean of V"
    )
    if useful:
        return f"{text}: {', '.join(f'{row.input}, {row.method}' for row in useful)}."
    return f"{text}: where bucketing helps sketches, it helps among answers that are of no use."


# ---- what buckets buy ------------------------------------------------------------------------


def power_finding(rows: Sequence[PowerRow]) -> str:
    """Power at equal error."""
    ratios = [ratio for ratio in dict.fromkeys(row.ratio for row in rows) if ratio < math.inf]
    one = [row for row in rows if row.chosen and row.ratio == math.inf]
    parts = []
    for ratio in ratios:
        mine = [row for row in rows if row.chosen and row.ratio == ratio]
        mean = sum(row.powers.mean_power for row in mine) / len(mine)
        equal = equal_power(rows, ratio)
        error = Interval.of([row.output_l2 for row in mine]).mean
        alone = "no power that was tried" if equal is None else f"p={equal}"
        parts.append(
            f"ratio {ratio:g} has a mean power of {mean:.3g} and an error of {brief(error)}, for "
            f"which one power takes {alone}"
        )
    largest = max(row.powers.largest_power for row in one)
    error = Interval.of([row.output_l2 for row in one]).mean
    return (
        f"One power for all pairs is p={largest} and errs by {brief(error)}. Buckets lower the "
        f"mean power, not the largest: {'; '.join(parts)}."
    )


def sketch_findings(rows: Sequence[SketchRow], bought: Sequence[Bought]) -> list[str]:
    """Sketch size and time at equal error."""
    said = []
    for factor in FACTORS:
        mine = [row for row in rows if row.factor == factor]
        free = sum(row.mean_v for row in mine) / len(mine)
        size = max(row.sketch_size for row in mine)
        bare = [row for row in mine if row.way != AS_RUN]
        best = min(bare, key=lambda row: row.output_l2)
        parts = [
            f"{ratio_name(ratio)}: {brief(_error(mine, ratio, ALL_SKETCHED, size))}"
            + (f" ({brief(_error(mine, ratio, SHARED, size))} shared)" if ratio < math.inf else "")
            for ratio in dict.fromkeys(row.ratio for row in mine)
        ]
        verdict = "above" if best.output_l2 >= free else "below"
        said.append(
            f"Entries × {factor:g}, nothing exact, sketch {size}, errors of the output: "
            f"{', '.join(parts)}; mean(V): {brief(free)}. The best single run with nothing exact "
            f"({ratio_name(best.ratio)}, size {best.sketch_size}, {best.way}) stays {verdict} the "
            f"mean of V, at {brief(best.output_l2)}."
        )
    return [*said, _sharing_sentence(rows), *_time_sentences(bought)]


def _sharing_sentence(rows: Sequence[SketchRow]) -> str:
    """What it does to share one sketch among pairs of equal power."""
    ratios = {factor: _sharing_ratio(rows, factor) for factor in FACTORS}
    parts = [
        f"{brief(ratio.mean)} ({brief(ratio.low)} to {brief(ratio.high)}) at entries × {factor:g}"
        for factor, ratio in ratios.items()
    ]
    text = (
        "One sketch for all bucket pairs of equal power, instead of one for each pair, multiplies "
        f"the error of buckets, over all ratios, sizes and seeds, by {' and by '.join(parts)}."
    )
    if all(ratio.high >= 1 for ratio in ratios.values()):
        return text
    return (
        f"{text} Pairs with sketches of their own are each off by a factor of their own, which the "
        "division by the row's sum cannot cancel."
    )


def _sharing_ratio(rows: Sequence[SketchRow], factor: float) -> Interval:
    """Error with shared sketches over error with own ones."""
    mine = [row for row in rows if row.factor == factor and row.ratio < math.inf]
    own, shared = (
        {(r.ratio, r.sketch_size, r.seed): r.output_l2 for r in mine if r.way == way}
        for way in (ALL_SKETCHED, SHARED)
    )
    return Interval.of([shared[key] / own[key] for key in own])


def _error(rows: Sequence[SketchRow], ratio: float, way: str, size: int) -> float:
    mine = [r.output_l2 for r in rows if (r.ratio, r.way, r.sketch_size) == (ratio, way, size)]
    return Interval.of(mine).mean


def _time_sentences(bought: Sequence[Bought]) -> list[str]:
    """The fastest that is not simply exact, at an error of 0.1, as the library runs it."""
    said = []
    for factor in FACTORS:
        near = [
            item
            for item in bought
            if (item.factor, item.way, item.target) == (factor, AS_RUN, ACCURATE)
        ]
        able = [item for item in near if item.seconds is not None and item.exact_share != 1]
        if not able:
            said.append(
                f"Entries × {factor:g}: no sketched plan of the library reaches an error of "
                f"{ACCURATE:g}."
            )
            continue
        best = min(able, key=lambda item: item.seconds or math.inf)
        assert best.seconds is not None and best.exact_share is not None
        said.append(
            f"Entries × {factor:g}: the fastest sketched plan of the library with an error of at "
            f"most {ACCURATE:g} ({ratio_name(best.ratio)}, size {best.sketch_size}, "
            f"{100 * best.exact_share:.0f} % of the pairs exact) takes {seconds(best.seconds)}, "
            f"{times(best.seconds / best.sdpa_seconds)} the time of SDPA."
        )
    return said


# ---- sketches --------------------------------------------------------------------------------


def decay_findings(decays: Sequence[Decay]) -> list[str]:
    """Measured against predicted, and why the slope is what it is."""
    said = []
    for decay in decays:
        measured, predicted = decay.slopes
        inner, _ = decay.inner_slopes
        at = decay.sizes.index(CHECKED_SIZE)
        said.append(
            f"Power {decay.power}: at sketch {CHECKED_SIZE} the output is off by "
            f"{decay.measured[at]:.3g}, {decay.ratio(CHECKED_SIZE):.2f} times the prediction. From "
            f"size {decay.sizes[0]} to {decay.sizes[-1]} the error falls with slope "
            f"{measured:.2f}, predicted {predicted:.2f}; the inner products themselves fall with "
            f"slope {inner:.2f}, as 1/√z does. {_far(decay)}"
        )
    return said


def _far(decay: Decay) -> str:
    """Where the predicted output error comes close to the slope of 1/√z."""
    points = decay.beyond
    for (a, x), (b, y) in pairwise(points):
        slope = math.log(y / x) / math.log(b / a)
        if slope <= -0.45:
            return (
                "The weights are squares of the inner products, biased upwards by their variance, "
                "and are divided by their sum: the prediction reaches a slope of −0.45 from size "
                f"{a} on, where its error is {brief(x)}."
            )
    return f"The prediction does not come near a slope of −1/2 up to size {points[-1][0]}."


# ---- time ------------------------------------------------------------------------------------


def length_findings(rows: Sequence[TimeRow]) -> list[str]:
    """Growth, and what SDPA takes."""
    said = []
    last = max(row.n for row in rows)
    for name, factors in doublings(rows).items():
        final = next(row for row in rows if (row.name, row.n) == (name, last))
        worse = "worse than" if final.output_l2 >= final.mean_v else "better than"
        compared = f"; returning the mean of V would be off by {brief(final.mean_v)}"
        if not final.method.startswith("PowerAttention"):
            compared = f", {worse} the mean of V with {brief(final.mean_v)}"
        said.append(
            f"{name}: doubling the length multiplies the time by at most {max(factors):.2f}; at "
            f"n={last} it takes {seconds(final.seconds)} and SDPA {seconds(final.sdpa_seconds)} "
            f"({times(final.ratio)}), with an error of {brief(final.output_l2)}{compared}."
        )
    return said


def sweep_findings(rows: Sequence[SweepRow]) -> list[str]:
    """How the measured growth compares with the formulas."""
    said = []
    for sweep in SWEEPS:
        mine = [row for row in rows if row.sweep == sweep]
        first, last = mine[0], mine[-1]
        attention = last.attention_seconds / first.attention_seconds
        sums = last.kernel_sum_seconds / first.kernel_sum_seconds
        said.append(
            f"From {first.name} to {last.name}: attention takes "
            f"{times(attention)} the time, kernel sums {times(sums)}; Lemma I.3's sum grows "
            f"{growth(last.lemma / first.lemma)}, B⁶/ε⁴ {growth(last.theorem / first.theorem)}."
        )
    worse = sum(row.kernel_sum_l2 > row.attention_l2 for row in rows)
    text = f"Kernel sums err more than attention in {worse} of {len(rows)} points"
    if worse > len(rows) / 2:
        text += (
            ": a factor that is common to a row's sketched weights cancels in attention's "
            "division, and stays in a sum"
        )
    return [*said, f"{text}."]


def bound_finding(rows: Sequence[SweepRow]) -> str:
    vacuous = sum(row.bound >= VACUOUS for row in rows)
    least = min(rows, key=lambda row: row.bound)
    return (
        f"The bound of Theorem I.5 is vacuous (2 or more) at {vacuous} of {len(rows)} points; the "
        f"smallest is {brief(least.bound)}, at {least.name}, where the measured "
        f"error is {brief(least.attention_l2)}."
    )


# ---- what was asked --------------------------------------------------------------------------


def checks(
    summaries: Sequence[Summary], decays: Sequence[Decay], lengths: Sequence[TimeRow]
) -> list[Check]:
    """Statements to be checked, what was measured, and whether it holds."""
    made = _accuracy_checks(summaries)
    for decay in decays:
        ratio = decay.ratio(CHECKED_SIZE)
        holds = 1 / PREDICTION_MARGIN <= ratio <= PREDICTION_MARGIN
        text = f"power {decay.power}, sketch {CHECKED_SIZE}: error within 1.5× of the prediction"
        made.append(Check(text, f"{ratio:.2f}×", holds))
        measured, predicted = decay.slopes
        holds = abs(measured - predicted) <= SLOPE_MARGIN
        text = f"power {decay.power}: slope within {SLOPE_MARGIN:g} of the predicted one"
        made.append(Check(text, f"{measured:.3f} against {predicted:.3f}", holds))
    for name, factors in doublings(lengths).items():
        text = f"{name}: doubling the length takes at most {MOST_PER_DOUBLING:g}× the time"
        made.append(Check(text, f"{max(factors):.2f}×", max(factors) <= MOST_PER_DOUBLING))
    return made


def _accuracy_checks(summaries: Sequence[Summary]) -> list[Check]:
    n = max(row.n for row in summaries)
    errors = {
        row.method: row.error
        for row in summaries
        if (row.input, row.n, row.part, row.norm) == ("log-normal", n, "output", "l2")
    }
    buckets, one = (errors[f"{way}, degree {DEGREE}"] for way in ("buckets 2", "one polynomial"))
    where = f"log-normal, n={n}, degree {DEGREE}"
    accurate = f"{where}: MultiThreshold errs by at most {ACCURATE:g}"
    useless = f"{where}: Polynomial is useless (error above 1)"
    return [
        Check(accurate, brief(buckets.mean), buckets.mean <= ACCURATE),
        Check(useless, brief(one.mean), one.mean > USELESS),
    ]
