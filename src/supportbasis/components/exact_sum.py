"""The exact component: a rectangle of rows and keys by online softmax; and, in the same tiles, a
kernel s(z)^p, which shows what the power alone does to the answer, without a sketch.

Where PyTorch's CPU kernel takes the rectangle it does the work; causal rectangles of some rows or
keys, masks, powers and other devices go tile by tile. Both give the same sums; tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..polynomials.certified import horner
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head, Problem
from ..problem.rounding import gamma, product_roundoff, sum_depth, unit_roundoff
from . import flash
from .cotangent import Cotangent, Gradients, add_tokens
from .partial import Partial

KEY_TILE = 4096
TILE = 2**19  # scores at a time
SUM_BLOCK = 1024  # keys added up at a time, which bounds the rounding of the sum
KERNEL_KEYS = 2048  # few rows are spread over the cores by handing out keys in pieces

Span = tuple[int, int]  # tokens, from and to
Index = Tensor | None  # of tokens, sorted; None: all in order


@dataclass(frozen=True, eq=False)
class ExactSum:
    """All pairs of the given rows with ``keys`` (sorted indices of live keys; None: all)."""

    keys: Index = None

    def add_to(self, total: Partial, head: Head, rows: Index) -> None:
        keys = head.live_keys if self.keys is None else self.keys
        key_at = take_index(keys, 0, head.m, head.query)
        if not len(key_at) or not len(total.den):
            return
        reach = abs(head.scale) * take(head.query_norms, rows) * take(head.key_norms, keys).max()
        rounding = self._rounding(head, reach, len(key_at))
        if type(self) is ExactSum and _kernel_takes(head, rows, keys):
            _by_kernel(head, rows, keys, total, rounding)
            return
        key, value = (take(x, keys).to(head.dtype) for x in (head.key, head.value))
        for of_rows, query, row_at in _row_tiles(head, rows, len(total.den), len(key)):
            part = Partial.empty(len(query), head.value_dim, head.query, head.dtype)
            for at in _key_tiles(head, row_at, key_at):
                score = self._log_kernel(query @ (key[at] * head.scale).T)
                part.add_(_tile(_weighed(head, score, row_at, key_at[at]), value[at]))
            self._set_noise(head, part, rounding[of_rows], len(key))
            total[of_rows].add_(part)

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Index
    ) -> None:
        key, value = (take(x, self.keys).to(head.dtype) for x in (head.key, head.value))
        key_at = take_index(self.keys, 0, head.m, head.query)
        grads = [torch.zeros_like(x) for x in (key, value, key[:, 0])]
        most = 1 / unit_roundoff(head.dtype)  # of usable denominators; beyond scores are rounding
        for of_rows, query, row_at in _row_tiles(head, rows, len(cotangent.den), len(key)):
            part, grad_query = cotangent[of_rows], torch.zeros_like(query)
            for at in _key_tiles(head, row_at, key_at):
                of_key, of_value, of_weight = (x[at] for x in grads)
                score = query @ (key[at] * head.scale).T
                slope = self._log_slope(score)
                weight = _weighed(head, self._log_kernel(score), row_at, key_at[at])
                weight = weight.add_(part.log_scale.unsqueeze(1)).exp_().clamp_(max=most)
                of_value.addmm_(weight.T, part.num)
                grad = torch.addmm(part.den.unsqueeze(1), part.num, value[at].T).mul_(weight)
                if total.key_log_weight is not None:
                    of_weight += grad.sum(0)
                if slope is not None:
                    grad = torch.where(weight > 0, grad * slope, 0.0)
                of_key.addmm_(grad.T, query, alpha=head.scale)
                grad_query.addmm_(grad, key[at], alpha=head.scale)
            add_tokens(total.query, rows, of_rows.start, grad_query)
        for whole, made in zip((total.key, total.value, total.key_log_weight), grads, strict=True):
            if whole is not None:
                add_tokens(whole, self.keys, 0, made)

    def _log_slope(self, score: Tensor) -> Tensor | None:
        """Derivative of `_log_kernel`; None where it is 1."""
        return None

    def _log_kernel(self, score: Tensor) -> Tensor:
        """Log-weights of the scores: softmax takes the scores themselves."""
        return score

    def _set_noise(self, head: Head, part: Partial, rounding: Tensor, keys: int) -> None:
        """Set the rounding of a tile's sums."""
        part.noise = part.den * rounding

    def _rounding(self, head: Head, reach: Tensor, keys: int) -> Tensor:
        """Relative rounding error of each row's sums, whose |scores| are at most ``reach``."""
        relative = softmax_rounding(head, reach, keys)
        # the relative error of a weighted mean is at most 1; that of a sum is not
        return (relative.clamp(max=1.0) if head.normalise else relative).to(head.dtype)


