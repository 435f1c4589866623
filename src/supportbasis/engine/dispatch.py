"""Which heads run through which kernels, forward and backward.

Heads that the same kernels take are a group: one problem with one plan, cut out of the call unless
they are all of it. Heads that no kernels take run through the component engine (`execute`), unless
the caller asked for kernels; then the call raises and says why. The choice depends on shapes,
dtypes, the device and the plan, never on entries, so forward and backward choose the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from ..components.cotangent import Gradients, SavedForward
from ..errors import InputError
from ..plans import HeadPlan, Plan
from ..problem.caching import WeakCache
from ..problem.problem import Outcome, Problem
from .execute import backward, execute

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # entries of a token or a value
EVALUATORS = {  # of a kind of head, a module of `supportbasis.cuda`
    "exact": "exact.exact_heads",
    "polynomial": "polynomial.threshold_heads",
    "single-threshold": "polynomial.threshold_heads",
    "lists": "lists.list_heads",
    "fitted": "fitted.fitted_heads",
}
# all heads at once, but by PyTorch operations; causal heads run through the component engine
WITHOUT_KERNELS = (EVALUATORS["fitted"],)

# output in the input dtype, lse in float32, and which rows failed and were computed exactly, where
# an evaluator checks for them; contiguous
Forward = tuple[Tensor, Tensor, Tensor | None]


class Evaluator(Protocol):
    """A module with kernels for some kinds of heads: why it refuses a head (None: it does not),
    the key of heads that run together, output and lse of all rows, and gradients."""

    def refusal(self, head: HeadPlan) -> str | None: ...

    def family(self, head: HeadPlan) -> object: ...

    def forward(self, problem: Problem, plan: Plan) -> Forward: ...

    def gradients(self, problem: Problem, plan: Plan, saved: SavedForward) -> Gradients: ...


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that run together; ``kind`` None: through the component engine."""

    kind: str | None
    heads: tuple[int, ...]
    plan: Plan  # of these heads
    index: Tensor | None = None  # the heads on the device; None: all of them, as they come


_groups: WeakCache[Plan, tuple[torch.device, str, bool, bool], tuple[Group, ...]] = WeakCache()


def groups(problem: Problem, plan: Plan, implementation: str) -> tuple[Group, ...]:
    """How the heads of a call run; raises if kernels were asked for and cannot take all of it."""
    reason = refusal(problem, implementation)
    if implementation == "triton" and reason is not None:
        raise InputError(f"implementation='triton' cannot run this call: {reason}")
    how = (problem.query.device, implementation, reason is None, problem.is_causal)
    return _groups.get(plan, how, lambda: _grouped(plan, *how))


def label(found: Sequence[Group]) -> str:
    """The label of the implementation that runs: eager, triton, or how many heads of each."""
    eager = sum(len(group.heads) for group in found if group.kind in (None, *WITHOUT_KERNELS))
    total = sum(len(group.heads) for group in found)
    if not 0 < eager < total:
        return "eager" if eager or not total else "triton"
    return f"triton for {total - eager} of {total} heads, eager for the others"


def refusal(problem: Problem, implementation: str) -> str | None:
    """Why no head of this call can run through kernels, or None."""
    query, widest = problem.query, max(problem.dim, problem.value_dim)
    if implementation == "eager":
        return "the caller asked for it"
    if not has_triton():
        return "Triton is not installed (pip install 'supportbasis[triton]')"
    if query.device.type != "cuda" and not (implementation == "triton" and interpreted()):
        return f"the tensors are on {query.device}, not on a CUDA device"
    if query.dtype not in DTYPES:
        return f"the dtype is {query.dtype}; kernels take float32, bfloat16 and float16"
    if not problem.normalise:
        return "kernel sums have no kernels"
    if problem.needs_exact:
        return problem.needs_exact
    if widest > WIDEST:
        return f"a token has {widest} entries, more than {WIDEST}"
    if 0 in (*query.shape, *problem.value.shape):
        return "there is nothing to do"
    return None


