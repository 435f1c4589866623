"""Validation of kernel densities: a density becomes a kernel sum with known factors."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from ..errors import InputError
from .problem import Problem
from .rounding import compute_dtype, unit_roundoff
from .validation import attention_problem, check_dense, kernel_problem


def density_problem(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, weights: Tensor | None
) -> tuple[Problem, Tensor]:
    """exp(-|x-y|^2/2) = exp(<x,y>) exp(-|x|^2/2) exp(-|y|^2/2), centred and divided by h."""
    names = ("points", "data", "data")
    check = attention_problem(points, data, None, None, 0.0, False, 1.0, False, names=names)
    if not data.shape[-2]:
        raise InputError("data has no points; expected at least one")
    width = _check_bandwidth(bandwidth, points)
    data64 = data.double()
    centre = data64.mean(-2, keepdim=True)
    query, key = (points.double() - centre) / width, (data64 - centre) / width
    row_weight, log_weight = (-x.square().sum(-1) / 2 for x in (query, key))
    weight = data64.new_ones(()) if weights is None else _check_weights(weights, data)
    log_weight = log_weight + weight.log()
    total = weight.expand(data.shape[:-1]).sum(-1).expand(check.leading)
    dtype = _density_dtype(points.dtype, query, key)
    query, key = query.to(dtype), key.to(dtype)
    problem = kernel_problem(query, key, query.new_ones(*key.shape[:-1], 1), 1.0, finite=False)
    key_weight, query_weight = (
        x.expand(*problem.leading, x.shape[-1]).reshape(problem.batch, problem.heads, x.shape[-1])
        for x in (log_weight, row_weight)
    )
    problem = replace(problem, key_log_weight=key_weight, query_log_weight=query_weight)
    volume = (width.log() + math.log(2 * math.pi) / 2).expand(points.shape[-1]).sum()
    return problem, total.log() + volume


def _density_dtype(dtype: torch.dtype, query: Tensor, key: Tensor) -> torch.dtype:
    """float32 unless its rounding of <x, y> would show: the exponent -|x - y|^2/2 is a small
    difference of large numbers when points lie many bandwidths from their centre."""
    reach = sum(float(x.square().sum(-1).max()) for x in (query, key) if x.numel())
    rounding = reach * (query.shape[-1] + 6) * unit_roundoff(torch.float32)
    return torch.float64 if rounding > 1e-4 else compute_dtype(dtype)


def _check_bandwidth(bandwidth: float | Tensor, points: Tensor) -> Tensor:
    dim = points.shape[-1]
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (Real, Tensor)):
        raise InputError(f"bandwidth must be a number or a tensor, got {bandwidth!r}")
    if isinstance(bandwidth, Tensor) and (bandwidth.is_complex() or bandwidth.requires_grad):
        raise InputError("bandwidth must be a real tensor that does not require grad")
    width = torch.as_tensor(bandwidth, dtype=torch.float64, device=points.device)
    if width.shape not in ((), (1,), (dim,)):
        raise InputError(
            f"bandwidth has shape {tuple(width.shape)}; expected a number or one for each of "
            f"the {dim} dims"
        )
    if not bool((width.isfinite() & (width > 0)).all()):
        raise InputError(f"bandwidth must be finite and > 0, got {bandwidth!r}")
    return width


def _check_weights(weights: Tensor, data: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise InputError(f"weights must be a floating-point tensor, got {weights!r}")
    if weights.requires_grad and torch.is_grad_enabled():
        raise InputError("weights requires grad, but densities have no gradients so far")
    check_dense("weights", weights)
    if weights.device != data.device:
        raise InputError(f"weights is on {weights.device} but data is on {data.device}")
    shape = tuple(data.shape[:-1])
    try:
        expanded = weights.double().expand(shape)
    except RuntimeError:
        raise InputError(f"weights has shape {tuple(weights.shape)}; expected {shape}") from None
    good = (expanded.isfinite() & (expanded >= 0)).all(-1) & (expanded.sum(-1) > 0)
    if not bool(good.all()):
        raise InputError("weights must be finite and >= 0, with a positive sum")
    return expanded
