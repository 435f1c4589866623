"""Polynomials and single thresholds on the device, all heads at once.

Large keys have weight zero in the feature sums, so no small token is gathered. Rows then go on from
these sums with the large keys, exactly (`exact.rectangle`), and there is one division; rows that
are large are written once more, exactly, over all keys. Which tokens are large is found at every
call, with preallocated capacity for them (`runtime.capacity`).

A polynomial runs here only if it is certified to be positive on its range: then no row can lose its
denominator as long as scores stay within it. Beyond (a plan reused on other data), a row whose
denominator is not positive gets zeros and lse -inf; it does not fall back to exact sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward
from ...plans import HeadPlan, Plan, PolynomialHead, ThresholdHead
from ...polynomials.certified import CertifiedPolynomial
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact.exact_heads import empty_results, finished, precision, whole
from ..exact.rectangle import Start, Tokens, Totals, add_gradients, exact_rows, slopes
from ..runtime.capacity import Capacity, Sizes, all_unless, enough
from ..runtime.lengths import large, limits, listed, thresholds
from .setting import Polynomials
from .sums import key_weights, polynomial_gradients, polynomial_sums

Result = TypeVar("Result")


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


class Split(NamedTuple):
    """Large tokens of a call, on the device."""

    rows: Tokens = Tokens(0)
    keys: Tokens = Tokens(0)
    large_row: Tensor | None = None  # [batch, heads, n] bool: exact over all keys; None: none is
    small_key: Tensor | None = None  # [batch, heads, m] float32: 0 where a key is large
    fits: Tensor | None = None  # whether the capacity was enough; None: the host checks it


def forward(problem: Problem, plan: Plan) -> Forward:
    return (*_with_split(problem, plan, _attended), None)


def _attended(problem: Problem, plan: Plan, split: Split) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows."""
    sums, every = _Sums.of(problem, plan, split, False), whole(problem)
    if split.keys.most:
        output, lse = empty_results(problem)
        num, den = polynomial_sums(*sums)
        start = Start(num.contiguous(), den, sums.polynomials.unit)
        exact_rows(replace(every, keys=split.keys), output, lse, start)
    else:
        shape, made = problem.query.shape[:3], polynomial_sums(*sums, divide=True)
        output, lse = (x.reshape(shape + x.shape[3:]).contiguous() for x in made)
    exact_rows(replace(every, rows=split.rows), output, lse)
    if split.fits is not None:
        exact_rows(all_unless(split.fits, every), output, lse)
    return output, lse


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    return _with_split(problem, plan, _pulled_back, saved)


def _pulled_back(problem: Problem, plan: Plan, split: Split, saved: SavedForward) -> Gradients:
    """Gradients through sums and rectangles, or through all rows exactly where the capacity was
    exceeded."""
    sums = _Sums.of(problem, plan, split, saved.for_weights)
    if split.large_row is None:
        return sums.gradients(problem, saved, problem.query.dtype)
    lse, of_small = saved.lse, saved.lse.masked_fill(split.large_row, math.inf)
    made = sums.gradients(problem, replace(saved, lse=of_small), torch.float32)
    key, value, weight = made.key, made.value, made.key_log_weight
    if problem.group > 1:  # rectangles add for each head of the queries; the first has these sums
        others = (0, 0, 0, 0, 0, problem.group - 1)
        key, value = (pad(x.unsqueeze(2), others).flatten(1, 2) for x in (key, value))
    if weight is None:
        weight = key.new_zeros(problem.batch, problem.heads, problem.m)
    total = Totals(*(x.contiguous() for x in (made.query, key, value, weight)))
    slope, every = slopes(saved.grad, saved.grad_lse, saved.output), whole(problem)
    add_gradients(total, saved.grad, slope, of_small, replace(every, keys=split.keys))
    add_gradients(total, saved.grad, slope, lse, replace(every, rows=split.rows))
    if split.fits is not None:
        add_gradients(total, saved.grad, slope, lse, all_unless(split.fits, every))
    return finished(total, problem, saved.for_weights)


