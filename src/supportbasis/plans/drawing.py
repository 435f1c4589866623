"""Pictures of plans: the components of a head, the heads of a model. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import SupportBasisError
from .heads import BucketHead, ExactHead, HeadPlan, ListHead, PowerHead, ThresholdHead
from .model_plan import ModelPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 256
LIGHT, BLUE, RED, VIOLET = "#cfe3f5", "#4878b8", "#c44e52", "#e3d7f0"
Labels = Sequence[tuple[str, str]]
PARTS = (
    ("small rows × small keys: polynomial", LIGHT),
    ("small rows × large keys: exact", BLUE),
    ("large rows × all keys: exact", RED),
)
POWER_PARTS = (("all rows × all keys: a power of the score", VIOLET),)
LIST_PARTS = (
    ("closed leaves: a tilted key in place of each", LIGHT),
    ("open leaves: exact", BLUE),
    ("own window: exact", RED),
)
BUCKET_PARTS = (
    ("bucket pair: power p of a polynomial", LIGHT),
    ("bucket pair: power p, sketched", VIOLET),
    ("bucket pair: exact", RED),
)
LETTERS = dict(
    zip(("exact", "lists", "fitted", "polynomial", "single-threshold"), "ELFPT", strict=True)
)
SMALLEST = 1e-3  # of the cost scale, and of the effect's share


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        hint = 'drawing needs matplotlib: pip install "supportbasis[cli]"'
        raise SupportBasisError(hint) from error
    return NewFigure(figsize=(width, height), layout="constrained")


def draw_supports(plan: HeadPlan, path: str | Path | None = None) -> Figure:
    """The support of each component of one head, as a picture of its score matrix."""
    figure = _figure(6.2, 5.6)
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    title = f"{plan.kind}, {plan.n} × {plan.m} pairs, cost {plan.cost:.3g} of exact"
    if isinstance(plan, ListHead):
        parts = _draw_lists(axes, plan)
        title += f"\n{plan.lists}"
    elif isinstance(plan, BucketHead):
        parts = _draw_buckets(axes, plan)
    else:
        parts = _draw_split(axes, plan)
        title += f", T = {plan.threshold:.3g}" if isinstance(plan, ThresholdHead) else ""
    handles = [Patch(color=colour, label=label) for label, colour in parts]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=8, ncols=1)
    axes.set_title(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_split(axes: Axes, plan: HeadPlan) -> Labels:
    """Large rows in red, large keys in blue, the rest light; large tokens are drawn first."""
    from matplotlib.colors import ListedColormap

    rows, keys = min(CELLS, max(1, plan.n)), min(CELLS, max(1, plan.m))
    picture = torch.full((rows, keys), 2.0 if isinstance(plan, ExactHead) else 0.0)
    split = isinstance(plan, ThresholdHead)
    if isinstance(plan, ThresholdHead):
        picture[:, : math.ceil(plan.large[1] * keys / max(1, plan.m))] = 1.0
        picture[: math.ceil(plan.large[0] * rows / max(1, plan.n))] = 2.0
    parts = POWER_PARTS if isinstance(plan, PowerHead) else PARTS
    colours = ListedColormap([colour for _, colour in parts])
    extent = (0, max(1, plan.m), max(1, plan.n), 0)
    axes.imshow(
        picture.numpy(),
        colours,
        vmin=0,
        vmax=2,
        interpolation="nearest",
        aspect="auto",
        extent=extent,
    )
    axes.set_xlabel("keys, large ones first" if split else "key")
    axes.set_ylabel("query rows, large ones first" if split else "query row")
    return parts


def _draw_lists(axes: Axes, plan: ListHead) -> Labels:
    """How much a row attends to exactly. Which leaves are open is decided at each call, for each
    block of queries; their mean share is drawn: windows at their positions, open leaves first."""
    from matplotlib.patches import Polygon

    n, keys, window = plan.n, plan.m, plan.lists.window
    if window:
        keys = min(n, keys)
        far = sum(min(keys, row) * min(window, n - row) for row in range(0, n, window)) / n
        share = plan.keys / far if far else 0.0
        for first in range(0, keys, window):  # its own rows see it exactly, later ones by lists
            end, last = min(keys, first + window), min(n, first + window)
            own = [(first, first), (end, end), (end, last), (first, last)]
            axes.add_patch(Polygon(own, facecolor=RED))
            _columns(axes, (first, last), (end - first, n - last), share)
    else:
        _columns(axes, (0, 0), (keys, n), plan.keys / max(1, keys))
    where = " in each window" if window else ""
    axes.set(xlim=(0, max(1, plan.m)), ylim=(max(1, n), 0), ylabel="query row")
    axes.set_xlabel(f"keys, those of open leaves first{where}")
    return LIST_PARTS if window else LIST_PARTS[:2]


def _columns(axes: Axes, corner: tuple[int, int], size: tuple[int, int], share: float) -> None:
    """Keys and rows of a rectangle, a share of the keys in open leaves."""
    from matplotlib.patches import Rectangle

    (x, y), (width, height) = corner, size
    opened = share * width
    axes.add_patch(Rectangle((x, y), opened, height, facecolor=BLUE))
    axes.add_patch(Rectangle((x + opened, y), width - opened, height, facecolor=LIGHT))


def _draw_buckets(axes: Axes, plan: BucketHead) -> Labels:
    """A rectangle for each pair of buckets, tokens sorted by bucket, with the pair's power."""
    from matplotlib.patches import Rectangle

    rows = {pair.row: pair.rows for pair in plan.pairs}
    keys = {pair.key: pair.keys for pair in plan.pairs}
    total_rows, total_keys, used = sum(rows.values()), sum(keys.values()), set()
    for pair in plan.pairs:
        x = sum(count for key, count in keys.items() if key < pair.key)
        y = sum(count for row, count in rows.items() if row < pair.row)
        kernel = pair.kernel
        colour = RED if kernel is None else LIGHT if kernel.sketch_size is None else VIOLET
        used.add(colour)
        box = Rectangle((x, y), pair.keys, pair.rows, edgecolor="white", linewidth=0.6)
        box.set_facecolor(colour)
        axes.add_patch(box)
        wide = pair.keys > 0.08 * total_keys and pair.rows > 0.05 * total_rows
        if wide and kernel is not None:
            middle = (x + pair.keys / 2, y + pair.rows / 2)
            axes.annotate(f"p = {kernel.power}", middle, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, max(1, total_keys)), ylim=(max(1, total_rows), 0))
    axes.set(xlabel="keys, bucket by bucket", ylabel="query rows, bucket by bucket")
    return [part for part in BUCKET_PARTS if part[1] in used]


