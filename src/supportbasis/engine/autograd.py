"""Attention as operators of PyTorch: what autograd, ``torch.compile`` and ``torch.func`` see.

Two operators wrap the engine, one for each direction. Everything that depends on entries happens
inside them: checks, supports, warnings. So a graph around a call contains tensors only. A plan is a
constant of the call, which the operators find by its handle, a string. Outside of graphs the same
two functions run as an `autograd.Function`, which `torch.func` needs and which does not load the
compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..components.cotangent import SavedForward
from ..plans import Plan
from ..problem.checks import is_tracing, refuse_forward, refuse_second
from ..problem.problem import Kept, Problem, in_rows
from ..problem.result import Outcome
from . import dispatch, sdpa
from .call_checks import check_output, checked, reports_later, warn_about

_in_graphs: dict[str, Plan] = {}  # a compiled graph holds a handle, so its plan has to live on


def is_recorded(problem: Problem) -> bool:
    """Whether gradients are recorded; within a transform of `torch.func` they may be."""
    return problem.requires_grad or (is_tracing() and not torch.compiler.is_compiling())


def run(problem: Problem, plan: Plan, implementation: str = "auto") -> Outcome:
    """`compute` with gradients: of output and lse by query, key, value and key log-weights."""
    inputs: tuple[Any, ...] = (
        problem.query,
        problem.key,
        problem.value,
        problem.key_log_weight,
        problem.mask,
        plan.handle,
        implementation,
        problem.scale,
        problem.is_causal,
    )
    operator: Any = _attention
    if not torch.compiler.is_compiling():
        operator = _Attention.apply
        inputs = (*inputs, None if is_tracing() else Kept())
    output, lse, fallback, counts = operator(*inputs)
    invalid_rows, fallback_rows, rounding = counts.unbind(0)
    zero = torch.zeros_like(rounding)
    return Outcome(output, lse, zero, invalid_rows, fallback_rows, rounding, fallback)


def compute(problem: Problem, plan: Plan, implementation: str) -> Outcome:
    """Run every head, through kernels where they take it, and warn about failed rows.

    Rows made by kernels are not checked, since that would synchronise with the host.
    """
    outcome = None
    if plan.is_exact and implementation == "auto" and sdpa.can_run(problem, need_lse=True):
        outcome = exact_outcome(problem)
    if outcome is not None:
        check_output(problem, outcome.output)
        return outcome
    if reports_later(problem, plan, implementation):
        from ..cuda.runtime.range_check import RangeCheck

        RangeCheck.of(plan, problem.query.device, problem.batch).start(problem)
    groups = dispatch.groups(problem, plan, implementation)
    outcome = dispatch.run(problem, groups)
    if any(group.kind is None for group in groups):
        warn_about(problem, plan, outcome)
    return outcome


def exact_outcome(problem: Problem) -> Outcome | None:
    """All heads by PyTorch's kernel for CPUs, where it takes them."""
    pair = sdpa.sdpa_with_lse(problem)
    if pair is None:
        return None
    lse, noise = pair[1], sdpa.sdpa_noise(problem)
    zero, none = torch.zeros_like(noise), lse.new_zeros(lse.shape, dtype=torch.bool)
    return Outcome(*pair, zero, zero, zero, noise, none)


TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? key_log_weight, Tensor? mask"
SETTINGS = "str plan, str implementation, float scale, bool is_causal"


