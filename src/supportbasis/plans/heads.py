"""What one head will do: a class for each kind, with what that kind needs.

===================  ==========================================================
exact                all rows x all keys, exact
polynomial           all rows x all keys, polynomial
single-threshold     large rows x all keys, exact (Case 1 of the paper);
                     small rows x large keys, exact (Case 2);
                     small rows x small keys, polynomial
multi-threshold      row bucket x key bucket, a power of a polynomial (sketched
                     or not) or exact, for every pair of buckets
power                all rows x all keys, a power of the score
lists                all rows x all keys, by lists of exact and tilted keys
fitted               far rows x all keys, exact; near rows x far keys, exact;
                     near rows x near keys, a polynomial fitted to their scores
===================  ==========================================================

`HeadPlan.basis` is the only place where a plan becomes work. These are settings: which tokens are
large, or in which bucket, is found again from the data at each call, so a plan serves any length,
and every split is a disjoint cover of all pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..components import (
    Component,
    ExactSum,
    FittedSum,
    PolynomialSum,
    PowerSum,
    SketchSum,
)
from ..lists.list_sum import ListSum
from ..lists.tables import ListSettings
from ..polynomials.balancing import Frame, framed
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.fitting import FittedKernel
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from .supports import RowGroup, Side, large_tokens, members, sides

PRINTED_PAIRS = 8


class ScoreRange(NamedTuple):
    """How large the scores could be that a head was planned for, by the norms of its tokens."""

    largest: float | None  # |scale| max|q| max|k|; None where the largest does not matter
    mean: float | None  # |scale| mean|q| mean|k|; None where every score up to that is certified
    framed: float | None = None  # the same in a balancing transform; None where there is none


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPlan(ABC):
    """What one head will do, and why."""

    kind: ClassVar[str]  # of the table above

    reason: str = ""
    n: int  # tokens it was made for
    m: int
    cost: float = 1.0  # multiply-adds relative to exact attention
    speedup: float = 1.0  # predicted against SDPA on this machine
    measured: float | None = None  # error on sampled rows, where the planner measured it
    scores: ScoreRange | None = None  # the range it was made for; None: nothing depends on it

    @abstractmethod
    def basis(self, head: Head) -> list[RowGroup]:
        """Disjoint components that cover all pairs of a head."""

    def exact(self, head: Head) -> Component:
        """What the components approximate, over all keys."""
        return ExactSum(head.live_keys)

    def smooth(self, head: Head) -> tuple[Tensor | None, Tensor | None]:
        """Rows and keys of the pairs that are approximated (None: all)."""
        return None, head.live_keys

    @property
    def polynomials(self) -> tuple[CertifiedPolynomial, ...]:
        """The certified polynomials of all components."""
        return ()

    @property
    def is_sketched(self) -> bool:
        return False

    @property
    def may_fail(self) -> bool:
        """Whether a row's sum can come out far too small, so that the row is computed exactly."""
        return self.is_sketched

    def details(self) -> list[str]:
        """What is particular to the head, in words."""
        return []

    def __str__(self) -> str:
        parts = [self.kind, *self.details()]
        parts.append(f"cost {self.cost:.3g}, predicted {self.speedup:.3g}x as fast as exact")
        if self.measured is not None:
            parts.append(f"measured error {self.measured:.2g}")
        return "; ".join(parts) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactHead(HeadPlan):
    """Everything is computed."""

    kind = "exact"

    def basis(self, head: Head) -> list[RowGroup]:
        return [RowGroup(None, [self.exact(head)])]


