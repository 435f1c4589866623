"""Cotangents of a component: gradients of its sums in, gradients of its tokens out.

With out = num / den and lse = ln den, a loss with gradients g of out and h of lse has the gradients
g / den of num and (h - <g, out>) / den of den. So the pair (i, j), which adds a_ij v_j to num and
a_ij to den, has d loss / d a_ij = (<g_i, v_j> + h_i - <g_i, out_i>) / den_i, and 1 / den_i is
exp(-lse_i): a log-scale, like that of the sums themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SavedForward:
    """Results and cotangents of a forward pass, for the backward pass, [batch, heads, ...]."""

    output: Tensor  # [batch, heads, n, dv]
    lse: Tensor  # [batch, heads, n]
    fallback: Tensor  # [batch, heads, n]: failed rows, which were computed exactly
    grad: Tensor  # of the output
    grad_lse: Tensor | None
    for_weights: bool  # whether the gradient of the key log-weights is asked for

    def map(self, change: Callable[[Tensor], Tensor]) -> SavedForward:
        """The same with every tensor changed."""
        changed: dict[str, Any] = {
            name: change(x) if isinstance(x, Tensor) else x for name, x in vars(self).items()
        }
        return SavedForward(**changed)

    def cotangent(self, at: tuple[int, int]) -> Cotangent:
        """Gradients of the sums of one head."""
        grad_lse = None if self.grad_lse is None else self.grad_lse[at]
        return Cotangent.of(self.output[at], self.lse[at], self.grad[at], grad_lse)


@dataclass
class Cotangent:
    """Gradients of the sums of some rows, in units of ``exp(log_scale)``; -inf: of no weight."""

    num: Tensor  # [rows, dv]
    den: Tensor  # [rows]
    log_scale: Tensor  # [rows]

    @staticmethod
    def of(output: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Cotangent:
        """From the gradients of output [n, dv] and lse [n]; rows without a result have none."""
        num = grad.to(lse.dtype)
        den = (num * output).sum(-1).neg_()
        if grad_lse is not None:
            den += grad_lse
        valid = lse > -math.inf
        if not bool(valid.all()):
            num, den = num.masked_fill(~valid.unsqueeze(1), 0.0), den.masked_fill(~valid, 0.0)
        return Cotangent(num, den, torch.where(valid, -lse, -math.inf))

    def __getitem__(self, rows: slice | Tensor) -> Cotangent:
        return Cotangent(self.num[rows], self.den[rows], self.log_scale[rows])

    def without(self, rows: Tensor) -> Cotangent:
        """The same with zero weight on the rows of a boolean mask."""
        return Cotangent(self.num, self.den, self.log_scale.masked_fill(rows, -math.inf))


@dataclass
class Gradients:
    """Gradients of the tokens of one head, to which every component adds its part."""

    query: Tensor  # [n, d]
    key: Tensor  # [m, d]
    value: Tensor  # [m, dv]
    key_log_weight: Tensor | None  # [m]; None: not needed


def add_tokens(total: Tensor, index: Tensor | None, start: int, part: Tensor) -> None:
    """Add to the tokens from ``start`` on of an index set (None: all tokens in order)."""
    stop = start + len(part)
    if index is None:
        total[start:stop] += part
    else:
        total.index_add_(0, index[start:stop], part)
