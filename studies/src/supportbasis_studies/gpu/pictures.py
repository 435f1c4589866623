"""Time against length, drawn from rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, INK, length_label, new_figure, plain_axes, save
from .rows import GpuRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = {
    (False, False): "forward",
    (False, True): "forward, causal",
    (True, False): "forward and backward",
    (True, True): "forward and backward, causal",
}


def draw_lengths(rows: Sequence[GpuRow], path: Path) -> None:
    """One panel for each width and mode: PyTorch's fastest backend, degree 2 and degree 1."""
    widths = sorted({row.d for row in rows})
    figure = new_figure(14.0, 3.6 * len(widths))
    panels = figure.subplots(len(widths), len(MODES), squeeze=False, sharex=True, sharey="row")
    for line, d in zip(panels, widths, strict=True):
        for axes, ((backward, causal), name) in zip(line, MODES.items(), strict=True):
            some = [r for r in rows if (r.d, r.backward, r.causal) == (d, backward, causal)]
            _panel(axes, f"d={d}, {name}", some)
        line[0].set_ylabel("milliseconds")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)


def _panel(axes: Axes, title: str, rows: Sequence[GpuRow]) -> None:
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(length_label)
    best = {row.n: row.baseline_ms for row in rows}
    axes.plot(*_sorted(best), "-D", color=INK, markersize=4, label="SDPA, fastest backend")
    for colour, name in zip(
        COLOURS, sorted({row.work for row in rows}, reverse=True), strict=False
    ):
        line = {row.n: row.ms for row in rows if row.work == name}
        label = name.removeprefix("sweep, ")
        axes.plot(*_sorted(line), "-o", color=colour, markersize=4, label=label)


def _sorted(points: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(points)
    return lengths, [points[n] for n in lengths]
