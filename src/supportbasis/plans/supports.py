"""Which rows and keys a component covers: split at a threshold, in buckets, far from the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..components import Component
from ..components.polynomial_sum import LARGEST_REACH
from ..paper.buckets import bucket_of
from ..problem.problem import Head


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Query rows (None: all) and the components whose disjoint keys cover all live keys."""

    rows: Tensor | None
    components: Sequence[Component]


@dataclass(frozen=True, eq=False)
class Side:
    """One side split in two: large indices (None: there are none), small ones (None: all)."""

    large: Tensor | None
    small: Tensor | None

    def count(self, total: int) -> tuple[int, int]:
        large = 0 if self.large is None else len(self.large)
        return large, total - large if self.small is None else len(self.small)


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """The entries of an index set (None: all)."""
    return x if index is None else x[index]


def is_empty(index: Tensor | None) -> bool:
    return index is not None and not len(index)


def large_tokens(head: Head, threshold: float) -> tuple[Tensor, Tensor]:
    """Rows of the query and live keys with an entry beyond the threshold (Definition B.3)."""
    rows = (head.query_maxima > threshold).nonzero().squeeze(1)
    return rows, live_indices(head, head.key_maxima > threshold)


def live_indices(head: Head, chosen: Tensor) -> Tensor:
    """Indices of the chosen keys that are not padded."""
    if head.key_log_weight is not None:
        chosen = chosen & (head.key_log_weight > -math.inf)
    return chosen.nonzero().squeeze(1)


def sides(head: Head, rows: Tensor, keys: Tensor) -> tuple[Side, Side]:
    """Rows and live keys, given those that are large."""
    return _side(rows, head.n, None), _side(keys, head.m, head.live_keys)


def _side(large: Tensor, total: int, live: Tensor | None) -> Side:
    if not len(large):
        return Side(None, live)
    small = torch.zeros(total, dtype=torch.bool, device=large.device)
    small[slice(None) if live is None else live] = True
    small[large] = False
    return Side(large, small.nonzero().squeeze(1))


def members(maxima: Tensor, edges: Sequence[float], live: Tensor | None) -> list[Tensor | None]:
    """Tokens of each bucket, by their largest entries; None where one bucket holds all."""
    if len(edges) == 1:
        return [live]
    position = bucket_of(take(maxima, live), edges)
    found = [(position == i).nonzero().squeeze(1) for i in range(len(edges))]
    return [index if live is None else live[index] for index in found]


def score_reach(head: Head, rows: Tensor | None, keys: Tensor | None) -> float:
    """Largest possible |score| of these rows and keys: |scale| max|q| max|k|."""
    query, key = take(head.query_norms, rows), take(head.key_norms, keys)
    if not query.numel() or not key.numel():
        return 0.0
    return min(abs(head.scale) * float(query.max()) * float(key.max()), LARGEST_REACH)


def entry_reach(head: Head, threshold: float) -> float:
    """The same from the threshold alone: |scale| d T^2 (Lemma B.8 has scale = 1/d)."""
    return abs(head.scale) * head.dim * threshold**2
