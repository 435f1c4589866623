"""Polynomials and single thresholds on the device, all heads at once.

Large keys have weight zero in the feature sums, so no small token is gathered. Rows then go on from
these sums with the large keys, exactly (`kernels.rectangle`), and there is one division; rows that
are large are written once more, exactly, over all keys. Which tokens are large is found at every
call, with preallocated capacity for them (`runtime.capacity`), without synchronising with the host.

A polynomial runs here only if it is certified to be positive on its range: then no row can lose its
denominator as long as scores stay within it. Beyond (a plan reused on other data), a row whose
denominator is not positive gets zeros and lse -inf; it does not fall back to exact sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward
from ...plans import HeadPlan, Plan, PolynomialHead, ThresholdHead
from ...polynomials.certified import CertifiedPolynomial
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact.exact_heads import empty_results, finished, precision, whole
from ..exact.rectangle import Start, Tokens, Totals, add_gradients, exact_rows, slopes
from ..runtime.capacity import Capacity, Sizes, all_unless, enough
from ..runtime.lengths import large, listed, rounded_down
from .setting import Polynomials
from .sums import key_weights, polynomial_attention, polynomial_gradients, polynomial_sums


def _polynomial(head: HeadPlan) -> CertifiedPolynomial:
    return cast(PolynomialHead, head).polynomial  # kinds that `engine.dispatch` sends here


def refusal(head: HeadPlan) -> str | None:
    polynomial = _polynomial(head)
    if polynomial.degree > 2:
        return f"its polynomial has degree {polynomial.degree}; kernels have up to 2"
    if not polynomial.positive:
        return f"its polynomial is not positive on ±{polynomial.bound:.3g}: rows may fail"
    return None


def family(head: HeadPlan) -> object:
    return max(1, _polynomial(head).degree)


@dataclass(frozen=True, eq=False)
class Split:
    """Polynomials and large tokens of a call, on the device."""

    coefficients: Tensor  # [batch * heads, 3] in <q, k>
    unit: Tensor  # [batch * heads]
    rows: Tokens
    keys: Tokens
    large_row: Tensor | None  # [batch, heads, n] bool: exact over all keys
    small_key: Tensor | None  # [batch, heads, m] float32: 0 where a key is large
    shared: bool  # whether heads that share keys have the same large ones
    fits: Tensor | None = None  # whether the capacity was enough


def forward(problem: Problem, plan: Plan) -> Forward:
    if not _splits(plan):
        return (*_attended(problem, plan, _whole(problem, plan)), None)

    def work(sizes: Sizes, guarded: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        split, needed = _new_split(problem, plan, sizes)
        output, lse = _attended(problem, plan, split)
        if guarded and split.fits is not None:
            exact_rows(all_unless(split.fits, whole(problem)), output, lse)
        return (output, lse), needed

    return (*Capacity.of(plan, problem, (0, 0)).run(work), None)


def _attended(problem: Problem, plan: Plan, split: Split) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows."""
    sums = _Sums.of(problem, plan, split, shared=split.shared)
    if not split.keys.most:
        made = polynomial_attention(*sums)
        output, lse = (x.reshape(problem.query.shape[:3] + x.shape[3:]) for x in made)
    else:
        output, lse = empty_results(problem)
        num, den = polynomial_sums(*sums)
        start = Start(num.contiguous(), den, sums.polynomials.unit)
        exact_rows(replace(whole(problem), keys=split.keys), output, lse, start)
    output, lse = output.contiguous(), lse.contiguous()
    if split.rows.most:
        exact_rows(replace(whole(problem), rows=split.rows), output, lse)
    return output, lse


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    pulled = partial(_pulled_back, problem, plan, saved)
    if not _splits(plan):
        return pulled(_whole(problem, plan), guarded=False)

    def work(sizes: Sizes, guarded: bool) -> tuple[Gradients, Tensor]:
        split, needed = _new_split(problem, plan, sizes)
        return pulled(split, guarded), needed

    return Capacity.of(plan, problem, (0, 0)).run_backward(work)


def _pulled_back(
    problem: Problem, plan: Plan, saved: SavedForward, split: Split, guarded: bool
) -> Gradients:
    """Gradients through sums and rectangles; if ``guarded``, through all rows exactly instead where
    the capacity was exceeded."""
    mixed = bool(split.keys.most or split.rows.most or guarded)
    sums = _Sums.of(problem, plan, split, shared=split.shared and not saved.for_weights)
    lse, large_row = saved.lse, split.large_row
    of_small = lse if large_row is None else lse.masked_fill(large_row, math.inf)
    made = sums.gradients(problem, replace(saved, lse=of_small), wide=mixed)
    if not mixed:
        return made
    # rectangles add to sums of their own for each head of the queries, where heads share keys
    query, key, value, weight = made.query, made.key, made.value, made.key_log_weight
    shape, new = (problem.batch, problem.heads), saved.lse.new_zeros
    shares_keys = problem.group > 1
    total = Totals(
        query.contiguous(),
        new(*shape, *key.shape[2:]) if shares_keys else key.contiguous(),
        new(*shape, *value.shape[2:]) if shares_keys else value.contiguous(),
        new(*shape, problem.m) if weight is None else weight.contiguous(),
    )
    slope = slopes(saved.grad, saved.grad_lse, saved.output)
    every = whole(problem)
    add_gradients(total, saved.grad, slope, of_small, replace(every, keys=split.keys))
    add_gradients(total, saved.grad, slope, lse, replace(every, rows=split.rows))
    if guarded and split.fits is not None:
        add_gradients(total, saved.grad, slope, lse, all_unless(split.fits, every))
    found = finished(total, problem, saved.for_weights)
    if shares_keys:
        found.key, found.value = found.key + key, found.value + value
    return found


