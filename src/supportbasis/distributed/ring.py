"""Ring attention: slices of the keys go from rank to rank, and every rank attends to each.

The outputs over single slices are joined by their log-sum-exps (`merged`). The backward pass goes
round again: with the output and the lse of all keys each slice has the gradients it would have on
one device, and those of its keys travel with it. A rank holds one slice at a time. Exact heads
only: an approximation of each slice would not be the approximation of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..components.cotangent import SavedForward
from ..components.partial import merged
from ..engine import dispatch
from ..engine.autograd import run
from ..plans import Plan
from ..problem.problem import Problem
from .ranks import Ranks
from .token_layout import Chunk, TokenLayout


@dataclass(frozen=True, eq=False)
class Ring:
    """One call: the settings of the local problem, and where tokens are."""

    problem: Problem
    plan: Plan  # of exact heads
    ranks: Ranks
    queries: TokenLayout
    keys: TokenLayout

    def attend(self) -> Tensor:
        """Output [batch, heads, own tokens, dv] of the local problem."""
        p, operator = self.problem, cast(Any, _Ring.apply)
        return operator(self, p.query, p.key, p.value, p.key_log_weight)[0]

    def pairs(self, source: int) -> Iterator[tuple[Chunk, Chunk, bool]]:
        """Own chunks of queries, the chunks of a rank's keys they attend to, and whether causally:
        chunks of the layout, or all tokens at once where nothing depends on their positions."""
        queries, keys = self.queries, self.keys
        if not self.problem.is_causal:
            queries, keys = (TokenLayout(x.lengths, "contiguous") for x in (queries, keys))
        for a in queries.own(self.ranks.rank):
            for b in keys.own(source):
                chunks = queries.chunks[a], keys.chunks[b]
                seen = not self.problem.is_causal or b <= a
                if seen and all(chunk.start < chunk.stop for chunk in chunks):
                    yield *chunks, self.problem.is_causal and a == b

    def part(self, rows: Chunk, keys: Chunk, causal: bool, tensors: _Slice) -> Problem:
        """The problem of one pair of chunks."""
        query, (key, value, weight) = tensors.query, tensors.keys
        return replace(
            self.problem, query=rows.of(query), key=keys.of(key), value=keys.of(value),
            key_log_weight=None if weight is None else keys.of(weight), is_causal=causal,
        )  # fmt: skip

    def next(self, source: int, *tensors: Tensor) -> list[Tensor]:
        """What the rank before sends: tensors [batch, heads, keys, ...] of one slice, which is that
        of ``source`` now."""
        coming = self.keys.lengths[(source - 1) % self.ranks.size]
        found = []
        for x in tensors:
            shape = (*x.shape[:2], coming, *x.shape[3:])
            found.append(self.ranks.shift(x, math.prod(shape)).view(shape))
        return found


@dataclass
class _Slice:
    """The queries, and the keys, values and log-weights that are here at the moment."""

    query: Tensor
    keys: tuple[Tensor, Tensor, Tensor | None]

    @property
    def moving(self) -> list[Tensor]:
        return [x for x in self.keys if x is not None]

    def take(self, tensors: list[Tensor]) -> None:
        key, value, *weight = tensors
        self.keys = key, value, weight[0] if weight else None


def _forward(ring: Ring, here: _Slice) -> tuple[Tensor, Tensor]:
    problem, size, rank = ring.problem, ring.ranks.size, ring.ranks.rank
    shape, dtype = here.query.shape[:3], problem.dtype
    output = here.query.new_zeros(*shape, problem.value.shape[-1], dtype=dtype)
    lse = here.query.new_full(shape, -math.inf, dtype=dtype)
    for step in range(size):
        source = (rank - step) % size
        for rows, keys, causal in ring.pairs(source):
            made = run(ring.part(rows, keys, causal, here), ring.plan, True)
            own, own_lse = rows.of(output), rows.of(lse)
            joined, joined_lse = merged(made.output, made.lse, own, own_lse)
            own.copy_(joined)
            own_lse.copy_(joined_lse)
        if step + 1 < size:
            here.take(ring.next(source, *here.moving))
    return output, lse


def _backward(
    ring: Ring, here: _Slice, output: Tensor, lse: Tensor, grad: Tensor, for_weights: bool
) -> tuple[Tensor, ...]:
    size, rank, dtype = ring.ranks.size, ring.ranks.rank, ring.problem.dtype
    totals = [torch.zeros_like(x, dtype=dtype) for x in here.moving]
    of_query = torch.zeros_like(here.query, dtype=dtype)
    none = torch.zeros_like(lse, dtype=torch.bool)
    for step in range(size):
        source = (rank - step) % size
        for rows, keys, causal in ring.pairs(source):
            problem = ring.part(rows, keys, causal, here)
            own, own_lse, no_row, own_grad = (rows.of(x) for x in (output, lse, none, grad))
            saved = SavedForward(own, own_lse, no_row, own_grad, None, for_weights)
            groups = dispatch.groups(problem, ring.plan, "auto")
            made = dispatch.gradients(problem, groups, saved)
            rows.of(of_query).add_(made.query)
            for total, part in zip(
                totals, (made.key, made.value, made.key_log_weight), strict=False
            ):
                if part is not None:
                    keys.of(total).add_(part)
        totals = ring.next(source, *totals)  # after the last step they are at home again
        if step + 1 < size:
            here.take(ring.next(source, *here.moving))
    return (of_query, *totals)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ring = replace(ring, problem=_detached(ring.problem))
        output, lse = _forward(ring, _Slice(query.detach(), (key.detach(), value.detach(), weight)))
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, weight, output, lse)
        ctx.mark_non_differentiable(lse)
        return output.to(query.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weight, output, lse = ctx.saved_tensors
        for_weights = ctx.needs_input_grad[4]
        found = _backward(
            ctx.ring, _Slice(query, (key, value, weight)), output, lse, grad, for_weights
        )
        given = (query, key, value, weight)
        moved = [x.to(y.dtype) for x, y in zip(found, given, strict=False) if y is not None]
        return (None, *moved, *[None] * (4 - len(moved)))


def _detached(problem: Problem) -> Problem:
    weight = problem.key_log_weight
    return replace(
        problem, query=problem.query.detach(), key=problem.key.detach(),
        value=problem.value.detach(), key_log_weight=None if weight is None else weight.detach(),
    )  # fmt: skip
