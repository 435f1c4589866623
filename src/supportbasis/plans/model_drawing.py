"""A picture of the plan of a model. Needs matplotlib (the ``cli`` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import SupportBasisError
from .heads import ExactHead
from .model_plan import ModelPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = {
    "exact": "E", "lists": "L", "fitted": "F", "polynomial": "P", "single-threshold": "T",
}  # fmt: skip
SMALLEST = 1e-3  # of the cost scale, and of the effect's share


def draw_model(plan: ModelPlan, path: str | Path | None = None) -> Figure:
    """Two panels, layer × head: the cost of each head, and its share of the effect."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise SupportBasisError(
            'drawing needs matplotlib: pip install "supportbasis[cli]"'
        ) from error
    heads = max((len(layer.heads) for layer in plan.layers), default=1)
    cost, share = torch.full((2, len(plan.layers), heads), float("nan"))
    for row, layer in enumerate(plan.layers):
        for column, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True)):
            cost[row, column] = max(head.cost, SMALLEST)
            if not isinstance(head, ExactHead) and plan.predicted:
                share[row, column] = max(effect / plan.predicted, SMALLEST)
    size = (3.2 + 0.75 * heads, 1.9 + 0.42 * len(plan.layers))
    figure = NewFigure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = ("cost of exact attention", f"share of the {plan.unit}")
    for axes, values, name, colours in zip(
        (left, right), (cost, share), names, ("Blues", "Oranges"), strict=True
    ):
        image = axes.imshow(
            values.numpy(), norm=LogNorm(SMALLEST, 1.0), cmap=colours, aspect="auto"
        )
        axes.set(title=name, xlabel="head", xticks=range(0, heads, max(1, heads // 8)))
        figure.colorbar(image, ax=axes, shrink=0.8)
    left.set(ylabel="layer", yticks=range(0, len(plan.layers), max(1, len(plan.layers) // 12)))
    _write_kinds(left, plan)
    said = f"{plan.predicted:.2g} predicted"
    if plan.measured is not None:
        said = f"{plan.measured:.2g} measured, {said}"
    kinds = {head.kind for layer in plan.layers for head in layer.heads}
    legend = ", ".join(f"{LETTERS[kind]}: {kind}" for kind in LETTERS if kind in kinds)
    figure.suptitle(
        f"{plan.model or 'model'}, {plan.tokens} tokens: cost {plan.cost:.2g}; {plan.unit} {said}, "
        f"allowed {plan.limit:.2g}\n{legend}",
        fontsize=10,
    )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _write_kinds(axes: Axes, plan: ModelPlan) -> None:
    """The letter of each head's kind on its cell."""
    for row, layer in enumerate(plan.layers):
        for column, head in enumerate(layer.heads):
            dark = head.cost > 0.1
            axes.text(
                column, row, LETTERS.get(head.kind, "?"), ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
