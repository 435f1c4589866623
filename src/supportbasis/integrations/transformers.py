"""A name for ``attn_implementation=`` in Hugging Face transformers (5 or newer), and its masks.

Causal and bidirectional masks come as key masks: a boolean [batch, 1, 1, keys], whose length tells
how many keys the last query of a causal call attends to. A key mask that hides nothing is a single
entry, expanded, so that it can be recognised without reading it. Every other mask (sliding windows,
packed sequences) is made by transformers, [batch, 1, queries, keys], and such calls are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor

from ..errors import InputError
from ..methods import Method
from ..plans import ModelPlan, Plan
from .answers import Answers
from .calls import Call, Handler, explicit

NAME = "support_basis"
FEW = 16  # queries: up to so many, a mask for each of them is made
EXPLICIT = ("softcap", "s_aux", "position_bias")  # arguments that PyTorch's attention has not
# models that combine the mask with one of their own, or select keys by it
COMBINING = ("axk2", "deepseek_v32", "doge", "glm_moe_dsa", "hy_v4", "qwen4_exp")
FORBIDDEN = ("sdpa", "flex_attention", "flash", "eager", "|")  # in a name: transformers reads them

_ours: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # key masks


def register(
    name: str = NAME,
    method: Method | None = None,
    plan: ModelPlan | Plan | None = None,
    min_tokens: int | None = None,
) -> Answers:
    """Register an attention and its masks; then ``model.set_attn_implementation(name)``, or
    ``attn_implementation=name`` when a model is loaded.

    With a ``plan`` of `sb.models.plan` each attention module takes its own part, in the order in
    which the modules of a model run first. With a ``method`` (None: ``Auto()``) every call is
    planned. Calls shorter than ``min_tokens`` are exact, and so are decoding steps, dropout, and
    calls whose mask depends on the query.

    The object that is returned counts the calls that arrive. A model with attention code of its
    own takes the name and never calls it: `sb.models.use` raises an error then.
    """
    if not isinstance(name, str) or not name or any(word in name for word in FORBIDDEN):
        raise InputError(
            f"name must be a string without {', '.join(FORBIDDEN)}, which transformers reads as "
            f"names of its own, got {name!r}"
        )
    answers = Answers(method, plan, min_tokens)
    install(name, answers, Sites())
    return answers


class Sites:
    """Numbers of attention modules in the order in which they run first: those with names, which
    belong to one model, together; others by their configuration."""

    def __init__(self, names: dict[Any, str] | None = None) -> None:
        self.names = names or {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._counts: dict[int, tuple[Any, int]] = {}  # by configuration, while it lives

    def __call__(self, module: Any) -> tuple[int, str]:
        """Number and name of a module."""
        number = self._numbers.get(module)
        if number is None:
            number = self._numbers[module] = self._next(module)
        return number, self.names.get(module) or f"{type(module).__name__} {number}"

    def _next(self, module: Any) -> int:
        owner = self if self.names else getattr(module, "config", module)
        alive, number = self._counts.get(id(owner), (None, 0))
        number = number if alive is not None and alive() is owner else 0
        self._counts[id(owner)] = ref(owner), number + 1
        return number


def install(name: str, handler: Handler, sites: Sites) -> None:
    """Register a handler of calls under a name."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise InputError(
            f"transformers 5 or newer is needed ({error}): pip install 'supportbasis[hf]'"
        ) from None
    AttentionInterface.register(name, partial(_attention, handler, sites))
    AttentionMaskInterface.register(name, key_mask)


def uninstall(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **more: Any,
) -> Tensor | None:
    """The mask of a forward pass, in the form that transformers asks for."""
    from transformers import masking_utils as masks

    causal = mask_function is None or mask_function is masks.causal_mask_function
    plain = causal or mask_function is masks.bidirectional_mask_function
    config: Any = more.get("config")
    make = masks.sdpa_mask
    if not _takes_key_masks(config.__class__):
        plain, more = plain and not causal, {**more, "allow_is_causal_skip": False}
        if getattr(config, "is_encoder_decoder", False):  # the encoder may add it to its scores
            plain, make = False, masks.eager_mask
    plain = plain and not getattr(config, "model_type", "").startswith(COMBINING)
    if local_size is not None or not plain or q_length <= FEW or kv_offset:
        given = {} if mask_function is None else {"mask_function": mask_function}
        found: Tensor | None = make(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
            local_size=local_size, **given, **more,
        )  # fmt: skip
        return found
    seen = int(q_offset) + q_length if causal else kv_length
    padding = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, :seen]
    if padding is None or bool(padding.all()):
        if not causal and more.get("allow_is_bidirectional_skip", False):
            return None
        if causal and seen == q_length and more.get("allow_is_causal_skip", True):
            return None
        padding = torch.ones(1, dtype=torch.bool, device=more.get("device", "cpu"))
        return _remembered(padding.expand(batch_size, 1, 1, seen))
    return _remembered(padding.contiguous()[:, None, None])


