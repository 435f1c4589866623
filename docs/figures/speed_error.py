"""Draw speed against error on heads of trained models: ``python docs/figures/speed_error.py``.

Reads the recorded rows of ``supportbasis bench frontier`` on a CPU and those of `Auto` on a GPU,
and writes ``speed-error-light.png`` and ``speed-error-dark.png``. Only measured times are drawn.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
GPU_ROWS = "lists-cuda-2026-11-16.csv"
LEAST = 1e-3  # smaller errors, and exact heads, are drawn here
SPEEDS, ERRORS = (1, 2, 5, 10, 20), (1e-3, 1e-2, 1e-1)


class Theme(NamedTuple):
    """Colours of one version of the picture."""

    paper: str
    ink: str
    grid: str
    budget: str
    auto: str
    gpu: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d8dee4", "#1f6feb", "#bc4c00", "#1a7f37"),
    "dark": Theme("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#f0883e", "#3fb950"),
}
MARKERS = {"lists": "s", "fitted": "^", "exact": "o"}


class Panel(NamedTuple):
    """One model: its rows on a CPU, and how those on a GPU begin."""

    title: str
    file: str
    gpu_case: str


PANELS = (
    Panel(
        "Causal language model, d=64\nCPU: 3 heads, n=32768.  H200: 6 layers, n=65536",
        "frontier-2026-11-16-code-model.csv",
        "Auto(0.1) code model",
    ),
    Panel(
        "Encoder of points, d=16\nCPU: 6 heads, n=16384.  H200: 3 layers, n=131072",
        "frontier-2026-11-16-tsp50.csv",
        "Auto(0.03) tsp50",
    ),
)


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def draw_budgets(axes: Axes, rows: list[dict[str, str]], colour: str) -> None:
    """A line for each head: `BlockSupport` at one budget after the other."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["method"] == "BlockSupport(budget)" and row["plan"] == "lists":
            point = (float(row["ratio"]), float(row["error"]))
            lines.setdefault((row["layer"], row["head"]), []).append(point)
    for line in lines.values():
        axes.plot(*zip(*line, strict=True), "o-", color=colour, lw=1.3, ms=3.5, alpha=0.75)


def draw_auto(axes: Axes, rows: list[dict[str, str]], colour: str) -> None:
    """A point for each head and tolerance; hollow where the head is exact."""
    for row in rows:
        if row["method"] != "Auto(tolerance)":
            continue
        is_exact, error = row["plan"] == "exact", float(row["error"])
        axes.plot(
            float(row["ratio"]), LEAST if is_exact else max(error, LEAST), MARKERS[row["plan"]],
            color=colour, ms=7.5, mec=colour if is_exact else axes.get_facecolor(),
            mew=1.6 if is_exact else 0.8, mfc="none" if is_exact else colour, clip_on=False,
            zorder=4,
        )  # fmt: skip


def draw_gpu(axes: Axes, case: str, colour: str) -> None:
    """A point for each layer: the median error of its heads, up to the largest."""
    for row in rows_of(GPU_ROWS):
        if row["case"].startswith(case):
            speed, error = float(row["ratio"]), float(row["error_median"])
            axes.plot([speed] * 2, [error, float(row["error_max"])], color=colour, lw=1.3, zorder=3)
            axes.plot(speed, error, "D", color=colour, ms=7, mec=axes.get_facecolor(), zorder=3)


def draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    rows = rows_of(panel.file)
    draw_budgets(axes, rows, theme.budget)
    draw_auto(axes, rows, theme.auto)
    draw_gpu(axes, panel.gpu_case, theme.gpu)
    axes.set_title(panel.title, color=theme.ink, size=10.5, loc="left")
    axes.set(xscale="log", yscale="log", xlim=(0.88, 34), ylim=(LEAST, 0.25))
    axes.set_xlabel("times as fast as PyTorch's SDPA", size=11)
    axes.xaxis.set_major_locator(FixedLocator(SPEEDS))
    axes.yaxis.set_major_locator(FixedLocator(ERRORS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(SPEEDS, [f"{speed}×" for speed in SPEEDS])
    axes.set_yticks(ERRORS, ["≤ 0.1 %", "1 %", "10 %"])
    axes.grid(True, color=theme.grid, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelsize=10.5, length=0, pad=7)
    for spine in axes.spines.values():
        spine.set_visible(False)


def legend_of(theme: Theme) -> list[Line2D]:
    hollow = {"mfc": "none", "mew": 1.6}
    entries = [
        ("BlockSupport: one head, budgets of 2 to 40 %", "o", theme.budget, "-", {}),
        ("Auto, one head: lists", MARKERS["lists"], theme.auto, "", {}),
        ("Auto, one head: fitted polynomial", MARKERS["fitted"], theme.auto, "", {}),
        ("Auto, one head: runs exactly", MARKERS["exact"], theme.auto, "", hollow),
        ("Auto on an H200: one layer, median to largest", "D", theme.gpu, "-", {}),
    ]
    return [
        Line2D([], [], color=colour, marker=marker, ls=line, label=label, **more)
        for label, marker, colour, line, more in entries
    ]


def draw(name: str, theme: Theme) -> None:
    style = {"text.color": theme.ink, "axes.labelcolor": theme.ink, "axes.facecolor": theme.paper}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(9, 4.7), sharey=True, layout="constrained")
        for one, panel in zip(axes, PANELS, strict=True):
            draw_panel(one, panel, theme)
        axes[0].set_ylabel("relative error of a head's output", size=11)
        figure.get_layout_engine().set(wspace=0.05)
        where = {"loc": "outside lower center", "ncols": 2, "frameon": False}
        figure.legend(handles=legend_of(theme), fontsize=10.5, **where)
        figure.savefig(HERE / f"speed-error-{name}.png", dpi=150, facecolor=theme.paper)
        plt.close(figure)


if __name__ == "__main__":
    for name, theme in THEMES.items():
        draw(name, theme)
