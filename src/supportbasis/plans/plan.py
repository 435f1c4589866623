"""`Plan`: the settings of all heads of a call, printable, drawable, and reusable on new tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from ..errors import InputError, SupportBasisError
from .heads import ExactHead, HeadPlan, ListHead

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..methods import Method

Made = TypeVar("Made", bound="SomeHeads")


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
    """A method applied to data: one `HeadPlan` for each head, whatever the batch.

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
        """The same plan with other heads."""
        return replace(self, heads=tuple(heads))

    def __str__(self) -> str:
        lines = [f"  [{number}] {head}" for number, head in enumerate(self.heads)]
        first = f"Plan: {self.method}, {self.num_heads} heads, dim {self.dim}, {self.summary}"
        return "\n".join([first, *lines])

    __repr__ = __str__

    def draw(self, path: str | Path | None = None, head: int = 0) -> Figure:
        """Draw the components of one head: which pairs are exact, and how the rest is summed."""
        from .drawing import draw_supports

        if not 0 <= head < len(self.heads):
            raise InputError(f"head must be in 0..{len(self.heads) - 1}, got {head}")
        return draw_supports(self.heads[head], path)


_numbers = itertools.count()
_plans: WeakValueDictionary[str, Plan] = WeakValueDictionary()
