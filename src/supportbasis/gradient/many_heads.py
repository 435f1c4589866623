"""The gradient of a layer of one or several heads, causal or not, from a loss or from above."""

from __future__ import annotations

import torch
from torch import Tensor

from ..methods import Method
from ..methods.planning import make_plan
from ..plans import Plan
from ..problem.validation import attention_problem
from .closed_attention import closed_form_attention, without_autocast
from .loss_inputs import Call
from .loss_result import AttentionLossGradient


def layer_gradient(
    call: Call,
    scale: float | None,
    method: Method,
    is_causal: bool,
    input_gradient: bool,
    *,
    from_above: bool,
) -> AttentionLossGradient:
    """As `attention_loss_gradient`; weights [d, h], or [heads, d, h] of several heads."""
    tokens, value_weight, *pair = (
        y.detach().requires_grad_() for y in (call.x, call.weight_v, *call.pair)
    )
    with torch.enable_grad(), without_autocast(tokens):
        query, value = tokens @ pair[0], tokens @ value_weight
        key = tokens @ pair[1] if len(pair) == 2 else tokens.expand_as(query)
        plan = _plan(query, key, value, is_causal, scale, method)
        output = closed_form_attention(query, key, value, None, is_causal, scale, plan=plan)
        loss = (output * call.goal if from_above else (output - call.goal).square()).sum()
        leaves = [value_weight, *pair, *([tokens] if input_gradient else [])]
        found = list(torch.autograd.grad(loss, leaves))
    of_x = found.pop() if input_gradient else None
    of_value, *of_pair = found
    whole = of_pair[0] if len(pair) == 1 else None
    return AttentionLossGradient(
        loss=None if from_above else loss.detach(),
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
