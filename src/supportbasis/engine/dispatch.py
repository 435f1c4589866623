"""Which heads run through which kernels, and the way there and back.

Heads that the same kernels take are a batch: one problem with one plan, cut out of the call unless
they are all of it. Heads that no kernels take run through the component engine (`execute`), unless
the caller asked for kernels; then the call is refused in words. What is decided depends on shapes,
dtypes, the device and the plan alone, never on entries: the way back decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from ..components.cotangent import Gradients
from ..errors import InputError
from ..plans.plan import HeadPlan, Plan
from ..problem.problem import Problem
from ..problem.result import Outcome
from .backward import backward
from .execute import execute

IMPLEMENTATIONS = ("auto", "eager", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # entries of a token or a value
EVALUATORS = {  # of a kind of head, a module of `supportbasis.cuda`
    "exact": "exact.exact_heads",
    "polynomial": "polynomial.threshold_heads",
    "single-threshold": "polynomial.threshold_heads",
    "lists": "lists.list_heads",
    "fitted": "fitted.fitted_heads",
}
PLAIN = (EVALUATORS["fitted"],)  # evaluators that have all heads at once, but no kernels


# output in the input dtype and lse in float32, contiguous; and which rows were lost and computed
# exactly instead, where an evaluator looks for them
Forward = tuple[Tensor, Tensor, Tensor | None]


class Evaluator(Protocol):
    """A module with kernels for some kinds of heads; its plan's ``memory`` is its own to use."""

    def refusal(self, head: HeadPlan) -> str | None:
        """Why this head cannot run, or None."""

    def family(self, head: HeadPlan) -> object:
        """Heads with the same family run together."""

    def forward(self, problem: Problem, plan: Plan) -> Forward:
        """Output and lse of all rows."""

    def gradients(
        self,
        problem: Problem,
        plan: Plan,
        output: Tensor,
        lse: Tensor,
        rescued: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
        for_weights: bool,
    ) -> Gradients:
        """Gradients of query, key, value and key log-weights, as `backward.backward`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Heads that run together; ``kind`` None: through the component engine."""

    kind: str | None
    heads: tuple[int, ...]  # batch * num_heads + head
    plan: Plan  # of these heads
    index: Tensor | None = None  # the heads on the device; None: all of them, as they come

    @property
    def evaluator(self) -> Evaluator:
        assert self.kind is not None
        return _evaluator(self.kind)


def check_implementation(implementation: object) -> str:
    if implementation not in IMPLEMENTATIONS:
        raise InputError(
            f"implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got "
            f"{implementation!r}"
        )
    return str(implementation)


def batches(problem: Problem, plan: Plan, implementation: str) -> tuple[Batch, ...]:
    """How the heads of a call run; raises if kernels were asked for and cannot take all of it."""
    reason = None if implementation != "eager" else "the caller asked for it"
    reason = reason or refusal(problem, implementation)
    if implementation == "triton" and reason is not None:
        raise InputError(f"implementation='triton' cannot run this call: {reason}")
    key = ("batches", problem.query.device, implementation, reason is None)
    if key not in plan.memory:
        plan.memory[key] = _batches(problem, plan, implementation, reason is None)
    found = plan.memory[key]
    assert isinstance(found, tuple)
    return found


def said(found: Sequence[Batch]) -> str:
    """What runs, in words."""
    eager = sum(len(batch.heads) for batch in found if batch.kind in (None, *PLAIN))
    total = sum(len(batch.heads) for batch in found)
    if not 0 < eager < total:
        return "eager" if eager or not total else "triton"
    return f"triton for {total - eager} of {total} heads, eager for the others"


def refusal(problem: Problem, implementation: str) -> str | None:
    """Why no head of this call can run through kernels, or None."""
    query, value = problem.query, problem.value
    if not has_triton():
        return "Triton is not installed (pip install 'supportbasis[triton]')"
    if query.device.type != "cuda" and not (implementation == "triton" and _interpreted()):
        return f"the tensors are on {query.device}, not on a CUDA device"
    if query.dtype not in DTYPES:
        return f"the dtype is {query.dtype}; kernels take float32, bfloat16 and float16"
    if not problem.normalise:
        return "kernel sums have no kernels"
    if problem.needs_exact:
        return problem.needs_exact
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"a token has {max(query.shape[-1], value.shape[-1])} entries, more than {WIDEST}"
    if 0 in (*query.shape, *value.shape):
        return "there is nothing to do"
    return None


@lru_cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    from ..cuda.runtime.language import interpreted

    return interpreted()


