"""Feature sums of a fitted polynomial for one head on the device, and their gradients.

`components.streaming` works in blocks that fit a cache; here a block is as many tokens as fit in
memory, and no number is read on the host. Units are the radii of the plan, not the largest norms.
Every row attends to every key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.jensen import PRODUCTS, long_product
from ...polynomials.features import Buffer, FeatureMap
from ...polynomials.fitting import FittedKernel

ENTRIES = 2**28  # of features in memory at a time


class Near(NamedTuple):
    """Transformed tokens that a head sums by its polynomial: tokens that are exact instead are
    zero, and such keys have log-weight -inf."""

    query: Tensor  # [n, d]
    key: Tensor  # [m, d]
    value: Tensor  # [m, dv]
    log_weight: Tensor  # [m]


def sums(features: Features, near: Near) -> tuple[Tensor, Tensor]:
    """Sums of the values and of ones [n, dv + 1], and the logarithm of each row's unit [n]."""
    query, key = features.tokens(near)
    top = near.log_weight.max()
    state = features.state(key, near, finite(top))
    read = [_read(written, state) for _, written, _ in features.blocks(query)]
    return torch.cat(read), top.expand(len(query))


def gradients(
    features: Features, near: Near, grad: Tensor, log_factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and log-weight from those of the rows' sums: ``grad``
    [n, dv + 1] in units of exp(log_factor) [n]; -inf: zero."""
    query, key = features.tokens(near)
    top, value = finite(near.log_weight.max()), with_ones(near.value)
    state = features.state(key, near, top)
    unit, to_query, to_key, read = finite(log_factor.max()), [], [], []
    of_rows = torch.zeros_like(state)
    for part, written, buffer in features.blocks(query, with_gradients=True):
        factor = log_factor[part].unsqueeze(1)
        to_query.append(_pull_back(buffer, state, grad[part] * (factor + top).exp()))
        of_rows += _summed(written, grad[part] * (factor - unit).exp())
    of_rows *= features.weights
    weight = (near.log_weight + unit).exp().unsqueeze(1)
    for part, written, buffer in features.blocks(key, with_gradients=True):
        to_key.append(_pull_back(buffer, of_rows, value[part] * weight[part]))
        read.append(_read(written, of_rows))
    total = torch.cat(read) * weight
    sides = (torch.zeros_like(near.query), torch.zeros_like(near.key))
    for side, parts, scale in zip(sides, (to_query, to_key), features.units, strict=True):
        side[:, : features.map.dim] = torch.cat(parts) / scale
    return *sides, total[:, :-1], (total * value).sum(1)


def with_ones(value: Tensor) -> Tensor:
    """Values [..., dv] in float32, and a column of ones."""
    return torch.cat([value.float(), value.new_ones(*value.shape[:-1], 1).float()], -1)


def finite(top: Tensor) -> Tensor:
    """A unit: zero where nothing has any weight."""
    return torch.where(top > -math.inf, top, 0.0)


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a kernel: their map, their weights, and the units of queries and keys."""

    map: FeatureMap
    weights: Tensor  # [count, 1]
    units: tuple[float, float]

    @staticmethod
    def of(kernel: FittedKernel, device: torch.device) -> Features:
        query_unit, key_unit = (
            radius if radius < math.inf else 1.0
            for radius in (kernel.query_radius, kernel.key_radius)
        )
        made = FeatureMap(kernel.spans[0], kernel.degree, kernel.spans)
        scaled = [a * (query_unit * key_unit) ** k for k, a in enumerate(kernel.coefficients)]
        weights = made.multiplicity * torch.tensor(scaled, dtype=torch.float64)[made.degrees]
        return Features(made, weights.float().to(device).unsqueeze(1), (query_unit, key_unit))

    def tokens(self, near: Near) -> tuple[Tensor, ...]:
        """Queries and keys in their units: the leading coordinates."""
        pairs = zip((near.query, near.key), self.units, strict=True)
        return tuple(x[:, : self.map.dim] / unit for x, unit in pairs)

    def blocks(
        self, x: Tensor, *, with_gradients: bool = False
    ) -> Iterator[tuple[slice, Tensor, Buffer]]:
        """Slices of tokens [tokens, dim] whose features (and their gradients) fit in memory, these
        features but the constant one, [count - 1, tokens], and the memory, the same for all."""
        entries = ENTRIES // 2 if with_gradients else ENTRIES
        step = max(PRODUCTS, entries // self.map.count // PRODUCTS * PRODUCTS)
        buffer = Buffer(self.map, 1, min(step, len(x)), x)
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            yield part, buffer.write(x[part].unsqueeze(0))[0], buffer

    def state(self, key: Tensor, near: Near, unit: Tensor) -> Tensor:
        """Sums over keys of features and values (and ones), with the keys' weights in units of
        exp(unit) and those of the features: [count, dv + 1]."""
        columns = with_ones(near.value) * (near.log_weight - unit).exp().unsqueeze(1)
        total = columns.new_zeros(self.map.count, columns.shape[1])
        for part, written, _ in self.blocks(key):
            total += _summed(written, columns[part])
        return total.mul_(self.weights)


def _summed(features: Tensor, columns: Tensor) -> Tensor:
    """Features times columns [tokens, width]: [count, width]."""
    return torch.cat([columns.sum(0, keepdim=True), long_product(features, columns)])


def _read(features: Tensor, state: Tensor) -> Tensor:
    """Features times a state [count, width]: [tokens, width]."""
    return features.mT @ state[1:] + state[:1]


def _pull_back(buffer: Buffer, state: Tensor, columns: Tensor) -> Tensor:
    """Gradients of the tokens whose features were written last, given those of `_read`, ``columns``
    [tokens, width]."""
    right = columns.T.unsqueeze(0)
    grad = buffer.pull_back(lambda out: torch.matmul(state[1:], right, out=out), len(columns))
    return grad[0].mT.clone(memory_format=torch.contiguous_format)  # blocks share the memory
