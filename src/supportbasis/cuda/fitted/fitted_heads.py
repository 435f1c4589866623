"""Fitted polynomials on the device, all heads in one captured CUDA graph.

Near rows read near keys through the feature sums of `fitted_sums`. Far keys, far rows and failed
rows are exact, as many as fit into the preallocated capacity (`runtime.capacity`), so that the
graph has fixed shapes. The number of failed rows is reported at the next call, which warns if there
were many.

The backward pass finds far tokens again; failed rows are saved by the forward pass. Gradients of
near rows and keys flow through the sums of their features and the balancing transforms, those of
far keys and exact rows through rectangles; all rows are exact where the capacity was exceeded. A
log-sum of +inf excludes a row from a part. All sums are float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward
from ...engine.jensen import FITTED_SHARE, grouped_lse
from ...plans import FittedHead, HeadPlan, Plan
from ...problem.caching import WeakCache
from ...problem.problem import FAILED_SHARE, Problem
from ..exact.exact_heads import empty_results, finished, precision, whole
from ..exact.rectangle import Rectangle, Totals, exact_rows, slopes
from ..exact.split import Split, first
from ..runtime.capacity import Capacity, Sizes
from ..runtime.replay import replayed
from . import fitted_sums
from .fitted_sums import Features, Near, finite, with_ones
from .transformed import Side


def refusal(head: HeadPlan) -> None:
    return None


def family(head: HeadPlan) -> object:
    return "fitted", _fitted(head).exact_rows


def _fitted(head: HeadPlan) -> FittedHead:
    return cast(FittedHead, head)  # the only kind that `engine.dispatch` sends here


def forward(problem: Problem, plan: Plan) -> Forward:
    """Output, lse, and which rows failed and were computed exactly."""
    output, lse, failed = _replayed(problem, plan, _outcome)
    counts = Capacity.of(plan, problem).reported
    if counts and counts[0] > FAILED_SHARE * problem.n and plan not in _warned:
        _warned.add(plan)
        warnings.warn(
            "supportbasis: in an earlier call with this plan the fitted polynomial failed on more "
            "than 1 % of a head's rows, which were computed exactly; use a new plan or another "
            "method",
            UserWarning,
            stacklevel=2,
        )
    return output, lse, failed


_warned: WeakSet[Plan] = WeakSet()  # once for each plan


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    """Gradients of query, key, value and key log-weights, as `supportbasis.engine.backward`."""
    grad_lse = torch.zeros_like(saved.lse) if saved.grad_lse is None else saved.grad_lse
    tensors = (saved.output, saved.lse, saved.fallback, saved.grad, grad_lse)
    total = Totals(*_replayed(problem, plan, _gradients, *tensors))
    return finished(total, problem, saved.for_weights)


def _replayed(
    problem: Problem, plan: Plan, work: Callable[..., tuple[Tensor, ...]], *saved: Tensor
) -> tuple[Tensor, ...]:
    """The results of ``work(problem, plan, sizes, guarded, *saved, *tokens, log-weights)``
    (`Capacity.run`), by a CUDA graph; in the backward pass with what the forward pass ``saved``.
    The key of a graph has all that it reads beside these tensors, and keeps it alive."""
    capacity = Capacity.of(plan, problem)  # may raise: before anything is copied
    weight = () if problem.key_log_weight is None else (problem.key_log_weight.float(),)
    given = (*saved, problem.query, problem.key, problem.value, *weight)
    key = (work, _table(problem, plan), precision())

    def run(sizes: Sizes, guarded: bool) -> tuple[tuple[Tensor, ...], Tensor]:
        function = partial(work, problem, plan, sizes, guarded)
        call = partial(replayed, (*key, sizes), function) if guarded else function
        *results, needed = call(*given)
        return tuple(results), needed

    return capacity.run(run, backward=bool(saved))


_Table = tuple[Side, Side, tuple[Features, ...]]
_tables: WeakCache[Plan, tuple[torch.device, int, float], _Table] = WeakCache()


def _table(problem: Problem, plan: Plan) -> _Table:
    """The transforms of queries and keys and the features of all heads, for every batch element."""
    device, batch, scale = problem.query.device, problem.batch, problem.scale

    def make() -> _Table:
        heads = [_fitted(head) for head in plan.heads]
        features = tuple(Features.of(head.fitted, device) for head in heads)
        query, key = (Side.of(heads * batch, name, scale, device) for name in ("query", "key"))
        return query, key, features * batch

    return _tables.get(plan, (device, batch, scale), make)


def _outcome(
    problem: Problem, plan: Plan, sizes: Sizes, guarded: bool, *given: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, which rows failed, and three counts of the worst head: far keys and exact rows,
    whose capacity is ``sizes``, and failed rows."""
    built, features = _Built.of(problem, plan, *given), _table(problem, plan)[2]
    rows, far = built.exact_rows, first(built.is_far, sizes[0])
    sums = [fitted_sums.sums(each, built.near(i, rows)) for i, each in enumerate(features)]
    total, unit = (torch.stack(x) for x in zip(*sums, strict=True))
    unit = unit + built.shift
    if sizes[0]:
        more, size = _sums_over(replace(built.whole, keys=far[0]))
        top = torch.maximum(unit, size)
        mine, theirs = ((x - finite(top)).exp().unsqueeze(2) for x in (unit, size))
        total, unit = total * mine + with_ones(more) * theirs, top
    den = total[..., -1:]
    num = torch.where(den == 0, 0.0, total[..., :-1] / den)  # zero for a row without keys
    lse = den.squeeze(2).log() + finite(unit)
    least = grouped_lse(built.query, built.key, built.log_weight) + built.shift
    failed = ~((lse >= least + math.log(FITTED_SHARE)) & (lse < math.inf)) & ~rows
    shape = problem.query.shape[:3]
    output, lse = num.to(problem.value.dtype).view(*shape, -1), lse.view(shape).contiguous()
    split = Split(built.whole, far, rows | failed, sizes[1], guarded)
    split.write(output, lse)
    counts = torch.cat([split.needed, failed.sum(1).amax().view(1)])
    return output, lse, failed.view(lse.shape), counts


