"""The range of scores that a plan was made for, and which heads of a call leave it.

An approximation is certified, fitted or measured on the scores of the data it was planned on. A
plan remembers how large they could be, by norms; a call with larger ones runs these heads exactly.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NoReturn

import torch

from ..components.polynomial_sum import LARGEST_REACH
from ..errors import InputError
from ..plans import ExactHead, FittedHead, HeadPlan, ListHead, Plan, PowerHead, ScoreRange
from ..polynomials.balancing import framed
from ..polynomials.certified import CertifiedPolynomial
from ..problem.problem import Head, Problem

# new tokens of the same kind are somewhat longer by chance
GROWTH = 10.0  # times its certified error may a polynomial err beyond its range
LEAST = 2.0**-40  # below that rounding counts for more
STEP = 1 / 64  # in which that is looked up
FURTHEST = 4.0  # times the range
HEADROOM = 1.25  # times what is usual, which varies less than what is largest
SAME_SCALE = 1e-6  # relative: a scale may have been rounded to float32


def score_range(plan: HeadPlan, head: Head) -> ScoreRange | None:
    """What norms allow for the pairs that a head approximates: |scale| max|q| max|k| and |scale|
    mean|q| mean|k|. None where nothing is approximated, or nothing depends on the range.

    A polynomial is certified up to the largest score; where its error was measured too, what is
    usual counts as well. Lists and fitted polynomials compute exactly what lies apart, so that only
    what is usual counts for them.
    """
    if isinstance(plan, (ExactHead, PowerHead)):
        return None
    rows, keys = plan.smooth(head)
    query = head.query_norms if rows is None else head.query_norms[rows]
    key = head.key_norms if keys is None else head.key_norms[keys]
    certified = not isinstance(plan, (ListHead, FittedHead))
    some = query.numel() and key.numel()
    largest, mean = (
        min(LARGEST_REACH, abs(head.scale) * float(of(query)) * float(of(key))) if some else 0.0
        for of in (torch.max, torch.mean)
    )
    is_measured = plan.measured is not None or not certified
    return ScoreRange(
        largest if certified else None, mean if is_measured else None, _framed(plan, head)
    )


def _framed(plan: HeadPlan, head: Head) -> float | None:
    """The mean of what norms allow in the balancing transform of a head, if it has one: tokens of
    the same length in other directions are longer there."""
    if not isinstance(plan, FittedHead) or plan.frame.is_plain:
        return None
    with torch.no_grad():
        inside, live = framed(head, plan.frame), head.live_keys
        key = inside.key if live is None else inside.key[live]
        means = [float(x.norm(dim=1).mean()) if len(x) else 0.0 for x in (inside.query, key)]
    return means[0] * means[1]


def with_range(plan: HeadPlan, heads: Sequence[Head]) -> HeadPlan:
    """The plan of a head, with the range of the scores of all batch elements it was made for."""
    found = [score_range(plan, head) for head in heads]
    ranges = [each for each in found if each is not None]
    if not ranges:
        return plan
    largest, mean, inside = (
        None if None in values else max(values) for values in zip(*ranges, strict=True)
    )
    return replace(plan, scores=ScoreRange(largest, mean, inside))


def check_call(problem: Problem, plan: Plan) -> None:
    """Raise if a call has another scale or causality than the plan was made for."""
    if plan.is_exact:
        return
    if plan.is_causal is not None and plan.is_causal != problem.is_causal:
        raise InputError(
            f"plan was made with is_causal={plan.is_causal}, but the call has "
            f"is_causal={problem.is_causal}; make a plan for it"
        )
    if plan.scale is not None:
        made_for = abs(plan.scale)
        if abs(problem.scale - made_for) > SAME_SCALE * made_for:
            _refuse_scale(plan, problem.scale)


def check_sign(problem: Problem, plan: Plan) -> None:
    """The same for the sign of the scale, which a problem counts to its queries."""
    if plan.scale is not None and problem.is_flipped != (plan.scale < 0) and not plan.is_exact:
        _refuse_scale(plan, -problem.scale if problem.is_flipped else problem.scale)


def _refuse_scale(plan: Plan, scale: float) -> NoReturn:
    raise InputError(
        f"plan was made with scale={plan.scale:g}, but the call has scale={scale:g}; make a plan "
        "for it"
    )


def in_range(problem: Problem, plan: Plan) -> Plan:
    """The plan with those heads exact whose scores, in some batch element, leave the range they
    were planned for."""
    left: dict[int, str] = {}
    for _, h, head in problem.each_head():
        if h not in left and plan.heads[h].scores is not None:
            reason = leaves(plan.heads[h], score_range(plan.heads[h], head))
            left |= {} if reason is None else {h: reason}
    return exact_where(plan, left) if left else plan


def leaves(plan: HeadPlan, found: ScoreRange | None) -> str | None:
    """In words how scores leave the range of a head's plan; None where they do not."""
    made_for = plan.scores
    if made_for is None or found is None:
        return None
    for name, within in (("largest", _is_certified), ("mean", _is_usual), ("framed", _is_usual)):
        now, before = getattr(found, name), getattr(made_for, name)
        if None not in (now, before) and not now <= before and not within(plan, now, before):
            which = {"framed": "mean balanced"}.get(name, name)
            return f"the {which} |score| may be {now:.3g}, the plan was made for {before:.3g}"
    return None


def _is_usual(plan: HeadPlan, now: float, before: float) -> bool:
    return now <= HEADROOM * before


def _is_certified(plan: HeadPlan, now: float, before: float) -> bool:
    """Whether the polynomials of a head are still good beyond their range."""
    if not now <= FURTHEST * before:
        return False
    steps = math.ceil((now / before - 1) / STEP)
    return all(_is_good(polynomial, 1 + steps * STEP) for polynomial in plan.polynomials)


@lru_cache(maxsize=4096)
def _is_good(polynomial: CertifiedPolynomial, ratio: float) -> bool:
    return polynomial.on(ratio * polynomial.bound).error <= GROWTH * max(polynomial.error, LEAST)


def exact_where(plan: Plan, reasons: dict[int, str]) -> Plan:
    """The plan with some heads exact, by their number; a warning says so."""
    names = ", ".join(str(number) for number in sorted(reasons)[:4])
    more = f" and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    first = reasons[min(reasons)]
    warnings.warn(
        f"supportbasis: heads {names}{more} leave the range of their plan ({first}) and run "
        "exactly; make a new plan",
        UserWarning,
        stacklevel=6,
    )
    return plan.with_heads(
        ExactHead(reason=reasons[number], n=head.n, m=head.m) if number in reasons else head
        for number, head in enumerate(plan.heads)
    )
