"""Feature sums of a fitted polynomial for one causal head on the device, and their gradients.

Tokens are cut into chunks. A row reads the features of all keys in earlier chunks, and is paired
with each key of its own chunk. In the backward pass a key reads the features of all rows in later
chunks. The sums over the chunks before or after each are one small product of matrices, in which
every chunk has a unit of its own: log-weights may vary by hundreds along the sequence without
underflow. Chunks come in groups that fit into memory; each group carries its sum over to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...plans.cost import FIT_CHUNK
from ...polynomials.fitting import FittedKernel
from ..runtime.language import cdiv
from . import fitted_sums
from .fitted_sums import Features, Near, Rows, TokenGradients, finite, with_ones

CHUNK = FIT_CHUNK
GROUP = 256  # chunks at most: each is summed with all before it, which costs as much as a product


def sums(kernel: FittedKernel, near: Near) -> tuple[Tensor, Tensor]:
    """Sums of the values and of ones [n, dv + 1], and the logarithm of each row's unit [n]."""
    features, n = Features.of(kernel, near.query.device), len(near.query)
    cut = _Cut.of(features, near)
    top = torch.maximum(cut.before[:-1].unsqueeze(1), cut.log_weight.cummax(1).values)
    unit = finite(top)
    found = []
    for part, prefix in cut.prefixes(features):
        read = features.written(cut.query_tokens[part]).read(prefix)
        total = read * (cut.before[:-1][part].unsqueeze(1) - unit[part]).exp().unsqueeze(2)
        weight = _shown(cut.log_weight[part].unsqueeze(1) - unit[part].unsqueeze(2))
        weight *= kernel(cut.query[part], cut.key[part])
        found.append(total + weight @ cut.value[part])
    return torch.cat(found).flatten(0, 1)[:n], top.flatten()[:n]


def gradients(kernel: FittedKernel, near: Near, rows: Rows) -> TokenGradients:
    """Gradients of the tokens from those of the rows' sums."""
    features = Features.of(kernel, near.query.device)
    cut = _Cut.of(features, near)
    grad, log_factor = _cut(rows.grad, cut.number), _cut(rows.log_factor, cut.number, -math.inf)
    own_pairs, early = [], []
    for part, prefix in cut.prefixes(features):
        factor = log_factor[part] + cut.before[:-1][part].unsqueeze(1)
        made = features.written(cut.query_tokens[part])
        early.append(made.pull_back(prefix, grad[part] * factor.exp().unsqueeze(2)))
        own_pairs.append(_pair_gradients(kernel, cut, part, grad[part], log_factor[part]))
    read, late = [], []
    for part, after, suffix in cut.suffixes(features, grad, log_factor):
        weight = (cut.log_weight[part] + after.unsqueeze(1)).exp().unsqueeze(2)
        made = features.written(cut.key_tokens[part])
        late.append(made.pull_back(suffix, cut.value[part] * weight))
        read.append(made.read(suffix) * weight)
    read, late = read[::-1], late[::-1]  # they come from the end
    parts = [torch.cat(x).flatten(0, 1) for x in (early, late, read)]
    n, visible = len(near.query), min(len(near.key), len(near.query))
    parts = [x[:end] for x, end in zip(parts, (n, visible, visible), strict=True)]
    rest = len(near.key) - visible  # keys that no row attends to
    total = features.token_gradients(
        near, parts[0], *(F.pad(x, (0, 0, 0, rest)) for x in parts[1:])
    )
    for whole, more in zip(total, zip(*own_pairs, strict=True), strict=True):
        own = torch.cat(more).flatten(0, 1)[: len(whole)]
        whole[: len(own)] += own
    return total


