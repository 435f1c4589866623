"""Sums of a polynomial of the scores, p(z) = c_0 + c_1 z + c_2 z^2, on the device.

``num_i = sum_j w_j p(<q_i, k_j>) v_j`` and ``den_i = sum_j w_j p(<q_i, k_j>)``, in time linear in
both lengths; every head of the queries has a polynomial of its own. Keys are summed in splits
(`moments`, `folded.square_state`), the splits are added up (`finish_state`), and every query reads
the sum with its coefficients (`read_out`). Causal sums take a split for every chunk, give each
chunk the sum of those before it, and evaluate p inside the chunk. The gradient is made of the same
parts (`contract`): sums over queries, with g = d num as values and h = d den as weights, are what
keys and values read.

Products of bfloat16 and float16 inputs have bfloat16 operands and are added in float32; those of
float32 inputs are three TF32 products in place of one ("tf32x3"), one ("tf32"), or float32
("ieee").
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...components.cotangent import Gradients, SavedForward
from ...problem.problem import in_rows
from ..exact.rectangle import slopes, splits_of
from ..runtime.language import cdiv, power_of_two
from . import contract, folded, moments
from .setting import Polynomials, Setting, Tile, operands

PAD = 128  # transposed tokens are padded to a multiple of this
PROGRAMS = 2048  # of the state kernel, at least, by cutting the keys into splits


@lru_cache(maxsize=32)
def fold_masks(dim: int, device: torch.device) -> Tensor:
    """Row p: -1 in the columns j >= p of x[p] x[j], 0 in those of the reversed tile."""
    p = torch.arange((dim + 1) // 2, device=device).unsqueeze(1)
    return -(torch.arange(power_of_two(dim), device=device) >= p).to(torch.int32)


class Side:
    """Tokens, values and weights of one side, [batch, heads, n, ...], and the copies of them that
    the kernels read. ``summed``: it is to be summed over; ``read``: its rows read sums of the
    other side."""

    def __init__(
        self, tokens: Tensor, values: Tensor, weight: Tensor | None, setting: Setting, *,
        summed: bool = False, read: bool = False, slope: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.values = x, v = in_rows(tokens), in_rows(values)
        self.weight = weight  # of keys
        self.slope = slope  # of queries whose values are gradients: those of the denominators
        # 1: rows of the other side read tokens not after them, -1: not before them; 0: all
        self.scan = 0 if not setting.causal else 1 if slope is None else -1
        (batch, heads, n, d), packed = x.shape, setting.packed
        self.padded = padded = cdiv(n, PAD) * PAD
        self.transposed: Tensor | None = None  # tokens, [batch, heads, d, padded]: what sums need
        self.words: Tensor | None = None  # the same in words of 32 bits: what rows need
        self.weighted: Tensor | None = None  # values times weights
        if setting.degree == 1 and weight is None:
            return
        if summed or not packed:
            self.transposed = x.new_empty((batch, heads, d, padded), dtype=setting.dtype)
        if read and packed:
            self.words = x.new_empty((batch, heads, d, padded), dtype=torch.int32)
        if weight is not None:
            self.weighted = x.new_empty(v.shape, dtype=setting.dtype)
        at_once = 64 if max(setting.width, setting.value_width) <= 128 else 32
        moments.prepare[(padded // at_once, batch * heads)](
            x, v, weight, self.transposed, self.words, self.weighted,
            heads, n, padded, d, setting.value_dim, *x.stride()[:3], *v.stride()[:3],
            setting.width, setting.value_width, at_once,
        )  # fmt: skip
        if not packed:
            self.words = self.transposed


class State(NamedTuple):
    """Sums over one side: of all its tokens, or before (after) each chunk."""

    features: Tensor  # [states, batch * heads, blocks, width, value_width]
    vectors: Tensor  # [states, batch * heads, dv + d + 1]: of values, of tokens, of weights
    matrix: Tensor  # [states, batch * heads, 2, width, width]: of products, rounded and rest
    side: Side


def sums_over(side: Side, setting: Setting, rows: int, group: int = 1) -> State:
    """Sums over the tokens of ``side``, over ``group`` heads together, for this number of rows: of
    their values, which weights multiply but slopes do not, and of weights or slopes."""
    x, padded, queries = side.tokens, side.padded, side.slope is not None
    value = side.values if side.weighted is None else side.weighted
    batch, heads, n, d = x.shape
    all_heads, own = batch * heads, batch * heads // group
    dv, width, value_width = setting.value_dim, setting.width, setting.value_width
    blocks, shape, small = setting.blocks, setting.state_tile, setting.small
    weight, square = side.slope if queries else side.weight, setting.degree == 2
    row_tiles, col_tiles = cdiv(width, shape.rows), cdiv(value_width, shape.columns)
    groups, scan = cdiv(setting.pairs, shape.pairs), side.scan
    if scan:
        span, splits, states = setting.chunk, cdiv(n, setting.chunk), cdiv(rows, setting.chunk)
    else:
        programs = max(groups, 4) * row_tiles * col_tiles * all_heads
        (splits, span), states = splits_of(programs, n, PAD, PROGRAMS), 1
    flat_at = d * d if square else 0
    flat_size = flat_at + dv + d + 1
    new = partial(torch.empty, dtype=torch.float32, device=x.device)
    part = new(splits, all_heads, blocks, d, dv)
    flat = new(splits, all_heads, flat_size)
    tokens = x if side.transposed is None else side.transposed.mT
    small_rows, at_once = cdiv(width, small), min(shape.tokens, 64)
    moments.value_moments[(small_rows * cdiv(value_width, small), splits, all_heads)](
        tokens, value, weight, part, flat,
        heads, n, span, blocks, d, dv, flat_size, flat_at,
        *tokens.stride(), *value.stride()[:3],
        small, small, at_once, small_rows, square, **setting.switches,
    )  # fmt: skip
    if square:
        moments.weight_moments[(small_rows**2, splits, all_heads)](
            tokens, weight, flat, n, span, padded, d, flat_size,
            small, at_once, small_rows, setting.precision,
        )  # fmt: skip
        folded.square_state[(groups * row_tiles * col_tiles, splits, all_heads)](
            tokens, value, fold_masks(d, x.device), part,
            heads, n, span, padded, setting.pairs, blocks, d, dv, groups, row_tiles,
            *value.stride()[:3],
            width, shape.rows, shape.columns, shape.tokens, shape.pairs, setting.packed,
            **setting.switches, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    # add up the splits, those of queries with their coefficients
    features = new(states, own, blocks, width, value_width, dtype=setting.dtype)
    vectors = new(states, own, dv + d + 1)
    size, at_once = width if square else 0, min(width, 16)
    matrix = new(states, own, 2, size, size, dtype=setting.dtype) if square else vectors
    folded.finish_state[(blocks * width // at_once, own)](
        part, features, setting.coefficients,
        splits, states, group, setting.pairs, blocks, d, dv,
        width, value_width, at_once, scan, queries,
    )  # fmt: skip
    moments.finish_moments[(size + 1, own)](
        flat, vectors, matrix, setting.coefficients,
        splits, states, group, d, dv, flat_size, flat_at,
        size, power_of_two(max(dv + d + 1, width)), scan, queries,
    )  # fmt: skip
    return State(features, vectors, matrix, side)


def read(
    rows: Side, state: State, setting: Setting, *,
    normaliser: bool = True, unit: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums of every row of ``rows`` (their weight multiplies them), and those of weights or slopes,
    unless no ``normaliser`` is asked for; with a ``unit`` their quotients, and the logarithms of
    the denominators."""
    shape, x = rows.tokens.shape[:3], rows.tokens
    out = torch.empty(*shape, setting.value_dim, dtype=dtype, device=x.device)
    den = torch.empty(shape, dtype=torch.float32, device=x.device)
    given = (
        fold_masks(x.shape[3], x.device), state.side.slope if normaliser else None, unit,
        out, den if normaliser else None,
    )  # fmt: skip
    launch(folded.read_out, setting.read_tile, setting.value_width, rows, state, setting, given)
    return out, den


