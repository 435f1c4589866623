"""The exact component: a rectangle of rows and keys by online softmax, tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..partial import Partial
from ..problem import Head
from ..rounding import gamma, product_roundoff, sum_depth, unit_roundoff

KEY_TILE = 4096
TILE = 2**19  # scores at a time
SUM_BLOCK = 1024  # keys added up at a time, which bounds the rounding of the sum


@dataclass(frozen=True, eq=False)
class ExactSum:
    """All pairs of the given rows with ``keys`` (sorted indices; None: every key)."""

    keys: Tensor | None = None

    def evaluate(self, head: Head, rows: Tensor | None) -> Partial:
        count = head.n if rows is None else rows.numel()
        keys = head.m if self.keys is None else self.keys.numel()
        if not keys:
            return Partial.empty(count, head.value_dim, head.query, head.dtype)
        total = Partial.blank(count, head.value_dim, head.query, head.dtype)
        least = 32 if head.is_causal else 128  # short tiles skip more of what lies ahead
        step = least if keys > KEY_TILE else max(least, min(8192, TILE // keys))
        for start in range(0, count, step):
            stop = min(count, start + step)
            self._row_tile(head, rows, (start, stop), keys, total[start:stop])
        total.noise = total.den * self._relative_noise(head, rows, keys)
        return total

    def _row_tile(
        self, head: Head, rows: Tensor | None, span: tuple[int, int], keys: int, total: Partial
    ) -> None:
        """Add all keys to the rows of one tile; ``total`` is a view that is written in place."""
        query = take(head.query, rows, *span).to(head.dtype)
        row_at = take_index(rows, *span, head.query)
        shown_to_all, shown = keys, keys
        if head.is_causal:
            shown_to_all, shown = (self._until(int(row_at[at]), keys) for at in (0, -1))
        for start in range(0, max(1, shown), KEY_TILE):
            tile = (start, min(max(1, shown), start + KEY_TILE))
            part = self._tile(head, query, row_at, tile, max(0, shown_to_all - start))
            total.add_(part) if start else total.copy_(part)

    def _until(self, row: int, keys: int) -> int:
        """Number of keys that do not lie ahead of a row."""
        if self.keys is None:
            return min(keys, row + 1)
        return int(torch.searchsorted(self.keys, row, right=True))

    def _tile(
        self, head: Head, query: Tensor, row_at: Tensor, tile: tuple[int, int], free: int
    ) -> Partial:
        """One tile of scores; its first ``free`` keys lie ahead of no row."""
        score = query @ (take(head.key, self.keys, *tile).to(head.dtype) * head.scale).T
        if head.key_log_weight is not None:
            score += take(head.key_log_weight, self.keys, *tile).to(head.dtype)
        if head.mask is not None:
            mask = head.mask[row_at][:, take_index(self.keys, *tile, row_at)]
            score = _masked(score, mask)
        if free < score.shape[1]:
            key_at = take_index(self.keys, *tile, row_at)[free:]
            score[:, free:].masked_fill_(key_at > row_at.unsqueeze(1), -math.inf)
        top = score.amax(1)
        unit = torch.where(top > -math.inf, top, 0.0)
        weight = score.sub_(unit.unsqueeze(1)).exp_()
        value = take(head.value, self.keys, *tile).to(head.dtype)
        num = weight[:, :SUM_BLOCK] @ value[:SUM_BLOCK]
        for start in range(SUM_BLOCK, len(value), SUM_BLOCK):
            block = slice(start, start + SUM_BLOCK)
            num.addmm_(weight[:, block], value[block])
        return Partial(num, weight.sum(1), top, torch.zeros_like(top))

    def _relative_noise(self, head: Head, rows: Tensor | None, keys: int) -> Tensor:
        """Relative rounding error of each row's sums: of the scores, then of the sum."""
        norms = head.query_norms if rows is None else head.query_norms[rows]
        key_norm = head.key_norms.max() if head.m else norms.new_zeros(())
        unit = unit_roundoff(head.dtype)
        score = (
            abs(head.scale) * norms * key_norm * gamma(head.dim + 6, product_roundoff(head.dtype))
        )
        for bias in (head.key_log_weight, head.mask):
            if bias is not None and bias.dtype != torch.bool:
                finite = bias.masked_fill(bias == -math.inf, 0.0).abs()
                score = score + (4 * unit * finite.max() if finite.numel() else 0.0)
        total = gamma(sum_depth(keys, SUM_BLOCK) + 16, product_roundoff(head.dtype))
        return (torch.expm1(2 * score) + total).clamp(max=1.0).to(head.dtype)


def take(source: Tensor, index: Tensor | None, start: int, stop: int) -> Tensor:
    """Tokens start..stop of an index set (None: all tokens in order, which needs no gather)."""
    return source[start:stop] if index is None else source[index[start:stop]]


def take_index(index: Tensor | None, start: int, stop: int, like: Tensor) -> Tensor:
    """Positions of the same tokens."""
    if index is None:
        return torch.arange(start, stop, device=like.device)
    return index[start:stop]


def _masked(score: Tensor, mask: Tensor) -> Tensor:
    return score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
