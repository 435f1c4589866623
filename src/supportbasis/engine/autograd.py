"""Runs a call: by SDPA, as an operator of PyTorch, or directly.

Two operators wrap the engine, one for each direction, for autograd, ``torch.compile`` and
``torch.func``. Everything that depends on entries happens inside them: checks, supports, warnings.
So a graph around a call contains tensors only. A plan is a constant of the call, which the
operators find by its handle, a string. Outside of graphs the same two functions run as an
`autograd.Function`, which `torch.func` needs and which does not load the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..components.cotangent import SavedForward
from ..plans import Plan
from ..problem.checks import check_bias, check_finite, is_tracing, refuse_forward, refuse_second
from ..problem.problem import Kept, Outcome, Problem, in_rows
from . import dispatch, sdpa
from .execute import warn_about
from .ranges import checked, reports_later

_in_graphs: dict[str, Plan] = {}  # a compiled graph holds a handle, so its plan has to live on


def run(problem: Problem, plan: Plan, need_lse: bool, implementation: str = "auto") -> Outcome:
    """Run a plan: by SDPA if every head is exact, as an operator if the call is differentiated or
    traced, else directly."""
    with torch.autocast(problem.query.device.type, enabled=False):
        if sdpa.can_run(problem, plan, need_lse, implementation):
            return sdpa.attend(problem, plan, need_lse)
        if problem.requires_grad or is_tracing():
            return as_operator(problem, plan, implementation)
        return compute(problem, plan, implementation)


def as_operator(
    problem: Problem, plan: Plan, implementation: str = "auto", kept: Kept | None = None
) -> Outcome:
    """`compute` with gradients: of output and lse by query, key, value and key log-weights. A
    backward pass by other components than those that ran gives ``kept`` of its own."""
    p, operator = problem, cast(Any, _attention)
    last: list[Kept | None] = []
    if kept is not None or not torch.compiler.is_compiling():
        operator, last = _Attention.apply, [Kept() if kept is None and not is_tracing() else kept]
    tensors = (p.query, p.key, p.value, p.key_log_weight, p.mask)
    settings = (plan.handle, implementation, p.scale, p.is_causal)
    output, lse, fallback, counts = operator(*tensors, *settings, *last)
    invalid_rows, rounding = counts.unbind(0)
    return Outcome(output, lse, torch.zeros_like(rounding), invalid_rows, rounding, fallback)


def compute(problem: Problem, plan: Plan, implementation: str) -> Outcome:
    """Run every head, through kernels where they take it, and warn about failed rows.

    Rows made by kernels are not checked, since that would synchronise with the host."""
    if sdpa.is_fused(problem) and sdpa.can_run(problem, plan, True, implementation):
        return sdpa.attend(problem, plan, need_lse=True)
    groups = dispatch.groups(problem, plan, implementation)
    with torch.cuda.device_of(problem.query):  # kernels run on the current device
        outcome = dispatch.run(problem, groups)
    if any(group.kind is None for group in groups):
        warn_about(problem, plan, outcome)
    return outcome


TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? key_log_weight, Tensor? mask"
SETTINGS = "str plan, str implementation, float scale, bool is_causal"


def _run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, handle, implementation = _call_of(*inputs)
    plan = _plan_of(problem, handle, implementation)
    with torch.autocast(problem.query.device.type, enabled=False):
        outcome = compute(problem, plan, implementation)
    return _as_tensors(outcome)


def _as_tensors(outcome: Outcome) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, rows that fell back to exact sums; failed rows, rounding [2, batch, heads]."""
    counts = torch.stack([outcome.invalid_rows, outcome.rounding])
    output, lse, fallback = outcome.output, outcome.lse, outcome.fallback
    return output.contiguous(), lse.contiguous(), fallback.contiguous(), counts


