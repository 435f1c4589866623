"""The backward pass of a state exchange: the same exchanges, with rows and keys in each other's
place.

Each rank sums features of its own rows, weighted by their gradients, and gets the sums over the
rows of all ranks, or in causal attention of those after its own; its keys read them. Gradients of
large keys return to their ranks. Of rows that are computed exactly the cotangents go to all ranks,
and the gradients of their queries return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..components import ExactSum
from ..components.cotangent import Cotangent, Gradients, add_tokens
from ..components.streaming import State
from ..components.streaming_backward import Backward
from ..problem.problem import Head
from .related_sums import Gathered
from .state_exchange import StateExchange, attends
from .state_units import Unit


class StateGradients:
    """Gradients of a call, ``total``, [batch, heads or key heads, ...]."""

    def __init__(
        self, call: StateExchange, output: Tensor, lse: Tensor, grad: Tensor, for_weights: bool
    ):
        self.call, self.saved = call, (output, lse, grad)
        p = call.problem
        query, key, value = (x.new_zeros(x.shape, dtype=p.dtype) for x in (p.query, p.key, p.value))
        weight = query.new_zeros(p.batch, p.heads, p.m) if for_weights else None
        self.total = Gradients(query, key, value, weight)
        with torch.no_grad():
            self.parts = [self._part(unit) for unit in call.units]
            self.cotangents = [self._cotangent(unit) for unit in call.units]
            self._smooth()
            self._large_keys()
            self._exact_rows()

    def _part(self, unit: Unit) -> Gradients:
        """The gradients of a unit's tokens, as views of the whole."""
        (b, h), group = unit.at, self.call.problem.group
        weight = self.total.key_log_weight
        return Gradients(
            unit.row_span.of(self.total.query[b, h], 0),
            unit.key_span.of(self.total.key[b, h // group], 0),
            unit.key_span.of(self.total.value[b, h // group], 0),
            None if weight is None else unit.key_span.of(weight[b, h], 0),
        )

    def _cotangent(self, unit: Unit) -> Cotangent:
        output, lse, grad = (unit.row_span.of(x[unit.at], 0) for x in self.saved)
        return Cotangent.of(output, lse, grad, None)

    def _small(self, unit: Unit, cotangent: Cotangent) -> Cotangent:
        """Of the rows that are not computed exactly."""
        rows = unit.rows.small
        return (cotangent if rows is None else cotangent[rows]).without(unit.failed)

    def _each(self) -> zip[tuple[Unit, Gradients, Cotangent]]:
        return zip(self.call.units, self.parts, self.cotangents, strict=True)

    def _smooth(self) -> None:
        """Small rows and small keys, by states."""
        states, steps = [], []
        for unit, part, cotangent in self._each():
            step = Backward(unit.task, part, self._small(unit, cotangent))
            states.append(step.add_rows(summed=True) if attends(unit) else State(unit.task))
            steps.append(step)
        vectors = [(state.flat(), state.top) for state in states]
        found = self.call.related_sums(vectors, [], self.call.seeing)
        for unit, step, (flat, top) in zip(self.call.units, steps, found, strict=True):
            later = State.of_flat(unit.task, flat, top)
            if unit.task.key_count and (later.count or unit.head.is_causal):
                step.add_keys(later)

    def _large_keys(self) -> None:
        """Small rows and large keys."""
        large = self.call.large
        for unit, part, cotangent in self._each():
            if unit.head.is_causal and unit.keys.large is not None:
                small = self._small(unit, cotangent)
                ExactSum(unit.keys.large).add_gradients(part, small, unit.head, unit.rows.small)
        if large is None:
            return
        grads = torch.zeros_like(large.tokens)
        for unit, part, cotangent in self._each():
            elsewhere = self.call.large_head(unit)
            if elsewhere is not None:
                head, index = elsewhere
                made = _like(head, part.query)
                small = self._small(unit, cotangent)
                ExactSum().add_gradients(made, small, head, unit.rows.small)
                columns = [made.key, made.value]
                if made.key_log_weight is not None:
                    columns.append(made.key_log_weight.unsqueeze(1))
                grads[index] += torch.cat(columns, 1)
        self._add_keys(torch.stack(large.returned(grads)).sum(0))

    def _add_keys(self, grads: Tensor) -> None:
        """Gradients of the own large keys, units one after the other."""
        start = 0
        for unit, part, _ in self._each():
            index, head = unit.large_keys, unit.head
            own = grads[start : start + len(index)]
            start += len(index)
            key, value = own[:, : head.dim], own[:, head.dim : head.dim + head.value_dim]
            add_tokens(part.key, index, 0, key)
            add_tokens(part.value, index, 0, value)
            if part.key_log_weight is not None:
                add_tokens(part.key_log_weight, index, 0, own[:, -1])

    def _exact_rows(self) -> None:
        exact = self.call.exact
        if exact is None:
            return
        own = []
        for unit, part, cotangent in self._each():
            rows = cotangent[unit.exact]
            own.append(torch.cat([rows.num, torch.stack([rows.den, rows.log_scale], 1)], 1))
            if unit.head.is_causal:
                unit.everything.add_gradients(part, rows, unit.head, unit.exact)
        width = own[0].shape[1]
        found = Gathered.of(self.call.chunks, exact.counts, own, width).tokens
        grads = torch.zeros_like(exact.tokens)
        for unit, part, _ in self._each():
            head, index = self.call.rows_head(unit)
            num, den, log_scale = found[index].split([width - 2, 1, 1], 1)
            sums = Cotangent(num, den.squeeze(1), log_scale.squeeze(1))
            made = Gradients(
                torch.zeros_like(head.query), part.key, part.value, part.key_log_weight
            )
            unit.everything.add_gradients(made, sums, head, None)
            grads[index] += made.query
        start, back = 0, torch.stack(exact.returned(grads)).sum(0)
        for unit, part, _ in self._each():
            add_tokens(part.query, unit.exact, 0, back[start : start + len(unit.exact)])
            start += len(unit.exact)


def _like(head: Head, query: Tensor) -> Gradients:
    """Zeros for keys from elsewhere, with the gradients of own queries."""
    key, value, weight = (
        None if x is None else torch.zeros_like(x)
        for x in (head.key, head.value, head.key_log_weight)
    )
    assert key is not None and value is not None
    return Gradients(query, key, value, weight)