def _pair_gradients(
    kernel: FittedKernel, cut: _Cut, part: slice, grad: Tensor, log_factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tokens of some chunks through the pairs within each of them."""
    query, key, value = cut.query[part], cut.key[part], cut.value[part]
    weight = _shown(log_factor.unsqueeze(2) + cut.log_weight[part].unsqueeze(1))
    slope, score = (grad @ value.mT).mul_(weight), kernel(query, key)
    to_weight = (score * slope).sum(1)
    to_value = weight.mul_(score).mT @ grad[..., :-1]
    return *kernel.gradients(query, key, slope), to_value, to_weight


def _shown(log_weight: Tensor) -> Tensor:
    """Weights of pairs [chunks, rows, keys]; none of keys that lie ahead."""
    ahead = torch.ones(log_weight.shape[1:], dtype=torch.bool, device=log_weight.device).triu(1)
    return log_weight.masked_fill(ahead, -math.inf).exp_()


def _cut(x: Tensor, chunks: int, fill: float = 0.0) -> Tensor:
    """Tokens [tokens, ...] as [chunks, CHUNK, ...], truncated or padded with ``fill``."""
    x = x[: chunks * CHUNK]
    missing = chunks * CHUNK - len(x)
    if missing:
        x = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing), value=fill)
    return x.unflatten(0, (chunks, CHUNK))


class _Cut(NamedTuple):
    """The tokens of a head cut into chunks."""

    number: int
    query: Tensor  # [chunks, CHUNK, d]
    key: Tensor
    value: Tensor  # and ones
    log_weight: Tensor  # [chunks, CHUNK]
    query_tokens: Tensor  # in their units
    key_tokens: Tensor
    before: Tensor  # [chunks + 1]: the largest log-weight of all chunks before

    @staticmethod
    def of(features: Features, near: Near) -> _Cut:
        number = cdiv(len(near.query), CHUNK)
        query, key, value = (_cut(x, number) for x in near[:3])
        log_weight = _cut(near.log_weight, number, -math.inf)
        before = F.pad(log_weight.amax(1).cummax(0).values, (1, 0), value=-math.inf)
        one, other = features.tokens(query, key)
        return _Cut(number, query, key, with_ones(value), log_weight, one, other, before)

    def prefixes(self, features: Features) -> Iterator[tuple[slice, Tensor]]:
        """Groups of chunks, and of each the state [chunks, count, dv + 1] of all keys before it, in
        units of ``before``."""
        top = self.log_weight.amax(1)
        carry = self.value.new_zeros(features.map.count, self.value.shape[2])
        for part in self._groups(features):
            weight = (self.log_weight[part] - finite(top[part]).unsqueeze(1)).exp().unsqueeze(2)
            states = features.written(self.key_tokens[part]).summed(self.value[part] * weight)
            edges = self.before[part.start : part.stop + 1]
            earlier = torch.ones(len(edges), len(states), device=weight.device).tril(-1)
            made = _running(states, carry, earlier, top[part], edges, edges[0])
            carry = made[-1]
            yield part, made[:-1] * features.weights

    def suffixes(
        self, features: Features, grad: Tensor, log_factor: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Groups of chunks, the last one first; the largest log-factor of all rows after each
        chunk, and the state of these rows in units of it."""
        top = log_factor.amax(1)
        after = F.pad(top.flip(0).cummax(0).values.flip(0), (0, 1), value=-math.inf)
        carry = self.value.new_zeros(features.map.count, self.value.shape[2])
        for part in reversed(list(self._groups(features))):
            weight = (log_factor[part] - finite(top[part]).unsqueeze(1)).exp().unsqueeze(2)
            states = features.written(self.query_tokens[part]).summed(grad[part] * weight)
            edges = after[part.start : part.stop + 1]
            later = torch.ones(len(edges), len(states), device=weight.device).triu()
            made = _running(states, carry, later, top[part], edges, edges[-1])
            carry = made[0]
            yield part, edges[1:], made[1:] * features.weights

    def _groups(self, features: Features) -> Iterator[slice]:
        """Groups of chunks whose features, gradients and pairs take half of the memory."""
        chunk = CHUNK * max(2 * features.map.count, 8 * CHUNK)
        step = min(GROUP, max(1, fitted_sums.ENTRIES // (2 * chunk)))
        return (slice(at, min(self.number, at + step)) for at in range(0, self.number, step))


def _running(
    states: Tensor, carry: Tensor, which: Tensor, top: Tensor, edges: Tensor, unit: Tensor
) -> Tensor:
    """Prefix (or suffix) sums of the states of chunks at every edge between them, [edges, count,
    width], in units of exp(edges): of the chunks in ``which`` [edges, chunks], in units of
    exp(top), plus ``carry`` in units of exp(unit)."""
    size = finite(edges).unsqueeze(1)
    share = torch.where(which > 0, (top - size).exp(), 0.0)
    total = share @ states.flatten(1)
    total.addr_((unit - size).exp().squeeze(1), carry.flatten())
    return total.unflatten(1, states.shape[1:])
