"""Polynomials and single thresholds on the device, all heads at once.

Large keys have weight zero in the feature sums, so no small token is gathered. Rows then go on from
these sums with the large keys, exactly (`kernels.rectangle`), and there is one division; rows that
are large are written once more, exactly, over all keys. The index sets of a plan are kept on the
device with the plan, so a call with a plan waits for nothing. A loaded plan has none and splits
again at every call, which does wait.

A polynomial runs here only if it is certified to be positive on its range: then no row can lose its
denominator as long as scores stay within it. Beyond (a plan reused on other data), a row whose
denominator is not positive gets zeros and lse -inf. Nothing is rescued here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..basis import large_tokens
from ..cotangent import Gradients
from ..kernels.polynomial import (
    Polynomials,
    key_weights,
    polynomial_attention,
    polynomial_gradients,
    polynomial_sums,
)
from ..kernels.rectangle import (
    Rectangle,
    Start,
    Tokens,
    Totals,
    add_gradients,
    exact_rows,
    slopes,
)
from ..plans import HeadPlan, Plan
from ..problem import Problem
from .dispatch import Forward
from .exact import empty_results, finished, precision


def refusal(head: HeadPlan) -> str | None:
    assert head.polynomial is not None
    if head.polynomial.degree > 2:
        return f"its polynomial has degree {head.polynomial.degree}; kernels have up to 2"
    if not head.polynomial.positive:
        return f"its polynomial is not positive on ±{head.polynomial.bound:.3g}: it may lose rows"
    return None


def family(head: HeadPlan) -> object:
    return max(1, head.degree or 0)


@dataclass(frozen=True, eq=False)
class Split:
    """What a plan says, on the device."""

    coefficients: Tensor  # [batch * heads, 3] in <q, k>
    unit: Tensor  # [batch * heads]
    rows: Tokens
    keys: Tokens
    large_row: Tensor | None  # [batch, heads, n] uint8
    small_key: Tensor | None  # [batch, heads, m] float32: 0 where a key is large
    shared: bool  # whether heads that share keys have the same large ones


def forward(problem: Problem, plan: Plan) -> Forward:
    split = _split(problem, plan)
    sums = _Sums.of(problem, plan, split, shared=split.shared)
    if not split.keys.most:
        output, lse = (x.reshape(problem.query.shape[:3] + x.shape[3:]) for x in sums.attention())
    else:
        output, lse = empty_results(problem)
        num, den = sums.sums()
        start = Start(num.contiguous(), den, sums.polynomials.unit)
        exact_rows(*_tokens(problem), _small_rows(problem, split), output, lse, start)
    if split.rows.most:
        output = output.contiguous()
        exact_rows(*_tokens(problem), _large_rows(problem, split), output, lse)
    return output.contiguous(), lse, None


def gradients(
    problem: Problem,
    plan: Plan,
    output: Tensor,
    lse: Tensor,
    rescued: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    for_weights: bool,
) -> Gradients:
    split = _split(problem, plan)
    mixed = bool(split.keys.most or split.rows.most)
    sums = _Sums.of(problem, plan, split, shared=split.shared and not for_weights)
    made = sums.gradients(grad, grad_lse, output, lse, split, for_weights, wide=mixed)
    if not mixed:
        return made
    # rectangles add to sums of their own for each head of the queries, where heads share keys
    query, key, value, weight = made.query, made.key, made.value, made.key_log_weight
    shape, new = (problem.batch, problem.heads), lse.new_zeros
    apart = problem.group > 1
    total = Totals(
        query.contiguous(),
        new(*shape, *key.shape[2:]) if apart else key.contiguous(),
        new(*shape, *value.shape[2:]) if apart else value.contiguous(),
        new(*shape, problem.m) if weight is None else weight.contiguous(),
    )
    slope = slopes(grad, grad_lse, output)
    for rectangle in (_small_rows(problem, split), _large_rows(problem, split)):
        add_gradients(total, grad, slope, lse, *_tokens(problem), rectangle)
    found = finished(total, problem, for_weights)
    if apart:
        found.key, found.value = found.key + key, found.value + value
    return found


def _tokens(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.query, problem.key, problem.value


def _small_rows(problem: Problem, split: Split) -> Rectangle:
    """All rows but the large ones, and the large keys."""
    return Rectangle(
        Tokens(problem.n), split.keys, problem.scale, problem.is_causal,
        problem.key_log_weight, split.large_row, precision(),
    )  # fmt: skip


def _large_rows(problem: Problem, split: Split) -> Rectangle:
    """The large rows, and all keys."""
    return Rectangle(
        split.rows, Tokens(problem.m), problem.scale, problem.is_causal,
        problem.key_log_weight, None, precision(),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Sums:
    """The feature sums of a call. Heads that share keys share their sums too if the weights of
    these keys are the same; else they become batches, and the keys are seen several times."""

    query: Tensor
    key: Tensor
    value: Tensor
    polynomials: Polynomials
    problem: Problem

    @staticmethod
    def of(problem: Problem, plan: Plan, split: Split, *, shared: bool) -> _Sums:
        query, key, value = _tokens(problem)
        group, bias, small = problem.group, problem.key_log_weight, split.small_key
        shared = shared and (bias is None or bias.stride(1) == 0 or problem.heads == 1)
        weighted = bias is not None or small is not None
        weight, unit = None, split.unit
        if weighted:
            step = group if shared else 1
            weight = None if small is None else small[:, ::step]
            if bias is not None:
                factor, shift = key_weights(bias[:, ::step])
                weight = factor if weight is None else factor * weight
                unit = unit + shift.repeat_interleave(step, 1).flatten()
        if weighted and group > 1 and not shared:
            query = query.reshape(-1, group, *query.shape[2:])
            key, value = (
                x.reshape(-1, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (key, value)
            )
            assert weight is not None
            weight = weight.reshape(-1, group, problem.m)
        if weight is not None:
            weight = weight.contiguous()
        polynomials = Polynomials(
            split.coefficients, unit, max(1, plan.heads[0].degree or 0), weight,
            problem.is_causal, precision=precision(),
        )  # fmt: skip
        return _Sums(query, key, value, polynomials, problem)

    def attention(self) -> tuple[Tensor, Tensor]:
        return polynomial_attention(self.query, self.key, self.value, self.polynomials)

    def sums(self) -> tuple[Tensor, Tensor]:
        return polynomial_sums(self.query, self.key, self.value, self.polynomials)

    def gradients(
        self,
        grad: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        lse: Tensor,
        split: Split,
        for_weights: bool,
        wide: bool,
    ) -> Gradients:
        """Of the call's tokens; ``wide``: in float32."""
        problem, shape = self.problem, self.query.shape[:2]

        def alike(x: Tensor) -> Tensor:
            return x.reshape(*shape, *x.shape[2:])

        made = polynomial_gradients(
            alike(grad), None if grad_lse is None else alike(grad_lse),
            self.query, self.key, self.value, self.polynomials, alike(output), alike(lse),
            excluded=None if split.large_row is None else alike(split.large_row),
            for_weights=for_weights, dtype=torch.float32 if wide else None,
        )  # fmt: skip
        query, key, value, weight = made
        if self.key.shape[:2] != problem.key.shape[:2]:
            key, value = (
                x.float().sum(1).view(problem.batch, -1, *x.shape[2:]) for x in (key, value)
            )
        query = query.reshape(problem.query.shape)
        if weight is not None:
            weight = weight.reshape(problem.batch, -1, problem.m)
        return Gradients(query, key, value, weight)


