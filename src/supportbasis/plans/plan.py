"""Plans: what each head will do, printable, drawable, and reusable on new tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from ..errors import InputError, SupportBasisError
from ..lists.tables import ListSettings
from ..polynomials.balancing import Frame
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.fitting import FittedKernel
from ..polynomials.powers import PowerKernel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..methods import Method

PRINTED_PAIRS = 8


@dataclass(frozen=True)
class BucketPair:
    """One piece of a multi-threshold basis: a bucket of rows times a bucket of keys."""

    row: int  # position of the row bucket among the plan's edges
    key: int
    rows: int  # how many there were when the plan was made
    keys: int
    reach: float  # certified range of the scores: |z| <= reach
    kernel: PowerKernel | None  # None: exact

    def __str__(self) -> str:
        what = "exact" if self.kernel is None else str(self.kernel)
        return f"{self.rows} rows x {self.keys} keys, scores within ±{self.reach:.3g}: {what}"


class ScoreRange(NamedTuple):
    """How large the scores could be that a head was planned for, by the norms of its tokens."""

    largest: float | None  # |scale| max|q| max|k|; None where the largest does not matter
    mean: float | None  # |scale| mean|q| mean|k|; None where every score up to that is certified
    framed: float | None = None  # the same in a balancing transform; None where there is none


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """What one (batch, head) pair will do, and why.

    These are settings: which tokens are large, or in which bucket, is found again from the data
    at each call, so a plan serves any length, and every split is a disjoint cover of all pairs.
    """

    kind: str  # of the table in `basis.support_basis`
    reason: str
    n: int
    m: int
    cost: float  # multiply-adds relative to exact attention
    speedup: float  # predicted against SDPA on this machine
    polynomial: CertifiedPolynomial | None = None
    threshold: float | None = None
    large: tuple[int, int] | None = None  # rows and keys beyond the threshold when it was made
    measured: float | None = None  # error on sampled rows, where the planner measured it
    kernel: PowerKernel | None = None  # of polynomial attention
    row_edges: tuple[float, ...] = ()  # upper thresholds of the buckets of a multi-threshold basis
    key_edges: tuple[float, ...] = ()
    pairs: tuple[BucketPair, ...] = ()  # every row bucket with every key bucket
    lists: ListSettings | None = None  # of lists of exact and tilted keys
    exact_rows: int = 0  # rows that are exact at the start of a causal head
    keys: float = 0.0  # keys of open leaves a query, or features of a fitted polynomial
    fitted: FittedKernel | None = None  # a polynomial fitted to the scores
    frame: Frame | None = None  # coordinates of a fitted polynomial
    scores: ScoreRange | None = None  # the range it was made for; None: nothing depends on it

    @property
    def degree(self) -> int | None:
        return None if self.polynomial is None else self.polynomial.degree

    @property
    def bound(self) -> float | None:
        """B: the polynomial is certified for scores in [-B, B]."""
        return None if self.polynomial is None else self.polynomial.bound

    @property
    def kernels(self) -> tuple[PowerKernel, ...]:
        """The power kernels of all components."""
        own = () if self.kernel is None else (self.kernel,)
        return own + tuple(pair.kernel for pair in self.pairs if pair.kernel is not None)

    @property
    def polynomials(self) -> tuple[CertifiedPolynomial, ...]:
        """The certified polynomials of all components."""
        own = () if self.polynomial is None else (self.polynomial,)
        return own + tuple(k.polynomial for k in self.kernels if k.polynomial is not None)

    @property
    def is_sketched(self) -> bool:
        return any(kernel.sketch_size is not None for kernel in self.kernels)

    @property
    def may_lose_rows(self) -> bool:
        """Whether a row's sum can come out far too small, and must be looked at."""
        return self.is_sketched or self.fitted is not None

    def __str__(self) -> str:
        parts = [self.kind]
        if self.polynomial is not None:
            poly = self.polynomial
            parts.append(f"{poly.kind} degree {poly.degree} on ±{poly.bound:.4g}")
            parts.append(f"eps {poly.error:.2g}")
        if self.threshold is not None:
            parts.append(f"T={self.threshold:.4g}")
        if self.large is not None:
            parts.append(f"{self.large[0]} large rows, {self.large[1]} large keys")
        if self.kernel is not None:
            parts.append(str(self.kernel))
        if self.pairs:
            parts.append(f"{len(self.row_edges)} x {len(self.key_edges)} buckets")
            parts.append(_summary(self.pairs))
        if self.lists is not None:
            parts.append(str(self.lists))
            parts.append(f"{self.keys:.0f} of {self.m} keys a query in open leaves")
        if self.fitted is not None:
            parts.append(str(self.fitted))
        parts.append(f"cost {self.cost:.3g}, predicted {self.speedup:.3g}x as fast as exact")
        if self.measured is not None:
            parts.append(f"measured error {self.measured:.2g}")
        text = "; ".join(parts) + (f" ({self.reason})" if self.reason else "")
        return "\n      ".join([text, *_largest_pairs(self.pairs)])


