"""Gradients of the sums of a polynomial of degree 1 or 2, by kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..runtime.language import cdiv
from . import contract as gradient
from .setting import Polynomials, Setting, operands
from .sums import Side, State, key_sums, pair_sizes, prepared, read, rows_of, sums_over


def token_gradient(
    rows: Side,
    slope: Tensor,
    state: State,
    other: Side,
    setting: Setting,
    *,
    scan: int = 0,
    queries: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the tokens of ``rows``, whose values are the directions (see `contract`)."""
    x, u, y, v = rows.tokens, rows.values, other.tokens, other.values
    shape, (batch, heads, n, d) = setting.tiles.contract, x.shape
    out = torch.empty(batch, heads, n, d, dtype=dtype, device=x.device)
    gradient.contract[(cdiv(n, shape.rows), cdiv(setting.width, shape.columns), batch * heads)](
        x, x if rows.words is None else rows.words, u, slope, *state,
        y, v, slope if other.weight is None else other.weight,
        slope if rows.weight is None else rows.weight, setting.coefficients, out,
        *pair_sizes(rows, other, setting),
        *x.stride()[:3], *u.stride()[:3], *y.stride()[:3], *v.stride()[:3],
        setting.width, shape.columns, setting.value_width, shape.rows, shape.tokens,
        setting.degree, scan, queries, other.weight is not None, rows.weight is not None,
        setting.packed, **setting.switches, **shape.launch,
    )  # fmt: skip
    return out


def polynomial_gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    polynomials: Polynomials,
    output: Tensor,
    lse: Tensor,
    *,
    excluded: Tensor | None = None,
    for_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, of the logarithm of the weights.

    ``lse`` belongs to the whole row, so other components may have been added to the sums; rows
    that are ``excluded`` [batch, heads, n] had none of them.
    """
    dim, columns, causal = query.shape[-1], value.shape[-1], polynomials.causal
    dtype = dtype or query.dtype
    query, key, value, grad, output = (
        operands(x, causal) for x in (query, key, value, grad.to(query.dtype), output)
    )
    setting = Setting(query, value, polynomials)
    batch, heads, n = lse.shape
    grad, output = rows_of(grad), output.contiguous()
    g = torch.empty(batch, heads, n, setting.value_dim, dtype=setting.dtype, device=grad.device)
    h = torch.empty_like(lse)
    gradient.gradient_rows[(cdiv(n, 64), batch * heads)](
        grad, output, lse, polynomials.unit, h if excluded is None else excluded,
        h if grad_lse is None else grad_lse.contiguous(), g, h,
        heads, n, setting.value_dim, *grad.stride()[:3],
        setting.value_width, 64, grad_lse is not None, excluded is not None,
    )  # fmt: skip
    scan, group, weight = int(causal), heads // key.shape[1], polynomials.weight
    keys, state = key_sums(query, key, value, weight, setting, read=True)
    queries = prepared(query, g, h, setting, summed=True, read=True)
    states = cdiv(key.shape[2], setting.chunk) if scan else 1
    of_queries = sums_over(queries, setting, scan=-scan, states=states, group=group, queries=True)
    queries = replace(queries, weight=None)
    grad_query = token_gradient(
        queries, h, state, keys, setting, scan=scan, queries=True, dtype=dtype
    )
    grad_key = token_gradient(
        keys, h, of_queries, queries, setting, scan=-scan, queries=False, dtype=dtype
    )
    grad_value, slope = read(
        keys, of_queries, queries, setting,
        scan=-scan, queries=False, slope=h if for_weights else None,
        dtype=torch.float32 if for_weights else dtype,
    )  # fmt: skip
    made = (grad_query[..., :dim], grad_key[..., :dim], grad_value[..., :columns].to(dtype))
    if not for_weights:
        return (*made, None)
    slope = (grad_value * value).sum(-1) + (slope if weight is None else weight * slope)
    return (*made, slope if weight is None else torch.where(weight > 0, slope, 0.0))
