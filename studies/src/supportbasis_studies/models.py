"""The attention of a model of transformers, observed or replaced.

transformers looks its attention up by name in a registry; a function of ours stands there under a
name of our own. Rotary embeddings are applied by then, and keys that several query heads share
come once. A model with attention code of its own, outside the registry, is met where that code
calls PyTorch's attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from supportbasis import InputError

NAME = "supportbasis_studies"

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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: dict[int, int] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **o: Any) -> Any:
        observe(layers.setdefault(id(module), len(layers)), query, key, value)
        return sdpa_attention_forward(module, query, key, value, *_, **o)

    def called(**given: Any) -> Tensor:  # the n-th call of a pass is layer n
        observe(layers.setdefault(len(layers), len(layers)), *_tokens(given))
        return F.scaled_dot_product_attention(**given)

    with _attention(model, attention, sdpa_mask, called):
        yield


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Within it, every layer of the model attends by this function."""

    def called(**given: Any) -> Tensor:
        if given.get("attn_mask") is not None:
            raise InputError(
                "--model: this model masks its attention by hand, which is not supported; expected "
                "one that attends through transformers' interface or without a mask"
            )
        query, key, value = _tokens(given)
        if given.get("enable_gqa"):
            key, value = _repeated(query, key, value)
        scale = given.get("scale")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return attend(query, key, value, scale, given.get("is_causal", False))

    with _attention(model, _registered(model, attend), _no_mask, called):
        yield


def use(model: Any, attend: Attend) -> None:
    """From now on, every layer of the model attends by this function."""
    _register(model, _registered(model, attend), _no_mask)


def _registered(model: Any, attend: Attend) -> Callable[..., Any]:
    """The form that transformers asks for. Inputs have no padding, so that no mask is needed: a
    causal model's queries are the last of its keys, and any other model sees everything."""

    def attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **o: Any) -> Any:
        key, value = _repeated(query, key, value)
        query, key = query.to(value.dtype), key.to(value.dtype)
        output = attend(query, key, value, o["scaling"], is_causal(model))
        return output.transpose(1, 2).contiguous(), None

    return attention


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head."""
    shared = query.shape[-3] // key.shape[-3]
    if shared > 1:
        key, value = (x.repeat_interleave(shared, -3) for x in (key, value))
    return key, value


@contextmanager
def _attention(
    model: Any, registered: Callable[..., Any], mask: Any, called: Callable[..., Tensor]
) -> Iterator[None]:
    """Layers attend by ``registered`` with this mask; those of a model with attention code of its
    own by ``called``, which takes the arguments of PyTorch's attention by their names."""
    if not model._can_set_attn_implementation():
        with _Calls(called):
            yield
        return
    before = model.config._attn_implementation
    _register(model, registered, mask)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _register(model: Any, registered: Callable[..., Any], mask: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, registered)
    AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


class _Calls(TorchFunctionMode):
    """Calls of PyTorch's attention, answered by another function."""

    def __init__(self, called: Callable[..., Tensor]):
        super().__init__()
        self.called = called

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*arguments, **(options or {}))
        return self.called(**dict(zip(ARGUMENTS, arguments, strict=False)), **(options or {}))


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _tokens(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return given["query"], given["key"], given["value"]


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
