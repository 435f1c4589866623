"""Validation: from the caller's tensors to a `Call`, or an error that names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import InputError
from ..methods import Exact, Method, Polynomial, SingleThreshold
from ..problem.checks import check_finite
from ..problem.rounding import compute_dtype
from ..problem.validation import DTYPES

METHODS = (Exact, Polynomial, SingleThreshold)


@dataclass(frozen=True, eq=False)
class Call:
    """Checked tensors, detached, in the dtype of all sums."""

    x: Tensor  # [n, d]
    pair: tuple[Tensor, ...]  # (W,) [d, d], or (W_Q, W_K) [d, h]
    weight_v: Tensor  # [d, dv]
    target: Tensor  # [n, dv]

    @property
    def query(self) -> Tensor:
        return self.x @ self.pair[0]

    @property
    def key(self) -> Tensor:
        return self.x @ self.pair[1] if len(self.pair) == 2 else self.x


def checked_call(
    x: Tensor, weight_qk: Tensor | Sequence[Tensor], weight_v: Tensor, target: Tensor
) -> Call:
    """The call, or an error about a tensor."""
    if isinstance(weight_qk, Tensor):
        pair = {"weight_qk": weight_qk}
    elif isinstance(weight_qk, Sequence) and len(weight_qk) == 2:
        pair = {"weight_qk[0]": weight_qk[0], "weight_qk[1]": weight_qk[1]}
    else:
        raise InputError(
            f"weight_qk must be a tensor [d, d] or a pair (W_Q, W_K), got {weight_qk!r}"
        )
    tensors = {"x": x, **pair, "weight_v": weight_v, "target": target}
    for name, tensor in tensors.items():
        _check_matrix(name, tensor, x)
    check_finite(**tensors)
    weights = tuple(pair.values())
    _check_shapes(x, weights, weight_v, target)
    x, weight_v, target, *weights = (  # type: ignore[assignment]
        y.detach().to(compute_dtype(y.dtype)) for y in (x, weight_v, target, *weights)
    )
    return Call(x, tuple(weights), weight_v, target)


def check_method(method: Method | None) -> None:
    """Raise unless the closed form knows the weights of this method."""
    if type(method) not in METHODS:
        names = ", ".join(f"sb.{kind.__name__}" for kind in METHODS)
        raise InputError(f"method must be one of {names} for this gradient, got {method!r}")


def check_settings(n: int, method: Method, low_rank: int | None, input_gradient: bool) -> None:
    """Raise for a method, a rank or a switch that cannot be used."""
    check_method(method)
    if not isinstance(input_gradient, bool):
        raise InputError(f"input_gradient must be True or False, got {input_gradient!r}")
    if low_rank is None:
        return
    if isinstance(low_rank, bool) or not isinstance(low_rank, int) or not 1 <= low_rank <= n:
        raise InputError(
            f"low_rank must be None or an integer from 1 to {n} (tokens), got {low_rank!r}"
        )
    if not isinstance(method, SingleThreshold):
        raise InputError(
            f"low_rank replaces the exact part of sb.SingleThreshold; {method!r} has none"
        )


def check_goal(target: Tensor | None, upstream: Tensor | None) -> None:
    """Raise unless there is a target or a gradient from above."""
    if (target is None) == (upstream is None):
        given = "neither is" if target is None else "both are"
        raise InputError(
            f"target or upstream: {given} given; expected the target of the loss, or the gradient "
            "of another loss by the output"
        )


def _check_matrix(name: str, tensor: Tensor, x: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise InputError(f"{name} has dtype {tensor.dtype}; expected floating point")
    if tensor.dim() != 2 or not tensor.numel():
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected a matrix, not empty")
    if tensor.dtype != x.dtype:
        raise InputError(f"{name} has dtype {tensor.dtype} but x has {x.dtype}")
    if tensor.device != x.device:
        raise InputError(f"{name} is on {tensor.device} but x is on {x.device}")


def _check_shapes(x: Tensor, pair: tuple[Tensor, ...], weight_v: Tensor, target: Tensor) -> None:
    n, dim = x.shape
    if len(pair) == 1 and pair[0].shape != (dim, dim):
        raise InputError(f"weight_qk has shape {tuple(pair[0].shape)}; expected {(dim, dim)}")
    if len(pair) == 2 and (pair[0].shape != pair[1].shape or len(pair[0]) != dim):
        shapes = " and ".join(str(tuple(y.shape)) for y in pair)
        raise InputError(f"weight_qk has shapes {shapes}; expected two of ({dim}, h)")
    if len(weight_v) != dim:
        raise InputError(f"weight_v has {len(weight_v)} rows; expected {dim}, the width of x")
    if target.shape != (n, weight_v.shape[1]):
        raise InputError(
            f"target has shape {tuple(target.shape)}; expected {(n, weight_v.shape[1])}"
        )
