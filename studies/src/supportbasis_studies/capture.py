"""Queries, keys and values as attention sees them, of any model of transformers.

transformers looks its attention up by name in a registry. Under a name of our own stands a
function that shows its inputs to an observer and then does what transformers' "sdpa" does, so the
model computes what it would compute anyway. Rotary embeddings are applied by then, and keys that
several query heads share come once. A model with attention code of its own, outside the registry,
is observed where that code calls PyTorch's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAME = "supportbasis_observed"

Observe = Callable[[int, Tensor, Tensor, Tensor], None]
"""Told the layer, and query, key and value, each [batch, heads, tokens, dim]."""


@contextmanager
def observed(model: Any, observe: Observe) -> Iterator[None]:
    """Within it, every attention layer of the model shows its inputs, in the order it runs."""
    if not model._can_set_attn_implementation():
        with _Calls(observe):
            yield
        return
    before = model.config._attn_implementation
    _register(observe)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _register(observe: Observe) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    layers: dict[int, int] = {}

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        observe(layers.setdefault(id(module), len(layers)), query, key, value)
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class _Calls(TorchFunctionMode):
    """Shows the inputs of PyTorch's attention; the n-th call of a pass is layer n."""

    def __init__(self, observe: Observe):
        super().__init__()
        self.observe, self.count = observe, 0

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is F.scaled_dot_product_attention:
            query, key, value = _inputs(*arguments, **options)
            self.observe(self.count, query, key, value)
            self.count += 1
        return function(*arguments, **options)


def _inputs(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return query, key, value
