"""Heads for tokens: every rank gives its tokens of the others' heads for all tokens of its own.

Each rank then has whole sequences of some heads, runs them as one device would, and sends the
output back. So any method and any plan gives what it gives on one device. Heads are handed out in
equal runs, by key heads where there are enough of them; otherwise query heads that share keys go to
different ranks, each with a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..api import attention
from ..methods import Method
from ..methods.planning import make_plan
from ..plans import HeadPlan, Plan
from ..problem.caching import WeakCache
from ..problem.problem import Problem
from .agreement import together
from .ranks import Ranks
from .token_layout import TokenLayout


@dataclass(frozen=True, eq=False)
class Swap:
    """One kind of tensor [batch, heads, tokens, dim]: its heads and its tokens by rank."""

    ranks: Ranks
    tokens: TokenLayout
    heads: int
    group: int = 1  # heads that stay together: those of the queries that share keys

    @cached_property
    def by_rank(self) -> list[int]:
        """Number of heads of each rank after the exchange."""
        whole, rest = divmod(self.heads // self.group, self.ranks.size)
        return [(whole + (rank < rest)) * self.group for rank in range(self.ranks.size)]

    @property
    def own(self) -> range:
        """Heads of this rank."""
        start = sum(self.by_rank[: self.ranks.rank])
        return range(start, start + self.by_rank[self.ranks.rank])

    def to_heads(self, x: Tensor) -> Tensor:
        """[batch, heads, own tokens, dim] to [batch, own heads, all tokens, dim]."""
        batch, _, _, dim = x.shape
        lengths, heads = self.tokens.lengths, len(self.own)
        counts = [batch * heads * length * dim for length in lengths]
        parts = self.ranks.exchange(x.split(self.by_rank, 1), counts)
        shapes = ((batch, heads, length, dim) for length in lengths)
        return self.tokens.join([p.view(s) for p, s in zip(parts, shapes, strict=True)])

    def to_tokens(self, x: Tensor) -> Tensor:
        """The other way round."""
        batch, _, _, dim = x.shape
        length = self.tokens.lengths[self.ranks.rank]
        counts = [batch * heads * length * dim for heads in self.by_rank]
        parts = self.ranks.exchange(self.tokens.slices(x), counts)
        shapes = ((batch, heads, length, dim) for heads in self.by_rank)
        return torch.cat([p.view(s) for p, s in zip(parts, shapes, strict=True)], 1)


class _Exchange(torch.autograd.Function):
    """Exchanges of some tensors; the gradients go back by the reverse exchanges, all of them on
    every rank, whichever are needed there."""

    @staticmethod
    def forward(
        ctx: Any,
        there: Sequence[Callable[[Tensor], Tensor]],
        back: Sequence[Callable[[Tensor], Tensor]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(move(x) for move, x in zip(there, tensors, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        moved = (move(x) for move, x in zip(ctx.back, grads, strict=True))
        return (None, None, *moved)


_exchange: Any = _Exchange.apply


def attend(
    problem: Problem, plan: Plan, ranks: Ranks, queries: TokenLayout, keys: TokenLayout
) -> Tensor:
    """Output [batch, heads, own tokens, dv] of a local problem, by whole heads."""
    problem = shared_among(problem, ranks.size)
    swaps = _swaps(problem, ranks, queries, keys)
    tensors = (problem.query, problem.key, problem.value)
    there = [swap.to_heads for swap in swaps]
    query, key, value = _exchange(there, [swap.to_tokens for swap in swaps], *tensors)
    mask = _moved_weights(problem, swaps[0], keys)
    if len(swaps[0].own):
        made = _own_plan(plan, swaps[0].own)
        output = attention(
            query, key, value, mask, is_causal=problem.is_causal, scale=problem.scale,
            enable_gqa=problem.group > 1, plan=made,
        )  # fmt: skip
    else:  # nothing to do, but part of every exchange
        nothing = query.sum() + key.sum() + value.sum()
        if mask is not None:
            nothing = nothing + mask.sum()
        output = query.new_zeros(*query.shape[:3], value.shape[3]) + nothing
    (moved,) = _exchange([swaps[0].to_tokens], [swaps[0].to_heads], output)
    return moved


def shared_among(problem: Problem, size: int) -> Problem:
    """With keys of its own for each head, if there are fewer key heads than ranks."""
    if problem.group == 1 or problem.key.shape[1] >= size:
        return problem
    key, value = (x.repeat_interleave(problem.group, 1) for x in (problem.key, problem.value))
    return replace(problem, key=key, value=value)


def _swaps(
    problem: Problem, ranks: Ranks, queries: TokenLayout, keys: TokenLayout
) -> tuple[Swap, Swap, Swap]:
    """Of query, key and value."""
    key = Swap(ranks, keys, problem.key.shape[1])
    return Swap(ranks, queries, problem.heads, problem.group), key, key


def _moved_weights(problem: Problem, heads: Swap, keys: TokenLayout) -> Tensor | None:
    """Log-weights [batch, own heads, 1, all keys]."""
    weight = problem.key_log_weight
    if weight is None:
        return None
    swap = replace(heads, tokens=keys)
    moved = _exchange([swap.to_heads], [swap.to_tokens], weight.unsqueeze(-1))[0]
    return moved.transpose(2, 3)


_own_plans: WeakCache[Plan, range, Plan] = WeakCache()


def _own_plan(plan: Plan, heads: range) -> Plan:
    """The plan of some heads, made once: evaluators cache what they know about a plan. A problem
    has a positive scale."""

    def make() -> Plan:
        scale = None if plan.scale is None else abs(plan.scale)
        return replace(plan, heads=tuple(plan.heads[i] for i in heads), scale=scale)

    return _own_plans.get(plan, heads, make)


def plan_together(
    problem: Problem,
    method: Method,
    ranks: Ranks,
    queries: TokenLayout,
    keys: TokenLayout,
) -> Plan:
    """The plan that one device would make of the whole sequence: each head is planned on one rank,
    and its settings are sent to all."""
    with torch.no_grad():
        whole = shared_among(problem, ranks.size)
        swaps = _swaps(whole, ranks, queries, keys)
        tensors = (whole.query, whole.key, whole.value)
        query, key, value = (s.to_heads(x) for s, x in zip(swaps, tensors, strict=True))
        weight = _moved_weights(whole, swaps[0], keys)
        own = replace(
            whole, query=query, key=key, value=value, leading=tuple(query.shape[:2]),
            key_log_weight=None if weight is None else weight.squeeze(2),
        )  # fmt: skip

        def heads() -> tuple[HeadPlan, ...]:
            return make_plan(own, method).heads if own.heads else ()

        found = together(ranks, heads, "planning")
    made = tuple(head for part in found for head in part)
    return Plan(method, problem.dim, made, problem.given_scale, problem.is_causal)