def _batches(
    problem: Problem, plan: Plan, implementation: str, possible: bool
) -> tuple[Batch, ...]:
    groups: dict[tuple[str, object] | None, list[int]] = {}
    for number, head in enumerate(plan.heads):
        kind = EVALUATORS.get(head.kind) if possible else None
        if possible:
            reason = f"{head.kind} heads have no kernels"
            if kind in PLAIN and implementation == "triton":
                kind = None
            refused = reason if kind is None else _evaluator(kind).refusal(head)
            if refused is not None and implementation == "triton":
                place = (number // plan.num_heads, number % plan.num_heads)
                raise InputError(
                    f"implementation='triton' cannot run head {list(place)}: {refused}"
                )
            kind = None if refused else kind
        family = None if kind is None else (kind, _evaluator(kind).family(head))
        groups.setdefault(family, []).append(number)
    if len(groups) <= 1:
        only = next(iter(groups), None)
        return (Batch(only and only[0], tuple(range(len(plan.heads))), plan),)
    return tuple(
        Batch(
            family and family[0],
            tuple(heads),
            plan.of_heads(tuple(plan.heads[i] for i in heads), (1, len(heads))),
            torch.tensor(heads, device=problem.query.device),
        )
        for family, heads in groups.items()
    )


@lru_cache
def _evaluator(kind: str) -> Evaluator:
    module: Evaluator = import_module(f"supportbasis.cuda.{kind}")
    return module


# ---- there -----------------------------------------------------------------------------------


def run(problem: Problem, found: Sequence[Batch]) -> Outcome:
    """Run the batches of a call."""
    if len(found) == 1:
        return _outcome(problem, found[0])
    new, shape = problem.query.new_zeros, (problem.batch, problem.heads)
    log_scale, invalid, rescued, rounding = new(4, *shape, dtype=problem.dtype).unbind(0)
    total = Outcome(
        new(*shape, problem.n, problem.value.shape[-1]),
        new(*shape, problem.n, dtype=problem.dtype),
        log_scale,
        invalid,
        rescued,
        rounding,
        new(*shape, problem.n, dtype=torch.bool),
    )
    for batch in found:
        assert batch.index is not None
        part = _outcome(cut_out(problem, batch.index), batch)
        for name in vars(total):
            whole = getattr(total, name).flatten(0, 1)
            whole.index_copy_(0, batch.index, getattr(part, name).flatten(0, 1))
    return total


def _outcome(problem: Problem, batch: Batch) -> Outcome:
    if batch.kind is None:
        return execute(problem, batch.plan)
    output, lse, lost = batch.evaluator.forward(problem, batch.plan)
    zero, none = _nothing(batch.plan, lse)
    if lost is None:
        return Outcome(output, lse, zero, zero, zero, zero, none.expand(lse.shape))
    count = lost.sum(-1).to(zero.dtype)
    return Outcome(output, lse, zero, count, count.clone(), zero, lost)


def _nothing(plan: Plan, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A zero for each head, and no row; kept, since every launch counts in a short call."""
    key = ("nothing", lse.device)
    if key not in plan.memory:
        zero = lse.new_zeros(lse.shape[:2])
        plan.memory[key] = (zero, zero.bool().unsqueeze(-1))
    zero, none = cast(tuple[Tensor, Tensor], plan.memory[key])
    return zero, none


def cut_out(problem: Problem, index: Tensor) -> Problem:
    """Some heads as one batch, each with keys of its own."""
    key_index = index // problem.heads * problem.key.shape[1]
    key_index += index % problem.heads // problem.group

    bias = problem.key_log_weight
    return Problem(
        heads_of(problem.query, index),
        heads_of(problem.key, key_index),
        heads_of(problem.value, key_index),
        None if bias is None else heads_of(bias, index),
        None,
        None,
        0.0,
        problem.is_causal,
        problem.scale,
        True,
        (1, len(index)),
    )


def heads_of(x: Tensor, index: Tensor) -> Tensor:
    """Some heads of a tensor [batch, heads, ...] as one batch."""
    return x.flatten(0, 1).index_select(0, index).unsqueeze(0)


# ---- and back --------------------------------------------------------------------------------


def gradients(
    problem: Problem,
    found: Sequence[Batch],
    output: Tensor,
    lse: Tensor,
    rescued: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    """Gradients of query, key, value and, if asked for, of the key log-weights."""
    if len(found) == 1:
        return _gradients(
            problem, found[0], output, lse, rescued, grad,
            grad_lse=grad_lse, for_weights=for_weights,
        )  # fmt: skip
    shape, new = (problem.batch, problem.heads), problem.query.new_zeros
    parts = [
        new(*shape, x.shape[2], x.shape[3], dtype=problem.dtype)
        for x in (problem.query, problem.key, problem.value)
    ]
    weight = new(*shape, problem.m, dtype=problem.dtype) if for_weights else None
    for batch in found:
        assert batch.index is not None
        some = [heads_of(x, batch.index) for x in (output, lse, rescued, grad)]
        some_lse = None if grad_lse is None else heads_of(grad_lse, batch.index)
        smaller = cut_out(problem, batch.index)
        part = _gradients(smaller, batch, *some, grad_lse=some_lse, for_weights=for_weights)
        made = [part.query, part.key, part.value]
        pairs = list(zip(parts, made, strict=True))
        if weight is not None and part.key_log_weight is not None:
            pairs.append((weight, part.key_log_weight))
        for whole, piece in pairs:
            whole.flatten(0, 1).index_copy_(0, batch.index, piece.flatten(0, 1).to(whole.dtype))
    query, key, value = parts
    return Gradients(query, by_key_head(key, problem), by_key_head(value, problem), weight)


def by_key_head(x: Tensor, problem: Problem) -> Tensor:
    """Keys and values that heads share get the gradients of all of them."""
    return x if problem.group == 1 else x.unflatten(1, (-1, problem.group)).sum(2)


def _gradients(
    problem: Problem,
    batch: Batch,
    output: Tensor,
    lse: Tensor,
    rescued: Tensor,
    grad: Tensor,
    *,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    if batch.kind is None:
        return backward(
            problem, batch.plan, output, lse, rescued, grad, grad_lse, for_weights=for_weights
        )
    return batch.evaluator.gradients(
        problem, batch.plan, output, lse, rescued, grad, grad_lse, for_weights
    )
