"""Feature sums, streamed: phi(keys) are summed once, phi(queries) read the sum, block by block.

For a kernel ``sum_k a_k t^k`` of t = <x_i, y_j>, with |x_i|, |y_j| <= 1, the sum over keys is
``sum_j p(t_ij) w_j v_j = <phi(x_i), diag(a W) S>`` where ``S = sum_j phi(y_j) w_j v_j``. Neither
the n x m matrix nor the n x r features exist at any time. Causal sums keep S as a running prefix
and evaluate the kernel densely within one chunk. A `Task` defines x, y and the kernel: the tokens
themselves for a polynomial, sketched tokens for a sketch.

Tokens are divided into lanes, one for each thread: the thread that writes a lane's features also
multiplies them. (Features written by one core and read by another cost up to twice the time.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..polynomials.certified import horner
from ..polynomials.features import Buffer, FeatureMap, Kernel, block_rows
from ..problem.problem import Head
from ..problem.rounding import gamma, product_roundoff, sum_depth
from .cotangent import Gradients, add_tokens
from .exact_sum import Index, Span, take, take_index
from .partial import Partial

CAUSAL_CHUNK = 504  # see `block_rows` for why it is not 512
MAX_LANES = 16


class Block(NamedTuple):
    """Some tokens of one side with log-weights, values and a column."""

    at: Span  # which of them
    tokens: Tensor  # [tokens, dim]
    logs: Tensor  # [tokens]: log-weights
    value: Tensor  # [tokens, dv]
    column: Tensor  # [tokens], beside the value


def lane_count(device: str) -> int:
    """Lanes that tokens are divided into: one for each thread of the CPU."""
    return min(MAX_LANES, torch.get_num_threads()) if device == "cpu" else 1


class Task:
    """One evaluation: unit tokens, block by block, and their kernel. Tokens, or their leading
    coordinates, are divided by ``units``, the norms of the longest query and key; sums of rows
    count in exp(``shift``), of each row [rows] or of all."""

    logs_vary = False  # whether the logs of factors have gradients that tokens receive

    def __init__(
        self, head: Head, rows: Index, keys: Index, kernel: Kernel,
        units: tuple[float, float] = (1.0, 1.0), shift: Tensor | float = 0.0,
    ):  # fmt: skip
        self.head, self.rows, self.keys, self.shift = head, rows, keys, shift
        self.norm = dict(zip(("query", "key"), units, strict=True))
        self.row_count = head.n if rows is None else rows.numel()
        self.key_count = head.m if keys is None else keys.numel()
        self.kernel, widest = kernel, max(kernel.spans, default=head.dim)
        self.features = FeatureMap(widest, kernel.degree, kernel.spans)
        self.lanes = lane_count(head.query.device.type)
        coefficient = torch.tensor(kernel.coefficients, dtype=torch.float64)
        layout = self.features.multiplicity * coefficient[self.features.degrees]
        self.weights = layout.to(head.dtype).to(head.query.device)
        self.reader: Reader | None = None  # of the keys, once they are summed
        # sums over keys on other devices: of causal heads those of all keys before the own ones,
        # else those of all keys, the own ones included; None: every key is here
        self.given: State | None = None

    def unit(self, side: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of norm at most 1 [tokens, dim] of some queries or keys (``side`` is the name of
        the tensor), and the logs of their factors [tokens]."""
        return x[:, : self.features.dim] / self.norm[side], x.new_zeros(len(x))

    def pull_back(self, side: str, x: Tensor, grad: Tensor, of_logs: Tensor) -> Tensor:
        """Gradients of some queries or keys from those of their unit tokens and logs."""
        return pad(grad / self.norm[side], (0, x.shape[1] - self.features.dim))

    def magnitude(self) -> Tensor:
        """sum_k |a_k| |x_i|^k: bounds the kernel's terms, and so its rounding, [rows]."""
        norms = (take(self.head.query_norms, self.rows) / self.norm["query"]).to(self.head.dtype)
        return horner([abs(coefficient) for coefficient in self.kernel.coefficients], norms)

    def queries(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Unit tokens of some rows, and the log of each row's factor."""
        query = take(self.head.query, self.rows, start, stop).to(self.head.dtype)
        tokens, log_factor = self.unit("query", query)
        shift = self.shift[start:stop] if isinstance(self.shift, Tensor) else self.shift
        return tokens, log_factor + shift

    def key_block(self, start: int, stop: int) -> Block:
        """Unit tokens, log-weights and values of some keys."""
        head, sides = self.head, (self.head.key, self.head.value)
        key, value = (take(x, self.keys, start, stop).to(head.dtype) for x in sides)
        tokens, log_factor = self.unit("key", key)
        if head.key_log_weight is not None:
            log_factor = log_factor + take(head.key_log_weight, self.keys, start, stop)
        logs, ones = log_factor.to(head.dtype), value.new_ones(len(value))
        return Block((start, stop), tokens, logs, value, ones)

    def add_gradient(
        self, total: Gradients, side: str, start: int, grad: Tensor, of_logs: Tensor
    ) -> None:
        """Add the gradients of queries or keys from those of their unit tokens and logs."""
        index = self.rows if side == "query" else self.keys
        x = take(getattr(self.head, side), index, start, start + len(grad)).to(self.head.dtype)
        add_tokens(getattr(total, side), index, start, self.pull_back(side, x, grad, of_logs))

    @property
    def all_keys(self) -> int:
        """Number of keys that a row may attend to, those on other devices included."""
        if self.given is None:
            return self.key_count
        return self.given.count + (self.key_count if self.head.is_causal else 0)

    @cached_property
    def block(self) -> int:
        """Tokens at a time: those whose features stay in cache; in causal attention, positions."""
        lane = block_rows(self.features.count, self.head.dtype)
        if self.head.is_causal:
            return max(32, min(CAUSAL_CHUNK, self.lanes * lane))
        longest = math.ceil(max(1, self.row_count, self.key_count) / self.lanes)
        return self.lanes * min(lane, longest)

    def buffer(self) -> Buffer:
        """Memory for the features of a block."""
        rows = math.ceil(self.block / self.lanes)
        return Buffer(self.features, self.lanes, rows, self.weights)

    def chunks(self) -> list[tuple[Span | None, Span | None]]:
        """Rows and keys at the positions of each block."""
        borders = torch.arange(0, self.head.n + self.block, self.block)
        sides = []
        for index, count in ((self.rows, self.row_count), (self.keys, self.key_count)):
            edges = borders.clamp(max=count)
            if index is not None:
                edges = torch.searchsorted(index, borders.to(index.device))
            sides.append([(a, b) if a < b else None for a, b in pairwise(edges.tolist())])
        return list(zip(*sides, strict=True))

    def in_lanes(self, tokens: Tensor) -> Tensor:
        """[rows, ...] as [lanes, rows / lanes, ...], filled up with zeros."""
        if missing := -len(tokens) % self.lanes:
            tokens = torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])])
        return tokens.view(self.lanes, len(tokens) // self.lanes, *tokens.shape[1:])

    def write(self, tokens: Tensor, buffer: Buffer) -> Tensor:
        """Features of a block of tokens, [lanes, count - 1, rows]."""
        return buffer.write(self.in_lanes(tokens))

    def noise(self) -> Tensor:
        """Rounding of each row's sums for keys of total weight 1: depth of the sums times the
        magnitude of their terms, and times the smallest normal number, the most that underflow
        takes from a term. So gradients can use the reciprocal of a denominator above it."""
        depth = sum_depth(self.all_keys, self.block) + self.features.count
        depth += 2 * self.features.degree + self.head.dim + 16
        dtype = self.head.dtype
        rounding = self.magnitude() * gamma(depth, product_roundoff(dtype))
        return rounding + depth * torch.finfo(dtype).smallest_normal

    def run(self, total: Partial) -> None:
        """Add the sums to ``total``, which holds the rows of this task."""
        if not self.row_count or not (self.key_count or self.given is not None):
            return
        buffer, noise = self.buffer(), self.noise()
        for rows, reader, block in self.walk(buffer):
            where, (query, log_scale) = slice(*rows), self.queries(*rows)
            if reader is not None:
                features = self.write(query, buffer)
                den = reader.den(features, len(query))
                num = den.unsqueeze(1) if self.head.is_density else reader.num(features, len(query))
                part = Partial(num, den, log_scale + reader.top, noise[where] * reader.mass)
                total[where].add_(part)
            if block is not None:
                part = self._diagonal(query, rows, block, noise[where])
                part.log_scale += log_scale
                total[where].add_(part)

    def walk(self, buffer: Buffer) -> Iterator[tuple[Span, Reader | None, Block | None]]:
        """Rows in blocks with the sums over all keys, or in causal attention over those of earlier
        chunks (None: over none), and then also the keys of their own chunk, to be summed densely.
        Where the sums hold less than the tokens do, they are kept for the backward pass."""
        if not self.head.is_causal:
            whole = self.reader or Reader(self.given or sum_keys(self, buffer), self)
            self.reader = whole if self.features.count <= self.key_count else None
            yield from ((rows, whole, None) for rows in spans(self.row_count, self.block))
            return
        state = State(self) if self.given is None else deepcopy(self.given)
        reader = None
        for rows, keys in self.chunks():
            block = None if keys is None else self.key_block(*keys)
            if rows is not None:
                if reader is None and state.top > -math.inf:
                    reader = Reader(state, self)
                yield rows, reader, block
            if block is not None:
                state.add(self, block, self.write(block.tokens, buffer))
                reader = None

    def ahead(self, rows: Span, keys: Span) -> Tensor:
        """Which keys lie ahead of which rows, [rows, keys]."""
        row_at = take_index(self.rows, *rows, self.head.query)
        return take_index(self.keys, *keys, self.head.query) > row_at.unsqueeze(1)

    def _diagonal(self, query: Tensor, rows: Span, block: Block, noise: Tensor) -> Partial:
        """Rows of one chunk against the keys of the same chunk that do not lie ahead of them."""
        ahead, kernel = self.ahead(rows, block.at), self.kernel(query, block.tokens)
        if bool(block.logs.any()):
            shown = block.logs.masked_fill(ahead, -math.inf)
            top = shown.amax(1)
            weight = (shown - torch.where(top > -math.inf, top, 0.0).unsqueeze(1)).exp_()
            kernel, mass = kernel.mul_(weight), weight.sum(1)
        else:  # a fifth faster in all
            kernel, mass = kernel.masked_fill_(ahead, 0.0), (~ahead).sum(1).to(kernel.dtype)
            top = torch.zeros_like(mass).masked_fill_(mass == 0, -math.inf)
        return Partial(kernel @ block.value, kernel.sum(1), top, noise * mass)


class State:
    """Running sums of features: S = sum phi(k) w v and s = sum phi(k) w, in units of exp(top)."""

    def __init__(self, task: Task):
        head, count = task.head, task.features.count
        self.values = head.query.new_zeros(task.lanes, count - 1, head.value_dim, dtype=head.dtype)
        self.ones = self.values.new_zeros(task.lanes, count - 1, 1)
        self.constant = self.values.new_zeros(head.value_dim)  # of the constant feature
        self.mass, self.top, self.count = 0.0, -math.inf, 0  # count: of tokens

    def flat(self) -> Tensor:
        """The sums as one vector in units of exp(top), which adds up over tokens."""
        sums, ends = (self.values.sum(0), self.ones.sum(0)), (self.mass, self.count)
        return torch.cat([*map(torch.flatten, sums), self.constant, self.constant.new_tensor(ends)])

    @staticmethod
    def of_flat(task: Task, flat: Tensor, top: float) -> State:
        """The state of such a vector."""
        state, rows, dim = State(task), task.features.count - 1, task.head.value_dim
        values, ones, constant, ends = flat.split([rows * dim, rows, dim, 2])
        state.values[0], state.ones[0, :, 0] = values.view(rows, dim), ones
        state.constant += constant
        state.mass, count = ends.tolist()
        state.count, state.top = round(count), top
        return state

    def add(self, task: Task, block: Block, features: Tensor) -> None:
        """Add a block of tokens, whose features have been written."""
        logs = block.logs
        top = float(logs.max())
        if top > self.top:
            shrink = math.exp(self.top - top)
            for sums in (self.values, self.ones, self.constant):
                sums.mul_(shrink)
            self.mass, self.top = self.mass * shrink, top
        weight = (logs - self.top if self.top > -math.inf else logs).exp()
        value, weight = block.value * weight.unsqueeze(1), weight * block.column
        self.mass += float(weight.sum())
        self.count += len(weight)
        self.ones.baddbmm_(features, task.in_lanes(weight).unsqueeze(2))
        if not task.head.is_density:
            self.constant += value.sum(0)
            self.values.baddbmm_(features, task.in_lanes(value))


class Reader:
    """A finished state with the polynomial applied: it maps features of one side to sums over the
    other, and in the backward pass to gradients."""

    def __init__(self, state: State, task: Task):
        weights = task.weights[1:].unsqueeze(1)
        self.task, self.top = task, state.top
        self.values = state.values.sum(0).mul_(weights)
        self.ones = state.ones.sum(0).mul_(weights)
        self.constant, self.mass = state.constant * task.weights[0], state.mass

    def num(self, features: Tensor, rows: int) -> Tensor:
        """Sums of values for the tokens of some features, [rows, dv]; `den`: of ones, [rows]."""
        return (features.mT @ self.values).flatten(0, 1)[:rows].add_(self.constant)

    def den(self, features: Tensor, rows: int) -> Tensor:
        den = (features.mT @ self.ones).flatten(0, 1)[:rows].squeeze(1)
        return den.add_(self.mass * float(self.task.weights[0]))

    @cached_property
    def sums(self) -> Tensor:
        """Values and column together, [count - 1, dv + 1]."""
        return torch.cat([self.values, self.ones], 1)

    def factor(self, block: Block) -> Tensor:
        """Weights of a block's tokens in the units of the state."""
        return (block.logs + self.top).exp_()

    def of_logs(self, num: Tensor, block: Block, features: Tensor) -> Tensor:
        """Gradient of a block's log-weights, from what `num` gives."""
        factor, den = self.factor(block), self.den(features, len(num)) * block.column
        return torch.where(factor > 0, ((num * block.value).sum(1) + den) * factor, 0.0)


def sum_keys(task: Task, buffer: Buffer) -> State:
    """One pass over the keys."""
    state = State(task)
    for span in spans(task.key_count, task.block):
        keys = task.key_block(*span)
        state.add(task, keys, task.write(keys.tokens, buffer))
    return state


def spans(count: int, block: int) -> list[Span]:
    return [(start, min(count, start + block)) for start in range(0, count, block)]
