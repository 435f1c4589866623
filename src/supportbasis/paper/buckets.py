"""Row buckets of geometrically growing thresholds (the paper's appendices F and G).

With b the smallest non-zero row maximum and B the largest, T_l = b * ratio^l, and a row belongs to
bucket l >= 1 when T_(l-1) <= max_j |x_j| < T_l. The paper takes b over single entries, which is
nearly zero and makes most of its buckets empty; empty buckets are dropped here. A zero row is
in the first bucket: its scores are zero in any.

Rows decide, so the pieces Q^(l) K^(l')^T are disjoint rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_number


def smallest_maximum(*maxima: Tensor) -> float:
    """b: the smallest non-zero row maximum of all sides, 0 where every row is zero."""
    together = torch.cat([side.double() for side in maxima])
    positive = together[together > 0]
    return float(positive.min()) if positive.numel() else 0.0


def bucket_numbers(maxima: Tensor, smallest: float, ratio: float) -> Tensor:
    """The paper's bucket l of each row maximum, counted from 1; zero rows belong to bucket 1.

    >>> bucket_numbers(torch.tensor([0.0, 1.0, 1.9, 2.0, 9.0]), 1.0, 2.0).tolist()
    [1, 1, 1, 2, 4]
    """
    maxima = maxima.double()
    if smallest <= 0 or ratio == math.inf:
        return torch.ones_like(maxima, dtype=torch.long)
    lower = ((maxima.clamp(min=smallest).log() - math.log(smallest)) / math.log(ratio)).floor()
    # the logarithm may be off by one unit in the last place: settle the border with powers
    lower += (_threshold(smallest, ratio, lower + 1) <= maxima).double()
    lower -= (_threshold(smallest, ratio, lower) > maxima).double()
    return lower.long().add_(1).clamp_(min=1)


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


def check_ratio(ratio: object) -> float:
    """A ratio above 1 as a float, or an error; inf means one bucket."""
    number = math.inf if ratio == math.inf else check_number("ratio", ratio)
    if number > 1:
        return number
    raise InputError(f"ratio must be a number > 1 (inf: one bucket), got {ratio!r}")