def token_gradient(rows: Side, state: State, setting: Setting, dtype: torch.dtype) -> Tensor:
    """Gradient of the tokens of ``rows``, whose values are the directions (see `contract`)."""
    u, slope = rows.values, state.side.slope if rows.slope is None else rows.slope
    out = torch.empty(rows.tokens.shape, dtype=dtype, device=u.device)
    launch(contract.contract, setting.contract_tile, setting.width, rows, state, setting,
           (u, slope, out), u.stride()[:3])  # fmt: skip
    return out


def launch(
    kernel: Any, shape: Tile, width: int, rows: Side, state: State, setting: Setting,
    given: tuple[Tensor | None, ...], strides: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Launch a kernel whose rows read the sums of the other side, ``width`` columns, with the
    arguments that all of them share and those that are given."""
    x, other, (batch, heads, n, d) = rows.tokens, state.side, rows.tokens.shape
    y, v, (other_heads, m) = other.tokens, other.values, other.tokens.shape[1:3]
    kernel[(cdiv(n, shape.rows), cdiv(width, shape.columns), batch * heads)](
        x, rows.words, *state[:3], y, v, other.weight, rows.weight, setting.coefficients, *given,
        heads, n, rows.padded, d, setting.value_dim, setting.pairs, setting.blocks, setting.chunk,
        cdiv(heads, other_heads), other_heads, m, cdiv(other_heads, heads),
        *x.stride()[:3], *y.stride()[:3], *v.stride()[:3], *strides,
        setting.width, setting.value_width, shape.columns, shape.rows, shape.tokens,
        setting.degree, other.scan, other.slope is None, setting.packed,
        **setting.switches, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def key_weights(log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log-weight - shift) [batch, heads, m] and the shift of each head, its largest."""
    log_weight = log_weight.float()
    shift = log_weight.amax(-1)
    shift = torch.where(shift > -math.inf, shift, 0.0)
    return (log_weight - shift.unsqueeze(-1)).exp().contiguous(), shift


def polynomial_sums(
    query: Tensor, key: Tensor, value: Tensor, polynomials: Polynomials, *, divide: bool = False
) -> tuple[Tensor, Tensor]:
    """Numerators and denominators in float32, in units of exp(polynomials.unit); or, to ``divide``,
    output in the dtype of the query and lse, zeros and -inf where the denominator is not positive.

    query [batch, heads, n, d], key and value [batch, key heads, m, ...] with heads a multiple of
    key heads.
    """
    columns, causal = value.shape[-1], polynomials.causal
    unit, dtype = (polynomials.unit, query.dtype) if divide else (None, torch.float32)
    query, key, value = (operands(x, causal) for x in (query, key, value))
    setting = Setting(query, value, polynomials)
    keys = Side(key, value, polynomials.weight, setting, summed=True)
    state = sums_over(keys, setting, query.shape[2])
    queries = Side(query, value, None, setting, read=True)
    out, den = read(queries, state, setting, unit=unit, dtype=dtype)
    return out[..., :columns], den


def polynomial_gradients(
    query: Tensor, key: Tensor, value: Tensor, polynomials: Polynomials, saved: SavedForward,
    dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    """Gradients of query, key, value and, if asked for, of the logarithm of the weights.

    The saved lse belongs to the whole row, so other components may have been added to the sums; it
    is +inf for rows that had none of these sums.
    """
    dim, columns, causal = query.shape[-1], value.shape[-1], polynomials.causal
    tokens = (query, key, value, saved.grad.to(query.dtype), saved.output)
    query, key, value, grad, output = (operands(x, causal) for x in tokens)
    setting, weight = Setting(query, value, polynomials), polynomials.weight
    g = value.new_empty(output.shape, dtype=setting.dtype)
    h = slopes(grad, saved.grad_lse, output, saved.lse, polynomials.unit, g)
    group = query.shape[1] // key.shape[1]
    keys = Side(key, value, weight, setting, summed=True, read=True)
    queries = Side(query, g, None, setting, summed=True, read=True, slope=h)
    state = sums_over(keys, setting, query.shape[2])
    of_queries = sums_over(queries, setting, key.shape[2], group)
    grad_query = token_gradient(queries, state, setting, dtype)
    grad_key = token_gradient(keys, of_queries, setting, dtype)
    grad_value, slope = read(
        keys, of_queries, setting, normaliser=saved.for_weights,
        dtype=torch.float32 if saved.for_weights else dtype,
    )  # fmt: skip
    made = (grad_query[..., :dim], grad_key[..., :dim], grad_value[..., :columns].to(dtype))
    if weight is None or not saved.for_weights:
        return Gradients(*made, None)
    slope = (grad_value * value).sum(-1) + weight * slope
    return Gradients(*made, torch.where(weight > 0, slope, 0.0))
