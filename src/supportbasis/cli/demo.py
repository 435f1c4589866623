"""``supportbasis demo``: every method on three generated settings, or on the user's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..api import plan
from ..methods import Auto, Method, Polynomial, SingleThreshold
from .machine import Machine
from .measure import Measurement, compare
from .plots import plot_errors
from .progress import Steps
from .report import (
    EXPLAINED,
    Section,
    figure,
    findings,
    html_table,
    machine_section,
    paragraph,
    terminal_table,
    write_csv,
    write_html,
)
from .settings import GENERATED, Setting, outliers

BUDGET = 9.0  # seconds of timing for each setting
PICTURE_N = 1024  # few enough tokens that one large row is visible

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
    write_csv(
        out / "results.csv", machine, [row for _, rows in compared for row in rows], name="setting"
    )
    sections = [_section(setting, rows, out) for setting, rows in compared]
    sections += [_supports(settings, seed, out), machine_section(machine)]
    write_html(out / "report.html", "supportbasis demo", _lead(settings), sections)
    for setting, rows in compared:
        console.print()
        console.print(terminal_table(_title(setting), rows))
        console.print(findings(rows))
    console.print(f"\nReport: {out / 'report.html'}\nNumbers: {out / 'results.csv'}", style="bold")
    console.print("Pictures: " + ", ".join(sorted(path.name for path in out.glob("*.png"))))


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
    text = f"{setting.description[0].upper()}{setting.description[1:]}."
    body = [
        paragraph(text),
        paragraph(findings(rows), "finding"),
        html_table(rows),
        figure(picture, f"Error against speed, {_title(setting)}. Right and down is better."),
    ]
    return Section(_title(setting), body)


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
    return Section("The supports", [paragraph(text), figure(picture, caption)])
