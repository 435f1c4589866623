"""Methods: small objects that say how a support basis is chosen. Every one returns a `HeadPlan`."""

from __future__ import annotations

from typing import Any

from .auto import Auto
from .base import Method
from .block_support import BlockSupport
from .exact import Exact
from .multi_threshold import MultiThreshold
from .polynomial import Polynomial
from .power import PowerAttention
from .single_threshold import SingleThreshold

__all__ = [
    "Auto",
    "BlockSupport",
    "Exact",
    "Method",
    "MultiThreshold",
    "Polynomial",
    "PowerAttention",
    "SingleThreshold",
    "method_from_json",
]

_METHODS: dict[str, type[Method]] = {
    method.__name__: method
    for method in (
        Exact,
        Polynomial,
        SingleThreshold,
        MultiThreshold,
        PowerAttention,
        BlockSupport,
        Auto,
    )
}


def method_from_json(content: dict[str, Any]) -> Method:
    """The method that `Method.to_json` described."""
    arguments = dict(content)
    name = arguments.pop("name")
    if name not in _METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {sorted(_METHODS)}")
    return _METHODS[name](**arguments)
