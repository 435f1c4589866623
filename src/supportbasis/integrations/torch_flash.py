"""A flash attention of PyTorch's own registry (`torch.nn.attention`, newer versions of PyTorch).

    sb.integrations.torch_flash.register(method=sb.Auto(0.05))
    torch.nn.attention.activate_flash_attention_impl("support_basis")

From then on ``F.scaled_dot_product_attention`` runs by a method inside `torch.inference_mode`
wherever PyTorch chooses its flash backend, in all threads, compiled code too. PyTorch decides when
that is: not with a mask on a GPU, and other backends may come first
(`torch.nn.attention.sdpa_kernel` says which). Outside of `torch.inference_mode` PyTorch's own
kernel runs: a compiled graph may differentiate a call without its operator seeing it, and would
pair an approximate forward pass with an exact backward pass.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..components.flash import OPERATOR
from ..errors import InputError
from ..methods import Method
from ..plans import Plan
from .answers import Answers
from .sdpa import call_of

NAME = "support_basis"
CUDA = "_scaled_dot_product_flash_attention"
LEAST = 1024  # tokens: shorter calls are exact

_inside = threading.local()  # the library uses the same operators


def register(
    name: str = NAME,
    method: Method | None = None,
    plan: Plan | None = None,
    min_tokens: int | None = None,
) -> Answers:
    """Register an implementation; then ``activate_flash_attention_impl(name)``, and
    ``restore_flash_attention_impl()`` to end it, both of `torch.nn.attention`.

    A ``plan`` serves every call; without one each is planned by ``method`` (None: ``Auto()``).
    Calls with fewer than ``min_tokens`` queries or keys (None: 1024), with a mask, with dropout or
    outside of `torch.inference_mode` run by PyTorch's own kernel. The operator does not know which
    layer calls: there are no plans of models here. The object that is returned counts the calls
    that it answered, not those that PyTorch's kernel took.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise InputError(
            f"torch {torch.__version__} has no registry of flash attention; use "
            "sb.integrations.sdpa.override"
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"name must be an identifier, got {name!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan must be an sb.Plan, which serves every call, got {plan!r}")
    answers = Answers(method, plan, LEAST if min_tokens is None else min_tokens)
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: Handle(answers))
    return answers


class Handle:
    """The kernels of an active implementation; PyTorch removes them when another is activated."""

    def __init__(self, answers: Answers) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._put(OPERATOR, "CPU", _cpu_kernel, answers)
        if torch.cuda.is_available():
            self._put(CUDA, "CUDA", _cuda_kernel, answers)

    def _put(self, name: str, key: str, make: Callable[..., Any], answers: Answers) -> None:
        own = torch.library.get_kernel(f"aten::{name}", key)
        kernel = make(answers, own.call_boxed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another kernel is what was asked for
            self._library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """PyTorch's kernels again."""
        self._library._destroy()


def _cpu_kernel(answers: Answers, own: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    def flash(
        keys: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        found = None
        if attn_mask is None:
            found = _answered(answers, numbers, query, key, value, dropout_p, is_causal, scale)
        if found is None:
            return own(
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        return found

    return flash


def _cuda_kernel(answers: Answers, own: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    def flash(
        keys: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        found = None
        if not return_debug_mask:
            found = _answered(answers, numbers, query, key, value, dropout_p, is_causal, scale)
        if found is None:
            return own(
                keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        none = query.new_empty(0, dtype=torch.int64)  # only the backward pass reads the rest
        return *found, none, none, query.shape[2], key.shape[2], none, none, query.new_empty(0)

    return flash


def _answered(
    answers: Answers,
    numbers: itertools.count[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of a call, if it is for us."""
    if getattr(_inside, "is_so", False) or not torch.is_inference_mode_enabled() or dropout_p:
        return None
    given = {"query": query, "key": key, "value": value, "is_causal": is_causal, "scale": scale,
             "enable_gqa": query.shape[1] != key.shape[1]}  # fmt: skip
    call = call_of(next(numbers), given)
    if call.reason or not answers.approximates(call):
        return None
    _inside.is_so = True
    try:
        output, lse = answers.with_lse(call)
    finally:
        _inside.is_so = False
    return output, lse.float()