def _run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and lse, which rows fell back to exact sums, and counts [3, batch, heads]."""
    problem, handle, implementation = _call_of(*inputs)
    plan = _plan_of(problem, handle, implementation)
    with torch.autocast(problem.query.device.type, enabled=False):
        outcome = compute(problem, plan, implementation)
    counts = torch.stack([outcome.invalid_rows, outcome.fallback_rows, outcome.rounding])
    made = (outcome.output, outcome.lse, outcome.fallback, counts)
    output, lse, fallback, counts = (x.contiguous() for x in made)
    return output, lse, fallback, counts


def _plan_of(problem: Problem, handle: str, implementation: str) -> Plan:
    """The plan that an operator runs, forward and backward. Outside of graphs and transforms the
    call was checked before. Inside, heads that leave their range are exact on a CPU; on a GPU they
    are only warned about, since a report may come between forward and backward."""
    plan = Plan.known(handle)
    if problem.kept is not None:
        return plan
    instead = checked(problem, plan, implementation)
    return plan if reports_later(problem, plan, implementation) else instead


_attention = torch.library.custom_op(
    "supportbasis::attention",
    _run_forward,
    mutates_args=(),
    schema=f"({TENSORS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_attention.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, handle, _ = _call_of(*inputs)
    _in_graphs[handle] = Plan.known(handle)
    query, rows = problem.query, problem.query.shape[:3]
    return (
        query.new_empty(*rows, problem.value.shape[-1]),
        query.new_empty(rows, dtype=problem.dtype),
        query.new_empty(rows, dtype=torch.bool),
        query.new_empty(3, *rows[:2], dtype=problem.dtype),
    )


def _run_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    fallback: Tensor,
    for_weights: bool,
    *inputs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, if asked for, of the key log-weights (else empty)."""
    problem, handle, implementation = _call_of(*inputs)
    saved = SavedForward(in_rows(output), lse, fallback, in_rows(grad), grad_lse, for_weights)
    with torch.autocast(problem.query.device.type, enabled=False):
        plan = _plan_of(problem, handle, implementation)
        total = dispatch.gradients(problem, dispatch.groups(problem, plan, implementation), saved)
    weight = lse.new_empty(0) if total.key_log_weight is None else total.key_log_weight
    query, key, value = (
        made.to(x.dtype).contiguous()
        for made, x in zip((total.query, total.key, total.value), inputs[:3], strict=True)
    )
    return query, key, value, weight.contiguous()


_backward = torch.library.custom_op(
    "supportbasis::attention_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor output, Tensor lse, Tensor fallback, "
    f"bool for_weights, {TENSORS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(
    grad: Tensor, grad_lse: Any, output: Any, lse: Tensor, fallback: Any, for_weights: bool,
    *inputs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value = (x.new_empty(x.shape) for x in inputs[:3])
    weight = (*query.shape[:2], key.shape[2]) if for_weights else (0,)
    return query, key, value, lse.new_empty(weight)


def _call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_log_weight: Tensor | None,
    mask: Tensor | None,
    plan: str,
    implementation: str,
    scale: float,
    is_causal: bool,
    kept: Kept | None = None,
) -> tuple[Problem, str, str]:
    """Inputs of both operators as a problem, the handle of its plan and the implementation."""
    leading = tuple(query.shape[:2])
    problem = Problem(
        query, key, value, key_log_weight, None, mask, 0.0, is_causal, scale, True, leading, kept
    )
    return problem, plan, implementation


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.settings, ctx.kept = inputs[:5], inputs[5:9], inputs[9:]
    ctx.plan = Plan.known(ctx.settings[0])  # kept until the backward pass
    ctx.for_weights = ctx.needs_input_grad[3]
    ctx.save_for_backward(*tensors, *output[:3])
    ctx.set_materialize_grads(False)


def _gradients(operator: Any, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, grad_lse = grads[:2]
    if grad is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    *tensors, output, lse, fallback = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(output)
    *parts, weight = operator(
        grad, grad_lse, output, lse, fallback, ctx.for_weights, *tensors, *ctx.settings, *ctx.kept
    )
    rest = (None,) * (len(ctx.needs_input_grad) - 4)
    return (*parts, weight if ctx.for_weights else None, *rest)


_attention.register_autograd(partial(_gradients, _backward), setup_context=_save)
_backward.register_autograd(refuse_second)


def _one_by_one(
    operator: Any, info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """``vmap``: a plan belongs to given heads, so the operator is called for each slice."""
    results = [
        operator(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


class _Attention(torch.autograd.Function):
    """The forward operator outside of graphs."""

    forward = staticmethod(_run_forward)
    setup_context = staticmethod(_save)
    jvp = staticmethod(refuse_forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _gradients(_AttentionBackward.apply, ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        return _one_by_one(_Attention.apply, info, in_dims, *args)


class _AttentionBackward(torch.autograd.Function):
    """The backward pass of `_Attention`, which has no backward pass of its own."""

    forward = staticmethod(_run_backward)
    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        return _one_by_one(_AttentionBackward.apply, info, in_dims, *args)
