"""Exact rows and keys of a call whose other pairs are summed by other components.

Some keys are exact for all rows, and some rows over all keys: as many of each as there is
preallocated capacity for (`runtime.capacity`). Where a head has more, every row is exact. With a
threshold these are the tokens that have an entry beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...plans import Plan, ThresholdHead
from ..runtime.language import cdiv, power_of_two
from . import split_kernels as kernels
from .rectangle import Rectangle, Tokens, Totals, add_gradients, exact_rows

ROWS = 64
LISTED = 2048  # tokens of a head at a time


class Split:
    """The exact parts of a call: keys and their number, from `first`, for all rows, and flagged
    rows [batch * heads, n], ``most`` of each head, over all keys.

    ``needed``: keys and rows of the worst head, [2]. ``guarded``: every row is computed exactly on
    the device where these exceed the capacity; else the host checks."""

    def __init__(
        self, every: Rectangle, keys: tuple[Tokens, Tensor], flags: Tensor, most: int, guarded: bool
    ) -> None:
        (rows, row_count), (some_keys, key_count) = first(flags, most), keys
        self.needed = needed = torch.stack([key_count, row_count]).amax(1)
        self.flags, self.fits = flags, (needed[0] <= some_keys.most) & (needed[1] <= most)
        self.keys = replace(every, keys=some_keys)
        parts = [Tokens(most, rows.index, row_count * self.fits)]
        if guarded:
            n = every.rows.most
            token = torch.arange(n, dtype=torch.int32, device=flags.device).expand(len(flags), -1)
            count = ((~self.fits).int() * n).expand(len(flags))
            parts.append(Tokens(n, token.contiguous(), count.contiguous()))
        self.rows = [replace(every, rows=part) for part in parts]

    def write(self, output: Tensor, lse: Tensor) -> None:
        """Write the rows that are exact over all keys."""
        for rows in self.rows:
            exact_rows(rows, output, lse)

    def near(self, lse: Tensor) -> Tensor:
        """``lse`` [batch, heads, n], +inf for rows that are exact over all keys."""
        return lse.masked_fill((self.flags | ~self.fits).view(lse.shape), math.inf)

    def add_gradients(
        self, total: Totals, grad: Tensor, slope: Tensor, lse: Tensor, near: Tensor
    ) -> None:
        """Add the gradients of all exact pairs; ``near`` is that of ``lse``."""
        add_gradients(total, grad, slope, near, self.keys)
        for rows in self.rows:
            add_gradients(total, grad, slope, lse, rows)


def first(flags: Tensor, most: int) -> tuple[Tokens, Tensor]:
    """The first ``most`` flagged tokens of each head [heads, tokens], and the number of all of
    them, [heads] int32."""
    heads, n = flags.shape
    index = torch.zeros(heads, most, dtype=torch.int32, device=flags.device)
    count = torch.empty(heads, dtype=torch.int32, device=flags.device)
    kernels.listed[(heads,)](flags.view(torch.uint8), index, count, n, most, LISTED)
    return Tokens(most, index, count.clamp(max=most)), count


def large(tokens: Tensor, heads: int, limit: Tensor, log_weight: Tensor | None) -> Tensor:
    """Which tokens [batch, heads or fewer, n, d] have an entry beyond the ``limit`` [batch * heads]
    of a head, and a finite log-weight [batch, heads, n]: [batch * heads, n] bool."""
    batch, key_heads, count, d = tokens.shape
    out = torch.empty(batch * heads, count, dtype=torch.uint8, device=tokens.device)
    weight = None if log_weight is None else log_weight.float().contiguous()
    kernels.large[(cdiv(count, ROWS), batch * heads)](
        tokens, weight, limit, out, heads, heads // key_heads, count, d,
        *tokens.stride()[:3], ROWS, power_of_two(d),
    )  # fmt: skip
    return out.view(torch.bool)


def thresholds(plan: Plan) -> list[float]:
    """Of all heads; infinite where there is none."""
    return [head.threshold if isinstance(head, ThresholdHead) else math.inf for head in plan.heads]


def rounded_down(limits: Sequence[float]) -> Tensor:
    """The largest float32 numbers not above these limits: an entry of at most 32 bits exceeds one
    exactly if it exceeds the other."""
    exact = torch.tensor(limits, dtype=torch.float64)
    near = exact.float()
    below = torch.nextafter(near, torch.tensor(-torch.inf))
    return torch.where(near.double() > exact, below, near)
