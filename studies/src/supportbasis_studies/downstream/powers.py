"""Many thresholds, all heads of a batch at once: the weights of all pairs by their formula.

`MultiThreshold` without a sketch is quadratic, and the library sums its pairs of buckets one after
the other, head by head. For a few hundred tokens that is mostly waiting. Here every pair of tokens
looks up the power and the polynomial of its buckets, which gives the same numbers (a test holds
them to those of the library).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from supportbasis.plans import BucketHead
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import largest_entries

from ..models import allowed

ENTRIES = 2**24  # weights in memory at a time


def by_powers(
    plans: Sequence[BucketHead],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Output [batch, heads, n, dv]; a plan for each head, the same for all items."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    table = _table(plans).to(query.device, dtype)
    rows = _buckets([plan.row_edges for plan in plans], query)
    keys = _buckets([plan.key_edges for plan in plans], key).unsqueeze(-2)  # [batch, heads, 1, m]
    right, values = key.to(dtype).mT * scale, value.to(dtype)
    n, m = query.shape[-2], key.shape[-2]
    mask = allowed(n, m, query.device) if causal else None
    head = torch.arange(len(plans), device=query.device).unsqueeze(-1)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    step = max(1, ENTRIES // (len(query) * len(plans) * m))
    for start in range(0, n, step):
        part = slice(start, start + step)
        score = query[..., part, :].to(dtype) @ right
        weight = _log_weights(score, table[head, rows[..., part]], keys)
        if mask is not None:
            weight = weight.masked_fill_(~mask[part], -math.inf)
        output[..., part, :] = (weight.softmax(-1) @ values).to(output.dtype)
    return output


def _log_weights(score: Tensor, numbers: Tensor, keys: Tensor) -> Tensor:
    """Of scores [batch, heads, n, m], whose rows have ``numbers`` [..., n, key buckets, ...]."""
    index = keys.expand(score.shape)
    power, unit, inverse, *coefficients = (x.gather(-1, index) for x in numbers.unbind(-1))
    inner, inverse = torch.zeros_like(score), inverse.mul_(score)
    for coefficient in reversed(coefficients):
        inner = inner.mul_(inverse).add_(coefficient)
    log = inner.abs_().log_().add_(unit).mul_(power)
    return torch.where(power == 0, score, log)


def _table(plans: Sequence[BucketHead]) -> Tensor:
    """[heads, row buckets, key buckets, numbers]: of each pair the power p, the logarithm of its
    unit, 1/(p B) and the coefficients of its polynomial on [-B, B]; all 0 for an exact pair."""
    rows = max(len(plan.row_edges) for plan in plans)
    keys = max(len(plan.key_edges) for plan in plans)
    lines = [
        (head, pair.row, pair.key, _numbers(pair.kernel))
        for head, plan in enumerate(plans)
        for pair in plan.pairs
        if pair.kernel is not None
    ]
    width = max((len(numbers) for *_, numbers in lines), default=4)
    table = torch.zeros(len(plans), rows, keys, width, dtype=torch.float64)
    for head, row, column, numbers in lines:
        table[head, row, column, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return table


def _numbers(kernel: PowerKernel) -> list[float]:
    poly = kernel.polynomial
    assert poly is not None and kernel.sketch_size is None
    reach = kernel.power * poly.bound
    return [kernel.power, kernel.log_unit, 1 / reach if reach else 0.0, *poly.coefficients]


def _buckets(edges: Sequence[Sequence[float]], tokens: Tensor) -> Tensor:
    """The bucket of every token [batch, heads, n], as `buckets.bucket_of` has it."""
    borders = torch.full((len(edges), max(map(len, edges)) - 1), math.inf, dtype=torch.float64)
    for head, upper in enumerate(edges):
        borders[head, : len(upper) - 1] = torch.tensor(upper[:-1], dtype=torch.float64)
    borders = borders.to(tokens.device).expand(len(tokens), -1, -1).contiguous()
    return torch.searchsorted(borders, largest_entries(tokens).double(), right=True)
