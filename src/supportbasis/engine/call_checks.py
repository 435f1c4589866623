"""What is checked around a call: that a plan suits it, its entries, its scores and its output.

On a GPU nothing here reads entries, which would synchronise with the host: what a call finds there
is reported at the next one.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from ..errors import InputError
from ..plans import Plan, PolynomialHead
from ..problem.checks import check_bias, check_finite
from ..problem.problem import Problem
from ..problem.result import FAILED_SHARE, Outcome
from . import dispatch, ranges


def checked(problem: Problem, plan: Plan, implementation: str) -> Plan:
    """The plan to use for a call: heads whose scores leave the range they were planned for are
    exact, with kernels on a GPU those that left it in earlier calls."""
    if reports_later(problem, plan, implementation):
        from ..cuda.runtime import range_check

        return range_check.checked(problem, plan)
    plan = ranges.in_range(problem, plan)
    check_scores(problem, plan)
    return plan


def reports_later(problem: Problem, plan: Plan, implementation: str) -> bool:
    """Whether the range of a call's scores is checked on the device, and reported later."""
    if plan.is_exact or not problem.query.is_cuda:
        return False
    return dispatch.refusal(problem, implementation) is None


def check_entries(problem: Problem) -> None:
    """Raise if an entry of a traced call is not finite; not on a GPU."""
    if problem.query.is_cpu:
        check_finite(query=problem.query, key=problem.key, value=problem.value)
        if problem.key_log_weight is not None:
            check_bias(problem.key_log_weight)


def warn_about(problem: Problem, plan: Plan, outcome: Outcome) -> None:
    """Warn about failed rows, and raise if the output is not finite."""
    texts = []
    if int(outcome.invalid_rows.sum() - outcome.fallback_rows.sum()):
        texts.append(
            "rows had no usable denominator (their weights cancel or vanish) and return zeros; "
            "sb.attention(..., return_result=True) counts them by head"
        )
    may_fail = any(head.may_fail for head in plan.heads)
    if may_fail and float(outcome.fallback_rows.max()) > FAILED_SHARE * problem.n:
        advice = "a larger sketch_size" if plan.heads[0].is_sketched else "a new plan"
        texts.append(
            "a sketch or fitted polynomial failed on more than 1 % of a head's rows, which were "
            f"computed exactly; use {advice} or another method"
        )
    for text in texts:
        warnings.warn(f"supportbasis: {text}", UserWarning, stacklevel=4)
    check_output(problem, outcome.output)


def check_scores(problem: Problem, plan: Plan | None = None) -> None:
    """Raise if a score can overflow, unless a plan has one polynomial for all of a head's scores,
    which has units of its own. A score of +inf shows in the output; but if all scores of a row
    become -inf, kernels take it for a row that may attend to nothing."""
    has_units = plan is not None and all(type(head) is PolynomialHead for head in plan.heads)
    if problem.query.is_cuda or has_units:
        return
    if _largest_step(problem, *problem.largest) < torch.finfo(problem.dtype).max:
        return
    for _, _, head in problem.each_head():  # keys that are masked may hold anything
        keys = head.key_maxima if head.live_keys is None else head.key_maxima[head.live_keys]
        if not keys.numel() or not head.n:
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


def check_output(problem: Problem, output: Tensor) -> None:
    """Raise if the output is not finite: finite inputs may overflow in a score or in a sum."""
    if output.is_cuda or math.isfinite(output.detach().sum(dtype=problem.dtype).item()):
        return
    if not bool(output.isfinite().all()):
        tokens = (problem.query, problem.key, problem.value)
        query, key, value = (float(x.detach().abs().max()) for x in tokens)
        raise InputError(
            f"the output overflows {problem.dtype}: the largest entries of query, key and value "
            f"are {query:.3g}, {key:.3g} and {value:.3g}; scale them down or use float64"
        )
