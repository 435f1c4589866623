"""Fitted polynomials on the device, all heads in one recording.

Near rows read near keys through the sums of `fitted_sums`, those of causal heads through the sums
of `fitted_chunks`. Keys that are far, and rows that are far or lost, are exact, as many as there is
room for (`room`): so all this is replayed, and the host waits for nothing. How many rows were lost
it hears at the next call, and says so then. The way back is `fitted_backward`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward, by_key_head
from ...engine.jensen import SIGNS, WRONG, grouped_lse
from ...plans import FittedHead, HeadPlan, Plan
from ...polynomials.fitting import FittedKernel
from ...problem.problem import Problem
from ...problem.result import FAILED_SHARE
from ..exact.exact_heads import precision
from ..exact.rectangle import Rectangle, Tokens, exact_rows
from ..runtime.replayed_call import Run, parted
from ..runtime.room import Room, Sizes, enough, exact_unless, marked
from . import fitted_chunks, fitted_sums
from .fitted_sums import Near
from .framed import Inside


def refusal(head: HeadPlan) -> str | None:
    return None


def family(head: HeadPlan) -> object:
    return "fitted", _fitted(head).exact_rows


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients of query, key, value and key log-weights, as `supportbasis.engine.backward`."""
    from . import fitted_backward

    query, key, value, weight = fitted_backward.gradients(problem, plan, saved)
    key, value = (by_key_head(x, problem) for x in (key, value))
    return Gradients(query, key, value, weight if saved.for_weights else None)


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output, lse, and which rows were lost and computed exactly instead."""
    run, call = run_of(problem, plan), Call.of(problem, plan)
    output, lse, lost = run.there("fitted", partial(_all_heads, call))
    _warn_once(plan, run.room, problem.n)
    return output, lse, lost


class Call(NamedTuple):
    """What the work depends on beside tensors."""

    kernels: tuple[FittedKernel, ...]
    first: int  # rows that are exact at the start
    scale: float
    causal: bool

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Call:
        kernels = tuple(_fitted(head).fitted for head in plan.heads) * problem.batch
        first = min(_fitted(plan.heads[0]).exact_rows, problem.n)
        return Call(kernels, first, problem.scale, problem.is_causal)


def run_of(problem: Problem, plan: Plan) -> Run:
    """A call, there or back: with room for keys that are far, and rows that are exact."""
    return Run.of(problem, plan, Call.of(problem, plan), (0, 0))


_warned: WeakSet[Plan] = WeakSet()


def _warn_once(plan: Plan, room: Room, rows: int) -> None:
    """Say that the last call whose counts are known has lost many rows; once for each plan."""
    if room.told and room.told[0] > FAILED_SHARE * rows and plan not in _warned:
        _warned.add(plan)
        warnings.warn(
            "supportbasis: the last call with this plan whose counts are known lost more than 1 % "
            "of a head's rows to a fit, which were computed exactly instead; use a new plan or "
            "another method",
            UserWarning,
            stacklevel=2,
        )


def _all_heads(
    call: Call,
    sizes: Sizes,
    sure: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *frames: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, which rows were lost, and how many keys of a head are far and rows exact, for
    which ``sizes`` is the room, and how many rows were lost. Nothing here waits."""
    tokens = (query, key, value)
    made = seen(call, *tokens, *frames)
    inside, way = made.inside, fitted_chunks if call.causal else fitted_sums
    sums = [way.sums(kernel, made.near(i)) for i, kernel in enumerate(call.kernels)]
    total, unit = (torch.stack(x) for x in zip(*sums, strict=True))
    unit = unit + inside.shift
    if sizes[0]:
        total, unit = _with(total, unit, *over_far_keys(made, sizes[0], tokens))
    num, lse = _divided(total, fitted_sums.finite(unit))
    least = _least(inside, call.causal) + inside.shift + math.log(WRONG)
    lost = ~((lse >= least) & (lse < math.inf))
    lost &= ~made.exact_rows
    needed = made.needed(lost)
    output = num.to(value.dtype).view(*query.shape[:3], -1)
    lse = lse.view(query.shape[:3]).contiguous()
    if sizes[1]:
        exact_rows(*tokens, made.rows_alone(lost, sizes[1]), output, lse)
    if sure:
        whole = (*tokens, call.scale, made.weight, precision())
        exact_unless(enough(needed, sizes), *whole, output, lse, causal=call.causal)
    told = torch.cat([needed, lost.sum(1).amax().view(1)])
    return output, lse, lost.view(lse.shape), told


