"""The polynomial component: p(scores) through packed features, never as an n x n or n x r array.

With t = <q, k> / (max|q| max|k|) in [-1, 1] and p = sum_k a_k t^k, the sum over keys is
``sum_j p(t_ij) w_j v_j = <phi(q_i), diag(a W) S>`` where ``S = sum_j phi(k_j) w_j v_j``. Causal
sums keep S as a running prefix and evaluate p densely inside one chunk.

Tokens are handed out in lanes, one for each thread: the thread that writes a lane's features also
multiplies them, and they never leave its cache. (Split any other way, features written by one core
and read by another cost up to twice the time, depending on where the cores happen to sit.)
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
MAX_LANES = 16
NARROW = 8  # columns below which products are faster the other way round


def lane_count(device: str) -> int:
    """Lanes that tokens are handed out in: one for each thread of the CPU."""
    return min(MAX_LANES, torch.get_num_threads()) if device == "cpu" else 1


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
        self.lanes = lane_count(head.query.device.type)
        self.log_scale = min(poly.bound, 1e30)  # beyond that no weight is left to scale
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
        return take(self.head.query, self.rows, start, stop).to(self.head.dtype) / self.query_norm

    def key(self, start: int, stop: int) -> Tensor:
        return take(self.head.key, self.keys, start, stop).to(self.head.dtype) / self.key_norm

    def value(self, start: int, stop: int) -> Tensor:
        return take(self.head.value, self.keys, start, stop).to(self.head.dtype)

    def log_weight(self, start: int, stop: int) -> Tensor | None:
        source = self.head.key_log_weight
        if source is None:
            return None
        return take(source, self.keys, start, stop).to(self.head.dtype)

    def in_lanes(self, tokens: Tensor) -> Tensor:
        """[rows, ...] as [lanes, rows / lanes, ...], filled up with zeros."""
        missing = -len(tokens) % self.lanes
        if missing:
            tokens = torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])])
        return tokens.view(self.lanes, len(tokens) // self.lanes, *tokens.shape[1:])

    def write(self, tokens: Tensor, buffer: Tensor) -> Tensor:
        """Features of a block of tokens, [lanes, count - 1, rows]."""
        return self.features.write(self.in_lanes(tokens), buffer)

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
        head, count = task.head, task.features.count
        new = head.query.new_zeros
        self.values = new(task.lanes, count - 1, head.value_dim, dtype=head.dtype)
        self.ones = new(task.lanes, count - 1, 1, dtype=head.dtype)
        self.constant = new(head.value_dim, dtype=head.dtype)  # of the constant feature
        self.mass = 0.0
        self.top = -math.inf

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
        features = task.write(task.key(start, stop), buffer)
        self.mass += float(weight.sum())
        _add_products(self.ones, features, task.in_lanes(weight).unsqueeze(2))
        if not task.head.is_density:
            self.constant += value.sum(0)
            _add_products(self.values, features, task.in_lanes(value))

    def _raise_top(self, top: float) -> None:
        if top > self.top:
            shrink = math.exp(self.top - top)
            for sums in (self.values, self.ones, self.constant):
                sums.mul_(shrink)
            self.mass *= shrink
            self.top = top


class _Reader:
    """The finished state with the polynomial applied: features of queries to sums over keys."""

    def __init__(self, state: _State, task: _Task):
        weights = task.weights[1:].unsqueeze(1)
        self.task = task
        self.values = state.values.sum(0).mul_(weights)
        self.ones = state.ones.sum(0).mul_(weights)
        self.constant = state.constant * task.weights[0]
        self.mass = state.mass * float(task.weights[0])

    def read(self, query: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator [rows, dv] and denominator [rows] of a block of queries."""
        features, rows = self.task.write(query, buffer), len(query)
        den = _products(features, self.ones)[:rows].add_(self.mass)
        if self.task.head.is_density:
            return den, den.squeeze(1)
        return _products(features, self.values)[:rows].add_(self.constant), den.squeeze(1)


def _add_products(total: Tensor, features: Tensor, value: Tensor) -> None:
    """Add features [lanes, count, rows] times value [lanes, rows, columns] to the sums."""
    if value.shape[2] >= NARROW:
        total.baddbmm_(features, value)
    else:
        total.transpose(1, 2).add_(value.transpose(1, 2) @ features.transpose(1, 2))


def _products(features: Tensor, sums: Tensor) -> Tensor:
    """Features [lanes, count, rows], transposed, times sums [count, columns]: [rows, columns]."""
    if sums.shape[1] >= NARROW:
        return (features.transpose(1, 2) @ sums).flatten(0, 1)
    return (sums.T @ features).transpose(1, 2).flatten(0, 1)


def _add_full(task: _Task, total: Partial) -> None:
    """Every row sees every key: one pass over the keys, one over the rows."""
    lane = block_rows(task.features.count, task.head.dtype)
    lane = min(lane, math.ceil(max(task.row_count, task.key_count) / task.lanes))
    buffer, block = task.features.buffer(task.lanes, lane, task.weights), lane * task.lanes
    state = _State(task)
    for start in range(0, task.key_count, block):
        state.add(task, start, min(task.key_count, start + block), buffer)
    reader = _Reader(state, task)
    noise = task.noise(state.mass, block)
    log_scale = torch.full_like(noise, task.log_scale + state.top)
    for start in range(0, task.row_count, block):
        rows = slice(start, min(task.row_count, start + block))
        num, den = reader.read(task.query(rows.start, rows.stop), buffer)
        total[rows].add_(Partial(num, den, log_scale[rows], noise[rows]))


def _add_causal(task: _Task, total: Partial) -> None:
    """Chunks of positions: earlier chunks through the running state, the chunk itself densely."""
    head = task.head
    fitting = task.lanes * block_rows(task.features.count, head.dtype)
    chunk = max(32, min(CAUSAL_CHUNK, fitting))
    row_edges = _edges(task.rows, task.row_count, head.n, chunk, head.query)
    key_edges = _edges(task.keys, task.key_count, head.n, chunk, head.query)
    lane = math.ceil(chunk / task.lanes)
    buffer = task.features.buffer(task.lanes, lane, task.weights)
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
        num, den = _Reader(state, task).read(query, buffer)
        top = torch.full_like(reach, task.log_scale + state.top)
        part.add_(Partial(num, den, top, reach * state.mass))
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
