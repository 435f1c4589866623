"""The exact component: a rectangle of rows and keys by online softmax, tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..partial import Partial
from ..problem import Head
from ..rounding import gamma, product_roundoff, sum_depth, unit_roundoff

KEY_TILE = 1024
TILE = 2**20  # scores at a time


@dataclass(frozen=True, eq=False)
class ExactSum:
    """All pairs of the given rows with ``keys`` (sorted indices; None: every key)."""

    keys: Tensor | None = None

    def evaluate(self, head: Head, rows: Tensor | None) -> Partial:
        count = head.n if rows is None else rows.numel()
        keys = head.m if self.keys is None else self.keys.numel()
        total = Partial.empty(count, head.value_dim, head.query, head.dtype)
        step = max(64, min(8192, TILE // max(1, min(keys, KEY_TILE))))
        for start in range(0, count, step):
            stop = min(count, start + step)
            index = take_index(rows, start, stop, head.query)
            tile = self._row_tile(head, index, keys)
            total.num[start:stop] = tile.num
            total.den[start:stop] = tile.den
            total.log_scale[start:stop] = tile.log_scale
        total.noise = total.den * self._relative_noise(head, rows, keys)
        return total

    def _row_tile(self, head: Head, rows: Tensor, keys: int) -> Partial:
        query = head.query[rows].to(head.dtype).mul_(head.scale)
        total = Partial.empty(rows.numel(), head.value_dim, query, head.dtype)
        for start in range(0, keys, KEY_TILE):
            index = take_index(self.keys, start, min(keys, start + KEY_TILE), head.key)
            if head.is_causal and int(index[0]) > int(rows[-1]):
                break
            total.add_(_tile(head, query, rows, index))
        return total

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
        total = gamma(sum_depth(keys, KEY_TILE) + 16, product_roundoff(head.dtype))
        return (torch.expm1(2 * score) + total).clamp(max=1.0).to(head.dtype)


def take_index(index: Tensor | None, start: int, stop: int, like: Tensor) -> Tensor:
    """Entries start..stop of an index set, where None stands for all tokens in order."""
    if index is None:
        return torch.arange(start, stop, device=like.device)
    return index[start:stop]


def _tile(head: Head, query: Tensor, rows: Tensor, keys: Tensor) -> Partial:
    score = query @ head.key[keys].to(head.dtype).T
    if head.key_log_weight is not None:
        score += head.key_log_weight[keys].to(head.dtype)
    if head.mask is not None:
        score = _masked(score, head.mask[rows][:, keys])
    if head.is_causal and int(keys[-1]) > int(rows[0]):
        score.masked_fill_(keys > rows.unsqueeze(1), -math.inf)
    top = score.amax(1)
    unit = torch.where(top > -math.inf, top, 0.0)
    weight = score.sub_(unit.unsqueeze(1)).exp_()
    num = weight @ head.value[keys].to(head.dtype)
    return Partial(num, weight.sum(1), top, torch.zeros_like(top))


def _masked(score: Tensor, mask: Tensor) -> Tensor:
    return score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