# ---- the plan on the device --------------------------------------------------------------------


def _split(problem: Problem, plan: Plan) -> Split:
    """Kept with the plan, unless the plan has to split again. Index sets belong to one length."""
    if any(_splits_again(head) for head in plan.heads):
        return _make_split(problem, plan)
    key = ("split", problem.query.device, problem.scale)
    if key not in plan.memory:
        plan.memory[key] = _make_split(problem, plan)
    split = plan.memory[key]
    assert isinstance(split, Split)
    return split


def _splits_again(head: HeadPlan) -> bool:
    return head.kind == "single-threshold" and head.large_rows is None


def _make_split(problem: Problem, plan: Plan) -> Split:
    device, n, m = problem.query.device, problem.n, problem.m
    pairs = [_large(problem, plan, number) for number in range(len(plan.heads))]
    rows, keys = (_listed(side, device) for side in zip(*pairs, strict=True))
    shape = (problem.batch, problem.heads)
    large_row = small_key = None
    if rows.most:
        large_row = _marked(rows, n).view(*shape, n)
    if keys.most:
        small_key = 1.0 - _marked(keys, m).view(*shape, m).float()
    shared = problem.group == 1 or small_key is None
    if small_key is not None and not shared:
        apart = small_key.unflatten(1, (-1, problem.group))
        shared = bool((apart == apart[:, :, :1]).all())
    coefficients = torch.tensor(
        [_coefficients(head, problem.scale) for head in plan.heads], dtype=torch.float64
    )
    unit = torch.tensor([head.bound or 0.0 for head in plan.heads])
    return Split(
        coefficients.float().to(device), unit.to(device), rows, keys, large_row, small_key, shared
    )


def _coefficients(head: HeadPlan, scale: float) -> tuple[float, float, float]:
    """In <q, k> from those in z / B."""
    polynomial = head.polynomial
    assert polynomial is not None
    unit = scale / polynomial.bound if polynomial.bound > 0 else 0.0
    c = [factor * unit**power for power, factor in enumerate(polynomial.coefficients)]
    return (c[0], c[1] if len(c) > 1 else 0.0, c[2] if len(c) > 2 else 0.0)


def _large(problem: Problem, plan: Plan, number: int) -> tuple[Tensor, Tensor]:
    """Large rows and keys of one head."""
    head = plan.heads[number]
    if head.kind != "single-threshold":
        none = torch.zeros(0, dtype=torch.long)
        return none, none
    if head.large_rows is not None and head.large_keys is not None:
        return head.large_rows, head.large_keys
    assert head.threshold is not None
    return large_tokens(problem.head(*divmod(number, problem.heads)), head.threshold)


def _listed(sets: Sequence[Tensor], device: torch.device) -> Tokens:
    """Sets of different sizes as one table."""
    most = max(len(tokens) for tokens in sets)
    index = torch.zeros(len(sets), most, dtype=torch.int32, device=device)
    for row, tokens in zip(index, sets, strict=True):
        row[: len(tokens)] = tokens.to(device)
    count = torch.tensor([len(tokens) for tokens in sets], dtype=torch.int32, device=device)
    return Tokens(most, index, count)


def _marked(tokens: Tokens, total: int) -> Tensor:
    """1 for the tokens of each set, [sets, total] uint8."""
    assert tokens.index is not None and tokens.count is not None
    real = torch.arange(tokens.most, device=tokens.index.device) < tokens.count.unsqueeze(1)
    index = torch.where(real, tokens.index.long(), total)
    marks = torch.zeros(len(index), total + 1, dtype=torch.uint8, device=index.device)
    return marks.scatter_(1, index, 1)[:, :total].contiguous()
