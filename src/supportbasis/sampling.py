"""Sampled query rows: which ones, their exact result, and what they say about all rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .components import ExactSum, evaluate
from .problem import Head

QUANTILE = 1.96  # one-sided 97.5 % of a normal ratio: 95 % is left for one with a long tail


def sample_rows(n: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Sorted row indices without replacement, from a private generator."""
    if n <= count:
        return torch.arange(n, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:count].sort().values.to(device)


def exact_rows(head: Head, rows: Tensor, log_scale: float = 0.0) -> Tensor:
    """The exact result of some rows in float64."""
    wide = replace(head, precision=torch.float64)
    total = evaluate([ExactSum(head.live_keys)], wide, rows)
    if head.normalise:
        return total.divide_(total.seen)[0]
    if head.query_log_weight is not None:
        total.log_scale = total.log_scale + head.query_log_weight[rows]
    return total.num * (total.log_scale - log_scale).exp().unsqueeze(1)


def frobenius_limit(squared: Tensor, size: Tensor, n: int) -> tuple[float, float]:
    """sqrt(sum e_i^2 / sum s_i^2) of sampled rows, and its upper confidence limit.

    The ratio of two sample means, with the standard error of the linearised ratio and the
    finite-population factor; the limit is taken on the logarithm of the ratio, which suits the
    long right tail that squared errors have.
    """
    count = len(squared)
    total = float(size.mean())
    if total == 0.0:
        return (0.0, 0.0) if float(squared.sum()) == 0.0 else (math.inf, math.inf)
    ratio = float(squared.mean()) / total
    if count == n or ratio == 0.0:
        return math.sqrt(ratio), math.sqrt(ratio)
    residual = (squared - ratio * size).square().sum() / (count - 1)
    standard = math.sqrt(float(residual) / count * (1 - count / n)) / total
    return math.sqrt(ratio), math.sqrt(ratio * math.exp(QUANTILE * standard / ratio))
