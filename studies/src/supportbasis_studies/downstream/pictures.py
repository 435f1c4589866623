"""Pictures of the report, drawn from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..figures import COLOURS, GREY, INK, legend_below, length_label, new_figure, plain_axes, save
from .contenders import EXACT, MEAN, NAMES
from .findings import Judged, chance
from .rows import LayerRow, RecallRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


OTHERS = [name for name in NAMES if name not in (EXACT, MEAN)]
SHADES = dict(zip(OTHERS, (*COLOURS, "#9b2c2c"), strict=True)) | {EXACT: INK, MEAN: GREY}


def _dashes(name: str) -> str:
    return "--" if "emulation" in name or name == MEAN else "-"


def draw_accuracy(models: Mapping[str, Mapping[str, Judged]], path: Path) -> None:
    """Average accuracy of every method with its interval, a panel for each model."""
    figure = new_figure(0.5 + 5.0 * len(models), 4.4)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, (model, made) in zip(panels, models.items(), strict=True):
        plain_axes(axes)
        for place, (name, mine) in enumerate(reversed(list(made.items()))):
            found = mine.average()
            reach = [[found.value - found.low], [found.high - found.value]]
            axes.errorbar(found.value, place, xerr=reach, fmt="o", color=SHADES[name], capsize=3)
        axes.set_yticks(range(len(made)), list(reversed(list(made))), fontsize=9)
        axes.axvline(chance(), color=GREY, linestyle="--", linewidth=1)
        axes.set_xlim(0, 100)
        axes.set_xlabel("items answered right, percent (dashed: chance)")
        axes.set_title(model, loc="left", fontsize=11)
    save(figure, path)


def draw_layers(rows: Sequence[LayerRow], path: Path) -> None:
    """Error of hidden states after each layer."""
    models = list(dict.fromkeys(row.model for row in rows))
    figure = new_figure(0.5 + 5.0 * len(models), 4.8)
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, model in zip(panels, models, strict=True):
        plain_axes(axes)
        axes.set_yscale("log")
        for name in NAMES:
            mine = [row for row in rows if row.model == model and row.method == name]
            points = [(row.layer, row.error) for row in mine if 0 < row.error < float("inf")]
            if points:
                _line(axes, name, points)
        axes.set_xlabel("layer")
        axes.set_title(model, loc="left", fontsize=11)
    panels[0].set_ylabel("relative error of hidden states")
    legend_below(figure, panels, 3, NAMES)
    save(figure, path)


def draw_recall(rows: Sequence[RecallRow], path: Path) -> None:
    """Share of codes recalled against distance, a panel for each model and form."""
    shown = list(dict.fromkeys((row.model, row.form) for row in rows))
    figure = new_figure(0.5 + 4.2 * len(shown), 4.8)
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, (model, form) in zip(panels, shown, strict=True):
        plain_axes(axes)
        axes.set_xscale("log", base=2)
        mine = [row for row in rows if (row.model, row.form) == (model, form)]
        for place, name in enumerate(NAMES):  # the later, the smaller: lines often coincide
            points = _recalled([row for row in mine if row.method == name])
            if points:
                _line(axes, name, points, 14.0 - 1.2 * place)
        axes.xaxis.set_major_formatter(length_label)
        axes.set_xlabel("distance in tokens, up to")
        axes.set_title(f"{model}, {form}", loc="left", fontsize=11)
    panels[0].set_ylabel("codes recalled, percent")
    legend_below(figure, panels, 4, NAMES)
    save(figure, path)


def _recalled(rows: Sequence[RecallRow]) -> list[tuple[int, float]]:
    points = []
    for reach in sorted({row.distance for row in rows}):
        those = [row for row in rows if row.distance == reach]
        asked = sum(row.asked for row in those)
        points.append((reach, 100 * sum(row.right for row in those) / asked))
    return points


def _line(axes: Axes, name: str, points: Sequence[tuple[int, float]], size: float = 4.0) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(x, y, _dashes(name), marker="o", markersize=size, color=SHADES[name], label=name)
