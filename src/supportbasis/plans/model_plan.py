"""`ModelPlan`: the plans of all attention modules of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .heads import ExactHead, HeadPlan
from .plan import Plan, SomeHeads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRINTED = 6  # heads on a line
UNITS = {"kl": "nats per token", "change": "of the output's square"}


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One attention module: its plan, and the effect of each of its heads on the prediction."""

    name: str
    plan: Plan
    effects: tuple[float, ...]  # predicted, of each head, in the unit of the model plan
    min_tokens: int  # below, the module is exact: its plan is not predicted to be faster

    @property
    def heads(self) -> tuple[HeadPlan, ...]:
        return self.plan.heads

    @property
    def dim(self) -> int:
        return self.plan.dim


@dataclass(frozen=True, eq=False)
class ModelPlan(SomeHeads):
    """What every head of a model runs, and how far the prediction moves.

    ``unit`` is "kl" (mean Kullback-Leibler divergence of the predicted distributions, nats per
    token) or "change" (squared change of the output relative to its square). ``predicted`` is the
    sum of the effects of all heads; ``measured`` was found by running the whole plan on batches
    that were not used for it, with an upper limit at 95 % confidence.
    """

    layers: tuple[LayerPlan, ...]
    unit: str
    limit: float  # that the caller allowed
    tokens: int  # that it was made for
    predicted: float
    measured: float | None = None
    upper: float | None = None
    model: str = ""  # class of the model
    speedups: tuple[tuple[int, float], ...] = ()  # predicted for attention, by tokens
    heads: tuple[HeadPlan, ...] = field(init=False, repr=False)  # of all layers

    def __post_init__(self) -> None:
        heads = tuple(head for layer in self.layers for head in layer.heads)
        object.__setattr__(self, "heads", heads)

    def __str__(self) -> str:
        approximated = sum(not isinstance(head, ExactHead) for head in self.heads)
        said = f"{self.unit} {self.predicted:.2g} predicted"
        if self.measured is not None:
            said += f", {self.measured:.2g} measured (below {self.upper:.2g} with confidence 0.95)"
        lines = [
            f"ModelPlan: {self.model or 'model'}, {len(self.layers)} attention modules, "
            f"{approximated} of {len(self.heads)} heads approximated at {self.tokens} tokens; "
            f"{self.summary}"
        ]
        if self.speedups:
            parts = ", ".join(f"{speed:.3g}x at {n}" for n, speed in self.speedups)
            lines.append(f"  attention predicted {parts} tokens")
        lines.append(f"  {said}, allowed {self.limit:.2g} ({UNITS[self.unit]})")
        lines += [line for layer in self.layers for line in self._lines(layer)]
        return "\n".join(lines)

    __repr__ = __str__

    def _lines(self, layer: LayerPlan) -> list[str]:
        """Kind, cost and share of the effect of each head of a layer."""
        cells = []
        for number, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True)):
            share = effect / self.predicted if self.predicted else 0.0
            numbers = "" if isinstance(head, ExactHead) else f" {head.cost:.2f} {share:.0%}"
            cells.append(f"[{number}] {head.kind}{numbers}")
        wide = max(map(len, cells))
        rows = [cells[at : at + PRINTED] for at in range(0, len(cells), PRINTED)]
        lines = ["    " + "  ".join(f"{cell:{wide}}" for cell in row).rstrip() for row in rows]
        return [f"  {layer.name}, from {layer.min_tokens} tokens on", *lines]

    def draw(self, path: str | Path | None = None) -> Figure:
        """Draw layer × head: the method and cost of each, and its share of the effect."""
        from .drawing import draw_model

        return draw_model(self, path)

    def with_layers(self, layers: tuple[LayerPlan, ...]) -> ModelPlan:
        predicted = sum(effect for layer in layers for effect in layer.effects)
        return replace(self, layers=layers, predicted=predicted)
