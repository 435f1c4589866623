"""Pictures of the studies: panels of lines that one function draws, and what others share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from supportbasis.cli.report import length_label, plain_axes
from supportbasis.plans.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "INK", "Line", "Panel", "draw", "legend_below", "length_label",
           "new_figure", "plain_axes", "save"]  # fmt: skip

INK, GREY = "#1f2933", "#7b8794"
COLOURS = ("#2f6fab", "#2f855a", "#b7791f", "#805ad5", "#c05621", "#d53f8c", "#319795")


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a panel, with matplotlib's style; ``spans`` are low and high ends around y."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-o"
    colour: str = INK
    spans: Sequence[tuple[float, float]] = ()
    band: bool = False  # spans as a band instead of bars
    options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, axes: Axes) -> None:
        options = {"ms": 4, "lw": 1.4} | dict(self.options)
        axes.plot(self.x, self.y, self.style, color=self.colour, label=self.label, **options)
        if not self.spans:
            return
        low, high = zip(*self.spans, strict=True)
        if self.band:
            axes.fill_between(self.x, low, high, color=self.colour, alpha=0.13, lw=0)
        else:
            axes.vlines(self.x, low, high, color=self.colour, lw=1)


@dataclass(frozen=True, eq=False)
class Panel:
    """Lines over common axes: ``log`` names the logarithmic ones ("x", "y", "xy"); ``levels`` are
    dashed horizontal lines by their labels."""

    title: str
    lines: Sequence[Line]
    x: str = ""
    y: str = ""
    log: str = "xy"
    ticks: Sequence[float] = ()  # on the x axis, and no others; lengths from 1024 on as 1k
    levels: Mapping[str, float] = field(default_factory=dict)
    limits: tuple[float | None, float | None] = (None, None)  # of y

    def draw(self, axes: Axes) -> None:
        from matplotlib.ticker import NullLocator

        plain_axes(axes)
        for line in self.lines:
            line.draw(axes)
        for label, level in self.levels.items():
            axes.axhline(level, color=GREY, ls="--", lw=1, label=label)
        if "x" in self.log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(length_label)
        if "y" in self.log:
            axes.set_yscale("log")
        if self.ticks:
            axes.set_xticks(list(self.ticks))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.set_title(self.title, loc="left", fontsize=10)


def draw(
    path: Path,
    grid: Sequence[Sequence[Panel]],
    size: tuple[float, float],
    *,
    legend: int = 4,
    order: Iterable[str] = (),
    sharey: Literal["row", "col"] | bool = False,
) -> None:
    """Rows of panels as a picture of a size in inches, the legend below in some columns."""
    figure = new_figure(*size)
    axes = figure.subplots(len(grid), len(grid[0]), squeeze=False, sharey=sharey)
    for line, panels in zip(axes, grid, strict=True):
        for each, panel in zip(line, panels, strict=True):
            panel.draw(each)
    for line, panels in zip(axes, grid, strict=True):  # after all data: panels may share an axis
        for each, panel in zip(line, panels, strict=True):
            if panel.limits != (None, None):
                each.set_ylim(*panel.limits)
    legend_below(figure, axes.flatten(), legend, order)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """As PNG, and as SVG beside it in the same layout."""
    figure.savefig(path, dpi=150)
    figure.set_layout_engine("none")  # to make it once more takes as long as the drawing
    figure.savefig(path.with_suffix(".svg"))


def legend_below(
    figure: Figure, panels: Iterable[Axes], columns: int, order: Iterable[str] = ()
) -> None:
    """Every label of the panels once, below them, those of ``order`` first and in that order."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = list(dict.fromkeys([*(name for name in order if name in found), *found]))
    handles = [found[name] for name in names]
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
