"""Models that call ``torch.nn.functional.scaled_dot_product_attention`` themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..engine.sdpa import SDPA
from ..errors import InputError
from ..methods import Method
from ..plans import ModelPlan, Plan
from .answers import Answers
from .calls import Call, Handler

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
WHOLE = (F.multi_head_attention_forward, *BACKWARD)  # functions that hide their calls from a mode
QUESTIONS = ("has_torch_function", "has_torch_function_unary")  # by which they do


@contextmanager
def override(
    method: Method | None = None,
    plan: ModelPlan | Plan | None = None,
    min_tokens: int | None = None,
) -> Iterator[Answers]:
    """Within it, calls of PyTorch's attention in this thread are answered by a method or a plan.

    Call sites are distinguished by their sequence: of a `ModelPlan` with s sites the calls number
    0, s, 2s, ... belong to the first one. Calls shorter than ``min_tokens`` are exact, and so are
    calls whose mask depends on the query, which is reported once. The object that is returned
    counts calls. If no call arrives, or not a multiple of s, leaving raises an `InputError`.
    The innermost override answers; `sb.attention` is not overridden.

    >>> import torch, supportbasis as sb
    >>> q = torch.randn(1, 2, 64, 8)
    >>> with sb.integrations.sdpa.override(sb.Exact()) as answers:
    ...     output = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> answers.calls
    1
    """
    answers = Answers(method, plan, min_tokens)
    sites = len(plan.layers) if isinstance(plan, ModelPlan) else None
    mode = Mode(answers, sites)
    with mode:
        yield answers
    if not mode.count:
        raise InputError(
            "scaled_dot_product_attention was not called: this model attends in another way; "
            "nothing was replaced"
        )
    if sites and mode.count % sites:
        raise InputError(
            f"plan has {sites} sites, but {mode.count} calls arrived, which is no multiple: it "
            "belongs to another model, or some calls were made outside of the model"
        )


class Mode(TorchFunctionMode):
    """Calls of PyTorch's attention, answered by a handler."""

    def __init__(self, handler: Handler, sites: int | None = None) -> None:
        super().__init__()
        self.handler, self.sites, self.count = handler, sites, 0
        self.has_plan = sites is not None  # of a model
        self.is_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WHOLE:
            return self._within(func, args, kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        if self.is_backward and self.has_plan:
            raise InputError(
                "plan: attention is computed again in a backward pass (gradient checkpointing), "
                "where its place in the model is not known; train with a method, or without "
                "checkpoints"
            )
        given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
        site = self.count % self.sites if self.sites else self.count
        self.count += 1
        return self.handler(call_of(site, given)).view(_shape(given))  # itself outside this mode

    def _within(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of PyTorch so that the calls within it are answered, too: without its
        question whether there is a mode."""
        names = func.__globals__ | dict.fromkeys(QUESTIONS, lambda *_: False)
        plain = FunctionType(func.__code__, names, argdefs=func.__defaults__)
        plain.__kwdefaults__ = func.__kwdefaults__
        before, self.is_backward = self.is_backward, self.is_backward or func in BACKWARD
        try:
            with self:
                return plain(*args, **kwargs)
        finally:
            self.is_backward = before


def is_overridden() -> bool:
    """Whether calls of PyTorch's attention in this thread are answered by a handler: then a backend
    of a host must not take them."""
    return any(isinstance(mode, Mode) for mode in _get_current_function_mode_stack())


def call_of(site: int, given: dict[str, Any]) -> Call:
    """A call with the arguments of PyTorch's attention, by name."""
    query, key, value = (given[name] for name in ARGUMENTS[:3])
    mask, own, reason = given.get("attn_mask"), None, ""
    key_mask = None
    if query.ndim != 4 or key.ndim != 4:
        reason = f"its query has {query.ndim} dimensions, not 4"
    elif query.shape[1] != key.shape[1] and not given.get("enable_gqa"):
        reason = "its keys are broadcast over heads"
    elif given.get("enable_gqa") and key.shape[1] != value.shape[1]:
        reason = "keys and values have other numbers of heads"
    elif mask is not None and _is_key_mask(mask, key):
        key_mask = mask.reshape(-1, key.shape[2]).expand(len(key), -1)
    elif mask is not None:
        reason = "its mask depends on the query or the head, or is a bias"
    causal = bool(given.get("is_causal", False))
    if reason or (causal and mask is not None):
        own = _own(given)
        reason = reason or "it has a mask and is causal"
    return Call(
        site, f"call {site}", query, key, value, key_mask, causal, 0, given.get("scale"),
        float(given.get("dropout_p", 0.0)), own, reason,
        mask if own is not None and query.ndim == 4 else None,
    )  # fmt: skip


def _is_key_mask(mask: Tensor, key: Tensor) -> bool:
    """Whether a boolean mask hides keys, the same for all heads and queries."""
    if mask.dtype != torch.bool or mask.shape[-1] != key.shape[2]:
        return False
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    return shape[1:3] == (1, 1) and shape[0] in (1, len(key))


def _own(given: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: SDPA(**given)


def _shape(given: dict[str, Any]) -> tuple[int, ...]:
    query, key, value = (given[name] for name in ARGUMENTS[:3])
    last = 3 if given.get("enable_gqa") else 2  # heads of keys are not broadcast
    leading = torch.broadcast_shapes(*(x.shape[:-last] for x in (query, key, value)))
    return (*leading, *query.shape[-last:-1], value.shape[-1])
