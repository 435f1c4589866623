"""The polynomial component: p(scores) through packed features, never as an n x n or n x r array.

With t = <q, k> / (max|q| max|k|) in [-1, 1] and p = sum_k a_k t^k, the sum over keys is
``sum_j p(t_ij) w_j v_j = <phi(q_i), diag(a W) S>`` where ``S = sum_j phi(k_j) w_j v_j``. Causal
sums keep S as a running prefix and evaluate p densely inside one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..features import FeatureMap, block_rows
from ..partial import Partial
from ..polynomials import CertifiedPolynomial, horner
from ..problem import Head
from ..rounding import gamma, product_roundoff, sum_depth
from .exact import take, take_index

CAUSAL_CHUNK = 504  # see `block_rows` for why it is not 512


@dataclass(frozen=True, eq=False)
class PolynomialSum:
    """p(score) instead of exp(score) over ``keys`` (sorted indices of live keys; None: all)."""

    polynomial: CertifiedPolynomial
    keys: Tensor | None = None

    def add_to(self, total: Partial, head: Head, rows: Tensor | None) -> None:
        """Add the sums over these keys to ``total``, which holds the given rows."""
        task = _Task(head, rows, self.keys, self.polynomial)
        if task.row_count and task.key_count:
            add = _add_causal if head.is_causal else _add_full
            add(task, total)


class _Task:
    """One evaluation: normalised tokens, block by block, and the polynomial in t."""

    def __init__(
        self, head: Head, rows: Tensor | None, keys: Tensor | None, poly: CertifiedPolynomial
    ):
        self.head, self.rows, self.keys = head, rows, keys
        self.row_count = head.n if rows is None else rows.numel()
        self.key_count = head.m if keys is None else keys.numel()
        self.features = FeatureMap(head.dim, poly.degree)
        self.log_scale = poly.bound
        query_norms = head.query_norms if rows is None else head.query_norms[rows]
        key_norms = head.key_norms if keys is None else head.key_norms[keys]
        self.query_norm = _largest(query_norms)
        self.key_norm = _largest(key_norms)
        reach = abs(head.scale) * self.query_norm * self.key_norm
        self.coefficients = _rescaled(poly, reach)
        self._relative_norms = (query_norms / self.query_norm).to(head.dtype)
        coefficient = torch.tensor(self.coefficients, dtype=torch.float64)
        layout = self.features.multiplicity * coefficient[self.features.order]
        self.weights = layout.to(head.dtype).to(head.query.device)

    def query(self, start: int, stop: int) -> Tensor:
        sign = math.copysign(1.0, self.head.scale) if self.head.scale else 0.0
        tokens = take(self.head.query, self.rows, start, stop)
        return tokens.to(self.head.dtype) * (sign / self.query_norm)

    def key(self, start: int, stop: int) -> Tensor:
        return take(self.head.key, self.keys, start, stop).to(self.head.dtype) / self.key_norm

    def value(self, start: int, stop: int) -> Tensor:
        return take(self.head.value, self.keys, start, stop).to(self.head.dtype)

    def log_weight(self, start: int, stop: int) -> Tensor | None:
        source = self.head.key_log_weight
        if source is None:
            return None
        return take(source, self.keys, start, stop).to(self.head.dtype)

    def noise(self, mass: Tensor | float, block: int) -> Tensor:
        """Rounding of a row's sums: depth of the sums times the magnitude of their terms."""
        magnitude = torch.zeros_like(self._relative_norms)
        for coefficient in reversed(self.coefficients):
            magnitude.mul_(self._relative_norms).add_(abs(coefficient))
        depth = sum_depth(self.key_count, block) + self.features.count
        depth += 2 * self.features.degree + self.head.dim + 16
        return magnitude * gamma(depth, product_roundoff(self.head.dtype)) * mass


def _largest(norms: Tensor) -> float:
    """Largest norm, 1 for a side that is all zeros (its t is 0 whatever the unit)."""
    largest = float(norms.max()) if norms.numel() else 0.0
    return largest if largest > 0 else 1.0


def _rescaled(poly: CertifiedPolynomial, reach: float) -> tuple[float, ...]:
    """Coefficients in t = z / reach from those in z / bound."""
    if poly.bound == 0:
        return (poly.coefficients[0], *(0.0 for _ in poly.coefficients[1:]))
    log_ratio = math.log(reach / poly.bound) if reach > 0 else -math.inf
    result = []
    for k, coefficient in enumerate(poly.coefficients):
        exponent = k * log_ratio if k else 0.0
        factor = math.exp(exponent) if exponent < 700 else math.inf
        result.append(coefficient * factor if coefficient else 0.0)
    return tuple(result)


