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

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...components.cotangent import Gradients, SavedForward
from ...engine.dispatch import Forward, by_key_head
from ...plans import HeadPlan, Plan, PolynomialHead, ThresholdHead
from ...polynomials.certified import CertifiedPolynomial
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact.exact_heads import empty_results, finished, precision, whole
from ..exact.rectangle import Start, Totals, exact_rows, slopes
from ..exact.split import Split, first, large, rounded_down, thresholds
from ..runtime.capacity import Capacity, Sizes
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


def forward(problem: Problem, plan: Plan) -> Forward:
    return (*_with_split(problem, plan, _attended), None)


def gradients(problem: Problem, plan: Plan, saved: SavedForward) -> Gradients:
    return _with_split(problem, plan, _pulled_back, saved)


def _with_split(
    problem: Problem, plan: Plan, work: Callable[..., Result], *saved: SavedForward
) -> Result:
    """``work(problem, plan, split, small, *saved)``: split at the thresholds of a plan, with
    ``small`` [batch, heads, m] zero where a key is large, else one; both are None if there are
    none. In the backward pass with what the forward pass ``saved``."""
    if not any(isinstance(head, ThresholdHead) for head in plan.heads):
        return work(problem, plan, None, None, *saved)

    def run(sizes: Sizes, guarded: bool) -> tuple[Result, Tensor]:
        limit, heads = _table(problem, plan)[2], problem.heads
        rows = large(problem.query, heads, limit, None)
        keys = large(problem.key, heads, limit, problem.key_log_weight)
        split = Split(whole(problem), first(keys, sizes[0]), rows, sizes[1], guarded)
        small = 1.0 - keys.view(problem.batch, heads, -1).float() if sizes[0] else None
        return work(problem, plan, split, small, *saved), split.needed

    return Capacity.of(plan, problem).run(run, backward=bool(saved))


def _attended(
    problem: Problem, plan: Plan, split: Split | None, small: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows."""
    sums = _sums(problem, plan, small)
    if split is not None and small is not None:  # rows go on from these sums
        output, lse = empty_results(problem)
        num, den = polynomial_sums(*sums)
        exact_rows(split.keys, output, lse, Start(num.contiguous(), den, sums[3].unit))
    else:
        shape, made = problem.query.shape[:3], polynomial_sums(*sums, divide=True)
        output, lse = (x.reshape(shape + x.shape[3:]).contiguous() for x in made)
    if split is not None:
        split.write(output, lse)
    return output, lse


def _pulled_back(
    problem: Problem, plan: Plan, split: Split | None, small: Tensor | None, saved: SavedForward
) -> Gradients:
    """Gradients through sums and rectangles, or through all rows exactly where the capacity was
    exceeded."""
    sums = _sums(problem, plan, small, saved.for_weights)
    near = saved.lse if split is None else split.near(saved.lse)
    shape, dtype = sums[0].shape[:2], problem.query.dtype if split is None else torch.float32
    own = replace(saved, lse=near).map(lambda x: x.reshape(*shape, *x.shape[2:]))
    made = polynomial_gradients(*sums, own, dtype)
    query, key, value = (
        x.reshape(problem.batch, -1, *x.shape[2:]) for x in (made.query, made.key, made.value)
    )
    weight = made.key_log_weight
    weight = None if weight is None else weight.reshape(problem.batch, -1, problem.m)
    is_shared = key.shape[1] < problem.heads
    if split is None:
        if not is_shared:
            key, value = (by_key_head(x, problem) for x in (key, value))
        return Gradients(query, key, value, weight)
    if is_shared:  # rectangles add for each head of the queries; the first has these sums
        others = (0, 0, 0, 0, 0, problem.group - 1)
        key, value = (pad(x.unsqueeze(2), others).flatten(1, 2) for x in (key, value))
    if weight is None:
        weight = key.new_zeros(problem.batch, problem.heads, problem.m)
    total = Totals(*(x.contiguous() for x in (query, key, value, weight)))
    slope = slopes(saved.grad, saved.grad_lse, saved.output)
    split.add_gradients(total, saved.grad, slope, saved.lse, near)
    return finished(total, problem, saved.for_weights)


def _sums(
    problem: Problem, plan: Plan, small: Tensor | None, for_weights: bool = False
) -> tuple[Tensor, Tensor, Tensor, Polynomials]:
    """Query, key, value and polynomials of the feature sums of a call. Heads that share keys share
    their sums too if the weights of these keys are the same; else they become batches, and the keys
    are read several times. ``for_weights``: their gradients are asked for, which heads do not
    share."""
    query, key, value = problem.query, problem.key, problem.value
    group, bias, borders = problem.group, problem.key_log_weight, thresholds(plan)
    shared = (
        not for_weights
        and all(x == borders[head - head % group] for head, x in enumerate(borders))
        and (bias is None or bias.stride(1) == 0 or problem.heads == 1)
    )
    (coefficients, unit, _), step = _table(problem, plan), group if shared else 1
    weight = None if small is None else small[:, ::step]
    if bias is not None:
        factor, shift = key_weights(bias[:, ::step])
        weight = factor if weight is None else factor * weight
        unit = unit + shift.repeat_interleave(step, 1).flatten()
    if weight is not None:
        if step < group:
            query = query.reshape(-1, group, *query.shape[2:])
            key, value = (
                x.reshape(-1, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (key, value)
            )
            weight = weight.reshape(-1, group, problem.m)
        weight = weight.contiguous()
    degree = max(1, _polynomial(plan.heads[0]).degree)
    causal = problem.is_causal
    polynomials = Polynomials(coefficients, unit, degree, weight, causal, precision=precision())
    return query, key, value, polynomials


_Table = tuple[Tensor, Tensor, Tensor]
_tables: WeakCache[Plan, tuple[torch.device, int, float], _Table] = WeakCache()


def _table(problem: Problem, plan: Plan) -> _Table:
    """Coefficients, units and thresholds of all heads [batch * heads], on the device. They are
    copied once: a call that a CUDA graph captures could not do it."""
    device, batch, scale = problem.query.device, problem.batch, problem.scale

    def make() -> _Table:
        heads, limit = plan.heads * batch, rounded_down(thresholds(plan) * batch)
        rows = [_coefficients(head, scale) for head in heads]
        coefficients = torch.tensor(rows, dtype=torch.float64).float()
        unit = torch.tensor([_polynomial(head).bound for head in heads])
        return coefficients.to(device), unit.to(device), limit.to(device)

    return _tables.get(plan, (device, batch, scale), make)


def _coefficients(head: HeadPlan, scale: float) -> tuple[float, ...]:
    """Coefficients of the polynomial in <q, k>, from those in z / B."""
    polynomial = _polynomial(head)
    unit = scale / polynomial.bound if polynomial.bound > 0 else 0.0
    c = [factor * unit**power for power, factor in enumerate(polynomial.coefficients)]
    return tuple((*c, 0.0, 0.0)[:3])
