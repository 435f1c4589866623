"""Ranges of scores: that which a plan was made for, and which heads of a call leave it; and whether
scores may overflow their dtype.

An approximation is certified, fitted or measured on the scores of the data it was planned on. A
plan remembers how large they could be, by norms; a call with larger ones runs these heads exactly.
On a GPU this takes no synchronisation with the host: what a call finds is reported at the next one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..components.polynomial_sum import LARGEST_REACH
from ..errors import InputError
from ..plans import ExactHead, FittedHead, HeadPlan, ListHead, Plan, PolynomialHead, ScoreRange
from ..plans.supports import take
from ..polynomials.balancing import transformed
from ..polynomials.certified import CertifiedPolynomial
from ..problem.problem import Head, Problem
from . import dispatch

# new tokens of the same kind are somewhat longer by chance
GROWTH = 10.0  # times its certified error may a polynomial err beyond its range
LEAST = 2.0**-40  # below that rounding counts for more
STEP = 1 / 64  # of that range, in which it is cached
FURTHEST = 4.0  # times the range
HEADROOM = 1.25  # times the mean score, which varies less than the largest
SAME_SCALE = 1e-6  # relative: a scale may have been rounded to float32


def score_range(plan: HeadPlan, head: Head) -> ScoreRange:
    """Largest and mean score that norms allow for the approximated pairs of a head: |scale| max|q|
    max|k| and |scale| mean|q| mean|k|; and the mean of the transformed tokens."""
    return range_of(head.scale, norm_sums(plan, head))


def norm_sums(plan: HeadPlan, head: Head) -> Tensor:
    """Count, sum and largest of the norms of the approximated rows, of the approximated keys, of
    the transformed queries and of the transformed live keys, [4, 3] in float64. Tokens of the same
    norm in other directions may be longer after a transform. Without one the last two are zero."""
    is_fitted = isinstance(plan, FittedHead)  # whose far tokens are known after the transform only
    rows, keys = (None, head.live_keys) if is_fitted else plan.smooth(head)
    found = [take(head.query_norms, rows), take(head.key_norms, keys)]
    if isinstance(plan, FittedHead):
        with torch.no_grad():
            balanced = transformed(head, plan.transform)
            keys = take(balanced.key, head.live_keys)
            found += [x.norm(dim=1) for x in (balanced.query, keys)]
    sums = torch.zeros(4, 3, dtype=torch.float64)
    for number, norms in enumerate(found):
        if norms.numel():
            total = float(norms.mean()) * norms.numel()
            sums[number] = torch.tensor([norms.numel(), total, float(norms.max())])
    return sums


def range_of(scale: float, sums: Tensor) -> ScoreRange:
    """The range of scores that `norm_sums` allow."""
    means, tops = (sums[:, 1] / sums[:, 0].clamp(min=1)).tolist(), sums[:, 2].tolist()
    largest, mean = (min(LARGEST_REACH, abs(scale) * x[0] * x[1]) for x in (tops, means))
    return ScoreRange(largest, mean, means[2] * means[3])


def with_range(plan: HeadPlan, heads: Sequence[Head], *before: ScoreRange) -> HeadPlan:
    """The plan of a head, with the range of the scores of all batch elements it was made for, and
    of ranges found ``before``; without one where nothing is approximated, or depends on it.

    A polynomial is certified up to the largest score; where its error was measured too, the mean
    counts as well. Lists and fitted polynomials compute outlier queries exactly, so only the mean
    counts for them."""
    if not heads or plan.kind in ("exact", "power"):
        return plan
    certified = not isinstance(plan, (ListHead, FittedHead))
    matters = (certified, plan.measured is not None or not certified, isinstance(plan, FittedHead))
    pairs = zip(*(score_range(plan, head) for head in heads), *before, strict=True)
    most = (max(x) if it_does else None for it_does, x in zip(matters, pairs, strict=True))
    return replace(plan, scores=ScoreRange(*most))


def widened(plan: HeadPlan, heads: Sequence[Head]) -> HeadPlan | None:
    """The plan of a head whose effect is measured on other data, too: the range of lists and fitted
    polynomials, which are not certified, holds the scores of both. None where those leave the
    range of a certified polynomial."""
    if isinstance(plan, (ListHead, FittedHead)) and plan.scores is not None:
        return with_range(plan, heads, plan.scores)
    return None if any(leaves(plan, score_range(plan, head)) for head in heads) else plan


def check_plan(problem: Problem, plan: Plan) -> None:
    """Raise if a plan does not fit the shapes of a call, its causality or its scale."""
    shape, made_for = (problem.heads, problem.dim), (plan.num_heads, plan.dim)
    if shape != made_for:
        raise InputError(f"plan was made for (heads, dim) = {made_for}, the inputs have {shape}")
    if plan.is_exact:
        return
    if plan.is_causal is not None and plan.is_causal != problem.is_causal:
        raise InputError(
            f"plan was made with is_causal={plan.is_causal}, but the call has "
            f"is_causal={problem.is_causal}; make a plan for it"
        )
    if plan.scale is None:
        return
    scale = problem.given_scale
    if abs(scale - plan.scale) > SAME_SCALE * abs(plan.scale):
        raise InputError(
            f"plan was made with scale={plan.scale:g}, but the call has scale={scale:g}; make a "
            "plan for it"
        )


def checked(problem: Problem, plan: Plan, implementation: str) -> Plan:
    """The plan to use for a call: heads whose scores leave the range they were planned for are
    exact, with kernels on a GPU those that left it in earlier calls."""
    if reports_later(problem, plan, implementation):
        from ..cuda.runtime import range_check

        return range_check.checked(problem, plan)
    plan = in_range(problem, plan)
    check_scores(problem, plan)
    return plan


def reports_later(problem: Problem, plan: Plan, implementation: str) -> bool:
    """Whether the range of a call's scores is checked on the device, and reported later."""
    if plan.is_exact or not problem.query.is_cuda:
        return False
    return dispatch.refusal(problem, implementation) is None