def _remembered(mask: Tensor) -> Tensor:
    """A key mask of ours, known as such while it lives: one that a caller gives is not causal."""
    if not torch.compiler.is_compiling():
        _ours[id(mask)] = mask
    return mask


def _is_ours(mask: Tensor) -> bool:
    """Whether a key mask, which may have been moved to another device, is one of ours."""
    if torch.compiler.is_compiling():
        return True
    return any(other.shape == mask.shape for other in list(_ours.values()))


@lru_cache
def _takes_key_masks(config: type) -> bool:
    """Whether modules of models with such a configuration say themselves that they are causal, as
    PyTorch's attention needs it; those of others learn it from their mask only."""
    from transformers import PreTrainedModel

    kinds: list[Any] = [PreTrainedModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    mine = [kind for kind in kinds if getattr(kind, "config_class", None) is config]
    return not mine or any(kind._supports_sdpa for kind in mine)


def _attention(
    handler: Handler,
    sites: Sites,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it."""
    site, name = sites(module)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    given = (query, key, value, attention_mask, dropout, scaling, is_causal)
    call = _call(site, name, module, causal, given, more)
    return handler(call).transpose(1, 2).contiguous(), None


def _call(
    site: int, name: str, module: Any, causal: bool, given: tuple[Any, ...], more: dict[str, Any]
) -> Call:
    """What a call means. Masks of few queries, and those that depend on the query, are left to
    transformers."""
    query, key, value, mask, dropout, scaling, said = given
    n, m = query.shape[2], key.shape[2]
    if more.get("block_indices") is not None:
        raise InputError(f"{name} selects blocks of keys, which runs by its own attention only")
    if more.get("indices") is not None:
        mask = _selected(mask, more["indices"], m)
        given = (query, key, value, mask, dropout, scaling, said)
    is_key_mask = mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)
    plain = mask is None or (is_key_mask and n > FEW)
    call = Call(
        site, name, query, key, value, scale=scaling, dropout=dropout,
        reason=_reason(plain or n <= FEW, more), row_mask=None if plain else mask,
    )  # fmt: skip
    if plain:
        causal = causal and n > 1 and (mask is None or _is_ours(mask))
        seen = (n if causal else m) if mask is None else mask.shape[-1]
        hides = mask is not None and mask.stride(-1) != 0  # an expanded one hides nothing
        call = replace(
            call, key=key[:, :, :seen], value=value[:, :, :seen], is_causal=causal,
            offset=max(0, seen - n) if causal else 0,
            key_mask=mask[:, 0, 0].expand(len(query), -1) if hides else None,
        )  # fmt: skip
    mask = None if plain else mask
    explicitly = {name: more.get(name) for name in EXPLICIT}
    if any(x is not None for x in explicitly.values()):
        return replace(call, own=partial(explicit, call, mask, **explicitly))
    return call if plain else replace(call, own=partial(_sdpa, module, given, more))


def _selected(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """A mask that leaves each query the keys of its ``indices`` [batch, queries, selected]."""
    chosen = indices.new_zeros(*indices.shape[:2], keys, dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else chosen & mask
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _reason(is_plain: bool, more: dict[str, Any]) -> str:
    """Why a call is exact; "" where it need not be, or where nobody would expect otherwise."""
    if more.get("s_aux") is not None:
        return "it has attention sinks"
    if more.get("softcap") is not None:
        return "its scores are soft-capped"
    if more.get("position_bias") is not None:
        return "it has a bias of positions"
    if more.get("indices") is not None:
        return "it selects its keys"
    if more.get("output_attentions"):
        return "output_attentions was asked for, and no weights are kept: use 'eager' for them"
    if not is_plain:
        return "its mask depends on the query (sliding window, packed sequences) or is a bias"
    return ""


def _sdpa(module: Any, given: tuple[Any, ...], more: dict[str, Any]) -> Tensor:
    """The attention that transformers calls "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    *tokens, dropout, scaling, is_causal = given
    found = sdpa_attention_forward(
        module, *tokens, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
    )
    output: Tensor = found[0].transpose(1, 2)
    return output
