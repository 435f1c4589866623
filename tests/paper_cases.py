"""Strategies and definitions by hand for the tests of splits (appendix B) and buckets (F, G)."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import supportbasis as sb
from supportbasis.plans import BucketPair, HeadPlan
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import Head
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

EPS = torch.finfo(torch.float64).eps
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RATIOS = [1.25, 1.5, 2.0, 3.0, 7.3, math.inf]
properties = settings(derandomize=True, deadline=None, max_examples=100)
few = settings(derandomize=True, deadline=None, max_examples=40)  # those that make plans


@st.composite
def dyadic_matrix(draw, rows: int, columns: int, exponent: int = 0) -> Tensor:
    """Integers up to 9 times a power of two: exact in every dtype, with zero rows, equal maxima,
    and maxima at b 2^l, b 3^l and b 1.5^l."""
    count = rows * columns
    entries = draw(st.lists(st.integers(-9, 9), min_size=count, max_size=count))
    whole = torch.tensor(entries, dtype=torch.float64).reshape(rows, columns)
    kept = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    whole[~torch.tensor(kept, dtype=torch.bool)] *= draw(st.sampled_from([0.0, 1.0]))
    return whole * 2.0**exponent


@st.composite
def dyadic_pair(draw) -> tuple[Tensor, Tensor, float]:
    n, m, d = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    query_exponent = draw(st.sampled_from([-450, -4, 0, 0, 0, 3, 450]))
    key_exponent = query_exponent + draw(st.integers(-3, 3))  # products stay within float64
    query = draw(dyadic_matrix(n, d, query_exponent))
    return query, draw(dyadic_matrix(m, d, key_exponent)), draw(st.sampled_from(RATIOS))


def bucket_by_hand(maximum: float, smallest: float, ratio: float) -> int:
    """The l >= 1 with b ratio^(l-1) <= maximum < b ratio^l, in rational numbers."""
    if maximum == 0 or ratio == math.inf:
        return 1
    number, upper = 1, Fraction(smallest) * Fraction(ratio)
    while upper <= Fraction(maximum):
        number, upper = number + 1, upper * Fraction(ratio)
    return number


def buckets_by_hand(x: Tensor, smallest: float, ratio: float) -> list[int]:
    return [bucket_by_hand(float(t), smallest, ratio) for t in x.double().abs().amax(1)]


def smallest_by_hand(*matrices: Tensor) -> float:
    maxima = [float(t) for x in matrices for t in x.double().abs().amax(1)]
    return min((t for t in maxima if t > 0), default=0.0)


def head_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Head:
    value = k if v is None else v
    return attention_problem(q, k, value, mask, 0.0, is_causal, scale, False).head(0, 0)


def log_weights(head: Head, plan: HeadPlan) -> Tensor:
    """Logarithms of the weights that a plan gives to all pairs, by the dense reference."""
    weight, top = reference.weights(head, plan)
    return weight.log() + top.unsqueeze(1)


def norm(x: Tensor, p: float) -> float:
    return float(x.abs().max() if p == math.inf else (x.abs() ** p).sum() ** (1 / p))


def dense_power(q, k, v, power, bias=None, is_causal=False, scale=None):
    """D^-1 (scale Q K^T)^p V on a blackboard: (output, log of the row sums)."""
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weight = (q @ k.mT * scale) ** power
    if bias is not None:
        weight = weight * (bias.double() if bias.dtype == torch.bool else bias.exp())
    if is_causal:
        weight = weight.tril()
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight @ v / total, 0.0), total.squeeze(-1).log()


def piece_bound(kernel: PowerKernel) -> float:
    """p beta^(p-1) eps0 of one piece, from its certificate (Fact G.4)."""
    poly = kernel.polynomial
    beta = math.exp(poly.bound) * (1 + poly.error)
    return kernel.power * beta ** (kernel.power - 1) * math.exp(poly.bound) * poly.error


def with_polynomial(pair: BucketPair, kind: str) -> BucketPair:
    old = pair.kernel.polynomial
    poly = getattr(polynomials, kind)(old.degree, old.bound)
    return replace(pair, kernel=replace(pair.kernel, polynomial=poly))


def matrix_errors(
    q: Tensor, k: Tensor, method: sb.MultiThreshold, kind: str | None = None
) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """A~ - exp(QK^T / d), and for each piece its mask and its bound; with polynomials of one kind
    in all pieces where it is given."""
    head = head_of(q, k, scale=1 / q.shape[-1])
    plan = method.plan_head(head)
    if kind is not None:
        plan = replace(plan, pairs=tuple(with_polynomial(pair, kind) for pair in plan.pairs))
    row_sets, key_sets = plan.buckets(head)
    pieces = []
    for pair in plan.pairs:
        inside = torch.zeros(head.n, head.m, dtype=torch.bool)
        rows, keys = row_sets[pair.row], key_sets[pair.key]
        rows = torch.arange(head.n) if rows is None else rows
        keys = torch.arange(head.m) if keys is None else keys
        inside[rows.unsqueeze(1), keys] = True
        pieces.append((inside, piece_bound(pair.kernel)))
    exact = (head.query @ head.key.T * head.scale).exp()
    return log_weights(head, plan).exp() - exact, pieces


@st.composite
def integer_matrix(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """Small integers in float64: sums and products are exact, zeros and cancellations common."""
    entry = st.integers(-4, 4)
    values = draw(st.lists(entry, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float64).reshape(rows, columns)


@st.composite
def disjoint_matrices(draw: st.DrawFn, parts: int | None = None) -> list[Tensor]:
    """A random matrix, each entry given to one of the parts."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = parts or draw(st.integers(2, 4))
    whole = draw(integer_matrix(n, m))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=n * m, max_size=n * m))
    owner = torch.tensor(owners).reshape(n, m)
    return [torch.where(owner == part, whole, 0.0) for part in range(count)]
