"""Gradients of a chain of layers by the closed form, and of the function that ran.

`python benchmarks/gradient_chain.py` prints, for three attention layers with skips, relative errors
of ∂L/∂W_Q against exact attention in float64, from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import supportbasis as sb

N, DIM, LAYERS = 256, 8, 3
TOKENS, WEIGHTS = 0.2, 0.35  # standard deviations
THRESHOLD = 9.0  # beyond all entries: nothing is exact

Attention = Callable[..., Any]


def gradients(attention: Attention) -> list[Tensor]:
    """∂L/∂W_Q of each layer, L being the squared distance to a target."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    x, target = TOKENS * draw(1, N, DIM), draw(1, N, DIM)
    layers = [(WEIGHTS * draw(3, DIM, DIM)).requires_grad_() for _ in range(LAYERS)]
    for weights in layers:
        x = x + attention(*(x @ weight for weight in weights))
    found = torch.autograd.grad((x - target).square().sum(), layers)
    return [gradient[0] for gradient in found]


def errors(attention: Attention) -> list[float]:
    """Relative errors, layer by layer."""
    exact = gradients(partial(sb.attention, method=sb.Exact()))
    pairs = zip(gradients(attention), exact, strict=True)
    return [float((mine - true).norm() / true.norm()) for mine, true in pairs]


def main() -> None:
    for degree in (2, 4):
        method = sb.SingleThreshold(THRESHOLD, degree)
        for name, attention in (
            ("closed form", sb.gradient.closed_form_attention),
            ("gradient of the function", sb.attention),
        ):
            found = errors(partial(attention, method=method))
            print(f"degree {degree}, {name}: {', '.join(f'{error:.1e}' for error in found)}")


if __name__ == "__main__":
    main()