class _Sums(NamedTuple):
    """The feature sums of a call. Heads that share keys share their sums too if the weights of
    these keys are the same; else they become batches, and the keys are read several times."""

    query: Tensor
    key: Tensor
    value: Tensor
    polynomials: Polynomials

    @staticmethod
    def of(problem: Problem, plan: Plan, split: Split, for_weights: bool) -> _Sums:
        """``for_weights``: their gradients are asked for, which heads do not share."""
        query, key, value = problem.query, problem.key, problem.value
        group, bias, borders = problem.group, problem.key_log_weight, thresholds(plan)
        shared = (
            not for_weights
            and all(x == borders[head - head % group] for head, x in enumerate(borders))
            and (bias is None or bias.stride(1) == 0 or problem.heads == 1)
        )
        (coefficients, unit), step = _table(problem, plan), group if shared else 1
        weight = None if split.small_key is None else split.small_key[:, ::step]
        if bias is not None:
            factor, shift = key_weights(bias[:, ::step])
            weight = factor if weight is None else factor * weight
            unit = unit + shift.repeat_interleave(step, 1).flatten()
        if weight is not None and step < group:
            query = query.reshape(-1, group, *query.shape[2:])
            key, value = (
                x.reshape(-1, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (key, value)
            )
            weight = weight.reshape(-1, group, problem.m)
        weight = None if weight is None else weight.contiguous()
        polynomials = Polynomials(
            coefficients, unit, max(1, _polynomial(plan.heads[0]).degree), weight,
            problem.is_causal, precision=precision(),
        )  # fmt: skip
        return _Sums(query, key, value, polynomials)

    def gradients(self, problem: Problem, saved: SavedForward, dtype: torch.dtype) -> Gradients:
        """Of the call's tokens."""
        shape = self.query.shape[:2]
        own = saved.map(lambda x: x.reshape(*shape, *x.shape[2:]))
        made = polynomial_gradients(*self, own, dtype)
        if self.key.shape[:2] != problem.key.shape[:2]:
            made.key, made.value = (
                x.float().sum(1).view(problem.batch, -1, *x.shape[2:])
                for x in (made.key, made.value)
            )
        made.query = made.query.reshape(problem.query.shape)
        if made.key_log_weight is not None:
            made.key_log_weight = made.key_log_weight.reshape(problem.batch, -1, problem.m)
        return made


def _with_split(
    problem: Problem, plan: Plan, work: Callable[..., Result], *saved: SavedForward
) -> Result:
    """``work(problem, plan, split, *saved)``, split at the thresholds of a plan; in the backward
    pass with what the forward pass ``saved``."""
    if not any(isinstance(head, ThresholdHead) for head in plan.heads):
        return work(problem, plan, Split(), *saved)

    def run(sizes: Sizes, guarded: bool) -> tuple[Result, Tensor]:
        split, needed = _split(problem, plan, sizes, guarded)
        return work(problem, plan, split, *saved), needed

    return Capacity.of(plan, problem).run(run, backward=bool(saved))


def _split(problem: Problem, plan: Plan, sizes: Sizes, guarded: bool) -> tuple[Split, Tensor]:
    """The split at the thresholds of a plan, with a capacity ``sizes`` for large rows and keys of a
    head; and how many there are, [2]. Where these exceed ``sizes``, all rows are large."""
    limit, query, weight = limits(plan, problem), problem.query, problem.key_log_weight
    rows = large(query, problem.heads, limit, None)
    keys = large(problem.key, problem.heads, limit, None if weight is None else weight.float())
    (row_index, row_count), (key_index, key_count) = map(listed, (rows, keys), sizes)
    needed = torch.stack([row_count, key_count]).amax(1)
    fits = enough(needed, sizes)
    split = Split(
        Tokens(sizes[0], row_index, row_count.clamp(max=sizes[0]) * fits),
        Tokens(sizes[1], key_index, key_count.clamp(max=sizes[1])),
        (rows | ~fits).view(query.shape[:3]) if guarded or any(sizes) else None,
        1.0 - keys.view(*query.shape[:2], -1).float() if sizes[1] else None,
        fits if guarded else None,
    )
    return split, needed


_tables: WeakCache[Plan, tuple[torch.device, int, float], tuple[Tensor, Tensor]] = WeakCache()


def _table(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor]:
    """Coefficients and units [batch * heads], on the device."""
    device, batch, scale = problem.query.device, problem.batch, problem.scale

    def make() -> tuple[Tensor, Tensor]:
        coefficients = torch.tensor(
            [_coefficients(head, scale) for head in plan.heads] * batch, dtype=torch.float64
        )
        unit = torch.tensor([_polynomial(head).bound for head in plan.heads] * batch)
        return coefficients.float().to(device), unit.to(device)

    return _tables.get(plan, (device, batch, scale), make)


def _coefficients(head: HeadPlan, scale: float) -> tuple[float, ...]:
    """Coefficients of the polynomial in <q, k>, from those in z / B."""
    polynomial = _polynomial(head)
    unit = scale / polynomial.bound if polynomial.bound > 0 else 0.0
    c = [factor * unit**power for power, factor in enumerate(polynomial.coefficients)]
    return tuple((*c, 0.0, 0.0)[:3])