@dataclass(frozen=True, eq=False, kw_only=True)
class PolynomialHead(HeadPlan):
    """One polynomial for all pairs."""

    kind = "polynomial"

    polynomial: CertifiedPolynomial

    @property
    def degree(self) -> int:
        return self.polynomial.degree

    @property
    def bound(self) -> float:
        """B: the polynomial is certified for scores in [-B, B]."""
        return self.polynomial.bound

    @property
    def polynomials(self) -> tuple[CertifiedPolynomial, ...]:
        return (self.polynomial,)

    def basis(self, head: Head) -> list[RowGroup]:
        return [RowGroup(None, [PolynomialSum(self.polynomial, head.live_keys)])]

    def details(self) -> list[str]:
        poly = self.polynomial
        text = f"{poly.kind} degree {poly.degree} on ±{poly.bound:.4g}"
        return [text, f"eps {poly.error:.2g}"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ThresholdHead(PolynomialHead):
    """Tokens with an entry beyond a threshold exactly, the rest by a polynomial."""

    kind = "single-threshold"

    threshold: float
    large: tuple[int, int]  # rows and keys beyond the threshold when it was made

    def split(self, head: Head) -> tuple[Side, Side]:
        """Rows and keys, by the threshold."""
        return sides(head, *large_tokens(head, self.threshold))

    def smooth(self, head: Head) -> tuple[Tensor | None, Tensor | None]:
        rows, keys = self.split(head)
        return rows.small, keys.small

    def basis(self, head: Head) -> list[RowGroup]:
        split = self.split(head)
        return _split_groups(head, *split, PolynomialSum(self.polynomial, split[1].small))

    def details(self) -> list[str]:
        rows, keys = self.large
        counts = f"{rows} large rows, {keys} large keys"
        return [*super().details(), f"T={self.threshold:.4g}", counts]


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedHead(HeadPlan):
    """Tokens far from the others exactly, the rest by a polynomial fitted to their scores."""

    kind = "fitted"

    fitted: FittedKernel
    frame: Frame  # the balancing transform that it is fitted in
    exact_rows: int = 0  # rows that are exact at the start of a causal head
    keys: float = 0.0  # features and exact keys, a query

    @property
    def may_fail(self) -> bool:
        return True

    def split(self, head: Head) -> tuple[Side, Side]:
        """Rows and live keys that are far, by the radius of the fit in its transform."""
        inside = framed(head, self.frame)
        rows = (inside.query.norm(dim=1) > self.fitted.query_radius).nonzero().squeeze(1)
        first = torch.arange(min(head.n, self.exact_rows), device=rows.device)
        rows = torch.cat([first, rows]).unique()
        far = inside.key.norm(dim=1) > self.fitted.key_radius
        if head.key_log_weight is not None:
            far &= head.key_log_weight > -torch.inf
        return sides(head, rows, far.nonzero().squeeze(1))

    def basis(self, head: Head) -> list[RowGroup]:
        split = self.split(head)
        return _split_groups(head, *split, FittedSum(self.fitted, self.frame, split[1].small))

    def details(self) -> list[str]:
        return [str(self.fitted)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ListHead(HeadPlan):
    """Lists of exact and tilted keys."""

    kind = "lists"

    lists: ListSettings
    keys: float = 0.0  # of open leaves, a query

    def basis(self, head: Head) -> list[RowGroup]:
        return [RowGroup(None, [ListSum(self.lists)])]

    def details(self) -> list[str]:
        return [str(self.lists), f"{self.keys:.0f} of {self.m} keys a query in open leaves"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PowerHead(HeadPlan):
    """A power of the score in place of its exponential."""

    kind = "power"

    kernel: PowerKernel

    @property
    def is_sketched(self) -> bool:
        return self.kernel.sketch_size is not None

    def basis(self, head: Head) -> list[RowGroup]:
        return [RowGroup(None, [_power(self.kernel, head.live_keys)])]

    def exact(self, head: Head) -> Component:
        return PowerSum(head.live_keys, kernel=self.kernel)

    def details(self) -> list[str]:
        return [str(self.kernel)]


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


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketHead(HeadPlan):
    """Buckets of rows and of keys by their largest entries."""

    kind = "multi-threshold"

    row_edges: tuple[float, ...]  # upper thresholds of the buckets
    key_edges: tuple[float, ...]
    pairs: tuple[BucketPair, ...] = ()  # every row bucket with every key bucket

    @property
    def polynomials(self) -> tuple[CertifiedPolynomial, ...]:
        kernels = (pair.kernel for pair in self.pairs if pair.kernel is not None)
        return tuple(kernel.polynomial for kernel in kernels if kernel.polynomial is not None)

    @property
    def is_sketched(self) -> bool:
        return any(pair.kernel is not None and pair.kernel.sketch_size for pair in self.pairs)

    def buckets(self, head: Head) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Rows and live keys of each bucket, sorted; None where one bucket holds all."""
        rows = members(head.query_maxima, self.row_edges, None)
        return rows, members(head.key_maxima, self.key_edges, head.live_keys)

    def basis(self, head: Head) -> list[RowGroup]:
        row_sets, key_sets = self.buckets(head)
        groups = []
        for row, rows in enumerate(row_sets):
            pairs = [pair for pair in self.pairs if pair.row == row]
            if rows is None or len(rows):
                groups.append(RowGroup(rows, _pair_components(pairs, key_sets)))
        return groups

    def details(self) -> list[str]:
        return [f"{len(self.row_edges)} x {len(self.key_edges)} buckets", _summary(self.pairs)]

    def __str__(self) -> str:
        return "\n      ".join([super().__str__(), *_largest_pairs(self.pairs)])


def _split_groups(head: Head, rows: Side, keys: Side, smooth: Component) -> list[RowGroup]:
    """Large rows exactly; small rows with large keys exactly, with small keys by ``smooth``."""
    groups = []
    if rows.large is not None:
        groups.append(RowGroup(rows.large, [ExactSum(head.live_keys)]))
    if rows.small is None or len(rows.small):
        components: list[Component] = []
        if keys.small is None or len(keys.small):
            components.append(smooth)
        if keys.large is not None:
            components.append(ExactSum(keys.large))
        groups.append(RowGroup(rows.small, components or [ExactSum(head.live_keys)]))
    return groups


def _power(kernel: PowerKernel, keys: Tensor | None) -> Component:
    """A power kernel over some keys, sketched if it says so."""
    return PowerSum(keys, kernel=kernel) if kernel.sketch_size is None else SketchSum(kernel, keys)


def _pair_components(
    pairs: Sequence[BucketPair], key_sets: Sequence[Tensor | None]
) -> list[Component]:
    """The components of one row bucket; all its exact keys make one of them."""
    components: list[Component] = []
    exact = [key_sets[pair.key] for pair in pairs if pair.kernel is None]
    indices = [keys for keys in exact if keys is not None]
    if len(indices) < len(exact):  # None is the only bucket: every key
        components.append(ExactSum(None))
    elif indices:
        components.append(ExactSum(torch.cat(indices).sort().values))
    for pair in pairs:
        keys = key_sets[pair.key]
        if pair.kernel is not None and (keys is None or len(keys)):
            components.append(_power(pair.kernel, keys))
    return components


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