def _row_tiles(
    head: Head, rows: Index, count: int, keys: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows whose scores with a tile of keys are formed at a time: which of the given ones, their
    queries and their positions."""
    step = min(8192, TILE // max(1, min(keys, KEY_TILE)))
    for start in range(0, count, step):
        stop = min(count, start + step)
        query = take(head.query, rows, start, stop).to(head.dtype)
        yield slice(start, stop), query, take_index(rows, start, stop, head.query)


def _key_tiles(head: Head, row_at: Tensor, key_at: Tensor) -> Iterator[slice]:
    """Tiles of the keys that some of these rows attend to."""
    shown = len(key_at)
    if head.is_causal:
        shown = int(torch.searchsorted(key_at, row_at[-1], right=True))
    for start in range(0, shown, KEY_TILE):
        yield slice(start, min(shown, start + KEY_TILE))


def _weighed(head: Head, score: Tensor, row_at: Tensor, key_at: Tensor) -> Tensor:
    """Log-weights of a tile with those of the keys and the mask; -inf for what lies ahead."""
    if head.key_log_weight is not None:
        score += head.key_log_weight[key_at].to(head.dtype)
    if head.mask is not None:
        mask = head.mask[row_at][:, key_at]
        masked = mask.dtype == torch.bool
        score = score.masked_fill(~mask, -math.inf) if masked else score + mask
    if head.is_causal:
        free = int(torch.searchsorted(key_at, row_at[0], right=True))  # keys ahead of no row
        score[:, free:].masked_fill_(key_at[free:] > row_at.unsqueeze(1), -math.inf)
    return score


def _tile(score: Tensor, value: Tensor) -> Partial:
    """Sums of one tile of log-weights, which are overwritten."""
    top = score.amax(1)
    unit = torch.where(top > -math.inf, top, 0.0)
    weight, num = score.sub_(unit.unsqueeze(1)).exp_(), value.new_zeros(len(score), value.shape[1])
    for block, part in zip(weight.split(SUM_BLOCK, 1), value.split(SUM_BLOCK), strict=True):
        num.addmm_(block, part)
    return Partial(num, weight.sum(1), top, torch.zeros_like(top))


def take(source: Tensor, index: Index, start: int = 0, stop: int | None = None) -> Tensor:
    """Tokens start..stop of an index set (None: all tokens in order, which needs no gather)."""
    return source[start:stop] if index is None else source.index_select(0, index[start:stop])


def take_index(index: Index, start: int, stop: int, like: Tensor) -> Tensor:
    """Positions of the same tokens."""
    if index is None:
        return torch.arange(start, stop, device=like.device)
    return index[start:stop]


def _kernel_takes(head: Head, rows: Index, keys: Index) -> bool:
    """Whether PyTorch's CPU kernel, which also returns the log-sum-exp, can do this rectangle; of
    causal heads it takes the whole, without biases."""
    if head.mask is not None or not (head.query.is_cpu and flash.AVAILABLE):
        return False
    whole = rows is None and keys is None and head.key_log_weight is None
    return whole or not head.is_causal


def _by_kernel(head: Head, rows: Index, keys: Index, total: Partial, noise: Tensor) -> None:
    """Add out * exp(lse) to ``total``: numerator out, denominator 1, log-scale lse."""
    key, value, bias = (
        take(x, keys).to(head.dtype) for x in (head.key, head.value, head.log_weights(head.dtype))
    )
    query = take(head.query, rows).to(head.dtype)
    few = len(query) <= KERNEL_KEYS and not head.is_causal
    whole = len(key) // KERNEL_KEYS if few else 0
    edge = whole * KERNEL_KEYS
    for piece, count in ((slice(0, edge), whole), (slice(edge, None), 1)):
        if not len(key[piece]):
            continue
        k, v, b = (x[piece].unflatten(0, (count, -1)).unsqueeze(0) for x in (key, value, bias))
        output, lse = flash.attend(
            query.expand(1, count, *query.shape), k, v,
            None if head.key_log_weight is None else b.unsqueeze(2), head.scale, head.is_causal,
        )  # fmt: skip
        lse = lse[0].to(head.dtype)  # [pieces, rows]
        top = lse.amax(0)
        weight = (lse - top).exp_()
        num, den = (output[0] * weight.unsqueeze(-1)).sum(0), weight.sum(0)
        total.add_(Partial(num, den, top, den * noise))


def softmax_rounding(given: Head | Problem, reach: Tensor, keys: int) -> Tensor:
    """Relative rounding error of scores of at most ``reach``, and of sums of their exp."""
    unit = product_roundoff(given.dtype)
    score = reach * gamma(given.dim + 6, unit)
    for bias in (given.key_log_weight, given.mask):
        if bias is not None and bias.dtype != torch.bool:
            finite = bias.masked_fill(bias == -math.inf, 0.0).abs()
            largest = finite.flatten(given.query.dim() - 2).amax(-1)
            score = score + 4 * unit_roundoff(given.dtype) * largest
    return torch.expm1(2 * score) + gamma(sum_depth(keys, SUM_BLOCK) + 16, unit)


NOTHING = -1e30  # logarithm of a weight that is zero


@dataclass(frozen=True, eq=False)
class PowerSum(ExactSum):
    """All pairs of the given rows with ``keys``, weighed by a power instead of exp."""

    kernel: PowerKernel = field(kw_only=True)

    def _log_kernel(self, score: Tensor) -> Tensor:
        return self.kernel.log(score).clamp_(min=NOTHING)

    def _log_slope(self, score: Tensor) -> Tensor | None:
        return self.kernel.log_slope(score)

    def _rounding(self, head: Head, reach: Tensor, keys: int) -> Tensor:
        """Rounding of each row's inner values s(z), in units of exp(log_unit)."""
        unit, poly = product_roundoff(head.dtype), self.kernel.polynomial
        if poly is None:
            return (reach * gamma(head.dim + 6, unit)).to(head.dtype)
        t = reach / (self.kernel.power * poly.bound) if poly.bound > 0 else torch.zeros_like(reach)
        size = horner([abs(coefficient) for coefficient in poly.coefficients], t)
        return (size * gamma(head.dim + 6 + 3 * poly.degree, unit)).to(head.dtype)

    def _set_noise(self, head: Head, part: Partial, rounding: Tensor, keys: int) -> None:
        """Set the rounding of a tile's sums. A row whose weights are all zero attends to keys, but
        has no usable denominator.

        An error e of every s changes a sum of m terms s^p by at most p e sum s^(p-1), and
        sum s^(p-1) <= m^(1/p) (sum s^p)^(1 - 1/p), so by the share p e (m / sum s^p)^(1/p)."""
        empty = (part.log_scale > -math.inf) & (part.log_scale < NOTHING / 2)
        part.num[empty], part.den[empty], part.log_scale[empty] = 0.0, 0.0, 0.0
        power, unit = self.kernel.power, unit_roundoff(head.dtype)
        log_mass = math.log(keys)
        if head.key_log_weight is not None:
            log_mass = float(take(head.key_log_weight, self.keys).double().logsumexp(0))
        log_sum = part.den.log() + part.log_scale - power * self.kernel.log_unit
        share = power * rounding * ((log_mass - log_sum) / power).exp()
        logs = 4 * unit * (part.log_scale.abs() + 100)  # of the logarithms and exponents
        total = gamma(sum_depth(keys, SUM_BLOCK) + 16, product_roundoff(head.dtype))
        relative = torch.nan_to_num(torch.expm1(share) + logs + total, nan=1.0, posinf=1.0)
        part.noise = part.den * (relative.clamp(max=1.0) if head.normalise else relative)
