"""Feature sums of a fitted polynomial for one head on the device, and their gradients.

`components.streaming` works in blocks that fit a cache; here a block is as many tokens as fit in
memory, and no number is read on the host. Units are the radii of the plan, not the largest norms.
Every row attends to every key; causal heads are in `fitted_chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...polynomials.features import FeatureMap
from ...polynomials.fitting import FittedKernel
from ...polynomials.monomials import Buffer

ENTRIES = 2**28  # of features in memory at a time
PRODUCTS = 128  # at most, that one sum over tokens is made of


class Near(NamedTuple):
    """Transformed tokens that a head sums by its polynomial: tokens that are exact instead are
    zero, and such keys have log-weight -inf."""

    query: Tensor  # [n, d]
    key: Tensor  # [m, d]
    value: Tensor  # [m, dv]
    log_weight: Tensor  # [m]


class Rows(NamedTuple):
    """Gradients of the rows' sums, in units of exp(log_factor)."""

    grad: Tensor  # [n, dv + 1]: of numerators and denominator
    log_factor: Tensor  # [n]; -inf: zero


class TokenGradients(NamedTuple):
    """Gradients of all transformed tokens of a head."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_weight: Tensor


def sums(kernel: FittedKernel, near: Near) -> tuple[Tensor, Tensor]:
    """Sums of the values and of ones [n, dv + 1], and the logarithm of each row's unit [n]."""
    features = Features.of(kernel, near.query.device)
    query, key = features.tokens(near.query, near.key)
    top = near.log_weight.max()
    weight = (near.log_weight - finite(top)).exp().unsqueeze(1)
    state = features.state(key, with_ones(near.value) * weight)
    read = [features.written(query[part]).read(state) for part in features.parts(len(query))]
    return torch.cat(read), top.expand(len(query))


def gradients(kernel: FittedKernel, near: Near, rows: Rows) -> TokenGradients:
    """Gradients of the tokens from those of the rows' sums."""
    features = Features.of(kernel, near.query.device)
    query, key = features.tokens(near.query, near.key)
    top, value = finite(near.log_weight.max()), with_ones(near.value)
    state = features.state(key, value * (near.log_weight - top).exp().unsqueeze(1))
    unit, to_query, to_key, read = finite(rows.log_factor.max()), [], [], []
    of_rows = torch.zeros_like(state)
    for part in features.parts(len(query), with_gradients=True):
        made, log_factor = features.written(query[part]), rows.log_factor[part].unsqueeze(1)
        to_query.append(made.pull_back(state, rows.grad[part] * (log_factor + top).exp()))
        of_rows += made.summed(rows.grad[part] * (log_factor - unit).exp())
    of_rows *= features.weights
    weight = (near.log_weight + unit).exp().unsqueeze(1)
    for part in features.parts(len(key), with_gradients=True):
        made = features.written(key[part])
        to_key.append(made.pull_back(of_rows, value[part] * weight[part]))
        read.append(made.read(of_rows))
    return features.token_gradients(
        near, torch.cat(to_query), torch.cat(to_key), torch.cat(read) * weight
    )


def with_ones(value: Tensor) -> Tensor:
    """Values [..., dv] in float32, and a column of ones."""
    return torch.cat([value.float(), value.new_ones(*value.shape[:-1], 1).float()], -1)


def finite(top: Tensor) -> Tensor:
    """A unit: zero where nothing has any weight."""
    return torch.where(top > -math.inf, top, 0.0)


