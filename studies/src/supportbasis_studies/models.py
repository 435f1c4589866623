"""The attention of a model, observed or replaced, through `supportbasis.integrations`.

Rotary embeddings are applied by then, and keys that several query heads share come once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from supportbasis import InputError
from supportbasis.integrations.calls import Call
from supportbasis.integrations.replacing import replaced

Observe = Callable[[int, Tensor, Tensor, Tensor], None]
"""Told the layer, and query, key and value, each [batch, heads, tokens, dim]."""

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""Output of query, key and value [batch, heads, tokens, dim] with a scale, causal or not.

Fewer queries than keys are the last ones: a model that writes token by token.
"""


@contextmanager
def observed(model: Any, observe: Observe) -> Iterator[None]:
    """Within it, every attention layer of the model shows its inputs, in the order it runs, and
    computes what it would compute anyway."""

    def handler(call: Call) -> Tensor:
        observe(call.site, call.query, call.key, call.value)
        return call.exact()

    with replaced(model, handler):
        yield


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Within it, every layer of the model attends by this function. Inputs have no padding."""

    def handler(call: Call) -> Tensor:
        if call.key_mask is not None or (call.own is not None and call.n > 1):
            raise InputError(
                f"--model: {call.name} masks its attention, which is not supported; expected one "
                "without padding, sliding windows or masks of its own"
            )
        key, value = (
            x if call.group == 1 else x.repeat_interleave(call.group, 1)
            for x in (call.key, call.value)
        )
        query, key = call.query.to(value.dtype), key.to(value.dtype)
        scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
        causal = is_causal(model) if call.n == 1 else call.is_causal
        return attend(query, key, value, scale, causal)

    with replaced(model, handler):
        yield


def without_cache(model: Any) -> dict[str, Any]:
    """Arguments of a forward pass that keeps no keys, if the model can be told."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if takes else {}


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """PyTorch's attention."""
    n, m = query.shape[-2], key.shape[-2]
    if not causal or n == m or n == 1:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal and n == m, scale=scale
        )
    mask = allowed(n, m, query.device)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def allowed(n: int, m: int, device: torch.device) -> Tensor:
    """Which keys the last n of m tokens may look at, [n, m]."""
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def is_causal(model: Any) -> bool:
    return bool(getattr(model.config, "is_causal", True))