def _gradients(
    problem: Problem, plan: Plan, sizes: Sizes, guarded: bool, *given: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and log-weights, one for each head of the queries, and the
    needed capacity."""
    (output, lse, fallback, grad, grad_lse), given = given[:5], given[5:]
    query_side, key_side, features = _table(problem, plan)
    built = _Built.of(problem, plan, *given)
    rows, far = built.exact_rows | fallback.flatten(0, 1), first(built.is_far, sizes[0])
    split, slope = Split(built.whole, far, rows, sizes[1], guarded), slopes(grad, grad_lse, output)
    near = split.near(lse)
    real = near.isfinite().flatten(0, 1)
    both = torch.cat([grad.float(), slope.unsqueeze(3)], 3).flatten(0, 1)
    both = torch.where(real.unsqueeze(2), both, 0.0)
    log_factor = torch.where(real, built.shift - near.flatten(0, 1), -math.inf)
    parts = [
        fitted_sums.gradients(each, built.near(i, rows), both[i], log_factor[i])
        for i, each in enumerate(features)
    ]
    # the scores of all near keys contain the rows' shifts: those of all keys, whose gradients sum
    # to that of lse, less far keys
    shift = torch.where(real, grad_lse.float().flatten(0, 1), 0.0)
    if sizes[0]:
        own, size = _sums_over(split.keys)
        share = (size - near.flatten(0, 1)).exp().nan_to_num(0.0)  # a row without keys has none
        along = (grad.float().flatten(0, 1) * own).sum(2)
        shift = shift - share * (along + slope.flatten(0, 1))
    query, key, value, weight = map(torch.stack, zip(*parts, strict=True))
    made = (query_side.pull_back(query, shift), key_side.pull_back(key, weight), value, weight)
    total = Totals(*(x.unflatten(0, lse.shape[:2]).contiguous() for x in made))
    split.add_gradients(total, grad, slope, lse, near)
    return *total, split.needed


class _Built(NamedTuple):
    """Heads in their balancing transforms [heads, tokens, ...], and which tokens are exact; forward
    and backward build the same."""

    query: Tensor
    key: Tensor  # zero where hidden
    value: Tensor  # in the input dtype
    log_weight: Tensor
    shift: Tensor  # scale <q, c>, which log-sums of transformed rows lack
    is_far: Tensor  # keys [heads, m]
    exact_rows: Tensor  # [heads, n]: far rows, and the first ones
    whole: Rectangle  # all rows and keys

    @staticmethod
    def of(
        problem: Problem, plan: Plan, query: Tensor, key: Tensor, value: Tensor,
        weight: Tensor | None = None,
    ) -> _Built:  # fmt: skip
        """Transform all heads, and find the tokens beyond the radii of their polynomials."""
        every = whole(replace(problem, query=query, key=key, value=value, key_log_weight=weight))
        (query_side, key_side, _), group = _table(problem, plan), problem.group
        value = value.repeat_interleave(group, 1) if group > 1 else value
        (x, shift), (y, log_weight) = query_side.apply(query), key_side.apply(key)
        if weight is not None:
            log_weight = log_weight + weight.flatten(0, 1)
            y.masked_fill_((log_weight == -math.inf).unsqueeze(2), 0.0)  # may hold anything
        is_far = torch.linalg.vector_norm(y, dim=2) > key_side.radius
        rows = torch.linalg.vector_norm(x, dim=2) > query_side.radius
        rows |= torch.arange(problem.n, device=query.device) < _fitted(plan.heads[0]).exact_rows
        return _Built(x, y, value.flatten(0, 1), log_weight, shift, is_far, rows, every)

    def near(self, head: int, rows: Tensor) -> Near:
        """The tokens of one head without far keys and without these exact ``rows`` [heads, n]."""
        query = self.query[head].masked_fill(rows[head].unsqueeze(1), 0.0)
        key = self.key[head].masked_fill(self.is_far[head].unsqueeze(1), 0.0)
        log_weight = self.log_weight[head].masked_fill(self.is_far[head], -math.inf)
        return Near(query, key, self.value[head], log_weight)


def _sums_over(far: Rectangle) -> tuple[Tensor, Tensor]:
    """Mean values [heads, n, dv] and log-sums [heads, n] of all rows over far keys, exactly."""
    output, lse = (x.flatten(0, 1) for x in empty_results(far.problem, torch.float32))
    exact_rows(far, output, lse)
    return output, lse
