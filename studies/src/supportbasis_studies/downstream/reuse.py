"""Methods of the library in the layers of a model: one plan serves many items.

Planning takes far longer than attending to a few hundred tokens, and the items of a task are
equally long. So the heads of a layer are planned on the first item of this length, and the plan
is used for the others (`Reuse`). Exact heads stay exact. Tokens are sorted and lists selected anew
for every item, at the price of the plan; a fitted polynomial computes tokens beyond its radius
and rows that it loses exactly. What is certified for a range of scores is not used beyond it:
heads with a threshold are planned for every item, and many thresholds for all items of a batch
together (`powers`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from supportbasis import Plan, attention
from supportbasis import plan as make_plan
from supportbasis.methods import Method, MultiThreshold
from supportbasis.plans import BucketHead, HeadPlan

from ..models import exact
from .powers import by_powers

LASTING = ("exact", "lists", "fitted")  # kinds of heads whose plan serves other tokens too


@dataclass
class Used:
    """What a method of the library did: how many heads ran exactly, and the mean cost."""

    heads: int = 0
    exact: int = 0
    cost: float = 0.0

    def add(self, heads: tuple[HeadPlan, ...], items: int = 1) -> None:
        self.heads += len(heads) * items
        self.exact += sum(head.kind == "exact" for head in heads) * items
        self.cost += sum(head.cost for head in heads) * items

    def clear(self) -> None:
        self.heads, self.exact, self.cost = 0, 0, 0.0

    @property
    def exact_share(self) -> float | None:
        return self.exact / self.heads if self.heads else None

    @property
    def mean_cost(self) -> float | None:
        return self.cost / self.heads if self.heads else None


class Reuse:
    """The attention of a model with this many layers, which call it in turn; ``layers`` None:
    nobody knows, and every call is planned.

    Single queries of a model that writes token by token run exactly.
    """

    def __init__(self, method: Method, layers: int | None):
        self.method, self.layers, self.used = method, layers, Used()
        self._calls = 0
        self._first: dict[tuple[int, int], Plan] = {}  # by layer and length: of the first item

    @property
    def lasts(self) -> bool:
        """Whether the first item's plans are made to be kept."""
        return self.layers is not None and not isinstance(self.method, MultiThreshold)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> Tensor:
        layer = self._calls % (self.layers or 1)
        self._calls += 1
        if causal and query.shape[-2] != key.shape[-2]:
            return exact(query, key, value, scale, causal)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # what went wrong shows in the answers
            if isinstance(self.method, MultiThreshold):
                return self._together(query, key, value, scale, causal)
            plan = self._plan(layer, query, key, value, scale, causal)
            output = attention(query, key, value, is_causal=causal, scale=scale, plan=plan)
        self.used.add(plan.heads, len(query))
        assert isinstance(output, Tensor)
        return output

    def _plan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> Plan:
        """That of the first item for all of them, if it lasts; otherwise one for each."""
        length = query.shape[2]
        if self.lasts:
            if (layer, length) not in self._first:
                one = (x[:1] for x in (query, key, value))
                self._first[layer, length] = self._made(scale, causal, *one)
            first = self._first[layer, length]
            if all(head.kind in LASTING for head in first.heads):
                return first
        return self._made(scale, causal, query, key, value)

    def _together(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> Tensor:
        """All items planned as one long sequence: buckets and ranges that hold for each of them.

        Planned on a CPU, since a GPU would be waited for at every bucket.
        """
        long = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0).cpu() for x in (query, key, value))
        heads = self._made(scale, causal, *long).heads
        self.used.add(heads, len(query))
        buckets = [head for head in heads if isinstance(head, BucketHead)]
        return by_powers(buckets, query, key, value, scale, causal)

    def _made(self, scale: float, causal: bool, *tokens: Tensor) -> Plan:
        query, key, value = tokens
        return make_plan(query, key, value, is_causal=causal, scale=scale, method=self.method)