@lru_cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _grouped(
    plan: Plan, device: torch.device, implementation: str, possible: bool, causal: bool
) -> tuple[Group, ...]:
    """Heads by evaluator (None: none takes them), and by the key of heads that run together."""
    found: dict[tuple[str | None, object], list[int]] = {}
    for number, head in enumerate(plan.heads):
        kind = EVALUATORS.get(head.kind) if possible else None
        if kind in WITHOUT_KERNELS and (causal or implementation == "triton"):
            kind = None
        refused = evaluator(kind).refusal(head) if kind else f"{head.kind} heads have no kernels"
        if refused is not None and implementation == "triton":
            raise InputError(f"implementation='triton' cannot run head {number}: {refused}")
        family = (None, None) if not kind or refused else (kind, evaluator(kind).family(head))
        found.setdefault(family, []).append(number)
    if len(found) <= 1:
        kind, _ = next(iter(found), (None, None))
        return (Group(kind, tuple(range(len(plan.heads))), plan),)
    groups = []
    for (kind, _), heads in found.items():
        part, index = plan.with_heads(plan.heads[i] for i in heads), torch.tensor(heads)
        groups.append(Group(kind, tuple(heads), part, index.to(device)))
    return tuple(groups)


def evaluator(kind: str) -> Evaluator:
    return cast(Evaluator, import_module(f"supportbasis.cuda.{kind}"))


def run(problem: Problem, found: Sequence[Group]) -> Outcome:
    """Run the groups of a call."""
    if len(found) == 1:
        kind, plan = found[0].kind, found[0].plan
        if kind is None:
            return execute(problem, plan)
        output, lse, failed = evaluator(kind).forward(problem, plan)
        invalid = zero = lse.new_zeros(lse.shape[:2])
        if failed is None:
            failed = zero.bool().unsqueeze(-1).expand(lse.shape)
        else:
            invalid = failed.sum(-1).to(zero.dtype)
        return Outcome(output, lse, zero, invalid, zero, failed)
    total = Outcome.empty(problem)
    for group in found:
        index = cast(Tensor, group.index)  # several groups have one each
        part = run(of_heads(problem, index), (group,))
        for name, whole in vars(total).items():
            whole.index_copy_(1, index, getattr(part, name))
    return total


def of_heads(problem: Problem, index: Tensor) -> Problem:
    """Some heads, each with keys of its own."""
    weight, own = problem.key_log_weight, index // problem.group
    key, value = (x.index_select(1, own) for x in (problem.key, problem.value))
    query = problem.query.index_select(1, index)
    weight = None if weight is None else weight.index_select(1, index)
    return replace(problem, query=query, key=key, value=value, key_log_weight=weight, kept=None)


def gradients(problem: Problem, found: Sequence[Group], saved: SavedForward) -> Gradients:
    """Gradients of query, key, value and, if asked for, of the key log-weights."""
    if len(found) == 1:
        kind, plan = found[0].kind, found[0].plan
        run_backward = backward if kind is None else evaluator(kind).gradients
        return run_backward(problem, plan, saved)
    shape, sizes = (problem.batch, problem.heads), (problem.query, problem.key, problem.value)
    query, key, value = (x.new_zeros(*shape, *x.shape[2:], dtype=problem.dtype) for x in sizes)
    weight = query.new_zeros(*shape, problem.m) if saved.for_weights else None
    total = Gradients(query, key, value, weight)
    for group in found:
        index = cast(Tensor, group.index)
        own = saved.map(partial(torch.index_select, dim=1, index=index))
        part = gradients(of_heads(problem, index), (group,), own)
        for name, whole in vars(total).items():
            piece = getattr(part, name)
            if whole is not None and piece is not None:
                whole.index_copy_(1, index, piece.to(whole.dtype))
    return replace(total, key=by_key_head(key, problem), value=by_key_head(value, problem))


def by_key_head(x: Tensor, problem: Problem) -> Tensor:
    """Sum the gradients of keys or values over the query heads that share them."""
    return x if problem.group == 1 else x.unflatten(1, (-1, problem.group)).sum(2)
