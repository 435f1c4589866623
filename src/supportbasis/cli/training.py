"""The training benchmark: a forward and a backward pass, against those of SDPA."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import attention, plan
from ..methods import SingleThreshold
from .measure import Contender, Measurement, Tick, describe, interleave
from .settings import gaussian

METHOD = SingleThreshold(0.4, 2)


def measure_training(name: str, n: int, budget: float, tick: Tick) -> list[Measurement]:
    """Output and gradients of query, key and value; errors are those of the gradients, relative
    to those of SDPA in norm and to the largest of them."""
    setting = gaussian(n)
    inputs = (setting.query, setting.key, setting.value)
    for x in inputs:
        x.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(setting.value.shape, generator=generator)

    def step(call: Callable[..., Tensor]) -> Tensor:
        with torch.enable_grad():
            return torch.stack(torch.autograd.grad(call(*inputs), inputs, weight))

    def ours(*tensors: Tensor) -> Tensor:
        query, key, value = tensors
        output = attention(query, key, value, method=METHOD)
        assert isinstance(output, Tensor)
        return output

    baseline = Contender("SDPA", lambda: step(F.scaled_dot_product_attention))
    contender = Contender("SingleThreshold(0.4, degree=2)", lambda: step(ours))
    rounds = interleave([baseline, contender], budget, tick)
    assert contender.output is not None and baseline.output is not None
    relative, largest = _errors(contender.output, baseline.output)
    made = plan(setting.query, setting.key, setting.value, method=METHOD)
    measured = Measurement(
        name=name,
        method=contender.label,
        n=n,
        d=setting.dim,
        causal=False,
        seconds=contender.seconds,
        baseline=baseline.label,
        baseline_seconds=baseline.seconds,
        ratio=baseline.seconds / contender.seconds,
        relative_error=relative,
        max_error=largest,
        bound=None,
        cost=made.cost,
        repeats=rounds,
        ran=f"forward and backward, {describe(made)}",
        note="; ".join(dict.fromkeys(contender.notes)),
    )
    return [measured]


def _errors(given: Tensor, exact: Tensor) -> tuple[float, float]:
    """Of the worst of three gradients: in norm, and the largest error over the largest entry."""
    wrong = (given - exact).flatten(1).double()
    exact = exact.flatten(1).double()
    relative = wrong.norm(dim=1) / exact.norm(dim=1)
    largest = wrong.abs().amax(1) / exact.abs().amax(1)
    return float(relative.max()), float(largest.max())
