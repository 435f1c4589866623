"""The gradient of a layer of one or several heads, causal or not, from a loss or from above."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..methods import Method
from ..methods.planning import make_plan
from ..plans import Plan
from ..problem.checks import check_finite
from ..problem.rounding import compute_dtype
from ..problem.validation import attention_problem
from .closed_attention import closed_form_attention
from .loss_result import AttentionLossGradient


def layer_gradient(
    x: Tensor,
    weight_qk: Tensor | Sequence[Tensor],
    weight_v: Tensor,
    target: Tensor | None,
    upstream: Tensor | None,
    scale: float | None,
    method: Method,
    is_causal: bool,
    input_gradient: bool,
) -> AttentionLossGradient:
    """As `attention_loss_gradient`; weights [d, h], or [heads, d, h] of several heads."""
    pair = [weight_qk] if isinstance(weight_qk, Tensor) else list(weight_qk)
    given = {"x": x, "weight_v": weight_v, **{f"weight_qk[{i}]": w for i, w in enumerate(pair)}}
    goal = target if upstream is None else upstream
    name = "target" if upstream is None else "upstream"
    assert goal is not None
    check_finite(**given, **{name: goal})
    dtype = compute_dtype(x.dtype)
    tokens, value_weight, *pair = (
        y.detach().to(dtype).requires_grad_() for y in (x, weight_v, *pair)
    )
    _check_shapes(tokens, pair, value_weight, goal, name)
    with torch.enable_grad():
        query, value = tokens @ pair[0], tokens @ value_weight
        key = tokens @ pair[1] if len(pair) == 2 else tokens.expand_as(query)
        plan = _plan(query, key, value, is_causal, scale, method)
        output = closed_form_attention(query, key, value, None, is_causal, scale, plan=plan)
        goal = goal.detach().to(dtype)
        loss = (output - goal).square().sum() if upstream is None else (output * goal).sum()
        leaves = [value_weight, *pair, *([tokens] if input_gradient else [])]
        found = list(torch.autograd.grad(loss, leaves))
    of_x = found.pop() if input_gradient else None
    of_value, *of_pair = found
    whole = of_pair[0] if len(pair) == 1 else None
    return AttentionLossGradient(
        loss=loss.detach() if upstream is None else None,
        weight_qk=whole,
        weight_q=None if len(pair) == 1 else of_pair[0],
        weight_k=None if len(pair) == 1 else of_pair[1],
        weight_v=of_value,
        x=of_x,
        output=output.detach(),
        plan=plan,
        invalid_rows=None,
        fallback_rows=None,
    )


def _plan(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, method: Method
) -> Plan:
    problem = attention_problem(
        query.detach(), key.detach(), value.detach(), None, 0.0, causal, scale, False
    )
    return make_plan(problem, method)


def _check_shapes(
    x: Tensor, pair: Sequence[Tensor], weight_v: Tensor, goal: Tensor, name: str
) -> None:
    weights = [*pair, weight_v]
    n, dim = x.shape
    if {w.dim() for w in weights} not in ({2}, {3}) or any(w.shape[-2] != dim for w in weights):
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        raise InputError(
            f"weight_qk and weight_v have shapes {shapes}; expected all [{dim}, ...] for one head "
            f"or all [heads, {dim}, ...]"
        )
    if len({w.shape[:-2] for w in weights}) > 1 or len({w.shape for w in pair}) > 1:
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        raise InputError(f"weight_qk and weight_v have shapes {shapes}, which disagree")
    if len(pair) == 1 and pair[0].shape[-1] != dim:
        raise InputError(
            f"weight_qk has shape {tuple(pair[0].shape)}; expected [..., {dim}, {dim}]"
        )
    expected = (*weight_v.shape[:-2], n, weight_v.shape[-1])
    if goal.shape != expected:
        raise InputError(f"{name} has shape {tuple(goal.shape)}; expected {expected}")
