"""Settings of a head: a class for each kind. `HeadPlan.basis` turns them into components.

Which tokens are large, or in which bucket, is found again from the data at each call, so a plan
serves any length, and every split is a disjoint cover of all pairs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..components import Component, ExactSum, FittedSum, PolynomialSum, PowerSum, SketchSum
from ..lists.list_sum import ListSum
from ..lists.tables import ListSettings
from ..polynomials.balancing import Transform, transformed
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.fitting import FittedKernel
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from .supports import RowGroup, Side, is_empty, members, side_of, split_at

PRINTED_PAIRS = 8
KINDS: dict[str, type[HeadPlan]] = {}  # by name, as files say it


class ScoreRange(NamedTuple):
    """Scores that the norms of the tokens allow, for which a head was planned."""

    largest: float | None  # |scale| max|q| max|k|; None where the largest does not matter
    mean: float | None  # |scale| mean|q| mean|k|; None where every score up to that is certified
    balanced: float | None = None  # the same in a balancing transform; None where there is none


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPlan:
    """The settings of one head, with its predicted cost and the reason for the choice."""

    kind: ClassVar[str]

    reason: str = ""
    n: int  # tokens it was made for
    m: int
    cost: float = 1.0  # multiply-adds relative to exact attention
    speedup: float = 1.0  # predicted against SDPA on this machine
    measured: float | None = None  # error on sampled rows, where the planner measured it
    scores: ScoreRange | None = None  # the range it was made for; None: nothing depends on it

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        KINDS[kind] = cls

    def basis(self, head: Head) -> list[RowGroup]:
        """Disjoint components that cover all pairs of a head: large rows exactly; small rows with
        large keys exactly, with small keys by `smooth_sum`."""
        rows, keys = self.split(head)
        groups = [] if rows.large is None else [RowGroup(rows.large, [self.exact(head)])]
        if not is_empty(rows.small):
            components = [] if is_empty(keys.small) else [self.smooth_sum(keys.small)]
            components += [] if keys.large is None else [ExactSum(keys.large)]
            groups.append(RowGroup(rows.small, components or [self.exact(head)]))
        return groups

    def split(self, head: Head) -> tuple[Side, Side]:
        """Rows and live keys; none of them are large unless the kind of head says which."""
        return Side(None, None), Side(None, head.live_keys)

    def smooth_sum(self, keys: Tensor | None) -> Component:
        """What sums small rows with these keys."""
        return ExactSum(keys)

    def exact(self, head: Head) -> Component:
        """The exact component that the others approximate, over all keys."""
        return ExactSum(head.live_keys)

    def smooth(self, head: Head) -> tuple[Tensor | None, Tensor | None]:
        """Rows and keys of the pairs that are approximated (None: all)."""
        rows, keys = self.split(head)
        return rows.small, keys.small

    @property
    def kernels(self) -> tuple[PowerKernel, ...]:
        return ()

    @property
    def polynomials(self) -> tuple[CertifiedPolynomial, ...]:
        return tuple(k.polynomial for k in self.kernels if k.polynomial is not None)

    @property
    def is_sketched(self) -> bool:
        return any(kernel.sketch_size for kernel in self.kernels)

    @property
    def may_fail(self) -> bool:
        """Whether sums of rows can be far too small; such rows are then computed exactly."""
        return self.is_sketched

    def details(self) -> list[str]:
        """Settings of this kind of head, as lines of text."""
        return []

    def __str__(self) -> str:
        parts = [self.kind, *self.details()]
        parts.append(f"cost {self.cost:.3g}, predicted {self.speedup:.3g}x as fast as exact")
        if self.measured is not None:
            parts.append(f"measured error {self.measured:.2g}")
        return "; ".join(parts) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactHead(HeadPlan, kind="exact"):
    """All pairs are computed exactly."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PolynomialHead(HeadPlan, kind="polynomial"):
    """One polynomial for all pairs."""

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

    def smooth_sum(self, keys: Tensor | None) -> PolynomialSum:
        return PolynomialSum(self.polynomial, keys)

    def details(self) -> list[str]:
        poly = self.polynomial
        return [f"{poly.kind} degree {poly.degree} on ±{poly.bound:.4g}", f"eps {poly.error:.2g}"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ThresholdHead(PolynomialHead, kind="single-threshold"):
    """Large rows with all keys exactly (Case 1 of the paper), small rows with large keys exactly
    (Case 2), small rows with small keys by a polynomial."""

    threshold: float
    large: tuple[int, int]  # rows and keys beyond the threshold when it was made

    def split(self, head: Head) -> tuple[Side, Side]:
        return split_at(head, self.threshold)

    def details(self) -> list[str]:
        counts = f"{self.large[0]} large rows, {self.large[1]} large keys"
        return [*super().details(), f"T={self.threshold:.4g}", counts]


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedHead(HeadPlan, kind="fitted"):
    """Far rows with all keys and near rows with far keys exactly, near rows with near keys by a
    polynomial fitted to their scores."""

    fitted: FittedKernel
    transform: Transform  # the balancing transform that it is fitted in
    exact_rows: int = 0  # rows that are exact at the start of a causal head
    keys: float = 0.0  # features and exact keys, a query

    @property
    def may_fail(self) -> bool:
        return True

    def split(self, head: Head) -> tuple[Side, Side]:
        """Far rows and live keys: beyond the radii of the fitted polynomial, transformed."""
        balanced = transformed(head, self.transform)
        rows = balanced.query.norm(dim=1) > self.fitted.query_radius
        rows[: self.exact_rows] = True
        keys = balanced.key.norm(dim=1) > self.fitted.key_radius
        return side_of(rows, None), side_of(keys, head.live_keys)

    def smooth_sum(self, keys: Tensor | None) -> FittedSum:
        return FittedSum(self.fitted, self.transform, keys)

    def details(self) -> list[str]:
        return [str(self.fitted)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ListHead(HeadPlan, kind="lists"):
    """Lists of exact and tilted keys."""

    lists: ListSettings
    keys: float = 0.0  # of open leaves, a query

    def smooth_sum(self, keys: Tensor | None) -> Component:
        return ListSum(self.lists)  # which leaves out padded keys itself

    def details(self) -> list[str]:
        return [str(self.lists), f"{self.keys:.0f} of {self.m} keys a query in open leaves"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PowerHead(HeadPlan, kind="power"):
    """A power of the score instead of its exponential."""

    kernel: PowerKernel

    @property
    def kernels(self) -> tuple[PowerKernel, ...]:
        return (self.kernel,)

    def smooth_sum(self, keys: Tensor | None) -> Component:
        return _power(self.kernel, keys)

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
class BucketHead(HeadPlan, kind="multi-threshold"):
    """Buckets of rows and of keys by their largest entries; each pair of buckets exactly, or by a
    power of a polynomial, sketched or not."""

    row_edges: tuple[float, ...]  # upper thresholds of the buckets
    key_edges: tuple[float, ...]
    pairs: tuple[BucketPair, ...] = ()  # every row bucket with every key bucket

    @property
    def kernels(self) -> tuple[PowerKernel, ...]:
        return tuple(pair.kernel for pair in self.pairs if pair.kernel is not None)

    def buckets(self, head: Head) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Rows and live keys of each bucket, sorted; None where one bucket holds all."""
        rows = members(head.query_maxima, self.row_edges, None)
        return rows, members(head.key_maxima, self.key_edges, head.live_keys)

    def basis(self, head: Head) -> list[RowGroup]:
        """For each bucket of rows, all its exact keys make one component."""
        groups, (row_sets, key_sets) = [], self.buckets(head)
        for row, rows in enumerate(row_sets):
            pairs = [pair for pair in self.pairs if pair.row == row]
            exact = [key_sets[pair.key] for pair in pairs if pair.kernel is None]
            indices = [keys for keys in exact if keys is not None]  # None: the only bucket
            together = torch.cat(indices).sort().values if indices else None
            components: list[Component] = [ExactSum(together)] if exact else []
            components += [
                _power(pair.kernel, keys)
                for pair in pairs
                if pair.kernel is not None and not is_empty(keys := key_sets[pair.key])
            ]
            groups.append(RowGroup(rows, components))
        return [group for group in groups if not is_empty(group.rows)]

    def details(self) -> list[str]:
        kernels = (pair.kernel for pair in self.pairs)
        ways = Counter(
            "exact" if k is None else "sketched" if k.sketch_size else "power" for k in kernels
        )
        text = ", ".join(f"{count} {way}" for way, count in ways.items())
        if powers := [kernel.power for kernel in self.kernels]:
            text += f", powers {min(powers)} to {max(powers)}"
        return [f"{len(self.row_edges)} x {len(self.key_edges)} buckets", text]

    def __str__(self) -> str:
        """With a line for each of the pairs that hold most of the matrix, in order."""
        largest = sorted(self.pairs, key=lambda pair: -pair.rows * pair.keys)[:PRINTED_PAIRS]
        lines = [super().__str__(), *(str(pair) for pair in self.pairs if pair in largest)]
        if rest := len(self.pairs) - len(lines) + 1:
            lines.append(f"and {rest} smaller pairs")
        return "\n      ".join(lines)


def _power(kernel: PowerKernel, keys: Tensor | None) -> Component:
    """A power component over some keys, sketched if the kernel has a sketch size."""
    return PowerSum(keys, kernel=kernel) if kernel.sketch_size is None else SketchSum(kernel, keys)
