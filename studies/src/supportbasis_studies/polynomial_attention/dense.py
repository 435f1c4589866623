"""The whole weight matrix of a plan beside softmax's, in float64, some rows at a time.

`reference.weights` writes the same matrix down at once and evaluates every kernel on every pair;
here a kernel sees only its own bucket pair, so that thousands of tokens and dozens of pairs are a
matter of seconds. Keys are put in the order of their buckets, which makes every bucket pair a
block; norms do not care about the order, and the values follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from supportbasis.components.sketch_sum import SketchSum
from supportbasis.engine.jensen import least_lse
from supportbasis.plans import BucketHead, HeadPlan, PolynomialHead, PowerHead
from supportbasis.polynomials.certified import CertifiedPolynomial
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import Head

from .variants import pairs_of

ENTRIES = 2**18  # of a block of rows times all keys, about what stays in the caches

NORMS = ("l1", "l2", "l4", "linf")


class Norms:
    """Entrywise l1, l2, l4 and l_inf norms of a matrix that comes in parts.

    Sums of powers are kept as logarithms: the fourth powers of bad weights leave float64.
    """

    def __init__(self) -> None:
        self.logs = [-math.inf] * 3
        self.largest = 0.0

    def add_(self, part: Tensor) -> None:
        """Add entries of the matrix; their place in memory is used up."""
        top = float(torch.linalg.vector_norm(part, math.inf))
        if not top:
            return
        self.largest = max(self.largest, top)
        unit = 1.0 if 1e-70 < top < 1e70 else top
        part = part.div_(unit) if unit != 1 else part
        first = float(torch.linalg.vector_norm(part, 1))
        square = part.square_().view(-1)
        sums = (first, float(square.sum()), float(square @ square))
        for index, (power, value) in enumerate(zip((1, 2, 4), sums, strict=True)):
            log = math.log(value) + power * math.log(unit)
            self.logs[index] = _log_add(self.logs[index], log)

    def values(self) -> tuple[float, float, float, float]:
        one, two, four = (
            math.exp(log / power) for log, power in zip(self.logs, (1, 2, 4), strict=True)
        )
        return one, two, four, self.largest

    def over(self, exact: Norms) -> tuple[float, float, float, float]:
        """Relative errors: these norms over those of the exact matrix."""
        pairs = zip(self.values(), exact.values(), strict=True)
        one, two, four, top = (mine / theirs for mine, theirs in pairs)
        return one, two, four, top


def _log_add(a: float, b: float) -> float:
    """log(e^a + e^b)."""
    low, high = min(a, b), max(a, b)
    return high + math.log1p(math.exp(low - high))


class Rows(NamedTuple):
    """Some rows of both matrices, the keys in the order of ``Dense.order``."""

    rows: Tensor
    exact: Tensor  # [rows, m], in units of exp(unit)
    given: Tensor  # [rows, m], in the same units


@dataclass(frozen=True, eq=False)
class Block:
    """How the weights of one row bucket with some neighbouring keys come about."""

    keys: slice
    kernel: PowerKernel | None = None  # of a bucket pair; None: softmax's own weight
    polynomial: CertifiedPolynomial | None = None
    query: tuple[Tensor, Tensor] | None = None  # sketched rows [rows, z] and their log-factors
    key: tuple[Tensor, Tensor] | None = None

    def weights(self, score: Tensor, part: slice, unit: float) -> Tensor:
        """Weights of scores [some rows, keys] in units of exp(unit)."""
        if self.polynomial is not None:
            return self.polynomial(score) * math.exp(self.polynomial.bound - unit)
        if self.kernel is None:
            return (score - unit).exp_()
        if self.query is None or self.key is None:
            return self.kernel.log(score).sub_(unit).exp_()
        (x, log_x), (y, log_y) = self.query, self.key
        square = (x[part] @ y.T).square_()
        return square.mul_((log_x[part].unsqueeze(1) + (log_y - unit)).exp_())


class Dense:
    """The weights of softmax and of a plan, in units of exp(unit), a few rows at a time."""

    def __init__(self, head: Head, plan: HeadPlan, unit: float):
        self.head, self.unit = replace(head, precision=torch.float64), unit
        row_sets: Sequence[Tensor | None] = [None]
        key_sets: Sequence[Tensor | None] = [None]
        if isinstance(plan, BucketHead):
            row_sets, key_sets = plan.buckets(head)
        members = [torch.arange(head.m) if keys is None else keys for keys in key_sets]
        self.order = torch.cat(members)
        ends = torch.tensor([0, *(len(keys) for keys in members)]).cumsum(0).tolist()
        places = [slice(ends[i], ends[i + 1]) for i in range(len(members))]
        self.groups = []
        for row, rows in enumerate(row_sets):
            pairs = [pair for pair in pairs_of(plan) if pair.row == row]
            alone = plan.kernel if isinstance(plan, PowerHead) else None
            kernels = [(pair.kernel, pair.key) for pair in pairs] or [(alone, 0)]
            blocks = [
                self._block(kernel, plan, rows, key_sets[at], places[at]) for kernel, at in kernels
            ]
            self.groups.append((torch.arange(head.n) if rows is None else rows, blocks))

    def _block(
        self,
        kernel: PowerKernel | None,
        plan: HeadPlan,
        rows: Tensor | None,
        keys: Tensor | None,
        place: slice,
    ) -> Block:
        if kernel is None or kernel.sketch_size is None:
            polynomial = plan.polynomial if isinstance(plan, PolynomialHead) else None
            return Block(place, kernel, polynomial)
        sketched = SketchSum(kernel).task(self.head, None)
        query = self.head.query if rows is None else self.head.query[rows]
        key = self.head.key if keys is None else self.head.key[keys]
        return Block(place, kernel, None, sketched.unit("query", query), sketched.unit("key", key))

    def __iter__(self) -> Iterator[Rows]:
        key = self.head.key[self.order].double()
        step = max(1, ENTRIES // len(key))
        for rows, blocks in self.groups:
            for start in range(0, len(rows), step):
                part = slice(start, min(start + step, len(rows)))
                query = self.head.query[rows[part]].double()
                score = query @ key.T * self.head.scale
                given = torch.empty_like(score)
                for block in blocks:
                    at = (slice(None), block.keys)
                    given[at] = block.weights(score[at], part, self.unit)
                yield Rows(rows[part], score.sub_(self.unit).exp_(), given)


class Exact(NamedTuple):
    """Softmax attention of a head, and what its errors are measured against."""

    unit: float  # the largest score: weights are in units of its exponential
    output: Tensor  # [n, dv]
    matrix: Norms
    attention: Norms
    values: Norms  # of the output

    @staticmethod
    def of(head: Head) -> Exact:
        key = head.key.double() * head.scale
        chunks = head.query.double().split(max(1, ENTRIES // head.m))
        unit = max(float((chunk @ key.T).max()) for chunk in chunks)
        matrix, attention, values, outputs = Norms(), Norms(), Norms(), []
        for chunk in chunks:
            weight = (chunk @ key.T).sub_(unit).exp_()
            matrix.add_(weight.clone())
            weight /= weight.sum(1, keepdim=True)
            outputs.append(weight @ head.value.double())
            attention.add_(weight)
        output = torch.cat(outputs)
        values.add_(output.clone())
        return Exact(unit, output, matrix, attention, values)


class Errors(NamedTuple):
    """Relative errors in the four norms, and the share of failed rows of a sketch."""

    matrix: tuple[float, float, float, float]
    attention: tuple[float, float, float, float]
    output: tuple[float, float, float, float]
    failed_rows: float


def measure_errors(head: Head, plan: HeadPlan, exact: Exact, *, fallback: bool) -> Errors:
    """Errors of a plan's weights exp(score), of its attention matrix and of its output.

    Rows whose sketched sum is provably too small have failed: with ``fallback`` they are exact, as
    in the library. Rows without a positive sum, which only a polynomial can have, are zero too.
    """
    matrix, attention = Norms(), Norms()
    output = torch.empty_like(exact.output)
    dense = Dense(head, plan, exact.unit)
    value, failed = head.value.double()[dense.order], 0
    least = least_lse(plan, head, None) - exact.unit
    for rows, truth, given in dense:
        if plan.is_sketched:
            bad = given.sum(1).log() < least[rows]
            failed += int(bad.sum())
            given = torch.where(bad.unsqueeze(1), truth, given) if fallback else given
        matrix.add_(given - truth)
        total = given.sum(1, keepdim=True)
        given = given.mul_(torch.where(total > 0, 1 / total, 0.0))
        output[rows] = given @ value
        attention.add_(given.sub_(truth.div_(truth.sum(1, keepdim=True))))
    values = Norms()
    values.add_(output - exact.output)
    norms = (matrix.over(exact.matrix), attention.over(exact.attention), values.over(exact.values))
    return Errors(*norms, failed / head.n)
