"""An attention backend of diffusers (0.36 or newer).

diffusers looks attention up in an enumeration of names and a registry of functions, which packages
outside extend as it does itself. Tokens are [batch, tokens, heads, dim], and a backend does
not know which layer calls: layers of a plan are distinguished by their sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..methods import Method
from ..plans import ModelPlan, Plan
from .answers import Answers
from .calls import Call
from .sdpa import ARGUMENTS, call_of, is_overridden
from .sliced import answer

NAME = "support_basis"
LEAST = 1024  # tokens: shorter calls, and cross-attention to short texts, are exact

Output = Tensor | tuple[Tensor, Tensor]


def register(
    name: str = NAME,
    method: Method | None = None,
    plan: ModelPlan | Plan | None = None,
    min_tokens: int | None = None,
) -> Answers:
    """Register a backend; then ``model.set_attention_backend(name)``.

    Without a plan every call is planned by ``method`` (None: ``Auto()``); calls with fewer than
    ``min_tokens`` queries or keys (None: 1024) are exact. Of a `ModelPlan` with s layers the calls
    number 0, s, 2s, ... belong to the first layer, so all attention of the model must go through
    diffusers' backends (not that of HunyuanVideo's text refiner); `sb.models.use` needs no backend,
    and checks that each forward pass has s calls. The object that is returned counts calls.
    ``set_attention_backend`` also sets the default of other models, until another one is set.

    ``return_lse`` and diffusers' context parallelism are supported. A ring runs by
    `sb.distributed.attention`, also in training: exact calls as a ring, others by what their plan
    exchanges. With ``ulysses_degree`` above 1 diffusers exchanges tokens itself, for inference.
    """
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise InputError(f"name must be an identifier in lower case, got {name!r}")
    least = LEAST if min_tokens is None and not isinstance(plan, ModelPlan) else min_tokens
    answers = Answers(method, plan, least)
    backend = _backend(answers, len(plan.layers) if isinstance(plan, ModelPlan) else None)
    dispatch = _dispatch()
    registry = dispatch._AttentionBackendRegistry
    registry.register(_member(dispatch.AttentionBackendName, name), supports_context_parallel=True)(
        backend
    )
    return answers


def _dispatch() -> Any:
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise InputError(
            f"diffusers 0.36 or newer is needed ({error}): pip install 'supportbasis[diffusers]'"
        ) from None
    return attention_dispatch


def _member(names: Any, name: str) -> Any:
    """A member of the enumeration of backends, added if need be."""
    if name.upper() in names.__members__:
        member = names[name.upper()]
        if member.value != name or not hasattr(member, "is_supportbasis"):
            raise InputError(f"name: diffusers has a backend {name!r} already; choose another")
        return member
    member = str.__new__(names, name)
    member._name_, member._value_, member.is_supportbasis = name.upper(), name, True
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    return member


def _backend(answers: Answers, sites: int | None) -> Callable[..., Output]:
    numbers = itertools.count()

    def called(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *more: Any) -> Call:
        tokens = (x.transpose(1, 2) for x in (query, key, value))
        number = next(numbers)
        given = dict(zip(ARGUMENTS, (*tokens, mask, *more), strict=True))
        return call_of(number % sites if sites else number, given)

    def forward_op(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
        dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        return_lse: bool, **_: Any,
    ) -> Output:  # fmt: skip
        call = called(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not return_lse:
            return answers(call).transpose(1, 2)
        output, lse = answers.with_lse(call)
        return output.transpose(1, 2), lse.transpose(1, 2)

    def backward_op(*_: Any, **__: Any) -> Any:
        raise InputError(
            "support_basis has no backward pass in diffusers' Ulysses attention, nor where a ring "
            "returns its lse; train with ring_degree alone, or with another backend"
        )

    def support_basis(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
    ) -> Output:  # fmt: skip
        if attn_mask is not None and attn_mask.shape == (len(key), key.shape[1]):  # of keys
            attn_mask = attn_mask[:, None, None]
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
        if _parallel_config is None and not return_lse and is_overridden():
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            ).transpose(1, 2)  # fmt: skip
        if _parallel_config is None:
            return forward_op(None, *given)
        parallelism = _parallel_config.context_parallel_config
        if parallelism.ulysses_degree == 1 and not return_lse:
            call = called(*given[:-1])
            return answer(answers, call, parallelism._ring_mesh, exact_by="ring").transpose(1, 2)
        parallel = _dispatch()._templated_context_parallel_attention
        found: Output = parallel(
            *given, forward_op=forward_op, backward_op=backward_op,
            _parallel_config=_parallel_config,
        )  # fmt: skip
        return found

    return support_basis


@contextmanager
def recorded(model: nn.Module, every: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Within it, the arguments of every so many forward passes of a denoiser are kept: batches for
    `sb.models.plan`, while its pipeline runs.

    >>> import torch, supportbasis as sb
    >>> model = torch.nn.Linear(2, 2)
    >>> with sb.integrations.diffusers.recorded(model, every=2) as batches:
    ...     for _ in range(4):
    ...         output = model(torch.ones(1, 2))
    >>> [list(batch) for batch in batches]
    [['input'], ['input']]
    """
    if type(every) is not int or every < 1:
        raise InputError(f"every must be an integer > 0, got {every!r}")
    found: list[dict[str, Any]] = []
    count, names = itertools.count(), signature(model.forward)

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if next(count) % every == 0:
            given = names.bind(*args, **kwargs).arguments
            found.append({name: _kept(value) for name, value in given.items()})

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