class _State:
    """Running sums of features: S = sum phi(k) w v and s = sum phi(k) w, in units of exp(top)."""

    def __init__(self, task: _Task):
        head = task.head
        zeros = head.query.new_zeros
        self.values = zeros(task.features.count, head.value_dim, dtype=head.dtype)
        self.ones = zeros(task.features.count, dtype=head.dtype)
        self.top = -math.inf
        self.mass = 0.0

    def add(self, task: _Task, start: int, stop: int, buffer: Tensor) -> None:
        """Add keys start..stop."""
        value, log_weight = task.value(start, stop), task.log_weight(start, stop)
        if log_weight is None:
            weight = value.new_ones(stop - start)
            self.top = 0.0
        else:
            self._raise_top(float(log_weight.max()))
            weight = (log_weight - self.top).exp_() if self.top > -math.inf else log_weight.exp()
            value = value * weight.unsqueeze(1)
        features = task.features.write(task.key(start, stop), buffer)
        total = weight.sum()
        if not task.head.is_density:
            self.values[0] += value.sum(0)
            self.values[1:].addmm_(features, value)
        self.ones[0] += total
        self.ones[1:].addmv_(features, weight)
        self.mass += float(total)

    def _raise_top(self, top: float) -> None:
        if top > self.top:
            shrink = math.exp(self.top - top)
            self.values.mul_(shrink)
            self.ones.mul_(shrink)
            self.mass *= shrink
            self.top = top


def _add_full(task: _Task, total: Partial) -> None:
    """Every row sees every key: one pass over the keys, one over the rows."""
    head = task.head
    block = block_rows(task.features.count, head.dtype)
    buffer = task.features.buffer(min(block, max(task.row_count, task.key_count)), task.weights)
    state = _State(task)
    for start in range(0, task.key_count, block):
        state.add(task, start, min(task.key_count, start + block), buffer)
    values = state.values.mul_(task.weights.unsqueeze(1))
    ones = state.ones.mul_(task.weights)
    noise = task.noise(state.mass, block)
    log_scale = torch.full_like(noise, task.log_scale + state.top)
    for start in range(0, task.row_count, block):
        rows = slice(start, min(task.row_count, start + block))
        features = task.features.write(task.query(rows.start, rows.stop), buffer)
        den = (features.T @ ones[1:]).add_(ones[0])
        if head.is_density:
            num = den.unsqueeze(1)
        else:
            num = (features.T @ values[1:]).add_(values[0])
        total[rows].add_(Partial(num, den, log_scale[rows], noise[rows]))


def _add_causal(task: _Task, total: Partial) -> None:
    """Chunks of positions: earlier chunks through the running state, the chunk itself densely."""
    head = task.head
    chunk = max(32, min(CAUSAL_CHUNK, block_rows(task.features.count, head.dtype)))
    row_edges = _edges(task.rows, task.row_count, head.n, chunk, head.query)
    key_edges = _edges(task.keys, task.key_count, head.n, chunk, head.query)
    buffer = task.features.buffer(chunk, task.weights)
    state = _State(task)
    reach = task.noise(1.0, chunk)
    for rows, keys in zip(pairwise(row_edges), pairwise(key_edges), strict=True):
        if rows[0] < rows[1]:
            where = slice(*rows)
            total[where].add_(_chunk_rows(task, state, rows, keys, buffer, reach[where]))
        if keys[0] < keys[1]:
            state.add(task, *keys, buffer)


def _chunk_rows(
    task: _Task,
    state: _State,
    rows: tuple[int, int],
    keys: tuple[int, int],
    buffer: Tensor,
    reach: Tensor,
) -> Partial:
    query = task.query(*rows)
    part = _diagonal(task, query, rows, keys, reach)
    if state.top > -math.inf:
        features = task.features.write(query, buffer)
        values = state.values * task.weights.unsqueeze(1)
        ones = state.ones * task.weights
        earlier = Partial(
            (features.T @ values[1:]).add_(values[0]),
            (features.T @ ones[1:]).add_(ones[0]),
            torch.full_like(reach, task.log_scale + state.top),
            reach * state.mass,
        )
        part.add_(earlier)
    return part


def _diagonal(
    task: _Task, query: Tensor, rows: tuple[int, int], keys: tuple[int, int], reach: Tensor
) -> Partial:
    """Rows of one chunk against the keys of the same chunk that do not lie ahead of them."""
    head = task.head
    if keys[0] == keys[1]:
        return Partial.empty(rows[1] - rows[0], head.value_dim, query, head.dtype)
    row_at = take_index(task.rows, *rows, query)
    key_at = take_index(task.keys, *keys, query)
    ahead = key_at > row_at.unsqueeze(1)
    kernel = horner(task.coefficients, query @ task.key(*keys).T)
    log_weight = task.log_weight(*keys)
    if log_weight is None:
        kernel.masked_fill_(ahead, 0.0)
        mass = torch.searchsorted(key_at, row_at, right=True).to(head.dtype)
        top = torch.zeros_like(mass).masked_fill_(mass == 0, -math.inf)
    else:
        shown = log_weight.masked_fill(ahead, -math.inf)
        top = shown.amax(1)
        weight = (shown - torch.where(top > -math.inf, top, 0.0).unsqueeze(1)).exp_()
        mass = weight.sum(1)
        kernel.mul_(weight)
    num = kernel @ task.value(*keys)
    return Partial(num, kernel.sum(1), top + task.log_scale, reach * mass)


def _edges(index: Tensor | None, count: int, tokens: int, chunk: int, like: Tensor) -> list[int]:
    """Where the chunks of positions 0, chunk, 2 chunk, ... begin in an index set."""
    borders = torch.arange(0, tokens + chunk, chunk, device=like.device)
    if index is None:
        return [min(count, int(border)) for border in borders.tolist()]
    edges: list[int] = torch.searchsorted(index, borders).tolist()
    return edges
