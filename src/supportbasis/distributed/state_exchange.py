"""State exchange: ranks send each other sums of features, not keys.

A polynomial of the scores needs of all other keys only ``S = sum_j phi(k_j) (v_j, 1)``. So each
rank sums the features of its own small keys, and gets the sum over all keys, or in causal attention
over those before its own (`related_sums`). Large keys are few: every rank gets them all. Rows that
are computed exactly (large ones, and small ones that failed) are few as well: every rank gets them,
attends with its own keys, and returns partial sums. All of it is the component engine on the
tokens of one rank; nothing that moves depends on the number of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..components import ExactSum, evaluate
from ..components.partial import Partial
from ..components.streaming import State, sum_keys
from ..engine.dispatch import of_heads
from ..engine.execute import check_values, falls_back, usable_rows, warn_about
from ..engine.ranges import exact_where, leaves, range_of
from ..plans import FittedHead, Plan, PolynomialHead
from ..problem.problem import Head, Outcome, Problem
from .ranks import Ranks
from .related_sums import Chunks, Gathered, Relation
from .state_bounds import group_sums, least_lse_with
from .state_units import NORM_SUMS, Unit, norm_width, units_of
from .token_layout import TokenLayout


@dataclass(eq=False)
class StateExchange:
    """One call: the heads that exchange states, their local problem, and the units of this rank."""

    heads: list[int]  # of the call
    plan: Plan  # of the call; heads that leave the range of their plan are exact in it
    own: Plan  # of these heads
    problem: Problem  # of these heads
    chunks: Chunks
    units: list[Unit]
    facts: Tensor  # [chunks, units of a chunk, entries]
    large: Gathered | None = None  # key, value and log-weight of large keys
    exact: Gathered | None = None  # queries that are computed exactly

    @staticmethod
    def of(
        problem: Problem, plan: Plan, ranks: Ranks, queries: TokenLayout, keys: TokenLayout
    ) -> StateExchange:
        """The heads of a call that exchange states. All ranks find the same."""
        heads = [
            h for h, head in enumerate(plan.heads) if isinstance(head, PolynomialHead | FittedHead)
        ]
        own, part = plan, problem
        if len(heads) < problem.heads:
            index = torch.tensor(heads, dtype=torch.long, device=problem.query.device)
            part = of_heads(problem, index)
            own = plan.with_heads(plan.heads[h] for h in heads)
        if not problem.is_causal:  # nothing depends on positions: one chunk for each rank
            queries, keys = (TokenLayout(x.lengths, "contiguous") for x in (queries, keys))
        chunks = Chunks(ranks, keys, problem.is_causal)
        made = StateExchange(heads, plan, own, part, chunks, [], torch.empty(0))
        if heads:
            with torch.no_grad():
                made.units = units_of(_detached(part), own, chunks, queries, keys)
                made.facts = made._facts()
            left = made._left()
            if left:
                rest = exact_where(plan, {heads[h]: reason for h, reason in left.items()})
                return StateExchange.of(problem, rest, ranks, queries, keys)
        return made

    def attend(self) -> Tensor:
        """Output [batch, heads, own tokens, dv]."""
        p, operator = self.problem, cast(Any, _StateAttention.apply)
        return operator(self, p.query, p.key, p.value, p.key_log_weight)[0]

    # ---- what all ranks know -------------------------------------------------------------------

    def _facts(self) -> Tensor:
        found = torch.stack([unit.facts(norm_width(self.own)) for unit in self.units])
        found = found.view(len(self.chunks.own), -1, found.shape[1])
        return self.chunks.gather(found.to(self.problem.query.device)).cpu()

    def _left(self) -> dict[int, str]:
        """Heads whose scores leave the range of their plan, and why."""
        left: dict[int, str] = {}
        for unit in self.units[: self.facts.shape[1]]:
            sums = self.facts[:, unit.number, :NORM_SUMS].view(-1, 4, 3)
            sums = torch.cat([sums[..., :2].sum(0), sums[..., 2:].amax(0)], 1)
            plan = self.own.heads[unit.at[1]]
            reason = leaves(plan, range_of(unit.head.scale, sums))
            left |= {} if reason is None else {unit.at[1]: reason}
        return left

    def _norms(self, unit: Unit) -> Tensor:
        """The longest small queries and keys of all ranks."""
        norms = self.facts[:, unit.number, NORM_SUMS:-1].amax(0).view(2, -1)
        spans = len(unit.plan.fitted.spans) if isinstance(unit.plan, FittedHead) else 1
        return norms[:, :spans]

    @cached_property
    def large_counts(self) -> Tensor:
        """Large keys of all chunks and units."""
        return self.facts[..., -1].long()

    @property
    def seen(self) -> Relation:
        """Chunks whose keys a row attends to, besides, in causal attention, those of its own."""
        return "before" if self.problem.is_causal else "all"

    @property
    def seeing(self) -> Relation:
        """Chunks whose rows attend to a key, likewise."""
        return "after" if self.problem.is_causal else "all"

    # ---- forward -------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output and lse of the own tokens."""
        p = self.problem
        shape, new = (p.batch, p.heads), p.query.new_zeros
        zero = new(shape, dtype=p.dtype)
        outcome = Outcome(
            new(*shape, p.n, p.value.shape[-1]), new(*shape, p.n, dtype=p.dtype),
            zero, zero.clone(), zero, new(*shape, p.n, dtype=torch.bool),
        )  # fmt: skip
        least = self._exchange_states()
        self._gather_large_keys()
        totals = [self._small_rows(unit) for unit in self.units]
        self._find_failed(totals, least, outcome)
        exact = self._exact_rows()
        for unit, total, sums in zip(self.units, totals, exact, strict=True):
            self._write(unit, total, sums, outcome)
        warn_about(p, self.own, outcome)
        return outcome.output, outcome.lse

    def _exchange_states(self) -> list[Tensor | None]:
        """Give every task the sums over keys elsewhere; lower bounds of the sums of fitted rows."""
        states, extra = [], []
        for unit in self.units:
            unit.task = unit.smooth.task(unit.head, unit.rows.small, self._norms(unit))
            states.append(sum_keys(unit.task, unit.task.buffer()))
            if isinstance(unit.plan, FittedHead):
                extra.append((unit, *group_sums(unit.plan, unit.head)))
        vectors = [(state.flat(), state.top) for state in states]
        found = self.related_sums(
            vectors, [(sums.flatten(), top) for _, sums, top in extra], self.seen
        )
        for unit, (flat, top) in zip(self.units, found, strict=False):
            unit.task.given = State.of_flat(unit.task, flat, top)
        least: dict[Unit, Tensor] = {}
        for (unit, sums, _), (flat, top) in zip(extra, found[len(self.units) :], strict=True):
            assert isinstance(unit.plan, FittedHead)
            groups = flat.view(len(sums), -1)
            least[unit] = least_lse_with(unit.plan, unit.head, unit.rows.small, groups, top)
        return [least.get(unit) for unit in self.units]

    def related_sums(
        self,
        first: list[tuple[Tensor, float]],
        more: list[tuple[Tensor, float]],
        relation: Relation,
    ) -> list[tuple[Tensor, float]]:
        """Sums over related chunks, of vectors and tops of all units, chunk by chunk."""
        own = len(self.chunks.own)
        rows = [
            [*first[i * len(first) // own : (i + 1) * len(first) // own],
             *more[i * len(more) // own : (i + 1) * len(more) // own]]
            for i in range(own)
        ]  # fmt: skip
        tops = first[0][0].new_tensor([[top for _, top in row] for row in rows])
        vectors, tops = self.chunks.sums([[x for x, _ in row] for row in rows], tops, relation)
        count, levels = len(first) // own, tops.tolist()
        pairs = [list(zip(*row, strict=True)) for row in zip(vectors, levels, strict=True)]
        return [p for row in pairs for p in row[:count]] + [p for row in pairs for p in row[count:]]

    def _gather_large_keys(self) -> None:
        if not bool(self.large_counts.any()):
            return
        own = []
        for unit in self.units:
            head, index = unit.head, unit.large_keys
            parts = [x[index].to(head.dtype) for x in (head.key, head.value)]
            if head.key_log_weight is not None:
                parts.append(head.key_log_weight[index].to(head.dtype).unsqueeze(1))
            own.append(torch.cat(parts, 1))
        self.large = Gathered.of(self.chunks, self.large_counts, own, own[0].shape[1])

    def large_head(self, unit: Unit) -> tuple[Head, Tensor] | None:
        """Large keys elsewhere as a head with the queries of a unit, and their slots."""
        if self.large is None:
            return None
        index = self.large.spans(unit.number, self.chunks.related(unit.chunk, self.seen))
        if not len(index):
            return None
        sizes = [unit.head.dim, unit.head.value_dim]
        tokens = self.large.tokens[index]
        key, value, weight = tokens.split([*sizes, tokens.shape[1] - sum(sizes)], 1)
        log_weight = weight.squeeze(1) if weight.shape[1] else None
        return replace(
            unit.head, key=key, value=value, key_log_weight=log_weight, is_causal=False
        ), index

    def _small_rows(self, unit: Unit) -> Partial:
        """Sums of the small rows over all keys."""
        head, rows = unit.head, unit.rows.small
        total = Partial.empty(unit.small_count, head.value_dim, head.query, head.dtype)
        if attends(unit):
            unit.task.run(total)
        if head.is_causal and unit.keys.large is not None:
            ExactSum(unit.keys.large).add_to(total, head, rows)
        elsewhere = self.large_head(unit)
        if elsewhere is not None:
            ExactSum().add_to(total, elsewhere[0], rows)
        return total

    def _find_failed(
        self, totals: list[Partial], least: list[Tensor | None], outcome: Outcome
    ) -> None:
        for unit, total, bound in zip(self.units, totals, least, strict=True):
            rows = unit.rows.small
            usable = usable_rows(unit.plan, unit.head, rows, total, bound)
            failed = total.has_keys & ~usable
            outcome.invalid_rows[unit.at] += failed.sum()
            if not falls_back(unit.plan):
                total.log_scale.masked_fill_(failed, -math.inf)  # no result
                failed = torch.zeros_like(failed)
            where = failed.nonzero().squeeze(1)
            unit.failed = failed
            where = where if rows is None else rows[where]
            unit.row_span.of(outcome.fallback[unit.at], 0)[where] = True
            unit.exact = torch.cat([unit.large_rows, where]).sort().values

    def _exact_rows(self) -> list[Partial | None]:
        """Sums of the rows that are computed exactly, over the keys of all ranks."""
        if not any(falls_back(head) for head in self.own.heads):
            return [None] * len(self.units)
        device = self.problem.query.device
        own = torch.tensor([len(unit.exact) for unit in self.units], device=device)
        counts = self.chunks.gather(own.view(len(self.chunks.own), -1)).cpu()
        if not bool(counts.any()):
            return [None] * len(self.units)
        dim, dtype = self.problem.query.shape[-1], self.problem.dtype
        queries = [unit.head.query[unit.exact].to(dtype) for unit in self.units]
        self.exact = Gathered.of(self.chunks, counts, queries, dim)
        sums = Partial.empty(
            len(self.exact.tokens), self.problem.value.shape[-1], self.exact.tokens, dtype
        )
        for unit in self.units:
            head, index = self.rows_head(unit)
            if len(index):
                sums.put_(index, sums[index].add_(evaluate([unit.everything], head, None)))
        packed = torch.cat([sums.num, torch.stack([sums.den, sums.log_scale, sums.noise], 1)], 1)
        first, *others = (_unpacked(x) for x in self.exact.returned(packed))
        for part in others:
            first.add_(part)
        return self._with_own_keys(first)

    def rows_head(self, unit: Unit) -> tuple[Head, Tensor]:
        """Exact rows of other chunks that attend to the keys of a unit, as a head, and their
        slots."""
        assert self.exact is not None
        index = self.exact.spans(unit.number, self.chunks.related(unit.chunk, self.seeing))
        return replace(unit.head, query=self.exact.tokens[index], is_causal=False), index

    def _with_own_keys(self, sums: Partial) -> list[Partial | None]:
        """By units, with the keys of the own chunk in causal attention."""
        found: list[Partial | None] = []
        start = 0
        for unit in self.units:
            part = sums[start : start + len(unit.exact)]
            start += len(unit.exact)
            if unit.head.is_causal and len(unit.exact):
                part.add_(evaluate([unit.everything], unit.head, unit.exact))
            found.append(part)
        return found

    def _write(self, unit: Unit, total: Partial, exact: Partial | None, outcome: Outcome) -> None:
        """The one division."""
        whole, rows, head = total, unit.rows.small, unit.head
        if rows is not None:
            whole = Partial.empty(head.n, head.value_dim, head.query, head.dtype)
            whole.put_(rows, total)
        if exact is not None and len(unit.exact):
            whole.put_(unit.exact, exact)
        if type(unit.plan) is not PolynomialHead and bool((whole.has_keys & ~whole.finite).any()):
            check_values(head)
        output, lse = whole.divide_(whole.has_keys & whole.usable)
        unit.row_span.of(outcome.output[unit.at], 0).copy_(output)
        unit.row_span.of(outcome.lse[unit.at], 0).copy_(lse)


def attends(unit: Unit) -> bool:
    """Whether a small row of a unit may attend to a small key anywhere."""
    given = unit.task.given
    own = unit.head.is_causal and unit.task.key_count
    return bool(unit.task.row_count) and (bool(own) or (given is not None and given.count > 0))


def _unpacked(packed: Tensor) -> Partial:
    den, log_scale, noise = (x.clone() for x in packed[:, -3:].unbind(1))
    return Partial(packed[:, :-3].clone(), den, log_scale, noise)


def _detached(problem: Problem) -> Problem:
    weight = problem.key_log_weight
    return replace(
        problem, query=problem.query.detach(), key=problem.key.detach(),
        value=problem.value.detach(), key_log_weight=None if weight is None else weight.detach(),
    )  # fmt: skip


class _StateAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: StateExchange,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse = call.forward()
        ctx.call = call
        ctx.save_for_backward(query, key, value, weight, output, lse)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        from .state_gradients import StateGradients

        *given, output, lse = ctx.saved_tensors
        made = StateGradients(ctx.call, output, lse, grad, ctx.needs_input_grad[4]).total
        found = (made.query, made.key, made.value, made.key_log_weight)
        return (
            None,
            *(None if x is None else x.to(y.dtype) for x, y in zip(found, given, strict=True)),
        )