def draw_model(plan: ModelPlan, path: str | Path | None = None) -> Figure:
    """Two panels, layer × head: the cost of each head with the letter of its kind, and its share
    of the effect."""
    heads = max((len(layer.heads) for layer in plan.layers), default=1)
    figure = _figure(3.2 + 0.75 * heads, 1.9 + 0.42 * len(plan.layers))
    from matplotlib.colors import LogNorm

    left, right = figure.subplots(1, 2, sharey=True)
    cost, share = torch.full((2, len(plan.layers), heads), float("nan"))
    for row, layer in enumerate(plan.layers):
        for column, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True)):
            cost[row, column] = max(head.cost, SMALLEST)
            if not isinstance(head, ExactHead) and plan.predicted:
                share[row, column] = max(effect / plan.predicted, SMALLEST)
            style = {"ha": "center", "va": "center", "fontsize": 8}
            colour = "white" if head.cost > 0.1 else "black"
            left.text(column, row, LETTERS.get(head.kind, "?"), color=colour, **style)
    panels = (
        (left, cost, "cost of exact attention", "Blues"),
        (right, share, f"share of the {plan.unit}", "Oranges"),
    )
    for axes, values, name, colours in panels:
        norm = LogNorm(SMALLEST, 1.0)
        image = axes.imshow(values.numpy(), norm=norm, cmap=colours, aspect="auto")
        axes.set(title=name, xlabel="head", xticks=range(0, heads, max(1, heads // 8)))
        figure.colorbar(image, ax=axes, shrink=0.8)
    left.set(ylabel="layer", yticks=range(0, len(plan.layers), max(1, len(plan.layers) // 12)))
    measured = "" if plan.measured is None else f"{plan.measured:.2g} measured, "
    kinds = {head.kind for layer in plan.layers for head in layer.heads}
    legend = ", ".join(f"{LETTERS[kind]}: {kind}" for kind in LETTERS if kind in kinds)
    figure.suptitle(
        f"{plan.model or 'model'}, {plan.tokens} tokens: cost {plan.cost:.2g}; {plan.unit} "
        f"{measured}{plan.predicted:.2g} predicted, allowed {plan.limit:.2g}\n{legend}",
        fontsize=10,
    )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
