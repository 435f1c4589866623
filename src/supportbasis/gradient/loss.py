"""The attention loss and its gradients: check, plan, sum up block by block, assemble."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..methods import Method
from ..plans import HeadPlan, Plan
from ..problem.problem import Head
from ..problem.validation import attention_problem
from ..sketch import approximate_svd
from .closed_attention import without_autocast
from .closed_form import Layer, Sums
from .factors import Factors, SvdFactors, moment_columns
from .loss_inputs import Call, check_settings, checked_call
from .loss_result import AttentionLossGradient, LowRankPart
from .many_heads import layer_gradient
from .weights import BlockWeights, RowGroup, block_weights, row_groups, sparse_part

EPS, SEED = 0.5, 0  # of the approximate SVD
STATE_LIMIT = 2**28  # numbers in the sums of a polynomial's features: 1 GiB of float32


def attention_loss_gradient(
    x: Tensor,
    weight_qk: Tensor | Sequence[Tensor],
    weight_v: Tensor,
    target: Tensor | None = None,
    *,
    scale: float | None,
    method: Method,
    upstream: Tensor | None = None,
    is_causal: bool = False,
    low_rank: int | None = None,
    input_gradient: bool = True,
) -> AttentionLossGradient:
    """The loss L = |D^-1 exp(scale X W Xᵀ) X Y - E|²_F and its gradients (Definitions E.1, E.2).

    ``x`` X is [n, d], ``weight_qk`` W [d, d] or a pair (W_Q, W_K) of [d, h] with W = W_Q W_Kᵀ,
    ``weight_v`` Y [d, dv], ``target`` E [n, dv]; ``scale=None`` means 1/sqrt(d), or 1/sqrt(h) for
    a pair. Gradients with respect to all of them but E come by the closed form, with the weights
    of ``method`` in place of the softmax (`Exact`, `Polynomial` or `SingleThreshold`), and nothing
    of size n x n is ever formed. ``low_rank=k`` replaces the exact part of a `SingleThreshold` by
    an approximate SVD of rank k, as the paper does. ``input_gradient=False`` leaves ∂L/∂X out,
    which is most of the work of a polynomial of degree 2 or more.

    ``upstream`` in place of ``target`` is the gradient of any loss by the layer's output, for
    example ∂L/∂X of the layer above it, so that layers chain by the closed form (``loss`` is None
    then). Several heads have weights [heads, d, h] and [heads, d, dv], with target, upstream and
    output [heads, n, dv]; ``is_causal`` hides later tokens. Such calls have no ``low_rank`` and no
    ``error``, and polynomials need the features of one degree more.

    The inputs may require grad; the results carry no graph. Float16 and bfloat16 inputs are
    computed, and returned, in float32.

    >>> import torch, supportbasis as sb
    >>> x, eye = torch.tensor([[0.0], [1.0]]), torch.eye(1)
    >>> result = sb.gradient.attention_loss_gradient(
    ...     x, 0 * eye, eye, x, scale=1.0, method=sb.Exact()
    ... )
    >>> result.loss, result.weight_v  # the output is the mean, 1/2, in both rows
    (tensor(0.5000), tensor([[0.]]))
    >>> result.weight_qk  # 2 x·cov·(1/2 - 1) for the second row, whose tokens have variance 1/4
    tensor([[-0.2500]])
    """
    call = checked_call(x, weight_qk, weight_v, target, upstream)
    check_settings(len(call.x), method, low_rank, input_gradient, is_causal)
    if upstream is not None or is_causal or call.weight_v.dim() == 3:
        if low_rank is not None:
            raise InputError(
                f"low_rank is {low_rank}, which is for one head with a target, not causal"
            )
        return layer_gradient(
            call, scale, method, is_causal, input_gradient, from_above=upstream is not None
        )
    with torch.no_grad(), without_autocast(call.x):
        head, scale = _head(call, scale)
        plan = Plan(method, head.dim, (method.plan_head(head),))
        groups, failed = row_groups(head, plan.heads[0])
        _check_work(plan.heads[0], groups, call.x.shape[1], low_rank, input_gradient)
        layer = Layer.of(call.x, call.weight_v, call.goal, centred=low_rank is None)
        sums, part = _sum_up(layer, head, groups, low_rank, input_gradient)
        weight, (weight_q, weight_k), inputs = _gradients(call, sums, scale)
    fallback = len(failed) if plan.heads[0].kind == "single-threshold" else 0
    if len(failed) > fallback:
        warnings.warn(
            "supportbasis: some rows have no usable sum of polynomial weights; their output is 0 "
            "and they add nothing to the gradient (see invalid_rows); use sb.SingleThreshold",
            stacklevel=2,
        )
    return AttentionLossGradient(
        loss=sums.loss.to(call.x.dtype),
        weight_qk=weight,
        weight_q=weight_q,
        weight_k=weight_k,
        weight_v=2 * sums.weight_v,
        x=inputs,
        output=sums.output,
        plan=plan,
        invalid_rows=len(failed),
        fallback_rows=fallback,
        low_rank=part,
        _layer=layer,
        _head=head,
        _rows=sums.rows,
    )


def _head(call: Call, scale: float | None) -> tuple[Head, float]:
    """The head whose weights are wanted, and the scale as it was given."""
    query = call.query
    given = query.shape[1] ** -0.5 if scale is None else scale
    problem = attention_problem(query, call.key, call.x, None, 0.0, False, given, False)
    return problem.head(0, 0), float(given)


def _sum_up(
    layer: Layer, head: Head, groups: list[RowGroup], low_rank: int | None, inputs: bool
) -> tuple[Sums, LowRankPart | None]:
    """One pass over the rows; before it, with ``low_rank``, one that collects the exact part."""
    factored: list[Factors] = [g.polynomial for g in groups if g.polynomial is not None]
    if low_rank is None:
        sums = Sums(layer, factored, inputs)
        for group in groups:
            for rows in group.blocks(layer.x):
                sums.add(rows, block_weights(head, group, rows))
        sums.finish()
        return sums, None
    matrix, shares = sparse_part(head, groups, layer.x)
    svd, part = _truncated(matrix, low_rank)
    sums = Sums(layer, [*factored, svd], inputs)
    for group in groups:
        for rows in group.blocks(layer.x):
            lefts: dict[Factors, Tensor] = {svd: svd.left(rows)}
            if group.polynomial is not None:
                lefts[group.polynomial] = group.polynomial.left(rows) * shares[rows, None]
            sums.add(rows, BlockWeights(lefts))
    sums.finish()
    return sums, part


def _truncated(matrix: Tensor, rank: int) -> tuple[SvdFactors, LowRankPart]:
    """The exact part by its approximate SVD, and how much of it that leaves out."""
    values = matrix._values().double()
    left, middle, right = approximate_svd(matrix, rank, EPS, SEED)
    wide = [y.double() for y in (left * middle, right)]
    rows, columns = matrix._indices().unbind(0)
    cross = sum(
        float((part * (wide[0][i] * wide[1][j]).sum(1)).sum())
        for part, i, j in zip(*(y.split(2**20) for y in (values, rows, columns)), strict=True)
    )
    size = float(values.square().sum())
    kept = float(((wide[0].T @ wide[0]) * (wide[1].T @ wide[1])).sum())
    residual = (max(0.0, size - 2 * cross + kept) / size) ** 0.5 if size else 0.0
    return SvdFactors(left, middle, right), LowRankPart(rank, len(values), residual)


def _gradients(
    call: Call, sums: Sums, scale: float
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor | None]:
    """∂L/∂W, (∂L/∂W_Q, ∂L/∂W_K) by the chain rule, and ∂L/∂X: the formulas of `closed_form`."""
    weight = 2 * scale * (call.x.T @ sums.rows)
    left, right = call.pair[0], call.pair[1] if len(call.pair) == 2 else None
    of_pair = (None, None) if right is None else (weight @ right, weight.T @ left)
    if sums.columns is None or sums.values is None:
        return weight, of_pair, None
    rows, columns = sums.rows, sums.columns @ left
    if right is not None:
        rows, columns = rows @ right, columns @ right.T
    return weight, of_pair, 2 * scale * (rows @ left.T + columns) + 2 * sums.values


def _check_work(
    plan: HeadPlan, groups: list[RowGroup], dim: int, low_rank: int | None, inputs: bool
) -> None:
    """The sums of the gradient have many more columns than those of attention."""
    if low_rank is not None and plan.kind == "exact":
        raise InputError(
            f"low_rank is {low_rank}, but the exact part is the whole n x n matrix "
            f"({plan.reason}); use a larger threshold, another degree, or low_rank=None"
        )
    columns = moment_columns(dim) + (dim**2 + 2 * dim if inputs else 0)
    for group in groups:
        if group.polynomial is not None and group.polynomial.rank * columns > STATE_LIMIT:
            raise InputError(
                f"method needs sums of {group.polynomial.rank} features by {columns} columns, more "
                f"than {STATE_LIMIT} numbers; use a lower degree, a pair weight_qk of fewer "
                "columns, or sb.Exact()"
            )
