"""Fitted polynomials on the device, all heads in one captured CUDA graph.

Near rows read near keys through the feature sums of `fitted_sums`, those of causal heads through
the sums of `fitted_chunks`. Far keys, far rows and failed rows are exact, as many as fit into the
preallocated capacity (`runtime.capacity`), so that the graph has fixed shapes and no call
synchronises with the host. The number of failed rows is reported at the next call, which warns if
there were many. `fitted_backward` is the backward pass.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward, by_key_head
from ...engine.jensen import FITTED_SHARE, SIGNS, grouped_lse
from ...plans import FittedHead, HeadPlan, Plan
from ...polynomials.fitting import FittedKernel
from ...problem.problem import Problem
from ...problem.result import FAILED_SHARE
from ..exact.exact_heads import precision
from ..exact.rectangle import Rectangle, Tokens, exact_rows
from ..runtime.capacity import Capacity, Sizes, enough, exact_unless, marked
from ..runtime.replayed_call import ReplayedCall, split_given
from . import fitted_chunks, fitted_sums
from .fitted_sums import Near
from .transformed import Balanced


def refusal(head: HeadPlan) -> str | None:
    return None


def family(head: HeadPlan) -> object:
    return "fitted", _fitted(head).exact_rows


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients of query, key, value and key log-weights, as `engine.execute.backward`."""
    from . import fitted_backward

    query, key, value, weight = fitted_backward.gradients(problem, plan, saved)
    key, value = (by_key_head(x, problem) for x in (key, value))
    return Gradients(query, key, value, weight if saved.for_weights else None)


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output, lse, and which rows failed and were computed exactly."""
    call = replayed_call(problem, plan)
    work = partial(_all_heads, Constants.of(problem, plan))
    output, lse, failed = call.forward("fitted", work)
    _warn_once(plan, call.capacity, problem.n)
    return output, lse, failed


class Constants(NamedTuple):
    """What the work of a call depends on beside tensors."""

    kernels: tuple[FittedKernel, ...]
    first: int  # rows at the start of a causal head that are exact
    scale: float
    causal: bool

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Constants:
        kernels = tuple(_fitted(head).fitted for head in plan.heads) * problem.batch
        first = min(_fitted(plan.heads[0]).exact_rows, problem.n)
        return Constants(kernels, first, problem.scale, problem.is_causal)


def replayed_call(problem: Problem, plan: Plan) -> ReplayedCall:
    """A call with a capacity for far keys and for exact rows of a head, at first (0, 0)."""
    return ReplayedCall.of(problem, plan, Constants.of(problem, plan), (0, 0))


_warned: WeakSet[Plan] = WeakSet()


def _warn_once(plan: Plan, capacity: Capacity, rows: int) -> None:
    """Warn, once for each plan, if many rows failed in the last call that was reported."""
    counts = capacity.reported
    if counts and counts[0] > FAILED_SHARE * rows and plan not in _warned:
        _warned.add(plan)
        warnings.warn(
            "supportbasis: in an earlier call with this plan the fitted polynomial failed on more "
            "than 1 % of a head's rows, which were computed exactly; use a new plan or another "
            "method",
            UserWarning,
            stacklevel=2,
        )


def _all_heads(
    call: Constants,
    sizes: Sizes,
    guarded: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *transforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, which rows failed, and three counts of the worst head: far keys and exact rows,
    whose capacity is ``sizes``, and failed rows. Does not synchronise with the host."""
    tokens = (query, key, value)
    built = build(call, *tokens, *transforms)
    balanced, module = built.balanced, fitted_chunks if call.causal else fitted_sums
    sums = [module.sums(kernel, built.near(i)) for i, kernel in enumerate(call.kernels)]
    total, unit = (torch.stack(x) for x in zip(*sums, strict=True))
    unit = unit + balanced.shift
    if sizes[0]:
        total, unit = _with(total, unit, *over_far_keys(built, sizes[0], tokens))
    num, lse = _divided(total, fitted_sums.finite(unit))
    least = _least(balanced, call.causal) + balanced.shift + math.log(FITTED_SHARE)
    failed = ~((lse >= least) & (lse < math.inf))
    failed &= ~built.exact_rows
    needed = built.needed(failed)
    output = num.to(value.dtype).view(*query.shape[:3], -1)
    lse = lse.view(query.shape[:3]).contiguous()
    if sizes[1]:
        exact_rows(*tokens, built.row_rectangle(failed, sizes[1]), output, lse)
    if guarded:
        whole = (*tokens, call.scale, built.weight, precision())
        exact_unless(enough(needed, sizes), *whole, output, lse, causal=call.causal)
    counts = torch.cat([needed, failed.sum(1).amax().view(1)])
    return output, lse, failed.view(lse.shape), counts


