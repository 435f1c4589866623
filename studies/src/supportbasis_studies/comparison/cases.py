"""Benchmark cases that are not one call of attention: training, and kernel densities."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from supportbasis import Auto, Result, SingleThreshold, attention, gaussian_kde, plan

from ..progress import Tick
from .measure import Measurement, TimedCall, describe, interleave, measurement
from .settings import gaussian

TRAINED = SingleThreshold(0.4, 2)
DIM, BANDWIDTH = 3, 1.0
SAMPLED_POINTS = 512
CHUNKS = (64, 256, 1024, 4096)

Sum = Callable[[Tensor, Tensor], Tensor]


# ---- training -------------------------------------------------------------------------------


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
        output = attention(query, key, value, method=TRAINED)
        assert isinstance(output, Tensor)
        return output

    baseline = TimedCall("SDPA", lambda: step(F.scaled_dot_product_attention))
    timed_call = TimedCall("SingleThreshold(0.4, degree=2)", lambda: step(ours))
    rounds = interleave([baseline, timed_call], budget, tick)
    made = plan(setting.query, setting.key, setting.value, method=TRAINED)
    errors = partial(_gradient_errors, baseline)
    ran, sizes = f"forward and backward, {describe(made)}", (name, n, setting.dim, False)
    return [measurement(timed_call, baseline, errors, sizes, rounds, ran, None, made.cost)]


def _gradient_errors(baseline: TimedCall, given: Tensor) -> tuple[float, float]:
    """Of the worst of three gradients: in norm, and the largest error over the largest entry."""
    assert baseline.output is not None
    wrong = (given - baseline.output).flatten(1).double()
    exact = baseline.output.flatten(1).double()
    relative = wrong.norm(dim=1) / exact.norm(dim=1)
    largest = wrong.abs().amax(1) / exact.abs().amax(1)
    return float(relative.max()), float(largest.max())


# ---- kernel densities -----------------------------------------------------------------------


def measure_density(name: str, n: int, budget: float, tick: Tick) -> list[Measurement]:
    """Density of n standard normal points at n others: `gaussian_kde` against exact sums."""
    generator = torch.Generator().manual_seed(0)
    points, data = (torch.randn(n, DIM, generator=generator) for _ in range(2))
    method = Auto(1e-4)
    baseline = TimedCall("chunked exact sum", partial(_fastest_form(points, data), points, data))

    def density() -> Tensor:
        output = gaussian_kde(points, data, BANDWIDTH, method=method)
        assert isinstance(output, Tensor)
        return output

    ours = TimedCall("Auto(1e-4)", density)
    rounds = interleave([baseline, ours], budget, tick)
    result = gaussian_kde(points, data, BANDWIDTH, method=method, return_result=True)
    assert isinstance(result, Result)
    bound, cost = float(result.certificate.bound.max()), result.plan.cost
    errors = partial(_density_errors, points, data)
    ran, sizes = describe(result.plan), (name, n, DIM, False)
    return [measurement(ours, baseline, errors, sizes, rounds, ran, bound, cost)]


def _normaliser(data: Tensor) -> float:
    return float(data.shape[0] * (2 * math.pi * BANDWIDTH**2) ** (DIM / 2))


def by_distance(points: Tensor, data: Tensor, chunk: int) -> Tensor:
    """exp(-|x - y|²/2h²) from pairwise distances, a chunk of points at a time."""
    sums = points.new_empty(len(points))
    for start in range(0, len(points), chunk):
        kernel = torch.cdist(points[start : start + chunk], data)
        kernel.square_().mul_(-0.5 / BANDWIDTH**2).exp_()
        torch.sum(kernel, 1, out=sums[start : start + chunk])
    return sums / _normaliser(data)


def by_products(points: Tensor, data: Tensor, chunk: int) -> Tensor:
    """The same from <x, y> - |x|²/2 - |y|²/2: one matrix product for each chunk, all of them in
    the same memory (fresh memory for each would cost more than the product)."""
    x, y = points / BANDWIDTH, data / BANDWIDTH
    left = torch.cat([x, -x.square().sum(1, keepdim=True) / 2, torch.ones(len(x), 1)], 1)
    right = torch.cat([y, torch.ones(len(y), 1), -y.square().sum(1, keepdim=True) / 2], 1).T
    right, buffer = right.contiguous(), points.new_empty(chunk, len(data))
    sums = points.new_empty(len(points))
    for start in range(0, len(points), chunk):
        part = left[start : start + chunk]
        kernel = torch.mm(part, right, out=buffer[: len(part)]).exp_()
        torch.sum(kernel, 1, out=sums[start : start + chunk])
    return sums / _normaliser(data)


def _fastest_form(points: Tensor, data: Tensor) -> Sum:
    """The form and chunk of the exact sum that is fastest on a part of the points."""
    forms = [partial(form, chunk=chunk) for form in (by_distance, by_products) for chunk in CHUNKS]
    part = points[: max(CHUNKS)]

    def trial(form: Sum) -> float:
        best = math.inf
        for _ in range(2):
            start = time.perf_counter()
            form(part, data)
            best = min(best, time.perf_counter() - start)
        return best

    return min(forms, key=trial)


def _density_errors(points: Tensor, data: Tensor, density: Tensor) -> tuple[float, float]:
    """Relative error in norm, and largest error over largest density, at sampled points."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(points), generator=generator)[:SAMPLED_POINTS]
    exact = by_distance(points[rows].double(), data.double(), chunk=64)
    wrong = density[rows].double() - exact
    return float(wrong.norm() / exact.norm()), float(wrong.abs().max() / exact.max())
