"""Tracing: calls under `torch.compile`, `torch.func` and forward-mode differentiation, and errors
for derivatives that do not exist."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InputError, SupportBasisError


def is_tracing() -> bool:
    """Whether something traces the call: the compiler, a transform of `torch.func`, or forward-mode
    differentiation. Then only operators see entries."""
    transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return bool(torch.compiler.is_compiling() or transforms() or _in_dual_level())


def _in_dual_level() -> bool:
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)


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
    if _in_dual_level():
        first_order(tensor)  # raises if there is a tangent


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
    if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    if is_tracing():
        chosen = [True] * len(tensors)
    elif torch.is_grad_enabled():
        chosen = [x.requires_grad for x in tensors]
    else:
        return tensors
    if not any(chosen):
        return tensors
    pairs = list(zip(tensors, chosen, strict=True))
    apply: Any = _FirstOrder.apply
    wrapped = iter(apply(*(x for x, wanted in pairs if wanted)))
    return tuple(next(wrapped) if wanted else x for x, wanted in pairs)


class _FirstOrder(torch.autograd.Function):
    """The identity, which can be differentiated once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        apply: Any = _FirstOrderBackward.apply
        return apply(*grads)

    jvp = staticmethod(refuse_forward)


class _FirstOrderBackward(torch.autograd.Function):
    """Its backward pass, which cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_forward)
