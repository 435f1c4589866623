"""The attention of a model of transformers, replaced by a function of ours.

transformers looks its attention up by name in a registry; under a name of our own stands whatever
is being judged. Inputs have no padding, so that no mask is needed: a causal model's queries are
the last of its keys, and any other model sees everything.
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

from supportbasis.errors import InputError

NAME = "supportbasis_judged"

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""Output of query, key and value [batch, heads, tokens, dim] with a scale, causal or not.

Fewer queries than keys are the last ones: a model that writes token by token.
"""


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


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Within it, every layer of the model attends by this function."""
    if not model._can_set_attn_implementation():
        with _Replaced(attend):
            yield
        return
    before = model.config._attn_implementation
    use(model, attend)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def use(model: Any, attend: Attend) -> None:
    """From now on, every layer of the model attends by this function."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    causal = is_causal(model)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        query, key = query.to(value.dtype), key.to(value.dtype)
        output = attend(query, key, value, options["scaling"], causal)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


class _Replaced(TorchFunctionMode):
    """For models with attention code of their own: replaces PyTorch's attention, which it calls."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is not F.scaled_dot_product_attention:
            return function(*arguments, **options)
        query, key, value, mask, causal, scale = _inputs(*arguments, **options)
        if mask is not None:
            raise InputError(
                "--model: this model masks its attention by hand, which is not supported; expected "
                "one that attends through transformers' interface or without a mask"
            )
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return self.attend(query, key, value, scale, causal)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]:
    shared = query.shape[-3] // key.shape[-3]
    if enable_gqa and shared > 1:
        key, value = (x.repeat_interleave(shared, -3) for x in (key, value))
    return query, key, value, attn_mask, is_causal, scale
