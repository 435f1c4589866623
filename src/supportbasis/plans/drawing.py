"""Pictures of plans. Needs matplotlib (the ``cli`` extra)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import SupportBasisError
from .heads import (
    BucketHead,
    BucketPair,
    ExactHead,
    HeadPlan,
    ListHead,
    PowerHead,
    ThresholdHead,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 256
PARTS = (
    ("small rows × small keys: polynomial", "#cfe3f5"),
    ("small rows × large keys: exact", "#4878b8"),
    ("large rows × all keys: exact", "#c44e52"),
)
POWER_PARTS = (("all rows × all keys: a power of the score", "#e3d7f0"),)
LIST_PARTS = (
    ("closed leaves: a tilted key in place of each", "#cfe3f5"),
    ("open leaves: exact", "#4878b8"),
    ("own window: exact", "#c44e52"),
)
BUCKET_PARTS = (
    ("bucket pair: power p of a polynomial", "#cfe3f5"),
    ("bucket pair: power p, sketched", "#e3d7f0"),
    ("bucket pair: exact", "#c44e52"),
)


def draw_supports(plan: HeadPlan, path: str | Path | None = None) -> Figure:
    """The support of each component of one head, as a picture of its score matrix."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise SupportBasisError(
            'drawing needs matplotlib: pip install "supportbasis[cli]"'
        ) from error
    figure = NewFigure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.add_subplot()
    if isinstance(plan, ListHead):
        parts = _draw_lists(axes, plan)
    elif isinstance(plan, BucketHead):
        parts = _draw_buckets(axes, plan)
    else:
        parts = _draw_split(axes, plan)
    _legend(figure, parts)
    axes.set_title(_title(plan), fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


Labels = Sequence[tuple[str, str]]


def _legend(figure: Figure, labels: Labels) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in labels]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=8, ncols=1)


def _title(plan: HeadPlan) -> str:
    title = f"{plan.kind}, {plan.n} × {plan.m} pairs, cost {plan.cost:.3g} of exact"
    if isinstance(plan, ThresholdHead):
        title += f", T = {plan.threshold:.3g}"
    if isinstance(plan, ListHead):
        title += f"\n{plan.lists}"
    return title


# ---- two buckets: large rows and keys first ---------------------------------------------------


def _draw_split(axes: Axes, plan: HeadPlan) -> Labels:
    """Large rows in red, large keys in blue, the rest light; large tokens are drawn first."""
    from matplotlib.colors import ListedColormap

    parts = POWER_PARTS if isinstance(plan, PowerHead) else PARTS
    axes.imshow(
        _picture(plan).numpy(),
        cmap=ListedColormap([colour for _, colour in parts]),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        aspect="auto",
        extent=(0, max(1, plan.m), max(1, plan.n), 0),
    )
    split = isinstance(plan, ThresholdHead)
    axes.set_xlabel("keys, large ones first" if split else "key")
    axes.set_ylabel("query rows, large ones first" if split else "query row")
    return parts


def _picture(plan: HeadPlan) -> torch.Tensor:
    rows, keys = min(CELLS, max(1, plan.n)), min(CELLS, max(1, plan.m))
    picture = torch.zeros(rows, keys)
    if isinstance(plan, ExactHead):
        return picture.fill_(2.0)
    if isinstance(plan, ThresholdHead):
        picture[:, : math.ceil(plan.large[1] * keys / max(1, plan.m))] = 1.0
        picture[: math.ceil(plan.large[0] * rows / max(1, plan.n))] = 2.0
    return picture


# ---- lists: windows at their positions, open leaves of a window first --------------------------


def _draw_lists(axes: Axes, plan: ListHead) -> Labels:
    """How much a row attends to exactly. Which leaves are open is decided at each call, for each
    block of queries; their mean share is drawn."""
    n, keys, window = plan.n, plan.m, plan.lists.window
    if window:
        keys = min(n, keys)
        far = sum(min(keys, row) * min(window, n - row) for row in range(0, n, window)) / n
        share = plan.keys / far if far else 0.0
        for first in range(0, keys, window):
            _window(axes, first, min(window, keys - first), window, n, share)
    else:
        _columns(axes, (0, 0), (keys, n), plan.keys / max(1, keys))
    axes.set_xlim(0, max(1, plan.m))
    axes.set_ylim(max(1, n), 0)
    where = " in each window" if window else ""
    axes.set_xlabel(f"keys, those of open leaves first{where}")
    axes.set_ylabel("query row")
    return LIST_PARTS if window else LIST_PARTS[:2]


def _window(axes: Axes, first: int, width: int, window: int, n: int, share: float) -> None:
    """A window of keys: its own rows see it exactly, those after it through lists."""
    from matplotlib.patches import Polygon

    last = min(n, first + window)
    own = [(first, first), (first + width, first + width), (first + width, last), (first, last)]
    axes.add_patch(Polygon(own, facecolor=LIST_PARTS[2][1]))
    _columns(axes, (first, last), (width, n - last), share)


def _columns(axes: Axes, corner: tuple[int, int], size: tuple[int, int], share: float) -> None:
    """Keys and rows of a rectangle, a share of the keys in open leaves."""
    from matplotlib.patches import Rectangle

    (x, y), (width, height) = corner, size
    opened = share * width
    axes.add_patch(Rectangle((x, y), opened, height, facecolor=LIST_PARTS[1][1]))
    axes.add_patch(Rectangle((x + opened, y), width - opened, height, facecolor=LIST_PARTS[0][1]))


# ---- many buckets: rows and keys in the order of their buckets ---------------------------------


def _draw_buckets(axes: Axes, plan: BucketHead) -> Labels:
    """A rectangle for each pair of buckets, tokens sorted by bucket, with the pair's power."""
    from matplotlib.patches import Rectangle

    rows = {pair.row: pair.rows for pair in plan.pairs}
    keys = {pair.key: pair.keys for pair in plan.pairs}
    for pair in plan.pairs:
        x = sum(count for key, count in keys.items() if key < pair.key)
        y = sum(count for row, count in rows.items() if row < pair.row)
        box = Rectangle(
            (x, y), pair.keys, pair.rows, facecolor=_colour(pair), edgecolor="white", linewidth=0.6
        )
        axes.add_patch(box)
        wide = pair.keys > 0.08 * sum(keys.values()) and pair.rows > 0.05 * sum(rows.values())
        if wide and pair.kernel is not None:
            middle = (x + pair.keys / 2, y + pair.rows / 2)
            axes.annotate(f"p = {pair.kernel.power}", middle, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, max(1, sum(keys.values())))
    axes.set_ylim(max(1, sum(rows.values())), 0)
    axes.set_xlabel("keys, bucket by bucket")
    axes.set_ylabel("query rows, bucket by bucket")
    used = {_colour(pair) for pair in plan.pairs}
    return [part for part in BUCKET_PARTS if part[1] in used]


def _colour(pair: BucketPair) -> str:
    if pair.kernel is None:
        return BUCKET_PARTS[2][1]
    return BUCKET_PARTS[0 if pair.kernel.sketch_size is None else 1][1]
