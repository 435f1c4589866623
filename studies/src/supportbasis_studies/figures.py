"""Pictures of the studies: what they share beside `supportbasis.cli.report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supportbasis.cli.report import COLOURS, GREY, INK, length_label, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "INK", "legend_below", "length_label", "log_lengths", "new_figure",
           "plain_axes", "save"]  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """As PNG, and as SVG beside it in the same layout."""
    figure.savefig(path, dpi=150)
    figure.set_layout_engine("none")  # to make it once more takes as long as the drawing
    figure.savefig(path.with_suffix(".svg"))


def log_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Both axes logarithmic, with a mark for each length."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(length_label)


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
