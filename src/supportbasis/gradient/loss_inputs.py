"""Validation: from the caller's tensors to a `Call`, or an error that names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..methods import Exact, Method, Polynomial, SingleThreshold
from ..problem.checks import check_finite, check_integer
from ..problem.rounding import compute_dtype
from ..problem.validation import check_tensors

METHODS = (Exact, Polynomial, SingleThreshold)


@dataclass(frozen=True, eq=False)
class Call:
    """Checked tensors, detached, in the dtype of all sums."""

    x: Tensor  # [n, d]
    pair: tuple[Tensor, ...]  # (W,) [d, d], or (W_Q, W_K) [d, h]; [heads, ...] of several heads
    weight_v: Tensor  # [d, dv], or [heads, d, dv]
    goal: Tensor  # [n, dv], or [heads, n, dv]: the target, or the gradient from above

    @property
    def query(self) -> Tensor:
        return self.x @ self.pair[0]

    @property
    def key(self) -> Tensor:
        return self.x @ self.pair[1] if len(self.pair) == 2 else self.x


def checked_call(
    x: Tensor, weight_qk: Tensor | Sequence[Tensor], weight_v: Tensor, target: Tensor | None,
    upstream: Tensor | None,
) -> Call:  # fmt: skip
    """The call, or an error about a tensor."""
    weights: dict[str, Any] = {"weight_qk": weight_qk}
    if isinstance(weight_qk, Sequence) and len(weight_qk) == 2:
        weights = {"weight_qk[0]": weight_qk[0], "weight_qk[1]": weight_qk[1]}
    elif not isinstance(weight_qk, Tensor):
        raise InputError(
            f"weight_qk must be a tensor [d, d] or a pair (W_Q, W_K), got {weight_qk!r}"
        )
    goals = {"target": target, "upstream": upstream}
    goals = {name: goal for name, goal in goals.items() if goal is not None}
    if len(goals) != 1:
        given = "both are" if goals else "neither is"
        raise InputError(
            f"target or upstream: {given} given; expected the target of the loss, or the gradient "
            "of another loss by the output"
        )
    tensors = {"x": x, **weights, "weight_v": weight_v, **goals}
    for name, tensor in tensors.items():
        _check_dims(name, tensor)
    check_tensors(list(tensors.values()), list(tensors))
    check_finite(**tensors)
    x, *pair, weight_v, goal = (y.detach().to(compute_dtype(y.dtype)) for y in tensors.values())
    call = Call(x, tuple(pair), weight_v, goal)
    _check_shapes(call, *goals)
    return call


def check_method(method: Method | None, gradient: str = "this gradient") -> None:
    """Raise unless the closed form knows the weights of this method."""
    if type(method) not in METHODS:
        names = ", ".join(f"sb.{kind.__name__}" for kind in METHODS)
        raise InputError(f"method must be one of {names} for {gradient}, got {method!r}")


def check_settings(
    n: int, method: Method, low_rank: int | None, input_gradient: bool, is_causal: bool
) -> None:
    """Raise for a method, a rank or a switch that cannot be used."""
    check_method(method)
    for name, flag in (("input_gradient", input_gradient), ("is_causal", is_causal)):
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, got {flag!r}")
    if low_rank is None:
        return
    check_integer("low_rank", low_rank, 1, n)
    if not isinstance(method, SingleThreshold):
        raise InputError(
            f"low_rank replaces the exact part of sb.SingleThreshold; {method!r} has none"
        )


def _check_dims(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        return  # `check_tensors` will say so
    dims, expected = ((2,), "a matrix") if name == "x" else ((2, 3), "a matrix or [heads, ...]")
    if tensor.dim() not in dims or not tensor.numel():
        shape = tuple(tensor.shape)
        raise InputError(f"{name} has shape {shape}; expected {expected}, not empty")


def _check_shapes(call: Call, name: str) -> None:
    (n, dim), pair, weight_v = call.x.shape, call.pair, call.weight_v
    shapes = ", ".join(str(tuple(w.shape)) for w in (*pair, weight_v))
    if len({w.shape[:-2] for w in (*pair, weight_v)}) > 1:
        raise InputError(
            f"weight_qk and weight_v have shapes {shapes}, which disagree; expected all "
            f"[{dim}, ...] for one head or all [heads, {dim}, ...]"
        )
    if len(pair) == 1 and pair[0].shape[-2:] != (dim, dim):
        raise InputError(
            f"weight_qk has shape {tuple(pair[0].shape)}; expected [..., {dim}, {dim}]"
        )
    if pair[0].shape != pair[-1].shape or pair[0].shape[-2] != dim:
        shapes = " and ".join(str(tuple(y.shape)) for y in pair)
        raise InputError(f"weight_qk has shapes {shapes}; expected two of [..., {dim}, h]")
    if weight_v.shape[-2] != dim:
        raise InputError(f"weight_v has {weight_v.shape[-2]} rows; expected {dim}, the width of x")
    expected = (*weight_v.shape[:-2], n, weight_v.shape[-1])
    if call.goal.shape != expected:
        raise InputError(f"{name} has shape {tuple(call.goal.shape)}; expected {expected}")