def _plan_of(problem: Problem, handle: str, implementation: str) -> Plan:
    """The plan that an operator runs, forward and backward. Outside of graphs and transforms the
    call was checked before. Inside, heads that leave their range are exact on a CPU; on a GPU they
    are only warned about, since a report may come between forward and backward."""
    plan = Plan.known(handle)
    if problem.kept is not None:
        return plan
    if problem.query.is_cpu:  # a GPU would synchronise with the host
        check_finite(query=problem.query, key=problem.key, value=problem.value)
        if problem.key_log_weight is not None:
            check_bias(problem.key_log_weight)
    instead = checked(problem, plan, implementation)
    return plan if reports_later(problem, plan, implementation) else instead


_attention = torch.library.custom_op(
    "supportbasis::attention", _run_forward, mutates_args=(),
    schema=f"({TENSORS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_attention.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, handle, _ = _call_of(*inputs)
    _in_graphs[handle] = Plan.known(handle)
    return _as_tensors(Outcome.empty(problem))


def _run_backward(
    grad: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, if asked for, of the key log-weights (else empty)."""
    fallback, for_weights, *inputs = others
    problem, handle, implementation = _call_of(*inputs)
    saved = SavedForward(in_rows(output), lse, fallback, in_rows(grad), grad_lse, for_weights)
    autocast = torch.autocast(problem.query.device.type, enabled=False)
    with autocast, torch.cuda.device_of(problem.query):
        plan = _plan_of(problem, handle, implementation)
        total = dispatch.gradients(problem, dispatch.groups(problem, plan, implementation), saved)
    pairs = zip((total.query, total.key, total.value), inputs[:3], strict=True)
    query, key, value = (grad.to(x.dtype).contiguous() for grad, x in pairs)
    weight = lse.new_empty(0) if total.key_log_weight is None else total.key_log_weight
    return query, key, value, weight.contiguous()


_backward = torch.library.custom_op(
    "supportbasis::attention_backward", _run_backward, mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor output, Tensor lse, Tensor fallback, "
    f"bool for_weights, {TENSORS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_backward.register_fake
def _(grad: Any, grad_lse: Any, output: Any, lse: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _, for_weights, *inputs = others
    query, key, value = (x.new_empty(x.shape) for x in inputs[:3])
    weight = (*query.shape[:2], key.shape[2]) if for_weights else (0,)
    return query, key, value, lse.new_empty(weight)


def _call_of(*inputs: Any) -> tuple[Problem, str, str]:
    """Inputs of both operators as a problem, the handle of its plan and the implementation."""
    query, key, value, weight, mask, handle, implementation, scale, is_causal, *kept = inputs
    factors, last = (weight, None), (kept or [None])[0]
    call = Problem(query, key, value, *factors, scale, is_causal, True, mask, kept=last)
    return call, handle, implementation


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.settings = inputs[:5], inputs[5:]
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
    saved = (output, lse, fallback, ctx.for_weights, *tensors)
    *parts, weight = operator(grad, grad_lse, *saved, *ctx.settings)
    rest = (None,) * (len(ctx.needs_input_grad) - 4)
    return (*parts, weight if ctx.for_weights else None, *rest)


_attention.register_autograd(partial(_gradients, _backward), setup_context=_save)
_backward.register_autograd(refuse_second)


class _Operator(torch.autograd.Function):
    """An operator outside of graphs."""

    jvp = staticmethod(refuse_forward)

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        """A plan belongs to given heads, so the operator is called for each slice; for an empty
        batch with zeros, whose results have the right shapes."""
        apply: Any = cls.apply
        size, pairs = info.batch_size, list(zip(args, in_dims, strict=True))

        def slices(x: Any, dim: int) -> list[Tensor]:
            return x.unbind(dim) if size else [x.new_zeros(x.movedim(dim, 0).shape[1:])]

        each = ([x] * max(1, size) if dim is None else slices(x, dim) for x, dim in pairs)
        results = [apply(*given) for given in zip(*each, strict=True)]
        stacked = tuple(torch.stack(parts)[:size] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)


class _Attention(_Operator):
    forward = staticmethod(_run_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _gradients(_AttentionBackward.apply, ctx, *grads)


class _AttentionBackward(_Operator):
    """The backward pass of `_Attention`, which has no backward pass of its own."""

    forward = staticmethod(_run_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(refuse_second)
