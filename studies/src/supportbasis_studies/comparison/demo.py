"""``supportbasis demo``: every method on three generated settings, or on the user's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from supportbasis import Auto, Polynomial, SingleThreshold, plan
from supportbasis.cli.report import write_csv
from supportbasis.methods import Method

from ..figures import INK, new_figure, plain_axes
from ..numbers import percent, small, times
from ..progress import Steps
from ..study import Machine, Section, publish
from .measure import Measurement, compare
from .settings import GENERATED, Setting, outliers
from .tables import EXPLAINED, is_approximate, is_lost, measurement_table

BUDGET = 9.0  # seconds of timing for each setting
PICTURE_N = 1024  # few enough tokens that one large row is visible
GOOD = 1e-3  # a relative error that counts as accurate
COLOURS = {"SDPA": INK, "Polynomial": "#c05621", "SingleThreshold": "#2f6fab", "Auto": "#2f855a"}
MARKERS = "ovs^DP*X"

Compared = tuple[Setting, list[Measurement]]


def demo_methods(threshold: float | None) -> dict[str, Method]:
    """The methods of the table, by the call that makes them."""
    methods: dict[str, Method] = {
        "Polynomial(1)": Polynomial(1),
        "Polynomial(2)": Polynomial(2),
        "SingleThreshold(degree=1)": SingleThreshold(degree=1),
        "SingleThreshold(degree=2)": SingleThreshold(degree=2),
    }
    if threshold is not None:
        methods[f"SingleThreshold({threshold:g}, degree=2)"] = SingleThreshold(threshold, 2)
    return methods | {"Auto(1e-3)": Auto(1e-3), "Auto(1e-2)": Auto(1e-2)}


def run_demo(settings: Sequence[Setting], out: Path, seed: int, console: Console) -> None:
    """Measure, print, and write the report."""
    machine = Machine.here()
    with Steps(console, len(settings)) as steps:
        compared = [(setting, _compare(setting, seed, steps)) for setting in settings]
    rows = [_line(row) for _, measured in compared for row in measured]
    write_csv(out / "results.csv", machine, rows)
    sections = [_section(setting, measured, out) for setting, measured in compared]
    sections.append(_supports(settings, seed, out))
    publish(out, "supportbasis demo", _lead(settings), sections, machine, console)


def _line(row: Measurement) -> dict[str, object]:
    content = asdict(row)
    return {"setting": content.pop("name")} | content


def _compare(setting: Setting, seed: int, steps: Steps) -> list[Measurement]:
    with steps.step(f"{setting.name}, n={setting.n}") as tick:
        return compare(
            setting,
            demo_methods(setting.threshold),
            budget=BUDGET,
            seed=seed,
            tick=tick,
            everything=True,
        )


def _title(setting: Setting) -> str:
    causal = ", causal" if setting.is_causal else ""
    return f"{setting.name}: n={setting.n}, d={setting.dim}, float32{causal}"


def _lead(settings: Sequence[Setting]) -> str:
    causal = "causal " if settings[0].is_causal else ""
    what = "generated inputs" if len(settings) > 1 else "one set of tensors"
    return (
        f"Softmax {causal}attention on {what} in float32, scale 1/√d: each method of the library "
        "beside PyTorch's exact kernel (SDPA) and the mean of V, with the time it took and the "
        f"error it made. {EXPLAINED} Polynomial(2) is the method of Alman and Song (AS23). Red "
        "lines are more than 10 % off."
    )


def _section(setting: Setting, rows: list[Measurement], out: Path) -> Section:
    picture = out / f"error-{setting.name}.png"
    plot_errors(rows, _title(setting), picture)
    caption = f"Error against speed, {_title(setting)}. Right and down is better."
    return Section(
        _title(setting),
        text=f"{setting.description[0].upper()}{setting.description[1:]}.",
        findings=[findings(rows)],
        grids=[measurement_table("", rows)],
        figures=[(picture, caption)],
    )


def _supports(settings: Sequence[Setting], seed: int, out: Path) -> Section:
    """The supports of the outlier setting on few tokens, or of the user's first head."""
    picture = out / "supports.png"
    if len(settings) == len(GENERATED):
        setting = outliers(min(PICTURE_N, settings[0].n), seed, settings[0].is_causal)
        which = f"The outlier setting at n={setting.n}, so that single rows are visible"
    else:
        setting = settings[0]
        which = "The first head of these tensors"
    tensors = (setting.query, setting.key, setting.value)
    made = plan(*tensors, is_causal=setting.is_causal, method=SingleThreshold(degree=1))
    made.draw(picture)
    caption = f"{which}, SingleThreshold(degree=1): {made.heads[0]}."
    text = (
        "A support basis covers the score matrix with disjoint parts. Queries with a large entry "
        "are computed exactly, and so are keys with a large entry; a polynomial covers the rest."
    )
    return Section("The supports", text, figures=[(picture, caption)])


