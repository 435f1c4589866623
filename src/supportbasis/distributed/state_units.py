"""The units of a state exchange: one batch element, head and chunk of tokens on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..components import ExactSum, FittedSum, PolynomialSum
from ..components.streaming import Task
from ..engine.ranges import norm_sums
from ..plans import FittedHead, HeadPlan, Plan, PolynomialHead
from ..plans.supports import Side
from ..problem.problem import Head, Problem
from .related_sums import Chunks
from .token_layout import Chunk, TokenLayout

Smooth = PolynomialSum | FittedSum
NORM_SUMS = 12  # entries of `engine.ranges.norm_sums`


@dataclass(eq=False)
class Unit:
    """Settings, tokens and split of one unit, and what its forward pass leaves for the backward
    pass."""

    number: int  # among those of its chunk
    chunk: int  # in the order of the sequence
    at: tuple[int, int]  # batch element and head
    row_span: Chunk
    key_span: Chunk
    head: Head
    plan: HeadPlan
    rows: Side
    keys: Side
    smooth: Smooth
    task: Task = field(init=False)
    failed: Tensor = field(init=False)  # small rows that are computed exactly, as a mask
    exact: Tensor = field(init=False)  # all rows that are, sorted

    @staticmethod
    def of(head: Head, plan: HeadPlan, offset: int) -> tuple[HeadPlan, Side, Side, Smooth]:
        """Plan, rows, keys and smooth component of a chunk that begins at ``offset``."""
        if isinstance(plan, FittedHead):
            plan = replace(plan, exact_rows=max(0, plan.exact_rows - offset))
        assert isinstance(plan, (PolynomialHead, FittedHead))
        rows, keys = plan.split(head)
        return plan, rows, keys, plan.smooth_sum(keys.small)

    @property
    def small_count(self) -> int:
        return self.head.n if self.rows.small is None else len(self.rows.small)

    @property
    def large_keys(self) -> Tensor:
        """Their indices."""
        return _index(self.keys.large, self.head)

    @property
    def large_rows(self) -> Tensor:
        return _index(self.rows.large, self.head)

    @property
    def everything(self) -> ExactSum:
        """All live keys of the chunk, exactly."""
        return ExactSum(self.head.live_keys)

    def facts(self, width: int) -> Tensor:
        """What all ranks need to know: sums of norms, units of the tokens, number of large keys."""
        norms = self.smooth.norms(self.head, self.rows.small).double().cpu()
        found = torch.zeros(NORM_SUMS + 2 * width + 1, dtype=torch.float64)
        found[:NORM_SUMS] = norm_sums(self.plan, self.head).flatten()
        found[NORM_SUMS:-1].view(2, width)[:, : norms.shape[1]] = norms
        found[-1] = len(self.large_keys)
        return found


def _index(tokens: Tensor | None, head: Head) -> Tensor:
    return torch.arange(0, device=head.query.device) if tokens is None else tokens


def norm_width(plan: Plan) -> int:
    """Most norms that a component of these heads has for each side."""
    fitted = (len(head.fitted.spans) for head in plan.heads if isinstance(head, FittedHead))
    return max(1, *fitted, 1)


def units_of(
    problem: Problem, plan: Plan, chunks: Chunks, queries: TokenLayout, keys: TokenLayout
) -> list[Unit]:
    """All units of this rank, chunk by chunk."""
    found = []
    for chunk in chunks.own:
        rows, own = queries.chunks[chunk], keys.chunks[chunk]
        weight = problem.key_log_weight
        part = replace(
            problem, query=rows.of(problem.query), key=own.of(problem.key),
            value=own.of(problem.value),
            key_log_weight=None if weight is None else own.of(weight),
        )  # fmt: skip
        for number, (b, h, head) in enumerate(part.each_head()):
            made = Unit.of(head, plan.heads[h], queries.offsets[chunk])
            found.append(Unit(number, chunk, (b, h), rows, own, head, *made))
    return found