@dataclass(frozen=True, eq=False)
class Plan:
    """A method applied to data: one `HeadPlan` for each (batch, head).

    >>> import torch, supportbasis as sb
    >>> q = k = v = torch.zeros(1, 2, 8, 4)
    >>> plan = sb.plan(q, k, v, method=sb.Polynomial(degree=1))
    >>> len(plan.heads), plan.heads[0].kind
    (2, 'polynomial')
    """

    method: Method
    batch: int
    num_heads: int
    dim: int
    heads: tuple[HeadPlan, ...]
    scale: float | None = None  # that it was made for; None: any, of a plan made by hand
    is_causal: bool | None = None
    handle: str = field(init=False)  # the plan's name where only strings can go
    memory: dict[object, object] = field(init=False, repr=False)  # of a device: see `device`
    is_exact: bool = field(init=False)  # every head of it
    # the same with lists that are (not) strict, where that depends on the call; else none
    _resolved: tuple[Plan, Plan] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", f"plan {next(_numbers)}")
        object.__setattr__(self, "memory", {})
        object.__setattr__(self, "is_exact", all(head.kind == "exact" for head in self.heads))
        _plans[self.handle] = self
        open_ones = any(head.lists is not None and head.lists.strict is None for head in self.heads)
        resolved = (self._with_strict(False), self._with_strict(True)) if open_ones else None
        object.__setattr__(self, "_resolved", resolved)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # a copy is another plan

    @staticmethod
    def known(handle: str) -> Plan:
        """The plan with this handle, as long as somebody holds it."""
        plan = _plans.get(handle)
        if plan is None:
            raise SupportBasisError(f"{handle} is gone; keep a plan for as long as it is used")
        return plan

    @property
    def cost(self) -> float:
        """Multiply-adds relative to exact attention (1.0), everything counted, mean over heads."""
        return sum(h.cost for h in self.heads) / len(self.heads) if self.heads else 1.0

    @property
    def speedup(self) -> float:
        """Predicted time of SDPA over predicted time of this plan on this machine."""
        times = [1.0 / h.speedup for h in self.heads]
        return len(times) / sum(times) if times else 1.0

    def resolved(self, recorded: bool) -> Plan:
        """The plan of a call whose gradients are ``recorded`` or not: with ``strict`` settled."""
        return self if self._resolved is None else self._resolved[recorded]

    def _with_strict(self, strict: bool) -> Plan:
        heads = tuple(
            replace(head, lists=replace(head.lists, strict=strict and head.lists.window > 0))
            if head.lists is not None and head.lists.strict is None
            else head
            for head in self.heads
        )
        return self.of_heads(heads, (self.batch, self.num_heads))

    def of_heads(self, heads: tuple[HeadPlan, ...], shape: tuple[int, int]) -> Plan:
        """The same plan with other heads, (batch, heads) of them."""
        return Plan(self.method, *shape, self.dim, heads, self.scale, self.is_causal)

    def head(self, batch: int, head: int) -> HeadPlan:
        return self.heads[batch * self.num_heads + head]

    def __str__(self) -> str:
        lines = [
            f"Plan: {self.method}, {self.batch} x {self.num_heads} heads, dim {self.dim}, "
            f"cost {self.cost:.3g} of exact, predicted {self.speedup:.3g}x SDPA"
        ]
        for i, head in enumerate(self.heads):
            lines.append(f"  [{i // self.num_heads}, {i % self.num_heads}] {head}")
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        from . import files as plan_json

        plan_json.save(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan written by `save`. What the plan claims is proved again; a file that is
        damaged, or from another version, raises an `InputError` that says what is wrong with it."""
        from . import files as plan_json

        return plan_json.load(path)

    def draw(self, path: str | Path | None = None, head: int = 0) -> Figure:
        """Draw the components of one head: which pairs are exact, and how the rest is summed."""
        from .drawing import draw_supports

        if not 0 <= head < len(self.heads):
            raise InputError(f"head must be in 0..{len(self.heads) - 1}, got {head}")
        return draw_supports(self.heads[head], path)


_numbers = itertools.count()
_plans: WeakValueDictionary[str, Plan] = WeakValueDictionary()


def _largest_pairs(pairs: tuple[BucketPair, ...]) -> list[str]:
    """A line for each of the pairs that hold most of the matrix, in order."""
    shown = sorted(pairs, key=lambda pair: -pair.rows * pair.keys)[:PRINTED_PAIRS]
    lines = [str(pair) for pair in pairs if pair in shown]
    rest = len(pairs) - len(lines)
    return lines + ([f"and {rest} smaller pairs"] if rest else [])


def _summary(pairs: tuple[BucketPair, ...]) -> str:
    """How many pairs are summed in which way, and their powers."""
    ways = Counter(
        "exact" if pair.kernel is None else "sketched" if pair.kernel.sketch_size else "power"
        for pair in pairs
    )
    powers = sorted({pair.kernel.power for pair in pairs if pair.kernel is not None})
    text = ", ".join(f"{count} {way}" for way, count in ways.items())
    return text + (f", powers {powers[0]} to {powers[-1]}" if powers else "")
