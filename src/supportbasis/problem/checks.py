"""Checks of the entries of tensors; calls under `torch.compile`, `torch.func` and forward-mode
differentiation, which cannot be checked; and errors for derivatives that do not exist."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import compress
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InputError, SupportBasisError
from .rounding import compute_dtype


def is_tracing() -> bool:
    """Whether something traces the call: the compiler, a transform of `torch.func`, or forward-mode
    differentiation. Then only operators see entries."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check_visible(name: str, tensor: Tensor) -> None:
    """Raise if a tensor's entries cannot be read, or not without dropping its tangent."""
    if not is_tracing() or torch.compiler.is_compiling():
        return
    functorch, inner = torch._C._functorch, tensor
    while functorch.is_functorch_wrapped_tensor(inner):
        if functorch.is_batchedtensor(inner):
            raise InputError(
                f"{name} is batched by torch.func.vmap, but this call reads its entries, as "
                "calls without a plan and masks of pairs do; make a plan outside of vmap and pass "
                "it as plan=, or pass the batch as leading dims"
            )
        inner = functorch.get_unwrapped(inner)
    first_order(tensor)  # raises if there is a tangent


def check_finite(**tensors: Tensor) -> None:
    """Raise if a tensor has NaN or Inf. One reduction; the entries are searched only on failure."""
    for name, tensor in tensors.items():
        check_visible(name, tensor)
        tensor = tensor.detach()
        if math.isfinite(tensor.sum(dtype=compute_dtype(tensor.dtype)).item()):
            continue
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):  # a sum of huge finite entries may overflow without any of them being at fault
            raise InputError(
                f"{name} has {len(bad)} non-finite entries (NaN or Inf), the first at "
                f"{tuple(bad[0].tolist())}; expected finite numbers"
            )


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """A plain int of this range, or an error."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least or (most is not None and number > most):
        wanted = f">= {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be an integer {wanted}, got {value!r}")
    return number


def check_number(name: str, value: object, wanted: str = "> 0") -> float:
    """A finite number > 0, or >= 0 if that is ``wanted``, as a float, or an error."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float can hold
            number = float(value)
    if not (0 < number < math.inf or (number == 0 and wanted.startswith(">="))):
        raise InputError(f"{name} must be a finite number {wanted}, got {value!r}")
    return abs(number)


def check_seed(seed: object) -> int:
    """A seed as a plain int, or an error: seeds and what is derived from them (seed + 1, ...) go
    into generators that take 64 bits."""
    if isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= int(seed) < 2**63:
        return int(seed)
    raise InputError(f"seed must be an integer with 0 <= seed < 2**63, got {seed!r}")


def check_bias(mask: Tensor) -> None:
    """Raise if a bias has NaN or +inf."""
    check_visible("attn_mask", mask)
    if mask.dtype != torch.bool and bool((mask.isnan() | (mask == math.inf)).any()):
        raise InputError("attn_mask contains NaN or +inf; a bias is finite or -inf (masked)")


def refuse_second(ctx: Any, *grads: Tensor | None) -> NoReturn:
    """Raise: the backward pass cannot be differentiated."""
    raise SupportBasisError(
        "attention has no second derivatives so far: do not differentiate its gradients "
        "(create_graph=True), or use F.scaled_dot_product_attention with the math backend"
    )


def refuse_forward(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    """Raise: there is no forward-mode derivative (`torch.func.hessian` needs it)."""
    raise SupportBasisError(
        "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian) so far: use "
        "torch.func.vjp or jacrev for first derivatives; there are no second ones"
    )


def first_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors for a kernel of PyTorch whose second derivative raises our error; unchanged in
    compiled graphs."""
    if torch.compiler.is_compiling():
        return tensors
    tracing, recorded = is_tracing(), torch.is_grad_enabled()
    chosen = [tracing or (recorded and x.requires_grad) for x in tensors]
    if not any(chosen):
        return tensors
    apply: Any = _FirstOrder.apply
    wrapped = iter(apply(False, *compress(tensors, chosen)))
    return tuple(next(wrapped) if wanted else x for x, wanted in zip(tensors, chosen, strict=True))


class _FirstOrder(torch.autograd.Function):
    """The identity, which can be differentiated once; or, of gradients, not at all."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_forward)

    @staticmethod
    def forward(of_gradients: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.of_gradients = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.of_gradients:
            refuse_second(ctx)
        apply: Any = _FirstOrder.apply
        return (None, *apply(True, *grads))