class _Sums(NamedTuple):
    """The feature sums of a call. Heads that share keys share their sums too if the weights of
    these keys are the same; else they become batches, and the keys are read several times."""

    query: Tensor
    key: Tensor
    value: Tensor
    polynomials: Polynomials

    @staticmethod
    def of(problem: Problem, plan: Plan, split: Split, *, shared: bool) -> _Sums:
        query, key, value = problem.query, problem.key, problem.value
        group, bias, small = problem.group, problem.key_log_weight, split.small_key
        shared = shared and (bias is None or bias.stride(1) == 0 or problem.heads == 1)
        unit, step = split.unit, group if shared else 1
        weight = None if small is None else small[:, ::step]
        if bias is not None:
            factor, shift = key_weights(bias[:, ::step])
            weight = factor if weight is None else factor * weight
            unit = unit + shift.repeat_interleave(step, 1).flatten()
        if weight is not None and group > 1 and not shared:
            query = query.reshape(-1, group, *query.shape[2:])
            key, value = (
                x.reshape(-1, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (key, value)
            )
            weight = weight.reshape(-1, group, problem.m)
        if weight is not None:
            weight = weight.contiguous()
        polynomials = Polynomials(
            split.coefficients, unit, max(1, _polynomial(plan.heads[0]).degree), weight,
            problem.is_causal, precision=precision(),
        )  # fmt: skip
        return _Sums(query, key, value, polynomials)

    def gradients(self, problem: Problem, saved: SavedForward, wide: bool) -> Gradients:
        """Of the call's tokens; ``wide``: in float32."""
        shape, dtype = self.query.shape[:2], torch.float32 if wide else self.query.dtype
        parts: dict[str, Any] = {
            name: x.reshape(*shape, *x.shape[2:])
            for name, x in vars(saved).items()
            if isinstance(x, Tensor)
        }
        made = polynomial_gradients(*self, replace(saved, **parts), dtype)
        if self.key.shape[:2] != problem.key.shape[:2]:
            made.key, made.value = (
                x.float().sum(1).view(problem.batch, -1, *x.shape[2:])
                for x in (made.key, made.value)
            )
        made.query = made.query.reshape(problem.query.shape)
        if made.key_log_weight is not None:
            made.key_log_weight = made.key_log_weight.reshape(problem.batch, -1, problem.m)
        return made


# ---- the plan on the device --------------------------------------------------------------------


def _splits(plan: Plan) -> bool:
    return any(isinstance(head, ThresholdHead) for head in plan.heads)


def _new_split(problem: Problem, plan: Plan, sizes: Sizes) -> tuple[Split, Tensor]:
    """The split at the thresholds of a plan, with a capacity ``sizes`` for large rows and keys of a
    head; and how many there are, [2]. Where these exceed ``sizes``, all rows are excluded."""
    table, unit, limit = _table(problem, plan)
    query, key, group = problem.query.detach(), problem.key.detach(), problem.group
    weight = None if problem.key_log_weight is None else problem.key_log_weight.detach().float()
    rows = large(query, problem.heads, limit, None)
    keys = large(key, problem.heads, limit, weight)
    (row_index, row_count), (key_index, key_count) = map(listed, (rows, keys), sizes)
    needed = torch.stack([row_count, key_count]).amax(1)
    fits = enough(needed, sizes)
    listed_rows = Tokens(sizes[0], row_index, row_count.clamp(max=sizes[0]) * fits)
    listed_keys = Tokens(sizes[1], key_index, key_count.clamp(max=sizes[1]))
    thresholds = [_limit(head) for head in plan.heads]
    groups = (thresholds[first : first + group] for first in range(0, len(thresholds), group))
    bias = problem.key_log_weight
    shared = all(len(set(each)) == 1 for each in groups) and (bias is None or bias.stride(1) == 0)
    large_row = (rows | ~fits).view(query.shape[:3])
    small_key = 1.0 - keys.view(*query.shape[:2], -1).float() if sizes[1] else None
    return Split(table, unit, listed_rows, listed_keys, large_row, small_key, shared, fits), needed


_tables: WeakCache[Plan, tuple[torch.device, int, float], tuple[Tensor, Tensor, Tensor]]
_tables = WeakCache()


def _table(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients, units and thresholds [batch * heads], on the device."""
    device, batch, scale = problem.query.device, problem.batch, problem.scale

    def make() -> tuple[Tensor, Tensor, Tensor]:
        coefficients = torch.tensor(
            [_coefficients(head, scale) for head in plan.heads] * batch, dtype=torch.float64
        )
        unit = torch.tensor([_polynomial(head).bound for head in plan.heads] * batch)
        limit = rounded_down([_limit(head) for head in plan.heads] * batch)
        return coefficients.float().to(device), unit.to(device), limit.to(device)

    return _tables.get(plan, (device, batch, scale), make)


def _limit(head: HeadPlan) -> float:
    return head.threshold if isinstance(head, ThresholdHead) else math.inf


def _whole(problem: Problem, plan: Plan) -> Split:
    """The split of a plan without thresholds: no token is large."""
    table, unit, _ = _table(problem, plan)
    return Split(table, unit, Tokens(0), Tokens(0), None, None, True)


def _coefficients(head: HeadPlan, scale: float) -> tuple[float, ...]:
    """Coefficients of the polynomial in <q, k>, from those in z / B."""
    polynomial = _polynomial(head)
    unit = scale / polynomial.bound if polynomial.bound > 0 else 0.0
    c = [factor * unit**power for power, factor in enumerate(polynomial.coefficients)]
    return tuple((*c, 0.0, 0.0)[:3])
