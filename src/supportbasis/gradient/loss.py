"""The attention loss and its gradients: check, plan, sum up block by block, assemble; and the
result, with its error on sampled rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..accuracy.certificate import CONFIDENCE, SAMPLED_ROWS
from ..accuracy.sampling import RowSample
from ..engine.execute import execute
from ..errors import InputError
from ..methods import Method, SingleThreshold
from ..methods.planning import make_plan
from ..plans import Plan
from ..problem.checks import check_finite, check_integer
from ..problem.problem import Head, Outcome, Problem
from ..problem.rounding import compute_dtype
from ..problem.validation import attention_problem, check_tensors
from ..sketch import approximate_svd
from .closed_attention import check_method, closed_form_attention
from .closed_form import Call, Factors, Sums, exact_tiles, row_gradients, sparse_part, weights_of

EPS, SEED = 0.5, 0  # of the approximate SVD


def attention_loss_gradient(
    x: Tensor, weight_qk: Tensor | Sequence[Tensor], weight_v: Tensor,
    target: Tensor | None = None, *, scale: float | None, method: Method,
    upstream: Tensor | None = None, is_causal: bool = False, low_rank: int | None = None,
    input_gradient: bool = True,
) -> AttentionLossGradient:  # fmt: skip
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
    call = _checked_call(x, weight_qk, weight_v, target, upstream)
    check_method(method)
    for name, flag in (("input_gradient", input_gradient), ("is_causal", is_causal)):
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, got {flag!r}")
    if low_rank is not None:
        check_integer("low_rank", low_rank, 1, len(call.x))
        if not isinstance(method, SingleThreshold):
            part = "the exact part of sb.SingleThreshold"
            raise InputError(f"low_rank replaces {part}; {method!r} has none")
    if upstream is None and not is_causal and call.weight_v.dim() == 2:
        return _head_gradient(call, scale, method, low_rank, input_gradient)
    if low_rank is not None:
        raise InputError(f"low_rank is {low_rank}, which is for one head with a target, not causal")
    return _layer_gradient(call, scale, method, is_causal, input_gradient, upstream is not None)


def _checked_call(
    x: Tensor, weight_qk: Tensor | Sequence[Tensor], weight_v: Tensor, target: Tensor | None,
    upstream: Tensor | None,
) -> Call:  # fmt: skip
    """The call, or an error about a tensor."""
    weights: dict[str, Any] = {"weight_qk": weight_qk}
    if isinstance(weight_qk, Sequence) and len(weight_qk) == 2:
        weights = {"weight_qk[0]": weight_qk[0], "weight_qk[1]": weight_qk[1]}
    elif not isinstance(weight_qk, Tensor):
        expected = "a tensor [d, d] or a pair (W_Q, W_K)"
        raise InputError(f"weight_qk must be {expected}, got {weight_qk!r}")
    if (target is None) == (upstream is None):
        given = "neither is" if target is None else "both are"
        raise InputError(
            f"target or upstream: {given} given; expected the target of the loss, or the gradient "
            "of another loss by the output"
        )
    goal = {"target": target} if upstream is None else {"upstream": upstream}
    tensors = {"x": x, **weights, "weight_v": weight_v, **goal}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            continue  # `check_tensors` will say so
        dims, expected = ((2,), "a matrix") if name == "x" else ((2, 3), "a matrix or [heads, ...]")
        if tensor.dim() not in dims or not tensor.numel():
            shape = tuple(tensor.shape)
            raise InputError(f"{name} has shape {shape}; expected {expected}, not empty")
    check_tensors(list(tensors.values()), list(tensors))
    check_finite(**tensors)
    x, *pair, weight_v, aim = (y.detach().to(compute_dtype(y.dtype)) for y in tensors.values())
    call = Call(x, tuple(pair), weight_v, aim)
    _check_shapes(call, *goal)
    return call


def _check_shapes(call: Call, name: str) -> None:
    (n, dim), pair, weight_v = call.x.shape, call.pair, call.weight_v
    shapes = [str(tuple(w.shape)) for w in (*pair, weight_v)]
    if len({w.shape[:-2] for w in (*pair, weight_v)}) > 1:
        raise InputError(
            f"weight_qk and weight_v have shapes {', '.join(shapes)}, which disagree; expected all "
            f"[{dim}, ...] for one head or all [heads, {dim}, ...]"
        )
    if len(pair) == 1 and pair[0].shape[-2:] != (dim, dim):
        raise InputError(f"weight_qk has shape {shapes[0]}; expected [..., {dim}, {dim}]")
    if pair[0].shape != pair[-1].shape or pair[0].shape[-2] != dim:
        both = " and ".join(shapes[:2])
        raise InputError(f"weight_qk has shapes {both}; expected two of [..., {dim}, h]")
    if weight_v.shape[-2] != dim:
        raise InputError(f"weight_v has {weight_v.shape[-2]} rows; expected {dim}, the width of x")
    expected = (*weight_v.shape[:-2], n, weight_v.shape[-1])
    if call.goal.shape != expected:
        raise InputError(f"{name} has shape {tuple(call.goal.shape)}; expected {expected}")


def _head_gradient(
    call: Call, scale: float | None, method: Method, low_rank: int | None, inputs: bool
) -> AttentionLossGradient:
    """By the sums of `closed_form`: one head with a target, not causal."""
    with torch.no_grad(), torch.autocast(call.x.device.type, enabled=False):
        scale = call.pair[0].shape[1] ** -0.5 if scale is None else scale
        problem = attention_problem(call.query, call.key, call.x, None, 0.0, False, scale, False)
        head = problem.head(0, 0)
        planned = method.plan_head(head)
        if low_rank is not None and planned.kind == "exact":
            raise InputError(
                f"low_rank is {low_rank}, but the exact part is the whole n x n matrix "
                f"({planned.reason}); use a larger threshold, another degree, or low_rank=None"
            )
        plan = Plan(method, head.dim, (planned,))
        sums, part, outcome = _sum_up(call, problem, plan, low_rank, inputs)
        left, weight = call.pair[0], 2 * scale * (call.x.T @ sums.rows)
        rows, keys, weight_q, weight_k = sums.rows, sums.keys, None, None
        if len(call.pair) == 2:
            right = call.pair[1]
            rows, keys = rows @ right, keys @ right.T
            weight_q, weight_k = weight @ right, weight.T @ left
        of_x = 2 * scale * (rows @ left.T + keys) + 2 * sums.values @ call.weight_v.T
    failed, fallback = int(outcome.invalid_rows), int(outcome.fallback_rows)
    if failed > fallback:
        warnings.warn(
            "supportbasis: some rows have no usable sum of polynomial weights; their output is 0 "
            "and they add nothing to the gradient (see invalid_rows); use sb.SingleThreshold",
            stacklevel=3,
        )
    return AttentionLossGradient(
        loss=sums.loss.to(call.x.dtype), weight_qk=weight, weight_q=weight_q, weight_k=weight_k,
        weight_v=sums.weight_v, x=of_x if inputs else None, output=sums.output, plan=plan,
        invalid_rows=failed, fallback_rows=fallback, low_rank=part, _call=call, _head=head,
        _rows=sums.rows,
    )  # fmt: skip


def _layer_gradient(
    call: Call, scale: float | None, method: Method, is_causal: bool, inputs: bool, from_above: bool
) -> AttentionLossGradient:
    """The same through `closed_form_attention`: one or several heads, causal or not."""
    x, weight_v, *pair = (y.requires_grad_() for y in (call.x, call.weight_v, *call.pair))
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        query, value = call.query, x @ weight_v
        tokens = query, call.key.expand_as(query), value
        problem = attention_problem(*tokens, None, 0.0, is_causal, scale, False)
        plan = make_plan(problem, method)
        output = closed_form_attention(*tokens, None, is_causal, scale, plan=plan)
        loss = (output * call.goal if from_above else (output - call.goal).square()).sum()
        leaves = [weight_v, *pair, *([x] if inputs else [])]
        of_value, *found = torch.autograd.grad(loss, leaves)
    weight_q, weight_k = found[:2] if len(pair) == 2 else (None, None)
    return AttentionLossGradient(
        loss=None if from_above else loss.detach(), weight_qk=found[0] if len(pair) == 1 else None,
        weight_q=weight_q, weight_k=weight_k, weight_v=of_value, x=found[-1] if inputs else None,
        output=output.detach(), plan=plan,
    )  # fmt: skip


def _sum_up(
    call: Call, problem: Problem, plan: Plan, low_rank: int | None, inputs: bool
) -> tuple[Sums, LowRankPart | None, Outcome]:
    """The sums over all weights; with ``low_rank`` the exact ones are cut to that rank before."""
    # weights that were cut to low rank do not add up to 1: for them zero is the centre
    centre = call.x.mean(0) if low_rank is None else torch.zeros_like(call.x[0])
    outcome = execute(replace(problem, value=(call.x - centre)[None, None]), plan)
    head = problem.head(0, 0)
    shifted, lse, fallback = (x[0, 0] for x in (outcome.output, outcome.lse, outcome.fallback))
    parts, exact = weights_of(head, plan.heads[0], lse, fallback)
    cut = None
    if low_rank is not None:
        matrix = sparse_part(head, lse, exact)
        svd, cut = _truncated(matrix, low_rank)
        truncated = svd.left(svd.rows) @ (svd.right(svd.keys).T @ call.x)
        shifted = shifted - matrix @ call.x + truncated
        parts, exact = [*parts, svd], []
    sums = Sums(call, centre, shifted, lse > -torch.inf, inputs)
    for factors in parts:
        sums.add_low_rank(factors)
    for tile in exact_tiles(head, lse, exact):
        sums.add_exact(*tile)
    return sums, cut, outcome


def _truncated(matrix: Tensor, rank: int) -> tuple[Factors, LowRankPart]:
    """The exact part by its approximate SVD, and how much of it that leaves out."""
    left, middle, right = approximate_svd(matrix, rank, EPS, SEED)
    left = left * middle
    wide_left, wide_right, wide = left.double(), right.double(), matrix.double()
    size = float(wide._values().square().sum())
    cross = float((wide_left * (wide @ wide_right)).sum())
    kept = float(((wide_left.T @ wide_left) * (wide_right.T @ wide_right)).sum())
    residual = (max(0.0, size - 2 * cross + kept) / size) ** 0.5 if size else 0.0
    everything = torch.arange(len(left), device=left.device)
    factors = Factors(everything, everything, rank, left.__getitem__, right.__getitem__)
    return factors, LowRankPart(rank, matrix._nnz(), residual)


@dataclass(frozen=True)
class LowRankPart:
    """The exact part B of the weights, and the rank-k matrix that replaced it.

    ``residual`` is |B - L D Wᵀ|_F / |B|_F: at least Δ_k/|B|_F, and below 1 + eps times that with
    the probability of `sb.sketch.approximate_svd`. 0 where there is no exact part."""

    rank: int
    non_zeros: int
    residual: float

    def __str__(self) -> str:
        return f"{self.non_zeros} exact weights as rank {self.rank}, residual {self.residual:.3g}"


@dataclass(frozen=True)
class GradientError:
    """Relative Frobenius errors on sampled rows, and upper limits for all rows.

    ``output`` is the error of Â X Y. ``rows`` is that of (Â∘𝒬 - diag(r) Â) X, one vector a row,
    whose products with the tokens add up to ∂L/∂W."""

    output: float
    output_limit: float
    rows: float
    rows_limit: float
    sampled: int
    confidence: float

    def __str__(self) -> str:
        return (
            f"error of the output {self.output:.3g} (below {self.output_limit:.3g}), of the "
            f"gradient's rows {self.rows:.3g} (below {self.rows_limit:.3g}) with confidence "
            f"{self.confidence:g}, {self.sampled} rows"
        )


@dataclass(frozen=True, eq=False)
class AttentionLossGradient:
    """The loss |ÂXY - E|²_F, its gradients under the names of the arguments, and what ran."""

    loss: Tensor | None  # None: the gradient came from above
    weight_qk: Tensor | None  # ∂L/∂W [d, d]; None: of a pair of several heads, causal or from above
    weight_q: Tensor | None  # ∂L/∂W_Q and ∂L/∂W_K [d, h], where W came as a pair
    weight_k: Tensor | None
    weight_v: Tensor  # ∂L/∂Y [d, dv]
    x: Tensor | None  # ∂L/∂X [n, d]; None where it was not asked for
    output: Tensor  # ÂXY [n, dv]
    plan: Plan
    # rows whose polynomial weights do not add up to a usable sum, of which so many were computed
    # exactly; the others have output 0 (None: not counted, of several heads, causal ones and
    # gradients from above; warned about)
    invalid_rows: int | None = None
    fallback_rows: int | None = None
    low_rank: LowRankPart | None = None
    _call: Call | None = None
    _head: Head | None = None
    _rows: Tensor | None = None  # (Â∘𝒬 - diag(r) Â) X

    @cached_property
    def error(self) -> GradientError:
        """Errors on 256 rows against exact float64 values, measured at the first access."""
        call, head, ours = self._call, self._head, self._rows
        if call is None or head is None or ours is None:
            raise InputError("error is measured for one head with a target, not causal")
        sizes = tuple(x.double().square().sum(1) for x in (self.output, ours))
        sample = RowSample.draw(head, SAMPLED_ROWS, seed=0, measures=sizes)
        output, rows = row_gradients(call, head, sample.rows)

        def measured(given: Tensor, exact: Tensor) -> tuple[float, float]:
            error = (given[sample.rows].double() - exact).square().sum(1)
            return sample.frobenius_limit(error, exact.square().sum(1))

        count, limits = len(sample.rows), (*measured(self.output, output), *measured(ours, rows))
        return GradientError(*limits, count, 1.0 if count == head.n else CONFIDENCE)

    def __str__(self) -> str:
        loss = "from above" if self.loss is None else f"loss {float(self.loss):.6g}"
        lines = [f"AttentionLossGradient: {loss}", str(self.plan)]
        if self.low_rank is not None:
            lines.append(str(self.low_rank))
        if self.invalid_rows:
            fallback = f"{self.fallback_rows} of them computed exactly"
            lines.append(f"{self.invalid_rows} rows without a usable sum, {fallback}")
        return "\n".join(lines)

    __repr__ = __str__
