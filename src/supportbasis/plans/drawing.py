"""Pictures of plans: the components of a head, the heads of a model. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SupportBasisError
from .heads import BucketHead, ExactHead, HeadPlan, ListHead, PowerHead, ThresholdHead
from .plan import ModelPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

LIGHT, BLUE, RED, VIOLET = "#cfe3f5", "#4878b8", "#c44e52", "#e3d7f0"
Part = tuple[str, str]  # a colour, and what it stands for
SMALL: Part = (LIGHT, "small rows × small keys: polynomial")
LARGE_KEYS: Part = (BLUE, "small rows × large keys: exact")
LARGE_ROWS: Part = (RED, "large rows × all keys: exact")
POWERS: Part = (VIOLET, "all rows × all keys: a power of the score")
CLOSED: Part = (LIGHT, "closed leaves: a tilted key in place of each")
OPEN: Part = (BLUE, "open leaves: exact")
OWN: Part = (RED, "own window: exact")
THINNEST = 1 / 256  # of a side: what fewer tokens are drawn as
SMALLEST = 1e-3  # of the cost scale, and of the effect's share


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, with space for its labels."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        hint = 'drawing needs matplotlib: pip install "supportbasis[cli]"'
        raise SupportBasisError(hint) from error
    return NewFigure(figsize=(width, height), layout="constrained")


def draw_supports(plan: HeadPlan, path: str | Path | None = None) -> Figure:
    """The support of each component of one head, as a picture of its score matrix."""
    figure = new_figure(6.2, 5.6)
    axes = figure.add_subplot()
    axes.set(xlim=(0, max(1, plan.m)), ylim=(max(1, plan.n), 0), xlabel="key", ylabel="query row")
    more = ""
    if isinstance(plan, ListHead):
        more = f"\n{plan.lists}"
        _draw_lists(axes, plan)
    elif isinstance(plan, BucketHead):
        _draw_buckets(axes, plan)
    else:
        more = f", T = {plan.threshold:.3g}" if isinstance(plan, ThresholdHead) else ""
        _draw_split(axes, plan)
    handles = list({patch.get_label(): patch for patch in axes.patches}.values())
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=8)
    title = f"{plan.kind}, {plan.n} × {plan.m} pairs, cost {plan.cost:.3g} of exact{more}"
    axes.set_title(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, part: Part) -> None:
    """Keys x and on, rows y and on."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=part[0], label=part[1]))


def _draw_split(axes: Axes, plan: HeadPlan) -> None:
    """Large rows in red, large keys in blue, the rest light; large tokens are drawn first."""
    whole: dict[type, Part] = {ExactHead: LARGE_ROWS, PowerHead: POWERS}
    _box(axes, 0, 0, plan.m, plan.n, whole.get(type(plan), SMALL))
    if isinstance(plan, ThresholdHead):
        sizes = zip(plan.large, (plan.n, plan.m), strict=True)
        rows, keys = (max(count, total * THINNEST) if count else 0 for count, total in sizes)
        _box(axes, 0, 0, keys, plan.n, LARGE_KEYS)
        _box(axes, 0, 0, plan.m, rows, LARGE_ROWS)
        axes.set(xlabel="keys, large ones first", ylabel="query rows, large ones first")


def _draw_lists(axes: Axes, plan: ListHead) -> None:
    """How much a row attends to exactly. Which leaves are open is decided at each call, for each
    block of queries; their mean share is drawn: windows at their positions, open leaves first."""
    n, keys, window = plan.n, plan.m, plan.lists.window
    columns, share = [(0, 0, keys, n)], plan.keys / max(1, keys)
    axes.set(xlabel="keys, those of open leaves first" + " in each window" * bool(window))
    if window:
        keys, columns = min(n, keys), []
        for first in range(0, keys, window):  # its own rows see it exactly, later ones by lists
            end, last = min(keys, first + window), min(n, first + window)
            own = [(first, first), (end, end), (end, last), (first, last)]
            axes.fill(*zip(*own, strict=True), facecolor=OWN[0], label=OWN[1])
            columns.append((first, last, end - first, n - last))
        far = sum(width * height for _, _, width, height in columns)
        share = plan.keys * n / far if far else 0.0
    for x, y, width, height in columns:
        _box(axes, x, y, share * width, height, OPEN)
        _box(axes, x + share * width, y, (1 - share) * width, height, CLOSED)


