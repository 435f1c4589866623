"""The settings that a head may get, from those that change little to those that cost little."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..engine.dispatch import EVALUATORS, evaluator, has_triton
from ..engine.ranges import with_range
from ..methods import Auto, FittedPolynomial, Method, Polynomial, SingleThreshold
from ..methods.fitted import FEWEST
from ..methods.list_search import ListSearch, settings_for
from ..methods.planning import plan_heads
from ..plans import ExactHead, FittedHead, HeadPlan, ListHead, Plan, PolynomialHead, ThresholdHead
from ..plans.cost import exact_seconds, fitted_work, list_work, pair_work, polynomial_work
from ..problem.problem import Head, Problem

# of far leaves that are open; and with blocks of half the size, which have smaller errors where
# many leaves are open (on a CPU: on a GPU heads of other sizes run one after the other)
SHARES = (0.0, 0.003, 0.01, 0.02, 0.03, 0.045, 0.065, 0.09, 0.12, 0.16, 0.21, 0.28, 0.36)
FINE_SHARES = (0.07, 0.12, 0.2, 0.35)
FINEST = 32  # queries of a block, at least
FITTED = tuple(FittedPolynomial(tolerance=tolerance) for tolerance in (0.03, 0.1, 0.3))
CERTIFIED = {1: (Polynomial(1), SingleThreshold(degree=1)),
             2: (Polynomial(2), SingleThreshold(degree=2))}  # fmt: skip
FASTER = 1.05  # than exact attention, predicted: what is not, is no option
LEAST = 512  # tokens below which a head is exact
LENGTHS = (32768, 131072)  # at which speed is predicted


def settings_of(head: Head, minimise: str, seed: int) -> list[HeadPlan]:
    """Settings that save time or cost; the first is exact."""
    found: list[HeadPlan] = [ExactHead(n=head.n, m=head.m)]
    found += _lists(head, seed)
    for method in _methods(head):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of methods that turn out not to suit this head
            found.append(plan_heads(method, [head]))
    return found[:1] + [
        with_range(plan, [head]) if plan.scores is None else plan
        for plan in found[1:]
        if not isinstance(plan, ExactHead) and _saves(plan, head, minimise)
    ]


def _lists(head: Head, seed: int) -> list[HeadPlan]:
    found: list[HeadPlan] = []
    half = settings_for(head, None, None).block // 2
    for block, shares in ((None, SHARES), (half, FINE_SHARES)):
        if block is not None and (block < FINEST or head.query.is_cuda):
            continue
        search = ListSearch.of(head, block, None, seed, 1.0)
        if isinstance(search, ListSearch):
            found += search.with_open_leaves(shares)
    return found


def _saves(plan: HeadPlan, head: Head, minimise: str) -> bool:
    """Whether a setting is predicted to be faster than exact attention: at the head's length, or,
    where cost is minimised, at the longest of `LENGTHS`. On a GPU what has no kernels is not."""
    if head.query.is_cuda and has_triton():
        kind = EVALUATORS.get(plan.kind)
        if kind is None or evaluator(kind).refusal(plan) is not None:
            return False
    if minimise == "time":
        return plan.speedup > FASTER
    longest = _with_tokens(head, max(head.n, *LENGTHS))
    exact = exact_seconds(longest)
    return plan.cost < 1 and exact > FASTER * _seconds_at(plan, longest, exact)


def _methods(head: Head) -> list[Method]:
    """Methods that are predicted to be faster in the best case."""
    found: list[Method] = []
    if fitted_work(head, FEWEST, 0, 0).speedup(head) > FASTER:
        found += FITTED
    for degree, methods in CERTIFIED.items():
        if polynomial_work(head, head.n, head.m, degree).speedup(head) > FASTER:
            found += methods
    return found


def rungs(problem: Problem, minimise: str, seed: int) -> list[list[HeadPlan]]:
    """The settings of each head of a layer, by its first batch element."""
    with torch.no_grad():
        heads = (problem.head(0, number) for number in range(problem.heads))
        return [settings_of(head, minimise, seed) for head in heads]


def layer_plan(problem: Problem, heads: Sequence[HeadPlan]) -> Plan:
    """The plan of a layer whose heads have these settings."""
    return Plan(Auto(), problem.dim, tuple(heads), problem.given_scale, problem.is_causal)


def min_tokens(problem: Problem, heads: Sequence[HeadPlan]) -> int:
    """Tokens from which on a layer is predicted to be faster than exact attention, a power of
    two; lists need several windows."""
    lists = [head.lists for head in heads if isinstance(head, ListHead)]
    least = max([LEAST, *(2 * max(x.window, 2 * x.block) for x in lists)])
    tokens = 1 << (least - 1).bit_length()
    while tokens < max(problem.n, least):
        if speedup_at(problem, heads, tokens) > FASTER:
            break
        tokens *= 2
    return tokens


def speedup_at(problem: Problem, heads: Sequence[HeadPlan], tokens: int) -> float:
    """Predicted time of exact attention over that of these heads, with so many tokens."""
    like = _with_tokens(problem.head(0, 0), tokens)
    exact = exact_seconds(like)
    return len(heads) * exact / sum(_seconds_at(head, like, exact) for head in heads)


def _with_tokens(head: Head, tokens: int) -> Head:
    """A head of so many tokens without entries, for predictions."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(tokens, -1)

    query, key, value = wide(head.query), wide(head.key), wide(head.value)
    return replace(head, query=query, key=key, value=value, key_log_weight=None)


def _seconds_at(plan: HeadPlan, head: Head, exact: float) -> float:
    if isinstance(plan, ListHead):
        share = plan.keys / max(1, plan.m)
        opened = math.ceil(share * head.m / plan.lists.leaf)
        return list_work(head, plan.lists, opened).seconds(head)
    if isinstance(plan, FittedHead):
        return fitted_work(head, plan.fitted.features, 0, 0).seconds(head)
    if isinstance(plan, PolynomialHead):
        rows = keys = 0
        if isinstance(plan, ThresholdHead):
            rows, keys = (x * head.n // max(1, plan.n) for x in plan.large)
        small = polynomial_work(head, head.n - rows, head.m - keys, plan.degree)
        work = small + pair_work(head, rows * head.m) + pair_work(head, (head.n - rows) * keys)
        return work.seconds(head)
    return exact / plan.speedup
