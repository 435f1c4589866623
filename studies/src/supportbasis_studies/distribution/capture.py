"""Queries, keys and values of every layer of a model, as attention sees them and as its projections
give them: before rotary embeddings, where the authors' scripts look.

Projections are found by their names. A model that scales its queries before attention (OPT) shows
them too small: that is undone, so that entries are those that 1/sqrt(d) is applied to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from supportbasis.integrations.calls import Call
from supportbasis.integrations.replacing import replaced

SIDES = ("query", "key", "value")
SEPARATE = {
    "query": ("q_proj", "query", "q_lin", "wq"),
    "key": ("k_proj", "key", "k_lin", "wk"),
    "value": ("v_proj", "value", "v_lin", "wv"),
}
FUSED = ("att_proj", "c_attn", "qkv_proj", "qkv")  # query, key and value one after the other
CLOSE = 0.01  # relative: norms that agree, whatever the dtype

Tokens = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer computed: query, key and value [batch, heads, tokens, dim] each."""

    number: int
    seen: Tokens  # by attention, its queries not yet scaled
    projected: Tokens | None  # None: the model has no projections of a known name

    @property
    def is_rotated(self) -> bool:
        """Whether something happens between projections and attention."""
        if self.projected is None:
            return False
        return any(
            _differ(mine, seen)
            for mine, seen in zip(self.projected[:2], self.seen[:2], strict=True)
        )


@contextmanager
def captured(model: nn.Module, show: Callable[[Layer], None]) -> Iterator[None]:
    """Within it, every attention layer of the model is shown, in the sequence in which they run;
    the model computes what it would compute anyway."""
    latest: dict[str, Tensor] = {}

    def keep(side: str, _: nn.Module, __: Any, output: Any) -> None:
        latest[side] = output[0] if isinstance(output, tuple) else output

    def handler(call: Call) -> Tensor:
        projected = _projected(latest, call)
        if projected is not None and _differ(projected[2], call.value):
            projected = None  # cut in another way: nothing happens to values before attention
        latest.clear()
        query = call.query * _scaling(call, projected)
        show(Layer(call.site, (query, call.key, call.value), projected))
        return call.exact()

    hooks = [
        module.register_forward_hook(partial(keep, side))
        for name, module in model.named_modules()
        if (side := _side(name, module)) is not None
    ]
    try:
        with replaced(model, handler):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _side(name: str, module: nn.Module) -> str | None:
    """Which side a projection of this name makes."""
    if not hasattr(module, "weight"):
        return None
    last = name.rpartition(".")[2]
    if last in FUSED:
        return "fused"
    return next((side for side, names in SEPARATE.items() if last in names), None)


def _projected(latest: dict[str, Tensor], call: Call) -> Tokens | None:
    """Outputs of the projections, [batch, tokens, width] each, cut into heads as attention is."""
    batch, _, n, dim = call.query.shape
    if "fused" in latest:
        width = call.query.shape[1] * dim
        rest = latest["fused"].shape[-1] - width
        if rest <= 0 or rest % 2:
            return None
        parts = latest["fused"].split([width, rest // 2, rest // 2], -1)
    elif all(side in latest for side in SIDES):
        parts = tuple(latest[side] for side in SIDES)
    else:
        return None
    dims = (dim, dim, call.value.shape[-1])
    if any(x.shape[:2] != (batch, n) or x.shape[-1] % d for x, d in zip(parts, dims, strict=True)):
        return None
    query, key, value = (
        x.view(batch, n, -1, d).transpose(1, 2) for x, d in zip(parts, dims, strict=True)
    )
    return query, key, value


def _scaling(call: Call, projected: Tokens | None) -> float:
    """What undoes a scaling of queries before attention: scale·sqrt(d) if that gives the norm of
    the projections back, which rotations keep; else 1."""
    factor = 1.0 if call.scale is None else call.scale * math.sqrt(call.query.shape[-1])
    if projected is None or abs(factor - 1) < CLOSE:
        return 1.0
    true, seen = float(projected[0].float().norm()), float(call.query.float().norm())
    return factor if abs(factor * seen - true) <= CLOSE * true else 1.0


def _differ(projected: Tensor, seen: Tensor) -> bool:
    group = seen.shape[1] // projected.shape[1]
    projected = projected.repeat_interleave(group, 1)
    error = (projected.float() - seen.float()).norm()
    return bool(error > CLOSE * torch.linalg.vector_norm(seen.float()))