class Seen(NamedTuple):
    """All heads in their frames, and what is exact: the same on the way back as there."""

    inside: Inside
    weight: Tensor | None  # log-weights of the keys that were given
    far_keys: Tensor  # [heads, m]
    exact_rows: Tensor  # [heads, n]: those that are far, and the first ones
    whole: Rectangle  # all rows and keys

    def near(self, head: int, lost: Tensor | None = None) -> Near:
        """One head without what is exact; ``lost`` rows [heads, n] are, too."""
        inside, rows = self.inside, self.exact_rows[head]
        rows = rows if lost is None else rows | lost[head]
        log_weight = inside.log_weight[head].masked_fill(self.far_keys[head], -math.inf)
        key = inside.key[head].masked_fill((log_weight == -math.inf).unsqueeze(1), 0.0)
        query = inside.query[head].masked_fill(rows.unsqueeze(1), 0.0)
        return Near(query, key, inside.value[head], log_weight)

    def needed(self, lost: Tensor) -> Tensor:
        """How many keys of a head are far, and how many of its rows exact."""
        rows = (self.exact_rows | lost).sum(1).amax()
        return torch.stack([self.far_keys.sum(1).amax(), rows])

    def rows_alone(self, lost: Tensor, most: int) -> Rectangle:
        return replace(self.whole, rows=marked(self.exact_rows | lost, most))

    def keys_alone(self, most: int) -> Rectangle:
        return replace(self.whole, keys=marked(self.far_keys, most))


def seen(call: Call, query: Tensor, key: Tensor, value: Tensor, *frames: Tensor) -> Seen:
    """What is near and what is far."""
    stack, weight = parted(frames)
    inside = Inside.made(query, key, value, *stack).weighted(weight)
    key_radius, query_radius = _radii(call.kernels, query.device)
    far_keys = torch.linalg.vector_norm(inside.key, dim=2) > key_radius
    far_rows = torch.linalg.vector_norm(inside.query, dim=2) > query_radius
    far_rows |= torch.arange(query.shape[2], device=query.device) < call.first
    whole = Rectangle(
        Tokens(query.shape[2]), Tokens(key.shape[2]), call.scale, call.causal, weight,
        precision=precision(),
    )  # fmt: skip
    return Seen(inside, weight, far_keys & (inside.log_weight > -math.inf), far_rows, whole)


def over_far_keys(
    made: Seen, most: int, tokens: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean values [heads, n, dv] and log-sums [heads, n] of all rows over far keys, exactly."""
    shape, new = made.exact_rows.shape, made.inside.query.new_empty
    output, lse = new(*shape, tokens[2].shape[3]), new(shape)
    exact_rows(*tokens, made.keys_alone(most), output, lse)
    return output, lse


def _with(total: Tensor, unit: Tensor, more: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [heads, n, dv + 1] of all rows in units of exp(unit), and those over some more keys."""
    top = torch.maximum(unit, size)
    mine, theirs = ((x - fitted_sums.finite(top)).exp().unsqueeze(2) for x in (unit, size))
    return total * mine + fitted_sums.with_ones(more) * theirs, top


def _divided(total: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Mean values and log-sums; zero and -inf for a row without keys."""
    num, den = total[..., :-1], total[..., -1]
    return torch.where(den.unsqueeze(2) == 0, 0.0, num / den.unsqueeze(2)), den.log() + unit


@lru_cache(maxsize=64)
def _radii(kernels: tuple[FittedKernel, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Beyond which keys and queries are far, [heads, 1]."""
    key = torch.tensor([[kernel.key_radius] for kernel in kernels])
    return key.to(device), torch.tensor([[kernel.query_radius] for kernel in kernels]).to(device)


def _fitted(head: HeadPlan) -> FittedHead:
    assert isinstance(head, FittedHead)
    return head


def _least(inside: Inside, causal: bool) -> Tensor:
    """Lower bound of the log-sums of all rows, by Jensen's inequality: that of the mean keys of
    groups; of causal rows, of the mean key so far."""
    if causal:
        return torch.stack([_least_so_far(inside.one(i)) for i in range(len(inside.key))])
    tokens = max(inside.query.shape[1], inside.key.shape[1])
    step = max(1, fitted_sums.ENTRIES // (4 * 2**SIGNS * tokens))  # heads at a time
    found = []
    for at in range(0, len(inside.key), step):
        query, key, log_weight = (
            x[at : at + step] for x in (inside.query, inside.key, inside.log_weight)
        )
        hidden = (log_weight == -math.inf).unsqueeze(2)
        found.append(grouped_lse(query, key.masked_fill(hidden, 0.0), log_weight))
    return torch.cat(found)


def _least_so_far(inside: Inside) -> Tensor:
    """Of one causal head, [n]; running sums are in float64, along rows: columns would be slow."""
    query, key, log_weight = inside.query[0], inside.key[0], inside.log_weight[0].double()
    top = fitted_sums.finite(log_weight.max())
    weight = (log_weight - top).exp()
    at = torch.arange(len(query), device=query.device).clamp(max=len(key) - 1)
    mass, total = weight.cumsum(0)[at], (key.T.contiguous() * weight).cumsum(1)[:, at]
    score = (query.T * total).sum(0) / torch.where(mass > 0, mass, 1.0)
    return (score + mass.log() + top).float()
