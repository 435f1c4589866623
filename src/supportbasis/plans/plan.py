"""Settings of all heads of a call (`Plan`) or of a model (`ModelPlan`): printable, drawable, and
reusable on new tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from ..errors import SupportBasisError
from ..problem.checks import check_integer
from .heads import ExactHead, HeadPlan, ListHead

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..methods import Method

Made = TypeVar("Made", bound="SomeHeads")
PRINTED = 6  # heads of a model plan on a line
UNITS = {"kl": "nats per token", "change": "of the output's square"}


class SomeHeads:
    """What the plans of a call and of a model share."""

    heads: tuple[HeadPlan, ...]

    @property
    def cost(self) -> float:
        """Multiply-adds relative to exact attention (1.0), everything counted, mean over heads."""
        return sum(h.cost for h in self.heads) / len(self.heads) if self.heads else 1.0

    @property
    def speedup(self) -> float:
        """Predicted time of SDPA over predicted time of this plan, for attention alone, on this
        machine."""
        times = [1.0 / h.speedup for h in self.heads]
        return len(times) / sum(times) if times else 1.0

    @property
    def summary(self) -> str:
        return f"cost {self.cost:.3g} of exact, predicted {self.speedup:.3g}x SDPA"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        from . import files

        files.save(self, path)

    @classmethod
    def load(cls: type[Made], path: str | Path) -> Made:
        """Read a plan written by `save`. What the plan claims is proved again; a file that is
        damaged, or from another version, raises an `InputError` that says what is wrong with it."""
        from . import files

        return files.load(path, cls)


@dataclass(frozen=True, eq=False)
class Plan(SomeHeads):
    """A method applied to data: one `HeadPlan` for each head, whatever the batch, and the ``scale``
    and causality it was made for.

    >>> import torch, supportbasis as sb
    >>> q = k = v = torch.zeros(1, 2, 8, 4)
    >>> plan = sb.plan(q, k, v, method=sb.Polynomial(degree=1))
    >>> len(plan.heads), plan.heads[0].kind
    (2, 'polynomial')
    """

    method: Method
    dim: int
    heads: tuple[HeadPlan, ...]
    scale: float | None = None  # that it was made for; None: any, of a plan made by hand
    is_causal: bool | None = None
    handle: str = field(init=False, repr=False)  # the plan's name where only strings can go
    is_exact: bool = field(init=False, repr=False)  # every head of it
    # the same with lists that are (not) strict, where that depends on the call; else none
    _resolved: tuple[Plan, Plan] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", f"plan {next(_numbers)}")
        object.__setattr__(self, "is_exact", all(isinstance(h, ExactHead) for h in self.heads))
        _plans[self.handle] = self
        open_ones = any(isinstance(h, ListHead) and h.lists.strict is None for h in self.heads)
        resolved = (self._with_strict(False), self._with_strict(True)) if open_ones else None
        object.__setattr__(self, "_resolved", resolved)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # a copy is another plan

    @staticmethod
    def known(handle: str) -> Plan:
        """The plan with this handle, as long as it is referenced elsewhere."""
        plan = _plans.get(handle)
        if plan is None:
            raise SupportBasisError(f"{handle} is gone; keep a plan for as long as it is used")
        return plan

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def resolved(self, recorded: bool) -> Plan:
        """The plan of a call whose gradients are ``recorded`` or not: with ``strict`` settled."""
        return self if self._resolved is None else self._resolved[recorded]

    def _with_strict(self, strict: bool) -> Plan:
        return self.with_heads(
            replace(head, lists=replace(head.lists, strict=strict and head.lists.window > 0))
            if isinstance(head, ListHead) and head.lists.strict is None
            else head
            for head in self.heads
        )

    def with_heads(self, heads: Iterable[HeadPlan]) -> Plan:
        return replace(self, heads=tuple(heads))

    def __str__(self) -> str:
        first = f"Plan: {self.method}, {self.num_heads} heads, dim {self.dim}, {self.summary}"
        return "\n".join([first, *(f"  [{i}] {head}" for i, head in enumerate(self.heads))])

    __repr__ = __str__

    def draw(self, path: str | Path | None = None, head: int = 0) -> Figure:
        """Draw the components of one head: which pairs are exact, and how the rest is summed."""
        from .drawing import draw_supports

        return draw_supports(self.heads[check_integer("head", head, 0, len(self.heads) - 1)], path)


_numbers = itertools.count()
_plans: WeakValueDictionary[str, Plan] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One attention module: its plan, the effect of each of its heads on the prediction, and from
    how many tokens on it is used: below ``min_tokens`` it is not predicted to be faster."""

    name: str
    plan: Plan
    effects: tuple[float, ...]  # predicted, of each head, in the unit of the model plan
    min_tokens: int

    @property
    def heads(self) -> tuple[HeadPlan, ...]:
        return self.plan.heads


@dataclass(frozen=True, eq=False)
class ModelPlan(SomeHeads):
    """What every head of a model runs, and how far the prediction moves.

    ``unit`` is "kl" (mean Kullback-Leibler divergence of the predicted distributions, nats per
    token) or "change" (squared change of the output relative to its square). ``predicted`` is the
    sum of the effects of all heads; ``measured`` was found by running the whole plan on batches
    that were held back (or the only one), with an upper limit at 95 % confidence.
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
        padded = [cell.ljust(max(map(len, cells))) for cell in cells]
        starts = range(0, len(cells), PRINTED)
        lines = ["    " + "  ".join(padded[at : at + PRINTED]).rstrip() for at in starts]
        return [f"  {layer.name}, from {layer.min_tokens} tokens on", *lines]

    def draw(self, path: str | Path | None = None) -> Figure:
        """Draw layer × head: the method and cost of each, and its share of the effect."""
        from .drawing import draw_model

        return draw_model(self, path)
