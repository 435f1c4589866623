"""Pictures of the report, drawn from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..figures import COLOURS, GREY, INK, Line, Panel, draw, new_figure, plain_axes, save
from .findings import Scored, chance
from .methods import EXACT, MEAN, NAMES
from .rows import LayerRow, RecallRow, recalled

OTHERS = [name for name in NAMES if name not in (EXACT, MEAN)]
MORE = ("#9b2c2c", "#744210", "#22543d", "#44337a", "#2c5282")
SHADES = dict(zip(OTHERS, (*COLOURS, *MORE), strict=True)) | {EXACT: INK, MEAN: GREY}


def draw_accuracy(models: Mapping[str, Mapping[str, Scored]], path: Path) -> None:
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


def _line(name: str, points: Mapping[int, float], size: float = 4.0) -> Line:
    dashes = "--" if "emulation" in name or name == MEAN else "-"
    options = {"marker": "o", "ms": size}
    return Line(name, list(points), list(points.values()), dashes, SHADES[name], options=options)


def draw_layers(rows: Sequence[LayerRow], path: Path) -> None:
    """Error of hidden states after each layer."""
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        lines = []
        for name in NAMES:
            mine = [row for row in rows if (row.model, row.method) == (model, name)]
            points = {row.layer: row.error for row in mine if 0 < row.error < float("inf")}
            lines += [_line(name, points)] if points else []
        label = "relative error of hidden states"
        panels.append(Panel(model, lines, "layer", label, log="y"))
    draw(path, [panels], (0.5 + 5.0 * len(panels), 4.8), legend=3, order=NAMES, sharey=True)


def draw_recall(rows: Sequence[RecallRow], path: Path) -> None:
    """Share of codes recalled against distance, a panel for each model and form."""
    panels = []
    for model, form in dict.fromkeys((row.model, row.form) for row in rows):
        lines = []
        for at, name in enumerate(NAMES):  # the later, the smaller: lines often coincide
            mine = [r for r in rows if (r.model, r.form, r.method) == (model, form, name)]
            points = recalled(mine)
            lines += [_line(name, points, 14.0 - 0.8 * at)] if points else []
        x, y = "distance in tokens, up to", "codes recalled, percent"
        panels.append(Panel(f"{model}, {form}", lines, x, y, log="x"))
    draw(path, [panels], (0.5 + 4.2 * len(panels), 4.8), order=NAMES, sharey=True)
