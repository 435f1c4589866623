"""Polynomials fitted to the scores of a head: low degrees in all directions, high ones in few.

After a balancing transform (`balancing`) both sides have variance s_i in coordinate i, s
descending, and a monomial of degree k in certain coordinates contributes the product of their s_i
to the exponential of the scores. So degree k is taken in the leading r_k coordinates only,

    p(x, y) = sum_k a_k <x, y>_k ^ k,    <x, y>_k the inner product in the leading r_k coordinates,

with r_1 >= r_2 >= ... chosen by what each direction and degree adds for the features it takes, and
the a_k by least squares over sampled pairs, weighted as the output weighs them. No bound is proved:
p is used for tokens within the radius of those it was fitted to; queries and keys beyond are exact,
and so are failed rows, whose sums are too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ..problem.problem import Head
from .features import Kernel

HIGHEST_DEGREE = 8
ROWS, KEYS = 512, 256  # pairs that are fitted to
LONGEST = 4  # one in so many of them is chosen for its length
RADIUS_QUANTILE, RADIUS_FACTOR = 0.99, 1.5  # radius = factor x that quantile of the norms
RIDGE = 1e-12  # of the largest entry of the normal equations
LARGEST_COEFFICIENT = torch.finfo(torch.float32).max  # sums may be in float32


@dataclass(frozen=True)
class FittedKernel(Kernel):
    """A kernel of transformed tokens, whose coordinates come by descending eigenvalue."""

    query_radius: float = math.inf  # largest norm of a transformed query that it is used for
    key_radius: float = math.inf

    @property
    def features(self) -> int:
        return count_features(self.spans)

    def __str__(self) -> str:
        spans = ", ".join(map(str, self.spans))
        return f"degree {self.degree} in ({spans}) directions, {self.features} features"


def count_features(spans: Sequence[int]) -> int:
    """The constant, and C(r + k - 1, k) monomials of degree k in r variables.

    >>> count_features((16, 16, 4))  # 1 + 16 + 136 + 20
    173
    """
    return 1 + sum(math.comb(r + k - 1, k) for k, r in enumerate(spans, 1))


def choose_spans(eigenvalues: Tensor, features: int) -> tuple[int, ...]:
    """Directions of each degree, at most ``features`` monomials in all.

    Degree k in one more direction r adds s_r^2 h_(k-1)(s_1^2, ..., s_r^2) to the squared kernel,
    h the complete symmetric polynomial, for C(r + k - 2, k - 1) monomials: the best ratio first.

    >>> choose_spans(torch.tensor([0.1, 0.1, 0.0], dtype=torch.float64), 6)
    (2, 2)
    """
    squared = [min(float(s), 1.0) ** 2 for s in eigenvalues]
    # h_k(s_1^2, ..., s_r^2) at [k][r], by h_k(r) = h_k(r - 1) + s_r^2 h_(k-1)(r)
    symmetric, left = [[1.0] * (len(squared) + 1)], features - 1
    for _ in range(HIGHEST_DEGREE):
        symmetric.append([0.0, *accumulate(map(mul, squared, symmetric[-1][1:]))])
    spans = [len(squared)] + [0] * HIGHEST_DEGREE  # of degree 0: all
    while True:
        options = [(0.0, 0, 0)]
        for k in range(1, HIGHEST_DEGREE + 1):
            r = spans[k] + 1
            count = math.comb(r + k - 2, k - 1)
            if r <= spans[k - 1] and count <= left:
                options.append((squared[r - 1] * symmetric[k - 1][r] / count, -k, count))
        gain, minus_k, count = max(options)
        if gain <= 0:
            return tuple(r for r in spans[1:] if r > 0)
        spans[-minus_k] += 1
        left -= count


@dataclass(frozen=True, eq=False)
class PairSample:
    """Sampled queries and keys of a transformed head: the longest, which a polynomial fitted
    without them would miss, and a weighted random sample of the others."""

    query: Tensor  # [rows, d], float64
    key: Tensor  # [keys, d]
    log_weight: Tensor  # [keys], of all that a key represents
    row_count: Tensor  # [rows]: how many each represents
    key_count: Tensor  # [keys]
    query_radius: float
    key_radius: float

    @staticmethod
    def draw(head: Head, seed: int) -> PairSample:
        """Sample the tokens within the radius of a head with queries and live keys."""
        query_norms, key_norms = (x.norm(dim=1) for x in (head.query, head.key))
        query_radius, key_radius = _radius(query_norms), _radius(key_norms)
        log_weight = head.log_weights(torch.float64)
        near = (key_norms <= key_radius) & (log_weight > -math.inf)
        if head.is_causal:
            near[head.n :] = False  # after the last row
        row, row_count = _pick(query_norms, query_norms <= query_radius, ROWS, seed)
        key, key_count = _pick(key_norms, near, KEYS, seed + 1)
        tokens = head.query[row].double(), head.key[key].double()
        weight = key_count.log() + log_weight[key]
        return PairSample(*tokens, weight, row_count, key_count, query_radius, key_radius)

    def fit(self, spans: tuple[int, ...]) -> FittedKernel | None:
        """Least squares for the weights of every row relative to their norm, as random values would
        weigh them; None where the normal equations are singular or overflow."""
        if not spans:
            return None
        share = self._share / (self.exact * self.key_count.rsqrt()).norm(dim=1, keepdim=True)
        unit = self.unit * share
        scores = (self.query[:, :r] @ self.key[:, :r].T for r in spans)
        columns = [unit, *(math.prod([score] * k) * unit for k, score in enumerate(scores, 1))]
        design, target = torch.stack(columns).flatten(1), (self.exact * share).flatten()
        size = design.norm(dim=1, keepdim=True)
        if not bool((size > 0).all() & size.isfinite().all()):
            return None
        design = design / size
        normal = design @ design.T
        normal.diagonal().add_(RIDGE)
        solved = torch.linalg.solve(normal, design @ target) / size.squeeze(1)
        if not bool((solved.abs() <= LARGEST_COEFFICIENT).all()):
            return None
        return FittedKernel(tuple(solved.tolist()), spans, self.query_radius, self.key_radius)

    def expected_error(self, kernel: FittedKernel) -> float:
        """Relative root-mean-square error of the weights: of the output, for random values."""
        given = kernel(self.query, self.key) * self.unit
        given = given / given.sum(1, keepdim=True)
        error = ((given - self.exact) * self._share).norm() / (self.exact * self._share).norm()
        return float(error.nan_to_num(math.inf))

    @cached_property
    def _share(self) -> Tensor:
        """Factors of the errors of pairs [rows, keys], whose rows and keys represent several: rows
        alike, and keys of independent errors."""
        return self.key_count.rsqrt() * self.row_count.sqrt().unsqueeze(1)

    @cached_property
    def unit(self) -> Tensor:
        """The ratio of `exact` to exp(score)."""
        scores = self.query @ self.key.T + self.log_weight
        return (self.log_weight - scores.logsumexp(1, keepdim=True)).exp()

    @cached_property
    def exact(self) -> Tensor:
        """The attention of the sampled queries over the sampled keys."""
        return (self.query @ self.key.T + self.log_weight).softmax(1)


def _pick(norms: Tensor, near: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the longest near tokens and of a random sample of the others, and how many tokens
    each represents."""
    index = near.nonzero().squeeze(1)
    if len(index) <= count:
        return index, torch.ones_like(index, dtype=torch.float64)
    index = index[norms[index].argsort(descending=True)]
    longest, others = index[: count // LONGEST], index[count // LONGEST :]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(others), generator=generator)[: count - len(longest)]
    each = torch.ones(count, dtype=torch.float64, device=norms.device)
    each[len(longest) :] = len(others) / len(chosen)
    return torch.cat([longest, others[chosen.to(norms.device)]]), each


def _radius(norms: Tensor) -> float:
    """The norm beyond which a token is far: 1.5 times the 0.99 quantile."""
    rank = max(1, math.ceil(RADIUS_QUANTILE * len(norms)))
    return RADIUS_FACTOR * float(norms.kthvalue(rank).values)
