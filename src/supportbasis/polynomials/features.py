"""Feature maps of polynomial kernels: (<x, y>)^k = <phi_k(x), W phi_k(y)>, packed symmetric.

phi_k holds the monomials of degree k, C(d+k-1, k) of them instead of d^k; W is the diagonal of
multinomial coefficients, applied once to the sum over keys instead of to every token. All
degrees 0..g together have C(d+g, g) features (Lemma A.2 prints C(2(d+g), 2g)).

Memory is feature-major, [lanes, features, tokens], so a product of variables is an elementwise
product of rows, and a few such products form all features. Degree 2 has a layout of its own
(`_pair_layout`), which one operation fills. Constants are left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from torch import Tensor

from ..errors import InputError
from .certified import LARGEST_DEGREE, derivative, horner, true_rank

RANK_LIMIT = 2**18  # 64 MiB of float32 state at 64 value columns
BUFFER_BYTES = 9 * 2**19  # of one lane
MAX_BLOCK = 8192


def check_rank(dim: int, degree: int) -> int:
    """Number of features, or an error when their sums would not fit in a sensible memory."""
    rank = true_rank(dim, degree)
    if rank > RANK_LIMIT:
        raise InputError(
            f"degree {degree} in head dim {dim} needs {rank} features, more than the limit of "
            f"{RANK_LIMIT}; use a lower degree, a smaller head dim, or sb.Exact()"
        )
    return rank


def largest_degree(dim: int) -> int:
    """Largest degree that can be certified and whose rank is within the limit."""
    degrees = range(1, LARGEST_DEGREE + 1)
    return bisect_left(degrees, True, key=lambda degree: true_rank(dim, degree) > RANK_LIMIT)


def block_rows(rank: int, dtype: torch.dtype) -> int:
    """Tokens a lane and block: the features of one block fill the buffer and stay in cache.

    A multiple of 8 for vector units, but not of 64: columns at power-of-two strides fall into the
    same cache sets, and products with the transposed features lose a third of their speed."""
    rows = max(16, min(MAX_BLOCK, BUFFER_BYTES // (max(1, rank) * dtype.itemsize)))
    if rows < 64:
        return rows
    rows -= rows % 8
    return rows - 8 if rows % 64 == 0 else rows


@dataclass(frozen=True)
class Kernel:
    """sum_k a_k <x, y>_k ^ k, with <x, y>_k the inner product in the leading r_k coordinates, and
    r_1 >= r_2 >= ...: what features sum, evaluated pair by pair.

    >>> x = torch.tensor([[2.0, 3.0]])
    >>> Kernel((1.0, 1.0, 0.5), (2, 1))(x, x)  # 1 + (4 + 9) + 0.5 * 4^2
    tensor([[22.]])
    """

    coefficients: tuple[float, ...]  # a_0, ..., a_g
    spans: tuple[int, ...]  # r_1, ..., r_g

    @property
    def degree(self) -> int:
        return len(self.spans)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The kernel of all pairs of tokens x [..., n, d] and y [..., m, d]: [..., n, m]."""
        parts = (horner(c, x[..., :r] @ y[..., :r].mT) for r, c in self._parts())
        return reduce(Tensor.add_, parts)

    def gradients(self, x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both sides' tokens from those of the kernel of all pairs."""
        to_x, to_y = torch.zeros_like(x), torch.zeros_like(y)
        for r, c in self._parts():
            one, other = x[..., :r], y[..., :r]
            slope = horner(derivative(c), one @ other.mT).mul_(grad)
            to_x[..., :r] += slope @ other
            to_y[..., :r] += slope.mT @ one
        return to_x, to_y

    def _parts(self) -> Iterator[tuple[int, list[float]]]:
        """Polynomials of one inner product each, that of r coordinates, which add up to this."""
        spans, start = (*self.spans[:1], *self.spans) or (0,), 0  # a_0 counts to the widest
        for r, count in Counter(spans).items():
            yield r, [0.0] * start + list(self.coefficients[start : start + count])
            start += count


class FeatureMap:
    """Monomials of degree 0..``degree`` in ``dim`` variables, written feature-major.

    ``spans`` r_1 >= r_2 >= ... (r_1 = dim) restrict degree k to the first r_k variables.

    >>> phi = FeatureMap(dim=2, degree=2)
    >>> phi(torch.tensor([[2.0, 3.0]]))          # 1, x, y, x*x, y*y, x*y
    tensor([[1., 2., 3., 4., 9., 6.]])
    >>> phi.multiplicity.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    """

    def __init__(self, dim: int, degree: int, spans: tuple[int, ...] | None = None):
        self.dim, self.degree = dim, degree
        spans = spans or (dim,) * degree
        if spans == (dim,) * degree:
            check_rank(dim, degree)
        layout = _pair_layout(dim) if spans == (dim, dim) else _prefix_layout(dim, spans)
        self.spare, self.steps, self.multiplicity, self.degrees = layout
        self.count = len(self.multiplicity)

    def __call__(self, x: Tensor) -> Tensor:
        """Features of all tokens at once, [rows, count], by differentiable operations."""
        tokens, spare = x.T, self.spare
        made, products = torch.cat([tokens[self.dim - spare :], tokens]), list[Tensor]()
        for left, right, _ in self.steps:
            if right.stop > len(made):  # the products so far are factors of the next degree
                made, products = torch.cat([made, *products]), []
            products.append(made[left] * made[right])
        features = torch.cat([made, *products])[spare : spare + self.count - 1]
        return torch.cat([torch.ones_like(tokens[:1]), features]).T


# Memory holds repeated variables (``spare`` rows), all variables, then products. A step is one of
# these: rows of a left factor (one or as many), of a right one, and of the product. A layout is
# spare, steps, and of each feature its multiplicity in a power (float64) and its degree.
_Step = tuple[slice, slice, slice]
_Layout = tuple[int, list[_Step], Tensor, Tensor]


class Buffer:
    """Memory for the features of one block of tokens, and for their gradients. Views are made once
    for each number of tokens: anew for every block, they would take longer than the products."""

    def __init__(self, features: FeatureMap, lanes: int, rows: int, like: Tensor):
        self.map = features
        self.memory = like.new_empty(lanes, features.spare + features.count - 1, rows)
        self._views: dict[tuple[bool, int], list[list[Tensor]]] = {}

    @cached_property
    def _gradients(self) -> Tensor:
        return torch.empty_like(self.memory)

    def _factors(self, rows: int, of_gradients: bool = False) -> list[list[Tensor]]:
        """Factors and products of all steps, or their gradients."""
        if (of_gradients, rows) not in self._views:
            memory = self._gradients if of_gradients else self.memory
            views = [[memory[:, part, :rows] for part in step] for step in self.map.steps]
            self._views[of_gradients, rows] = views
        return self._views[of_gradients, rows]

    def write(self, x: Tensor) -> Tensor:
        """Features of degree >= 1 of tokens ``x`` [lanes, rows, dim]: [lanes, features, rows].

        The constant feature is left to the caller, as a plain sum. Degree 1 is a view of ``x``."""
        if not self.map.steps:
            return x.mT[:, : self.map.count - 1]
        rows, dim, spare = x.shape[1], self.map.dim, self.map.spare
        memory, steps = self.memory[:, :, :rows], self._factors(rows)
        variables = memory[:, spare : spare + dim]
        variables.copy_(x.mT)
        if spare:  # all rotations at once
            memory[:, :spare].copy_(memory[:, dim : dim + spare])
            rotated = memory[:, : spare + dim].unfold(1, dim, 1).mT
            products = memory[:, spare + dim : spare + dim + (spare + 1) * dim]
            products = products.unflatten(1, (spare + 1, dim))
            torch.mul(variables.unsqueeze(1), rotated, out=products)
            steps = steps[spare + 1 :]
        for left, right, product in steps:
            torch.mul(left, right, out=product)
        return memory[:, spare:]

    def pull_back(self, fill: Callable[[Tensor], object], rows: int) -> Tensor:
        """Gradient of the tokens, [lanes, dim, rows], whose features were the last to be written,
        from that of the features, which ``fill(out)`` writes: each product, the last one first,
        adds its own to both of its factors."""
        dim, spare = self.map.dim, self.map.spare
        if self.map.count == 1:  # degree 0
            return self.memory.new_zeros(len(self.memory), dim, rows)
        grad = self._gradients[:, :, :rows]
        grad[:, :spare].zero_()
        fill(grad[:, spare:])
        both = zip(self._factors(rows), self._factors(rows, True), strict=True)
        for (left, right, _), (to_left, to_right, product) in reversed(list(both)):
            to_right.addcmul_(product, left)
            if left.shape == product.shape:
                to_left.addcmul_(product, right)
            else:
                to_left.add_(product.mul_(right).sum(1, keepdim=True))
        grad[:, dim : dim + spare] += grad[:, :spare]
        return grad[:, spare : spare + dim]


@lru_cache(maxsize=64)
def _pair_layout(dim: int) -> _Layout:
    """x_a, and x_a x_b of all pairs: the token times itself rotated by 0, 1, 2, ... variables.

    A rotation by s and one by d - s give the same pairs, so those by s < d/2 do, and for even d
    half of those by d/2. The last variables are repeated before the first, so that every rotation
    is a window on the same rows. The rotation by 0, which gives squares, comes last."""
    rotations, half = (dim + 1) // 2, dim // 2
    spare = max(0, rotations - 1)
    end = spare + dim
    steps, variables = [], slice(spare, end)
    for first in range(rotations):
        steps.append((variables, slice(first, first + dim), slice(end, end + dim)))
        end += dim
    if dim % 2 == 0:
        opposite = slice(spare, spare + half), slice(spare + half, spare + dim)
        steps.append((*opposite, slice(end, end + half)))
    degrees = torch.tensor([0] + [1] * dim + [2] * (dim * (dim + 1) // 2))
    multiplicity = torch.where(degrees == 2, 2.0, 1.0).double()
    multiplicity[1 + rotations * dim : 1 + rotations * dim + dim] = 1.0
    return spare, steps, multiplicity, degrees


@lru_cache(maxsize=64)
def _prefix_layout(dim: int, spans: tuple[int, ...]) -> _Layout:
    """Monomials of degree 1..g, ordered within each degree by their last variable: block t holds
    variable t times the monomials of the degree below in the variables up to t, which come first.
    Of degree k only the monomials in the first ``spans[k - 1]`` variables are formed.

    The multiplicities follow from (s + u)^k - s^k = u * sum_c C(k, c+1) u^c s^(k-1-c), where u is
    the part of an inner product that belongs to variable t and s that of earlier ones: a monomial
    of degree k-1 with c factors of variable t gains the factor C(k, c+1) / C(k-1, c) = k / (c + 1).
    """
    ones = torch.ones(1 + dim, dtype=torch.float64)
    levels, steps = [ones[:1], ones[1:]][: 1 + len(spans)], list[_Step]()
    repeats = ones[1:]  # factors of each monomial's last variable
    below, end = 0, dim  # where the degree below begins, and all products so far end
    for k, span in enumerate(spans[1:], 2):
        blocks, counts, first = [], [], end
        for variable in range(span):
            size = math.comb(variable + k - 1, k - 1)
            same = math.comb(variable + k - 2, k - 2)  # end with this variable already
            count = torch.ones(size, dtype=torch.float64)
            count[size - same :] += repeats[size - same : size]
            blocks.append(levels[-1][:size] * k / count)
            counts.append(count)
            left, right = slice(variable, variable + 1), slice(below, below + size)
            steps.append((left, right, slice(end, end + size)))
            end += size
        levels.append(torch.cat(blocks))
        repeats, below = torch.cat(counts), first
    degrees = [torch.full_like(level, k) for k, level in enumerate(levels)]
    return 0, steps, torch.cat(levels), torch.cat(degrees).long()
