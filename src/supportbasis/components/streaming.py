"""Feature sums, streamed: phi(keys) are summed once, phi(queries) read the sum, block by block.

For a kernel ``sum_k a_k t^k`` of t = <x_i, y_j>, with |x_i|, |y_j| <= 1, the sum over keys is
``sum_j p(t_ij) w_j v_j = <phi(x_i), diag(a W) S>`` where ``S = sum_j phi(y_j) w_j v_j``. Neither
the n x m matrix nor the n x r features exist at any time. Causal sums keep S as a running prefix
and evaluate the kernel densely within one chunk. A `Task` defines x, y and the kernel: the tokens
themselves for a polynomial, sketched tokens for a sketch.

Tokens are divided into lanes, one for each thread: the thread that writes a lane's features also
multiplies them, and they stay in its cache. (Features written by one core and read by another cost
up to twice the time.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..polynomials.certified import derivative, horner
from ..polynomials.features import FeatureMap, block_rows
from ..polynomials.monomials import Buffer
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff, sum_depth
from .cotangent import Gradients
from .exact_sum import take, take_index
from .partial import Partial

CAUSAL_CHUNK = 504  # see `block_rows` for why it is not 512
MAX_LANES = 16
NARROW = 8  # columns below which products are faster the other way round


class Block(NamedTuple):
    """Some tokens of one side with log-weights, values and a column."""

    tokens: Tensor  # [tokens, dim]
    log_weight: Tensor | None  # None: zero
    value: Tensor  # [tokens, dv]
    column: Tensor | None = None  # beside the value; None: ones

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Log-weights and column [tokens]; zeros and ones where they are None."""
        zero = self.value.new_zeros(len(self.value))
        log_weight = zero if self.log_weight is None else self.log_weight
        return log_weight, zero + 1 if self.column is None else self.column


Span = tuple[int, int]  # tokens of a task, from and to


def lane_count(device: str) -> int:
    """Lanes that tokens are divided into: one for each thread of the CPU."""
    return min(MAX_LANES, torch.get_num_threads()) if device == "cpu" else 1


