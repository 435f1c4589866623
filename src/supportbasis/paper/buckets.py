"""Row buckets of geometrically growing thresholds (the paper's appendices F and G).

With b the smallest non-zero row maximum and B the largest, T_l = b * ratio^l, and a row belongs to
bucket l >= 1 when T_(l-1) <= max_j |x_j| < T_l. The paper takes b over single entries, which is
nearly zero and makes most of its buckets empty; empty buckets are dropped here. A zero row is
in the first bucket: its scores are zero in any.

Rows decide, so the pieces Q^(l) K^(l')^T are disjoint rectangles. `decompose` and `support_basis`
write the paper's matrices down, for tests and small examples; plans hold only the edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_finite
from .split import check_matrix, check_pair, row_maxima

__all__ = ["bucket_count", "bucket_numbers", "bucket_of", "decompose", "edges", "support_basis"]


def smallest_maximum(*maxima: Tensor) -> float:
    """b: the smallest non-zero row maximum of all sides, 0 where every row is zero.

    >>> smallest_maximum(torch.tensor([0.0, 2.0]), torch.tensor([3.0]))
    2.0
    """
    together = torch.cat([side.double() for side in maxima])
    positive = together[together > 0]
    return float(positive.min()) if positive.numel() else 0.0


def bucket_count(smallest: float, largest: float, ratio: float) -> int:
    """How many thresholds cover [b, B]: m = floor(log_ratio(B / b)) + 1 (Fact G.2).

    >>> bucket_count(1.0, 8.0, 2.0), bucket_count(1.0, 7.9, 2.0)
    (4, 3)
    """
    if not 0 < smallest <= largest:
        return 1
    return int(bucket_numbers(torch.tensor(largest, dtype=torch.float64), smallest, ratio))


def bucket_numbers(maxima: Tensor, smallest: float, ratio: float) -> Tensor:
    """The paper's bucket l of each row maximum, counted from 1; zero rows belong to bucket 1.

    >>> bucket_numbers(torch.tensor([0.0, 1.0, 1.9, 2.0, 9.0]), 1.0, 2.0).tolist()
    [1, 1, 1, 2, 4]
    """
    maxima = maxima.double()
    first = torch.ones_like(maxima, dtype=torch.long)
    if smallest <= 0 or ratio == math.inf:
        return first
    step = math.log(ratio)
    lower = ((maxima.clamp(min=smallest).log() - math.log(smallest)) / step).floor()
    # the logarithm may be off by one unit in the last place: settle the border with powers
    lower += (_threshold(smallest, ratio, lower + 1) <= maxima).double()
    lower -= (_threshold(smallest, ratio, lower) > maxima).double()
    return torch.maximum(lower.long() + 1, first)


def _threshold(smallest: float, ratio: float, number: Tensor) -> Tensor:
    """The threshold b * ratio^number in two steps: the power may leave float64 where
    the product does not."""
    base, half = torch.tensor(ratio, dtype=torch.float64), (number / 2).floor()
    return smallest * torch.pow(base, half) * torch.pow(base, number - half)


def edges(maxima: Tensor, smallest: float, largest: float, ratio: float) -> tuple[float, ...]:
    """Upper thresholds T_l of the non-empty buckets, ascending; the last one at most B.

    >>> edges(torch.tensor([1.0, 1.5, 9.0]), 1.0, 9.0, 2.0)
    (2.0, 9.0)
    """
    if ratio == math.inf or smallest <= 0:
        return (largest,)
    numbers = bucket_numbers(maxima, smallest, ratio).unique().double()
    return tuple(_threshold(smallest, ratio, numbers).clamp(max=largest).tolist())


def bucket_of(maxima: Tensor, upper: Sequence[float]) -> Tensor:
    """Position of each row among the buckets with these edges: the first whose edge lies above.

    Rows beyond the last edge belong to the last bucket, so that a plan covers any data.

    >>> bucket_of(torch.tensor([0.0, 2.0, 9.0, 50.0]), (2.0, 9.0)).tolist()
    [0, 1, 1, 1]
    """
    borders = torch.tensor(upper[:-1], dtype=torch.float64, device=maxima.device)
    return torch.bucketize(maxima.double(), borders, right=True)


def decompose(x: Tensor, ratio: float, smallest: float | None = None) -> list[Tensor]:
    """X^(T_1), ..., X^(T_m): the rows of each bucket, zeros elsewhere (Definition F.1, G.1).

    >>> [part.tolist() for part in decompose(torch.tensor([[1.0], [2.0], [0.0]]), ratio=2.0)]
    [[[1.0], [0.0], [0.0]], [[0.0], [2.0], [0.0]]]
    """
    check_matrix("x", x, single=True)
    check_finite(x=x)
    maxima = row_maxima(x)
    b = smallest_maximum(maxima) if smallest is None else smallest
    numbers = bucket_numbers(maxima, b, check_ratio(ratio))
    count = int(numbers.max()) if numbers.numel() else 1
    return [torch.where((numbers == l).unsqueeze(1), x, 0.0) for l in range(1, count + 1)]


def support_basis(query: Tensor, key: Tensor, ratio: float) -> list[list[Tensor]]:
    """The pieces A^(T_l, T_l') = Q^(T_l) K^(T_l')^T, which are disjoint and add up to Q K^T
    (Definition F.2, Lemma F.4).
    """
    check_pair(query, key)
    b = smallest_maximum(row_maxima(query), row_maxima(key))
    keys = decompose(key, ratio, b)
    return [[q @ k.T for k in keys] for q in decompose(query, ratio, b)]


def check_ratio(ratio: object) -> float:
    """A ratio above 1 as a float, or an error; inf means one bucket."""
    if isinstance(ratio, Real) and not isinstance(ratio, bool):
        with suppress(OverflowError):
            if float(ratio) > 1:
                return float(ratio)
    raise InputError(f"ratio must be a number > 1 (inf: one bucket), got {ratio!r}")