def plot_errors(rows: Sequence[Measurement], title: str, path: Path) -> None:
    """Relative error against speed relative to SDPA, a marker for each method.

    The mean of V costs next to nothing, so it is a line: the error that comes for free.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    figure = new_figure(8.6, 4.6)
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvline(1.0, color="#9aa5b1", linewidth=1, linestyle="--")
    for index, row in enumerate(rows):
        if not row.ratio or not row.relative_error or not math.isfinite(row.relative_error):
            continue
        if row.method == "mean(V)":
            axes.axhline(row.relative_error, color="#7b8794", ls="--", lw=1, label=row.method)
            continue
        colour = COLOURS.get(row.method.split("(")[0].split(" ")[0], INK)
        mark, label = MARKERS[index % len(MARKERS)], row.method
        axes.plot(row.ratio, row.relative_error, mark, color=colour, ms=8, label=label)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel("speed relative to SDPA (right is faster)")
    axes.set_ylabel("relative error (down is better)")
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


# ---- findings --------------------------------------------------------------------------------


def findings(rows: Sequence[Measurement]) -> str:
    """Two sentences that the numbers of one setting say: what won, and what did not work."""
    tried = [row for row in rows if row.bound is not None or row.seconds is None]
    return f"{_best_sentence(tried)} {_other_sentence(rows, tried)}"


def _best_sentence(tried: Sequence[Measurement]) -> str:
    accurate = [row for row in tried if is_approximate(row) and (row.relative_error or 0) <= GOOD]
    best = max(accurate, key=lambda row: row.ratio or 0.0, default=None)
    if best is None:
        return "No approximation came within 0.1 % of the exact answer."
    assert best.ratio is not None and best.relative_error is not None
    if best.ratio <= 1:
        return (
            f"No approximation within 0.1 % of the exact answer was faster than {best.baseline}; "
            f"the closest was {best.method} at {times(best.ratio)}."
        )
    return (
        f"The fastest approximation within 0.1 % of the exact answer was {best.method}: "
        f"{times(best.ratio)} as fast as {best.baseline}, with a relative error of "
        f"{small(best.relative_error)} and {_bound_words(best.bound)}."
    )


def _bound_words(bound: float | None) -> str:
    if bound is None or bound == math.inf:
        return "no certified bound"
    return f"a certified bound of {small(bound)} on its largest error"


def _other_sentence(rows: Sequence[Measurement], tried: Sequence[Measurement]) -> str:
    lost = [row.method for row in tried if is_lost(row)]
    mean = next((row for row in rows if row.method == "mean(V)"), None)
    parts = []
    if mean is not None and mean.relative_error is not None:
        parts.append(f"the mean of V alone is off by {percent(100 * mean.relative_error)}")
    if lost:
        parts.append(f"{', '.join(lost)} lost the answer (more than 10 % off, or no answer)")
    else:
        parts.append("every method stayed within 10 %")
    text = ", and ".join(parts)
    return text[0].upper() + text[1:] + "."