def in_range(problem: Problem, plan: Plan) -> Plan:
    """The plan with those heads exact whose scores, in some batch element, leave the range they
    were planned for."""
    left: dict[int, str] = {}
    for _, h, head in problem.each_head():
        if h not in left and plan.heads[h].scores is not None:
            reason = leaves(plan.heads[h], score_range(plan.heads[h], head))
            left |= {} if reason is None else {h: reason}
    return exact_where(plan, left) if left else plan


def leaves(plan: HeadPlan, found: ScoreRange) -> str | None:
    """The reason why scores leave the range of a head's plan; None where they do not."""
    if plan.scores is None:
        return None
    names = ("largest", "mean", "mean balanced")
    for which, now, before in zip(names, found, plan.scores, strict=True):
        if now is None or before is None or now <= before:
            continue
        close = _is_certified(plan, now, before) if which == "largest" else now <= HEADROOM * before
        if not close:
            return f"the {which} |score| may be {now:.3g}, the plan was made for {before:.3g}"
    return None


def _is_certified(plan: HeadPlan, now: float, before: float) -> bool:
    """Whether the certified errors of a head's polynomials on the wider range stay within GROWTH
    times those on their own."""
    if not now <= FURTHEST * before:
        return False
    steps = math.ceil((now / before - 1) / STEP)
    return all(_is_good(polynomial, 1 + steps * STEP) for polynomial in plan.polynomials)


@lru_cache(maxsize=4096)
def _is_good(polynomial: CertifiedPolynomial, ratio: float) -> bool:
    return polynomial.on(ratio * polynomial.bound).error <= GROWTH * max(polynomial.error, LEAST)


def exact_where(plan: Plan, reasons: dict[int, str]) -> Plan:
    """The plan with the heads of these numbers exact; warns with the reasons."""
    names = ", ".join(str(number) for number in sorted(reasons)[:4])
    more = f" and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    left = f"heads {names}{more} leave the range of their plan ({reasons[min(reasons)]})"
    text = f"supportbasis: {left} and run exactly; make a new plan"
    warnings.warn(text, UserWarning, stacklevel=6)
    return plan.with_heads(
        ExactHead(reason=reasons[number], n=head.n, m=head.m) if number in reasons else head
        for number, head in enumerate(plan.heads)
    )


def check_scores(problem: Problem, plan: Plan | None = None) -> None:
    """Raise if a score can overflow, unless a plan has one polynomial for all of a head's scores,
    which has units of its own. A score of +inf shows in the output; but if all scores of a row
    become -inf, kernels take it for a row that may attend to nothing."""
    has_units = plan is not None and all(type(head) is PolynomialHead for head in plan.heads)
    tokens = (problem.query.detach(), problem.key.detach())
    if problem.query.is_cuda or has_units or not all(x.numel() for x in tokens):
        return
    ends = [x.aminmax() for x in tokens]
    sizes = [max(-low.item(), high.item()) for low, high in ends]
    if _largest_step(problem, *sizes) < torch.finfo(problem.dtype).max:
        return
    for _, _, head in problem.each_head():  # keys that are masked may hold anything
        keys = take(head.key_maxima, head.live_keys)
        if not len(keys):
            continue
        sizes = [float(head.query_maxima.max()), float(keys.max())]
        if not _largest_step(problem, *sizes) < torch.finfo(problem.dtype).max:
            raise InputError(
                f"a score overflows {problem.dtype}: scale is {problem.scale:.3g}, the largest "
                f"entries of query and key are {sizes[0]:.3g} and {sizes[1]:.3g}; scale them down "
                "or use float64"
            )


def _largest_step(problem: Problem, query: float, key: float) -> float:
    """Upper bound of every product on the way to a score, whether the scale comes first or last."""
    scale = abs(problem.scale)
    return max(problem.dim * query * key * max(scale, 1.0), scale * max(query, key))
