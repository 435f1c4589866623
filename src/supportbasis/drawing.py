"""Pictures of plans. Needs matplotlib (the ``cli`` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import SupportBasisError
from .plans import HeadPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 256
PARTS = (
    ("small rows × small keys: polynomial", "#cfe3f5"),
    ("small rows × large keys: exact", "#4878b8"),
    ("large rows × all keys: exact", "#c44e52"),
)


def draw_supports(plan: HeadPlan, path: str | Path | None = None) -> Figure:
    """The support of each component: large rows in red, large keys in blue, the rest light.

    A cell of the picture covers many tokens; it takes the colour of the most exact of them.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure as NewFigure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SupportBasisError(
            'drawing needs matplotlib: pip install "supportbasis[cli]"'
        ) from error
    figure = NewFigure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.add_subplot()
    colours = ListedColormap([colour for _, colour in PARTS])
    axes.imshow(
        _picture(plan).numpy(),
        cmap=colours,
        vmin=0,
        vmax=2,
        interpolation="nearest",
        aspect="auto",
        extent=(0, max(1, plan.m), max(1, plan.n), 0),
    )
    axes.set_xlabel("key")
    axes.set_ylabel("query row")
    axes.set_title(_title(plan), fontsize=10)
    handles = [Patch(color=colour, label=label) for label, colour in PARTS]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=8, ncols=1)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _title(plan: HeadPlan) -> str:
    title = f"{plan.kind}, {plan.n} × {plan.m} pairs, cost {plan.cost:.3g} of exact"
    if plan.threshold is not None:
        title += f", T = {plan.threshold:.3g}"
    return title


def _picture(plan: HeadPlan) -> torch.Tensor:
    rows, keys = min(CELLS, max(1, plan.n)), min(CELLS, max(1, plan.m))
    picture = torch.zeros(rows, keys)
    if plan.kind == "exact":
        return picture.fill_(2.0)
    if plan.large_keys is not None and len(plan.large_keys):
        picture[:, (plan.large_keys.cpu() * keys // plan.m).unique()] = 1.0
    if plan.large_rows is not None and len(plan.large_rows):
        picture[(plan.large_rows.cpu() * rows // plan.n).unique()] = 2.0
    return picture
