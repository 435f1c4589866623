"""One model, its attention answered by a function: counted, and restored afterwards."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ..errors import InputError
from . import sdpa, transformers
from .calls import Call, Handler

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # in the source of models that look attention up by name
_numbers = itertools.count()
_replaced: WeakSet[nn.Module] = WeakSet()  # models whose attention is replaced now


@contextmanager
def replaced(model: Any, handler: Handler, sites: int | None = None) -> Iterator[None]:
    """Within it, attention of the model is answered by a handler. A forward pass in which no call
    arrives raises an `InputError`; the model's own attention comes back in any case.

    Models of transformers are met through their attention interface, others (also those of
    transformers with code of their own) where they call PyTorch's attention; there sites are
    numbered by their order in a forward pass.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = uncompiled(model)
    if model in _replaced:
        raise InputError("model: its attention is replaced already; leave the other `use` first")
    count = _Count(handler)
    by_name = has_interface(model)
    mode = None if by_name else sdpa.Mode(count)
    if mode is not None:
        mode.has_plan = sites is not None

    def start(*_: Any) -> None:
        count.arrived = 0
        if mode is not None:
            mode.count = 0

    def finish(*_: Any) -> None:
        if not count.arrived:
            raise InputError(
                f"model: no attention of {type(model).__name__} arrived in a forward pass, so "
                "nothing was replaced: it neither looks its attention up in transformers' "
                "interface nor calls scaled_dot_product_attention; for calls from another thread "
                "or from compiled code use sb.integrations.sdpa.override there"
            )
        if sites is not None and mode is not None and count.arrived != sites:
            raise InputError(
                f"plan has {sites} sites, but {count.arrived} calls arrived in a forward pass of "
                f"{type(model).__name__}: it was made for another model"
            )

    hooks = [model.register_forward_pre_hook(start), model.register_forward_hook(finish)]
    _replaced.add(model)
    try:
        with _interface(model, count) if by_name else nullcontext(), mode or nullcontext():
            yield
    finally:
        _replaced.discard(model)
        for hook in hooks:
            hook.remove()


def uncompiled(model: Any) -> Any:
    """The module that `torch.compile` was given, where the model is what it returned."""
    return model._modules.get("_orig_mod", model) if isinstance(model, nn.Module) else model


class _Count:
    """A handler, and how many calls it has answered in this forward pass."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.arrived = handler, 0

    def __call__(self, call: Call) -> Tensor:
        self.arrived += 1
        return self.handler(call)


@contextmanager
def _interface(model: Any, handler: Callable[[Call], Tensor]) -> Iterator[None]:
    """The attention of a model of transformers under a name of its own."""
    name = f"{transformers.NAME}_{next(_numbers)}"
    names = {module: label for label, module in model.named_modules()}
    transformers.install(name, handler, transformers.Sites(names))
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        transformers.uninstall(name)


def _configs(model: Any) -> list[Any]:
    """All configurations of a model that name an attention."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())


def has_interface(model: Any) -> bool:
    """Whether a model of transformers looks its attention up by name: whether the source of any of
    its modules does. (A model without a class named ...Attention is said to, and may not.)"""
    if not hasattr(model, "set_attn_implementation"):
        return False
    if not model._can_set_attn_implementation():
        return False
    sources = {type(module).__module__ for module in model.modules()}
    return any(_mentions(name) for name in sources if not name.startswith("torch."))


def _mentions(name: str) -> bool:
    module = sys.modules.get(name)
    try:
        return module is not None and INTERFACE in inspect.getsource(module)
    except (OSError, TypeError):
        return False
