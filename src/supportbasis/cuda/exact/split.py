"""Exact rows and keys of a call whose other pairs are summed by other components.

Some keys are exact for all rows, and some rows over all keys: as many of each as there is
preallocated capacity for (`runtime.capacity`). Where a head has more, every row is exact.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..runtime.lengths import listed
from .rectangle import Rectangle, Tokens, Totals, add_gradients, exact_rows


def first(flags: Tensor, most: int) -> tuple[Tokens, Tensor]:
    """The first ``most`` flagged tokens of each head [heads, tokens], and the number of all of
    them, [heads] int32."""
    index, count = listed(flags, most)
    return Tokens(most, index, count.clamp(max=most)), count


class Split:
    """The exact parts of a call: keys and their number, from `first`, for all rows, and flagged
    rows [batch * heads, n], ``most`` of each head, over all keys.

    ``needed``: keys and rows of the worst head, [2]. ``guarded``: every row is computed exactly on
    the device where these exceed the capacity; else the host checks."""

    def __init__(
        self, every: Rectangle, keys: tuple[Tokens, Tensor], flags: Tensor, most: int, guarded: bool
    ) -> None:
        (index, row_count), (some_keys, key_count) = listed(flags, most), keys
        self.needed = needed = torch.stack([key_count, row_count]).amax(1)
        self.flags, self.fits = flags, (needed[0] <= some_keys.most) & (needed[1] <= most)
        self.keys = replace(every, keys=some_keys)
        parts = [Tokens(most, index, row_count.clamp(max=most) * self.fits)]
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