def _draw_buckets(axes: Axes, plan: BucketHead) -> None:
    """A rectangle for each pair of buckets, tokens sorted by bucket, with the pair's power."""
    rows = {pair.row: pair.rows for pair in plan.pairs}
    keys = {pair.key: pair.keys for pair in plan.pairs}
    for pair in plan.pairs:
        x = sum(count for key, count in keys.items() if key < pair.key)
        y = sum(count for row, count in rows.items() if row < pair.row)
        kernel = pair.kernel
        if kernel is None:
            part = (RED, "bucket pair: exact")
        elif kernel.sketch_size is None:
            part = (LIGHT, "bucket pair: power p of a polynomial")
        else:
            part = (VIOLET, "bucket pair: power p, sketched")
        _box(axes, x, y, pair.keys, pair.rows, part)
        axes.patches[-1].set(edgecolor="white", linewidth=0.6)
        if kernel is not None and pair.keys > 0.08 * plan.m and pair.rows > 0.05 * plan.n:
            middle = (x + pair.keys / 2, y + pair.rows / 2)
            axes.annotate(f"p = {kernel.power}", middle, ha="center", va="center", fontsize=8)
    axes.set(xlabel="keys, bucket by bucket", ylabel="query rows, bucket by bucket")


def layer_panels(
    figure: Figure, values: Tensor, styles: Sequence[tuple[str, Normalize | None, str]]
) -> Sequence[Axes]:
    """Panels of values [panels, layers, heads], each with its title, scale and colours."""
    found: Sequence[Axes] = figure.subplots(1, len(styles), sharey=True)
    _, layers, heads = values.shape
    for axes, panel, (title, norm, colours) in zip(found, values, styles, strict=True):
        image = axes.imshow(panel.numpy(), norm=norm, cmap=colours, aspect="auto")
        axes.set(title=title, xlabel="head", xticks=range(0, heads, max(1, heads // 8)))
        axes.title.set_fontsize(10)
        figure.colorbar(image, ax=axes, shrink=0.8)
    found[0].set(ylabel="layer", yticks=range(0, layers, max(1, layers // 12)))
    return found


def draw_model(plan: ModelPlan, path: str | Path | None = None) -> Figure:
    """Two panels, layer × head: the cost of each head with the first letter of its kind, and its
    share of the effect."""
    heads = max((len(layer.heads) for layer in plan.layers), default=1)
    figure = new_figure(3.2 + 0.75 * heads, 1.9 + 0.42 * len(plan.layers))
    from matplotlib.colors import LogNorm

    panels = torch.full((2, len(plan.layers), heads), float("nan"))
    for row, layer in enumerate(plan.layers):
        for column, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True)):
            panels[0, row, column] = max(head.cost, SMALLEST)
            if not isinstance(head, ExactHead) and plan.predicted:
                panels[1, row, column] = max(effect / plan.predicted, SMALLEST)
    cost = ("cost of exact attention", LogNorm(SMALLEST, 1.0), "Blues")
    effects = (f"share of the {plan.unit}", LogNorm(SMALLEST, 1.0), "Oranges")
    left = layer_panels(figure, panels, (cost, effects))[0]
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for row, layer in enumerate(plan.layers):
        for column, head in enumerate(layer.heads):
            colour = "white" if head.cost > 0.1 else "black"
            left.text(column, row, head.kind[0].upper(), color=colour, **style)
    measured = "" if plan.measured is None else f"{plan.measured:.2g} measured, "
    kinds = sorted({head.kind for head in plan.heads})
    legend = ", ".join(f"{kind[0].upper()}: {kind}" for kind in kinds)
    figure.suptitle(
        f"{plan.model or 'model'}, {plan.tokens} tokens: cost {plan.cost:.2g}; {plan.unit} "
        f"{measured}{plan.predicted:.2g} predicted, allowed {plan.limit:.2g}\n{legend}",
        fontsize=10,
    )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
