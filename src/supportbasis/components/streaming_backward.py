"""The backward pass of streamed feature sums: features are formed again, block by block; the state
of the keys is that of the forward pass, where it was kept.

The tokens receive the gradients of the bilinear form

    L = sum_ij p(<x_i, y_j>) exp(r_i + s_j) <(u_i, c_i), (v_j, 1)>

with (u_i, c_i) exp(r_i) the gradients of row i's sums. It is symmetric: the gradient of x_i reads
the state S = sum_j phi(y_j) e^{s_j} (v_j, 1) of all keys, and those of y_j and v_j read the state T
= sum_i phi(x_i) e^{r_i} (u_i, c_i) of all rows. In causal attention S is a prefix and T a suffix,
and pairs within one chunk are summed densely.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cotangent import Cotangent, Gradients, add_tokens
from .exact_sum import take_index
from .streaming import Block, Reader, Span, State, Task, causal_chunks, lane_rows, sum_keys


def add_gradients(task: Task, total: Gradients, cotangent: Cotangent) -> None:
    """Add the gradients of the tokens from those of the sums of the task's rows."""
    if task.row_count and task.key_count:
        backward = Backward(task, total, cotangent)
        backward.add_keys(backward.add_rows(summed=not task.head.is_causal))


class Backward:
    """One evaluation: the task, its cotangent, the total to add to, and memory for a block.

    First `add_rows`, then `add_keys` with the state of the rows that attend to all keys. Between
    the two, rows on other devices can be added to that state.
    """

    def __init__(self, task: Task, total: Gradients, cotangent: Cotangent):
        self.task, self.total, self.cotangent = task, total, cotangent
        self._allocate(0)

    def _allocate(self, lane: int) -> None:
        self.features = self.task.features.buffer(self.task.lanes, lane, self.task.weights)

    def add_rows(self, summed: bool) -> State:
        """Gradients of the rows, and, if ``summed``, the state T of all of them (else empty)."""
        return self._causal_rows(summed) if self.task.head.is_causal else self._rows(summed)

    def add_keys(self, rows: State) -> None:
        """Gradients of the keys, from the state of all rows, or in causal attention of the rows
        after those of the task."""
        (self._causal_keys if self.task.head.is_causal else self._keys)(rows)

    def _rows(self, summed: bool) -> State:
        """Not causal: S over the keys, one pass over the rows."""
        task, lane = self.task, lane_rows(self.task)
        self._allocate(lane)
        reader = task.reader or Reader(sum_keys(task, lane, self.features), task)
        rows = State(task)
        for span in _spans(task.row_count, lane * task.lanes):
            block = self._row_block(span)
            features = task.write(block.tokens, self.features)
            task.add_query_gradient(self.total, span[0], self._read(reader, block))
            self._add_row_weights(reader, block, features, span)
            if summed:
                rows.add(task, block, features)
        return rows

    def _keys(self, rows: State) -> None:
        """Not causal: one pass over the keys."""
        lane, reader = lane_rows(self.task), Reader(rows, self.task)
        self._allocate(lane)
        for span in _spans(self.task.key_count, lane * self.task.lanes):
            self._finish_keys(reader, span)

    def _causal_rows(self, summed: bool) -> State:
        """Chunks in order: rows read what is before them."""
        task = self.task
        chunk, chunks = causal_chunks(task)
        self._allocate(math.ceil(chunk / task.lanes))
        keys = State(task) if task.given is None else task.given.copy()
        rows = State(task)
        for row_span, key_span in chunks:
            self._chunk(keys, row_span, key_span)
            if summed and row_span[0] < row_span[1]:
                block = self._row_block(row_span)
                rows.add(task, block, task.write(block.tokens, self.features))
        return rows

    def _causal_keys(self, rows: State) -> None:
        """Chunks backwards: keys read what is after them."""
        task = self.task
        chunk, chunks = causal_chunks(task)
        self._allocate(math.ceil(chunk / task.lanes))
        for row_span, key_span in reversed(chunks):
            if key_span[0] < key_span[1] and rows.top > -math.inf:
                self._finish_keys(Reader(rows, task), key_span)
            if row_span[0] < row_span[1]:
                block = self._row_block(row_span)
                rows.add(task, block, task.write(block.tokens, self.features))

    def _chunk(self, keys: State, row_span: Span, key_span: Span) -> None:
        """The rows of one chunk with all keys up to its end."""
        task = self.task
        key_block = task.key_block(*key_span) if key_span[0] < key_span[1] else None
        if row_span[0] < row_span[1]:
            block = self._row_block(row_span)
            grad = torch.zeros_like(block.tokens)
            if keys.top > -math.inf:
                features = task.write(block.tokens, self.features)
                reader = Reader(keys, task)
                grad += self._read(reader, block)
                self._add_row_weights(reader, block, features, row_span)
            if key_block is not None:
                grad += self._diagonal(block, key_block, row_span, key_span)
            task.add_query_gradient(self.total, row_span[0], grad)
        if key_block is not None:
            keys.add(task, key_block, task.write(key_block.tokens, self.features))

    def _row_block(self, span: Span) -> Block:
        """Tokens x_i with (u_i, c_i) exp(r_i)."""
        tokens, log_factor = self.task.queries(*span)
        part = self.cotangent[slice(*span)]
        return Block(tokens, log_factor + part.log_scale, part.num, part.den)

    def _read(self, reader: Reader, block: Block) -> Tensor:
        """Gradient of a block's tokens, whose features have been written; zero where a token has
        no weight, whatever the sums are."""
        task, rows, factor = self.task, len(block.tokens), reader.factor(block).unsqueeze(1)
        column = torch.ones_like(factor) if block.column is None else block.column.unsqueeze(1)
        weight = task.in_lanes(torch.cat([block.value, column], 1)).transpose(1, 2)

        def fill(start: int, stop: int, out: Tensor) -> None:
            torch.matmul(reader.sums[start:stop], weight, out=out)

        grad = task.features.pull_back(self.features, fill, weight.shape[2])
        grad = grad.transpose(1, 2).flatten(0, 1)[:rows]
        return torch.where(factor > 0, grad * factor, 0.0)

    def _add_row_weights(self, reader: Reader, block: Block, features: Tensor, span: Span) -> None:
        """Gradients of the rows' log-factors, if they are needed."""
        if self.total.query_log_weight is not None:
            value = reader.num(features, len(block.value))
            weight = reader.weight_gradient(value, block, features)
            add_tokens(self.total.query_log_weight, self.task.rows, span[0], weight)

    def _finish_keys(self, reader: Reader, span: Span) -> None:
        """Gradients of some keys from the state of the rows that attend to all of them."""
        task, total, block = self.task, self.total, self.task.key_block(*span)
        features, factor = task.write(block.tokens, self.features), reader.factor(block)
        task.add_key_gradient(total, span[0], self._read(reader, block))
        value = reader.num(features, len(factor))
        if total.key_log_weight is not None:
            weight = reader.weight_gradient(value, block, features)
            add_tokens(total.key_log_weight, task.keys, span[0], weight)
        add_tokens(total.value, task.keys, span[0], value.mul_(factor.unsqueeze(1)))

    def _diagonal(self, block: Block, keys: Block, row_span: Span, key_span: Span) -> Tensor:
        """Rows and keys of one chunk: finishes the keys' part, returns that of the tokens x_i."""
        task, total = self.task, self.total
        row_at = take_index(task.rows, *row_span, block.tokens)
        key_at = take_index(task.keys, *key_span, block.tokens)
        log_weight, column = block.factors
        weight = log_weight.unsqueeze(1)
        if keys.log_weight is not None:
            weight = weight + keys.log_weight
        weight = weight.masked_fill(key_at > row_at.unsqueeze(1), -math.inf).exp_()
        kernel = task.kernel(block.tokens, keys.tokens).mul_(weight)
        add_tokens(total.value, task.keys, key_span[0], kernel.T @ block.value)
        grad = torch.addmm(column.unsqueeze(1), block.value, keys.value.T)
        if total.key_log_weight is not None:
            add_tokens(total.key_log_weight, task.keys, key_span[0], (kernel * grad).sum(0))
        if total.query_log_weight is not None:
            add_tokens(total.query_log_weight, task.rows, row_span[0], (kernel * grad).sum(1))
        of_rows, of_keys = task.kernel_gradients(block.tokens, keys.tokens, grad.mul_(weight))
        task.add_key_gradient(total, key_span[0], of_keys)
        return of_rows


def _spans(count: int, block: int) -> list[Span]:
    return [(start, min(count, start + block)) for start in range(0, count, block)]
