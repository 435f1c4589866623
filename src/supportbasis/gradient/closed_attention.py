"""Attention whose backward pass is the paper's closed form, for any number of heads and layers.

With approximate weights Â in place of the softmax and G the gradient of the output, the closed form
of appendix E reads

    ∂L/∂S = Â ∘ (G Vᵀ - diag(r)),   r_i = g_i · o_i,   ∂L/∂V = Âᵀ G;

a key bias has the sums of the columns of ∂L/∂S. `sb.attention` differentiates the function that ran
instead, with p'(s) where this has p(s). With P' = p, the gradients of queries and keys here are
those of a sum over P(s), one degree higher: causal heads, masks and shared keys need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..api import autocast
from ..components import Component, PolynomialSum
from ..components.cotangent import Cotangent, Gradients
from ..engine import autograd
from ..errors import InputError
from ..methods import Exact, Method, Polynomial, SingleThreshold
from ..methods.planning import plan_of
from ..plans import Plan, PolynomialHead
from ..plans.supports import RowGroup
from ..polynomials.certified import CertifiedPolynomial
from ..polynomials.features import check_rank
from ..problem.problem import Head, Kept
from ..problem.validation import attention_problem

METHODS = (Exact, Polynomial, SingleThreshold)


def closed_form_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    method: Method | None = None, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """`sb.attention` with the backward pass of the closed form.

    Its gradients approximate those of exact attention; they are not those of the approximate
    output. ``method``, or the method of the ``plan``, is `Exact`, `Polynomial` or
    `SingleThreshold`. A key bias has a gradient too; there are no second derivatives. Sums run in
    PyTorch operations, without kernels.

    >>> import torch, supportbasis as sb
    >>> q, k, v = torch.randn(3, 1, 2, 64, 4).mul(0.3).requires_grad_().unbind(0)
    >>> output = sb.gradient.closed_form_attention(q, k, v, method=sb.Polynomial(2))
    >>> output.sum().backward()
    """
    if (method is None) == (plan is None):
        raise InputError("closed_form_attention needs a method or a plan, and not both")
    if plan is None:
        check_method(method)
    query, key, value = autocast(query, key, value)
    problem = attention_problem(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    plan = plan_of(problem, method, plan, "eager")
    check_method(plan.method)
    for head in plan.heads:
        if isinstance(head, PolynomialHead):
            check_rank(plan.dim, head.degree + 1)  # of the antiderivative
    return problem.restore(autograd.as_operator(problem, plan, "eager", _ClosedForm()).output)


def check_method(method: Method | None, gradient: str = "this gradient") -> None:
    """Raise unless the closed form knows the weights of this method."""
    if type(method) not in METHODS:
        names = ", ".join(f"sb.{kind.__name__}" for kind in METHODS)
        raise InputError(f"method must be one of {names} for {gradient}, got {method!r}")


class _ClosedForm(Kept):
    """Components of a forward pass; in the backward pass polynomials have the closed form."""

    def __setitem__(self, at: tuple[int, int], ran: tuple[Head, Sequence[RowGroup]]) -> None:
        head, groups = ran
        parts = [replace(g, components=list(map(_closed, g.components))) for g in groups]
        super().__setitem__(at, (head, parts))


def _closed(part: Component) -> Component:
    if not isinstance(part, PolynomialSum):
        return part
    closed = _ClosedFormSum(part.polynomial, part.keys)
    closed.last.extend(part.last)  # what its forward pass saved
    return closed


class _ClosedFormSum(PolynomialSum):
    """Differentiated by values and key log-weights by p, by queries and keys by P."""

    def add_gradients(
        self, total: Gradients, cotangent: Cotangent, head: Head, rows: Tensor | None
    ) -> None:
        unused = torch.zeros_like
        of_values = replace(total, query=unused(total.query), key=unused(total.key))
        super().add_gradients(of_values, cotangent, head, rows)
        of_scores = replace(total, value=unused(total.value), key_log_weight=None)
        higher = PolynomialSum(antiderivative(self.polynomial), self.keys)
        higher.add_gradients(of_scores, cotangent, head, rows)


def antiderivative(poly: CertifiedPolynomial) -> CertifiedPolynomial:
    """P with P' = p and P(0) = 0, in the same form; nothing is certified about it.

    >>> from supportbasis.polynomials.certified import taylor
    >>> p = taylor(2, 1.5)
    >>> z = torch.linspace(-1, 1, 5, dtype=torch.float64)
    >>> torch.allclose(antiderivative(p).slope(z), p(z))
    True
    """
    bound = poly.bound or 1.0  # on a single point p is the constant c_0
    factor = bound * math.exp(poly.bound - bound)
    kept = poly.coefficients if poly.bound else poly.coefficients[:1]
    coefficients = (0.0, *(c * factor / (k + 1) for k, c in enumerate(kept)))
    unknown = (math.inf, (-math.inf, -math.inf))
    return CertifiedPolynomial(poly.kind, len(kept), bound, coefficients, *unknown)