class Features(NamedTuple):
    """The features of a kernel: their map, their weights, and the units of queries and keys."""

    map: FeatureMap
    weights: Tensor  # [count, 1]
    units: tuple[float, float]

    @staticmethod
    @lru_cache(maxsize=512)  # one for each head of a model
    def of(kernel: FittedKernel, device: torch.device) -> Features:
        query_unit, key_unit = (
            radius if radius < math.inf else 1.0
            for radius in (kernel.query_radius, kernel.key_radius)
        )
        made = FeatureMap(kernel.spans[0], kernel.degree, kernel.spans)
        scaled = [a * (query_unit * key_unit) ** k for k, a in enumerate(kernel.coefficients)]
        weights = made.multiplicity * torch.tensor(scaled, dtype=torch.float64)[made.degrees]
        return Features(made, weights.float().to(device).unsqueeze(1), (query_unit, key_unit))

    def tokens(self, *sides: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys [..., d] in their units: the leading coordinates, which are the last of
        the map's variables."""
        pairs = zip(sides, self.units, strict=True)
        return tuple((x[..., : self.map.dim] / unit).flip(-1) for x, unit in pairs)

    def parts(self, tokens: int, *, with_gradients: bool = False) -> Iterator[slice]:
        """Slices of tokens whose features (and their gradients) fit in memory."""
        entries = ENTRIES // 2 if with_gradients else ENTRIES
        step = max(PRODUCTS, entries // self.map.count // PRODUCTS * PRODUCTS)
        return (slice(start, start + step) for start in range(0, tokens, step))

    def written(self, x: Tensor) -> Written:
        """Features of tokens [tokens, dim], or of those of several lanes [lanes, tokens, dim]."""
        lanes = x if x.dim() == 3 else x.unsqueeze(0)
        buffer = self.map.buffer(len(lanes), lanes.shape[1], lanes)
        return Written(self.map, buffer, self.map.write(lanes, buffer), x.dim() == 3)

    def state(self, x: Tensor, columns: Tensor) -> Tensor:
        """Sums over tokens of weight x feature x column [tokens, width]: [count, width]."""
        total = columns.new_zeros(self.map.count, columns.shape[1])
        for part in self.parts(len(x)):
            total += self.written(x[part]).summed(columns[part])
        return total.mul_(self.weights)

    def token_gradients(
        self, near: Near, query: Tensor, key: Tensor, read: Tensor
    ) -> TokenGradients:
        """Gradients of tokens from those in their units, and of values and log-weights from what
        the keys read, [m, dv + 1]."""
        whole = []
        pairs = zip((near.query, near.key), (query, key), self.units, strict=True)
        for tokens, part, unit in pairs:
            grad = torch.zeros_like(tokens)
            grad[:, : self.map.dim] = part.flip(1) / unit
            whole.append(grad)
        return TokenGradients(
            whole[0], whole[1], read[:, :-1], (read * with_ones(near.value)).sum(1)
        )


class Written(NamedTuple):
    """Features of some tokens; the constant one is left out."""

    map: FeatureMap
    buffer: Buffer
    features: Tensor  # [lanes, count - 1, tokens]
    in_lanes: bool

    def summed(self, columns: Tensor) -> Tensor:
        """Features times columns: [count, width], or [lanes, count, width]."""
        if self.in_lanes:
            first = columns.sum(1, keepdim=True)
            return torch.cat([first, self.features @ columns], 1)
        # one product so long and thin would keep few of the device's units busy
        parts = math.gcd(len(columns), PRODUCTS)
        split = self.features[0].unflatten(1, (parts, -1)).transpose(0, 1)
        rest = (split @ columns.unflatten(0, (parts, -1))).sum(0)
        return torch.cat([columns.sum(0, keepdim=True), rest])

    def read(self, state: Tensor) -> Tensor:
        """Features times a state [count, width]: [tokens, width], or [lanes, tokens, width]."""
        features = self.features if self.in_lanes else self.features[0]
        return features.mT @ state[..., 1:, :] + state[..., :1, :]

    def pull_back(self, state: Tensor, columns: Tensor) -> Tensor:
        """Gradients of the tokens, given those of `read`, ``columns`` [tokens, width]."""
        columns = columns.mT if self.in_lanes else columns.T.unsqueeze(0)

        def fill(start: int, stop: int, out: Tensor) -> None:
            torch.matmul(state[..., 1 + start : 1 + stop, :], columns, out=out)

        grad = self.map.pull_back(self.buffer, fill, columns.shape[-1]).mT
        grad = grad.clone(
            memory_format=torch.contiguous_format
        )  # frees the gradients of all features
        return grad if self.in_lanes else grad[0]
