"""Which rows and keys a component covers: split at a threshold, in buckets, far from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..components import Component
from ..components.exact_sum import take as take
from ..components.polynomial_sum import LARGEST_REACH
from ..paper.buckets import bucket_of
from ..problem.problem import Head


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Query rows (None: all) and the components whose disjoint keys cover all live keys."""

    rows: Tensor | None
    components: Sequence[Component]


class Side(NamedTuple):
    """One side split in two: large indices (None: there are none), small ones (None: all)."""

    large: Tensor | None
    small: Tensor | None

    def sizes(self, total: int) -> tuple[int, int]:
        large = 0 if self.large is None else len(self.large)
        return large, total - large if self.small is None else len(self.small)


def is_empty(index: Tensor | None) -> bool:
    return index is not None and not len(index)


def split_at(head: Head, threshold: float) -> tuple[Side, Side]:
    """Rows and live keys; large ones have an entry beyond the threshold (Definition B.3)."""
    keys = side_of(head.key_maxima > threshold, head.live_keys)
    return side_of(head.query_maxima > threshold, None), keys


def side_of(is_large: Tensor, live: Tensor | None) -> Side:
    """All rows, or the live keys, given which are large, [n] or [m]."""
    index = torch.arange(len(is_large), device=is_large.device) if live is None else live
    is_large = take(is_large, live)
    large = index[is_large]
    return Side(large, index[~is_large]) if len(large) else Side(None, live)


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