class Built(NamedTuple):
    """Transformed heads, and which tokens are exact; forward and backward build the same."""

    balanced: Balanced
    weight: Tensor | None  # log-weights of the keys that were given
    far_keys: Tensor  # [heads, m]
    exact_rows: Tensor  # [heads, n]: far rows, and the first ones of causal heads
    whole: Rectangle  # all rows and keys

    def near(self, head: int, failed: Tensor | None = None) -> Near:
        """The tokens of one head that are not exact; ``failed`` rows [heads, n] are exact."""
        balanced, rows = self.balanced, self.exact_rows[head]
        rows = rows if failed is None else rows | failed[head]
        log_weight = balanced.log_weight[head].masked_fill(self.far_keys[head], -math.inf)
        key = balanced.key[head].masked_fill((log_weight == -math.inf).unsqueeze(1), 0.0)
        query = balanced.query[head].masked_fill(rows.unsqueeze(1), 0.0)
        return Near(query, key, balanced.value[head], log_weight)

    def needed(self, failed: Tensor) -> Tensor:
        """Far keys and exact rows of the worst head, [2]."""
        rows = (self.exact_rows | failed).sum(1).amax()
        return torch.stack([self.far_keys.sum(1).amax(), rows])

    def row_rectangle(self, failed: Tensor, most: int) -> Rectangle:
        """Exact rows, at most so many of a head, and all keys."""
        return replace(self.whole, rows=marked(self.exact_rows | failed, most))

    def key_rectangle(self, most: int) -> Rectangle:
        """All rows and far keys, at most so many of a head."""
        return replace(self.whole, keys=marked(self.far_keys, most))


def build(call: Constants, query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Built:
    """Transform all heads, and find the tokens beyond the radii of their polynomials."""
    transforms, weight = split_given(given)
    balanced = Balanced.of(query, key, value, transforms).weighted(weight)
    key_radius, query_radius = _radii(call.kernels, query.device)
    far_keys = torch.linalg.vector_norm(balanced.key, dim=2) > key_radius
    far_rows = torch.linalg.vector_norm(balanced.query, dim=2) > query_radius
    far_rows |= torch.arange(query.shape[2], device=query.device) < call.first
    whole = Rectangle(
        Tokens(query.shape[2]), Tokens(key.shape[2]), call.scale, call.causal, weight,
        precision=precision(),
    )  # fmt: skip
    return Built(balanced, weight, far_keys & (balanced.log_weight > -math.inf), far_rows, whole)


def over_far_keys(
    built: Built, most: int, tokens: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean values [heads, n, dv] and log-sums [heads, n] of all rows over far keys, exactly."""
    shape, new = built.exact_rows.shape, built.balanced.query.new_empty
    output, lse = new(*shape, tokens[2].shape[3]), new(shape)
    exact_rows(*tokens, built.key_rectangle(most), output, lse)
    return output, lse


def _with(total: Tensor, unit: Tensor, more: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Add mean values ``more`` with log-sums ``size`` over further keys to the sums ``total``
    [heads, n, dv + 1] in units of exp(unit); returns the new sums and units."""
    top = torch.maximum(unit, size)
    mine, theirs = ((x - fitted_sums.finite(top)).exp().unsqueeze(2) for x in (unit, size))
    return total * mine + fitted_sums.with_ones(more) * theirs, top


def _divided(total: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Mean values and log-sums; zero and -inf for a row without keys."""
    num, den = total[..., :-1], total[..., -1]
    return torch.where(den.unsqueeze(2) == 0, 0.0, num / den.unsqueeze(2)), den.log() + unit


@lru_cache(maxsize=64)
def _radii(kernels: tuple[FittedKernel, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Norms beyond which keys and queries are far, each [heads, 1]."""
    key = torch.tensor([[kernel.key_radius] for kernel in kernels])
    return key.to(device), torch.tensor([[kernel.query_radius] for kernel in kernels]).to(device)


def _fitted(head: HeadPlan) -> FittedHead:
    return cast(FittedHead, head)  # the only kind that `engine.dispatch` sends here


def _least(balanced: Balanced, causal: bool) -> Tensor:
    """Lower bound of the log-sums of all rows [heads, n] by Jensen's inequality: from mean keys of
    groups (`grouped_lse`), or for causal rows from the mean of the keys up to the row."""
    if causal:
        return torch.stack([_least_so_far(balanced.one(i)) for i in range(len(balanced.key))])
    tokens = max(balanced.query.shape[1], balanced.key.shape[1])
    step = max(1, fitted_sums.ENTRIES // (4 * 2**SIGNS * tokens))  # heads at a time
    found = []
    for at in range(0, len(balanced.key), step):
        query, key, log_weight = (
            x[at : at + step] for x in (balanced.query, balanced.key, balanced.log_weight)
        )
        hidden = (log_weight == -math.inf).unsqueeze(2)
        found.append(grouped_lse(query, key.masked_fill(hidden, 0.0), log_weight))
    return torch.cat(found)


def _least_so_far(balanced: Balanced) -> Tensor:
    """The bound of one causal head, [n]; running sums in float64, along rows for speed."""
    query, key, log_weight = balanced.query[0], balanced.key[0], balanced.log_weight[0].double()
    top = fitted_sums.finite(log_weight.max())
    weight = (log_weight - top).exp()
    at = torch.arange(len(query), device=query.device).clamp(max=len(key) - 1)
    mass, total = weight.cumsum(0)[at], (key.T.contiguous() * weight).cumsum(1)[:, at]
    score = (query.T * total).sum(0) / torch.where(mass > 0, mass, 1.0)
    return (score + mass.log() + top).float()
