"""A dense float64 reference: the corrected formula of appendix E with n x n matrices in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def closed_form(
    x: Tensor, weight: Tensor, weight_v: Tensor, target: Tensor, scale: float, attention: Tensor
) -> dict[str, Tensor]:
    """Loss and gradients for W [d, d] with the weights ``attention`` Â [n, n], whatever they are.

    ∂L/∂W = 2 scale Xᵀ(Â∘𝒬 - diag(r) Â) X with 𝒬 = (ÂV - E) Vᵀ, V = XY and r = rowsum(Â∘𝒬).
    """
    tensors = (x, weight, weight_v, target, attention)
    x, weight, weight_v, target, attention = (y.double() for y in tensors)
    value = x @ weight_v
    residual = attention @ value - target
    product = attention * (residual @ value.T)
    scores = product - product.sum(1, keepdim=True) * attention
    through_scores = scores @ x @ weight.T + scores.T @ x @ weight
    return {
        "loss": residual.square().sum(),
        "output": attention @ value,
        "weight_qk": 2 * scale * x.T @ scores @ x,
        "weight_v": 2 * x.T @ attention.T @ residual,
        "x": 2 * scale * through_scores + 2 * attention.T @ residual @ weight_v.T,
    }


def softmax_weights(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Â = D^-1 exp(scale X W Xᵀ) in float64."""
    return (scale * (x.double() @ weight.double() @ x.double().T)).softmax(1)


def autograd(
    x: Tensor, weight: Tensor, weight_v: Tensor, target: Tensor, scale: float
) -> dict[str, Tensor]:
    """The same for exact weights, by differentiating the loss as it is written."""
    leaves = [y.detach().double().requires_grad_() for y in (x, weight, weight_v)]
    with torch.enable_grad():
        output = softmax_weights(leaves[0], leaves[1], scale) @ leaves[0] @ leaves[2]
        loss = (output - target.double()).square().sum()
        gradients = torch.autograd.grad(loss, leaves)
    names = ("loss", "output", "x", "weight_qk", "weight_v")
    return dict(zip(names, (loss.detach(), output.detach(), *gradients), strict=True))
