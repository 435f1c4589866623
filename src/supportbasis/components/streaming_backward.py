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

from ..problem.problem import Head
from .cotangent import Cotangent, Gradients, add_tokens
from .exact_sum import Index, Span
from .partial import Partial
from .streaming import Block, Reader, State, Task, spans


class StreamedSum:
    """A component whose sums are streamed."""

    def task(self, head: Head, rows: Index) -> Task:
        """The evaluation for some rows."""
        raise NotImplementedError

    def add_to(self, total: Partial, head: Head, rows: Index) -> None:
        self.task(head, rows).run(total)

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Index
    ) -> None:
        task = self.task(head, rows)
        if task.row_count and task.key_count:
            backward = Backward(task, total, cotangent)
            backward.add_keys(backward.add_rows(summed=not task.head.is_causal))


class Backward:
    """One evaluation: the task, its cotangent, the total to add to, and memory for a block.

    First `add_rows`, then `add_keys` with the state of the rows that attend to all keys. Between
    the two, rows on other devices can be added to that state."""

    def __init__(self, task: Task, total: Gradients, cotangent: Cotangent):
        self.task, self.total, self.cotangent = task, total, cotangent
        self.buffer = task.buffer()
        self.with_logs = task.logs_vary or total.key_log_weight is not None

    def add_rows(self, summed: bool) -> State:
        """Gradients of the rows, and, if ``summed``, the state T of all of them (else empty). In
        causal attention chunks come in order: rows read what is before them."""
        task, rows = self.task, State(self.task)
        for span, reader, keys in task.walk(self.buffer):
            block = self._row_block(span)
            features = task.write(block.tokens, self.buffer)
            grad, of_logs = torch.zeros_like(block.tokens), torch.zeros_like(block.logs)
            if keys is not None:
                grad, of_logs = self._diagonal(block, keys)
            if reader is not None:
                grad += self._read(reader, block)
                if task.logs_vary:
                    of_logs += reader.of_logs(reader.num(features, len(grad)), block, features)
            task.add_gradient(self.total, "query", span[0], grad, of_logs)
            if summed:
                rows.add(task, block, features)
        return rows

    def add_keys(self, rows: State) -> None:
        """Gradients of the keys, from the state of all rows. In causal attention it is that of the
        rows after those of the task, and chunks come backwards: keys read what is after them."""
        task, reader = self.task, None
        alone = [(None, span) for span in spans(task.key_count, task.block)]
        chunks = task.chunks() if task.head.is_causal else alone
        for row_span, key_span in reversed(chunks):
            if key_span is not None and rows.top > -math.inf:
                reader = reader or Reader(rows, task)
                self._finish_keys(reader, key_span)
            if row_span is not None:
                block, reader = self._row_block(row_span), None
                rows.add(task, block, task.write(block.tokens, self.buffer))

    def _row_block(self, span: Span) -> Block:
        """Tokens x_i with (u_i, c_i) exp(r_i)."""
        tokens, log_factor = self.task.queries(*span)
        part = self.cotangent[slice(*span)]
        return Block(span, tokens, log_factor + part.log_scale, part.num, part.den)

    def _read(self, reader: Reader, block: Block) -> Tensor:
        """Gradient of a block's tokens, whose features have been written; zero without weight."""
        factor = reader.factor(block).unsqueeze(1)
        weight = torch.cat([block.value, block.column.unsqueeze(1)], 1)
        weight = self.task.in_lanes(weight).transpose(1, 2)
        grad = self.buffer.pull_back(
            lambda out: torch.matmul(reader.sums, weight, out=out), weight.shape[2]
        )
        grad = grad.transpose(1, 2).flatten(0, 1)[: len(factor)]
        return torch.where(factor > 0, grad * factor, 0.0)

    def _finish_keys(self, reader: Reader, span: Span) -> None:
        """Gradients of some keys from the state of the rows that attend to all of them."""
        block = self.task.key_block(*span)
        features = self.task.write(block.tokens, self.buffer)
        grad, value = self._read(reader, block), reader.num(features, len(block.value))
        of_logs = torch.zeros_like(block.logs)
        if self.with_logs:
            of_logs = reader.of_logs(value, block, features)
        self._add_keys(block, grad, of_logs, value.mul_(reader.factor(block).unsqueeze(1)))

    def _add_keys(self, keys: Block, grad: Tensor, of_logs: Tensor, of_value: Tensor) -> None:
        total, index, start = self.total, self.task.keys, keys.at[0]
        self.task.add_gradient(total, "key", start, grad, of_logs)
        add_tokens(total.value, index, start, of_value)
        if total.key_log_weight is not None:
            add_tokens(total.key_log_weight, index, start, of_logs)

    def _diagonal(self, block: Block, keys: Block) -> tuple[Tensor, Tensor]:
        """Rows and keys of one chunk: finishes the keys' part, returns that of the rows' tokens
        and logs."""
        weight = block.logs.unsqueeze(1) + keys.logs
        weight = weight.masked_fill_(self.task.ahead(block.at, keys.at), -math.inf).exp_()
        kernel = self.task.kernel(block.tokens, keys.tokens).mul_(weight)
        grad = torch.addmm(block.column.unsqueeze(1), block.value, keys.value.T)
        of_logs = torch.zeros_like(block.logs), torch.zeros_like(keys.logs)
        if self.with_logs:
            of_pairs = kernel * grad
            of_logs = of_pairs.sum(1), of_pairs.sum(0)
        of_value = kernel.T @ block.value
        of_rows, of_keys = self.task.kernel.gradients(block.tokens, keys.tokens, grad.mul_(weight))
        self._add_keys(keys, of_keys, of_logs[1], of_value)
        return of_rows, of_logs[0]