class Task(ABC):
    """One evaluation: unit tokens, block by block, and the kernel's coefficients in t."""

    def __init__(
        self,
        head: Head,
        rows: Tensor | None,
        keys: Tensor | None,
        features: FeatureMap,
        coefficients: Sequence[float],
    ):
        self.head, self.rows, self.keys = head, rows, keys
        self.row_count = head.n if rows is None else rows.numel()
        self.key_count = head.m if keys is None else keys.numel()
        self.features, self.coefficients = features, coefficients
        self.lanes = lane_count(head.query.device.type)
        coefficient = torch.tensor(coefficients, dtype=torch.float64)
        layout = features.multiplicity * coefficient[features.degrees]
        self.weights = layout.to(head.dtype).to(head.query.device)
        self.reader: Reader | None = None  # of the keys, once they are summed
        # sums over keys on other devices: of causal heads those of all keys before the own ones,
        # else those of all keys, the own ones included; None: every key is here
        self.given: State | None = None

    @abstractmethod
    def queries(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens x_i of norm at most 1 [rows, dim], and the log of each row's factor [rows]."""

    @abstractmethod
    def key_tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Tokens y_j of norm at most 1 [keys, dim], and their log-weights [keys] (None: zero)."""

    @abstractmethod
    def add_query_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        """Add the gradients of queries from those of the tokens x_i from ``start`` on."""

    @abstractmethod
    def add_key_gradient(self, total: Gradients, start: int, grad: Tensor) -> None:
        """Add the gradients of keys from those of the tokens y_j from ``start`` on."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """sum_k |a_k| |x_i|^k: bounds the kernel's terms, and so its rounding, [rows]."""

    def kernel(self, query: Tensor, tokens: Tensor) -> Tensor:
        """The kernel of all pairs, densely."""
        return horner(self.coefficients, query @ tokens.T)

    def kernel_gradients(
        self, query: Tensor, tokens: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of both sides' tokens from those of the kernel of all pairs."""
        slope = horner(derivative(self.coefficients), query @ tokens.T).mul_(grad)
        return slope @ tokens, slope.T @ query

    def run(self, total: Partial) -> None:
        """Add the sums to ``total``, which holds the rows of this task."""
        if self.row_count and (self.key_count or self.given is not None):
            (_add_causal if self.head.is_causal else _add_full)(self, total)

    @property
    def all_keys(self) -> int:
        """Number of keys that a row may attend to, those on other devices included."""
        if self.given is None:
            return self.key_count
        return self.given.count + (self.key_count if self.head.is_causal else 0)

    def key_block(self, start: int, stop: int) -> Block:
        """Tokens, log-weights and values of some keys."""
        value = take(self.head.value, self.keys, start, stop).to(self.head.dtype)
        return Block(*self.key_tokens(start, stop), value)

    def log_weight(self, start: int, stop: int) -> Tensor | None:
        """Log-weights of some keys in the call; None: zero."""
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

    def write(self, tokens: Tensor, buffer: Buffer) -> Tensor:
        """Features of a block of tokens, [lanes, count - 1, rows]."""
        return self.features.write(self.in_lanes(tokens), buffer)

    def noise(self, mass: Tensor | float, block: int) -> Tensor:
        """Rounding of a row's sums: depth of the sums times the magnitude of their terms, and
        times the smallest normal number, the most that underflow takes from one of them. So the
        reciprocal of a denominator above it is finite, and gradients can use it."""
        depth = sum_depth(self.all_keys, block) + self.features.count
        depth += 2 * self.features.degree + self.head.dim + 16
        dtype = self.head.dtype
        rounding = self.magnitude() * gamma(depth, product_roundoff(dtype))
        return (rounding + depth * torch.finfo(dtype).smallest_normal) * mass


class State:
    """Running sums of features: S = sum phi(k) w v and s = sum phi(k) w, in units of exp(top)."""

    def __init__(self, task: Task):
        head, count = task.head, task.features.count
        new = head.query.new_zeros
        self.values = new(task.lanes, count - 1, head.value_dim, dtype=head.dtype)
        self.ones = new(task.lanes, count - 1, 1, dtype=head.dtype)
        self.constant = new(head.value_dim, dtype=head.dtype)  # of the constant feature
        self.mass = 0.0
        self.top = -math.inf
        self.count = 0  # of tokens

    def flat(self) -> Tensor:
        """The sums as one vector in units of exp(top), which adds up over tokens."""
        ends = self.constant.new_tensor([self.mass, self.count])
        return torch.cat(
            [self.values.sum(0).flatten(), self.ones.sum(0)[:, 0], self.constant, ends]
        )

    @staticmethod
    def of_flat(task: Task, flat: Tensor, top: float) -> State:
        """The state of such a vector."""
        state, rows = State(task), task.features.count - 1
        values, ones, constant, ends = flat.split(
            [rows * task.head.value_dim, rows, task.head.value_dim, 2]
        )
        state.values[0], state.ones[0, :, 0] = values.view(rows, task.head.value_dim), ones
        state.constant += constant
        state.mass, count = ends.tolist()
        state.count, state.top = round(count), top
        return state

    def copy(self) -> State:
        """A state to go on from."""
        other = copy(self)
        other.values, other.ones = self.values.clone(), self.ones.clone()
        other.constant = self.constant.clone()
        return other

    def add(self, task: Task, block: Block, features: Tensor) -> None:
        """Add a block of tokens, whose features have been written."""
        tokens, log_weight, value, column = block
        if log_weight is None:
            weight = value.new_ones(len(tokens))
            self.top = 0.0
        else:
            self._raise_top(float(log_weight.max()))
            weight = (log_weight - self.top).exp_() if self.top > -math.inf else log_weight.exp()
            value = value * weight.unsqueeze(1)
        if column is not None:
            weight = weight * column
        self.mass += float(weight.sum())
        self.count += len(tokens)
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


class Reader:
    """A finished state with the polynomial applied: it maps features of one side to sums over the
    other, and in the backward pass to gradients."""

    def __init__(self, state: State, task: Task):
        weights = task.weights[1:].unsqueeze(1)
        self.task, self.top = task, state.top
        self.values = state.values.sum(0).mul_(weights)
        self.ones = state.ones.sum(0).mul_(weights)
        self.constant = state.constant * task.weights[0]
        self.mass = state.mass * float(task.weights[0])

    def read(self, query: Tensor, buffer: Buffer) -> tuple[Tensor, Tensor]:
        """Numerator [rows, dv] and denominator [rows] of a block of queries."""
        features, rows = self.task.write(query, buffer), len(query)
        den = self.den(features, rows)
        if self.task.head.is_density:
            return den.unsqueeze(1), den
        return self.num(features, rows), den

    def num(self, features: Tensor, rows: int) -> Tensor:
        return _products(features, self.values)[:rows].add_(self.constant)

    def den(self, features: Tensor, rows: int) -> Tensor:
        return _products(features, self.ones)[:rows].add_(self.mass).squeeze(1)

    @cached_property
    def sums(self) -> Tensor:
        """Values and column together, [count - 1, dv + 1]."""
        return torch.cat([self.values, self.ones], 1)

    def factor(self, block: Block) -> Tensor:
        """Weights of a block's tokens in the units of the state."""
        if block.log_weight is None:
            return block.value.new_full((len(block.value),), self.top).exp_()
        return (block.log_weight + self.top).exp_()

    def weight_gradient(self, num: Tensor, block: Block, features: Tensor) -> Tensor:
        """Gradient of a block's log-weights, from what `num` gives."""
        den = self.den(features, len(num))
        if block.column is not None:
            den = den * block.column
        factor = self.factor(block)
        return torch.where(factor > 0, ((num * block.value).sum(1) + den) * factor, 0.0)


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


def lane_rows(task: Task) -> int:
    """Tokens of a lane in a block where every row attends to every key."""
    longest = math.ceil(max(task.row_count, task.key_count) / task.lanes)
    return min(block_rows(task.features.count, task.head.dtype), longest)


def _add_full(task: Task, total: Partial) -> None:
    """Every row attends to every key: one pass over the keys, one over the rows."""
    lane = lane_rows(task)
    buffer, block = task.features.buffer(task.lanes, lane, task.weights), lane * task.lanes
    state = sum_keys(task, lane, buffer) if task.given is None else task.given
    reader = Reader(state, task)
    # a reader of many features would hold more than the tokens do
    if task.given is not None or task.features.count <= task.key_count:
        task.reader = reader
    noise = task.noise(state.mass, block)
    for start in range(0, task.row_count, block):
        rows = slice(start, min(task.row_count, start + block))
        query, log_scale = task.queries(rows.start, rows.stop)
        num, den = reader.read(query, buffer)
        total[rows].add_(Partial(num, den, log_scale + state.top, noise[rows]))


def own_sums(task: Task) -> State:
    """Sums over the keys of a task, for other devices."""
    lane = lane_rows(task)
    return sum_keys(task, lane, task.features.buffer(task.lanes, lane, task.weights))


def sum_keys(task: Task, lane: int, buffer: Buffer) -> State:
    """One pass over the keys."""
    state, block = State(task), lane * task.lanes
    for start in range(0, task.key_count, block):
        keys = task.key_block(start, min(task.key_count, start + block))
        state.add(task, keys, task.write(keys.tokens, buffer))
    return state


def _add_causal(task: Task, total: Partial) -> None:
    """Chunks of positions: earlier chunks through the running state, the chunk itself densely."""
    chunk, spans = causal_chunks(task)
    buffer = task.features.buffer(task.lanes, math.ceil(chunk / task.lanes), task.weights)
    state = State(task) if task.given is None else task.given.copy()
    reach = task.noise(1.0, chunk)
    for rows, keys in spans:
        block = task.key_block(*keys) if keys[0] < keys[1] else None
        if rows[0] < rows[1]:
            where, (query, log_scale) = slice(*rows), task.queries(*rows)
            if state.top > -math.inf:
                num, den = Reader(state, task).read(query, buffer)
                noise = reach[where] * state.mass
                total[where].add_(Partial(num, den, log_scale + state.top, noise))
            if block is not None:
                part = _diagonal(task, query, block, rows, keys, reach[where])
                part.log_scale += log_scale
                total[where].add_(part)
        if block is not None:
            state.add(task, block, task.write(block.tokens, buffer))


def _diagonal(
    task: Task,
    query: Tensor,
    block: Block,
    rows: Span,
    keys: Span,
    reach: Tensor,
) -> Partial:
    """Rows of one chunk against the keys of the same chunk that do not lie ahead of them."""
    tokens, log_weight, value, _ = block
    row_at = take_index(task.rows, *rows, query)
    key_at = take_index(task.keys, *keys, query)
    ahead = key_at > row_at.unsqueeze(1)
    kernel = task.kernel(query, tokens)
    if log_weight is None:
        kernel.masked_fill_(ahead, 0.0)
        mass = torch.searchsorted(key_at, row_at, right=True).to(kernel.dtype)
        top = torch.zeros_like(mass).masked_fill_(mass == 0, -math.inf)
    else:
        shown = log_weight.masked_fill(ahead, -math.inf)
        top = shown.amax(1)
        weight = (shown - torch.where(top > -math.inf, top, 0.0).unsqueeze(1)).exp_()
        mass = weight.sum(1)
        kernel.mul_(weight)
    return Partial(kernel @ value, kernel.sum(1), top, reach * mass)


def causal_chunks(task: Task) -> tuple[int, list[tuple[Span, Span]]]:
    """Positions of a chunk, and for each chunk the rows and the keys of the task within it."""
    fitting = task.lanes * block_rows(task.features.count, task.head.dtype)
    chunk = max(32, min(CAUSAL_CHUNK, fitting))
    row_edges = _edges(task.rows, task.row_count, task.head, chunk)
    key_edges = _edges(task.keys, task.key_count, task.head, chunk)
    return chunk, list(zip(pairwise(row_edges), pairwise(key_edges), strict=True))


def _edges(index: Tensor | None, count: int, head: Head, chunk: int) -> list[int]:
    """Where the chunks of positions 0, chunk, 2 chunk, ... begin in an index set."""
    borders = torch.arange(0, head.n + chunk, chunk, device=head.query.device)
    if index is None:
        return [min(count, int(border)) for border in borders.tolist()]
    edges: list[int] = torch.searchsorted(index, borders).tolist()
    return edges
