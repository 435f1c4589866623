"""Feature maps of polynomial kernels: (<x, y>)^k = <phi_k(x), W phi_k(y)>, packed symmetric.

phi_k holds the monomials of degree k, C(d+k-1, k) of them instead of d^k; W is the diagonal of
multinomial coefficients, applied once to the sum over keys instead of to every token. All
degrees 0..g together have C(d+g, g) features (Lemma A.2 prints C(2(d+g), 2g)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .certified import LARGEST_DEGREE, true_rank
from .monomials import Buffer, Fill, pair_layout, suffix_layout

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
    degree = 0
    while degree < LARGEST_DEGREE and true_rank(dim, degree + 1) <= RANK_LIMIT:
        degree += 1
    return degree


def block_rows(rank: int, dtype: torch.dtype) -> int:
    """Tokens a lane and block: the features of one block fill the buffer and stay in cache.

    A multiple of 8 for vector units, but not of 64: columns at power-of-two strides fall into the
    same cache sets, and products with the transposed features lose a third of their speed."""
    return odd_rows(max(16, min(MAX_BLOCK, BUFFER_BYTES // (max(1, rank) * dtype.itemsize))))


def odd_rows(rows: int) -> int:
    """The nearest multiple of 8 below that is no multiple of 64; small numbers as they are."""
    if rows < 64:
        return rows
    rows -= rows % 8
    return rows - 8 if rows % 64 == 0 else rows


class FeatureMap:
    """Monomials of degree 0..``degree`` in ``dim`` variables, written feature-major.

    ``spans`` r_1 >= r_2 >= ... (r_1 = dim) leave of degree k only the monomials in the last r_k
    variables. `monomials` orders and forms them.

    >>> phi = FeatureMap(dim=2, degree=2)
    >>> phi(torch.tensor([[2.0, 3.0]]))          # 1, x, y, x*x, y*y, x*y
    tensor([[1., 2., 3., 4., 9., 6.]])
    >>> phi.multiplicity.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    """

    def __init__(self, dim: int, degree: int, spans: tuple[int, ...] | None = None):
        self.dim, self.degree, full = dim, degree, (dim,) * degree
        is_whole = spans is None or spans == full
        if is_whole:
            check_rank(dim, degree)
        is_pairs = is_whole and degree == 2
        self._layout = pair_layout(dim) if is_pairs else suffix_layout(dim, spans or full)
        self.multiplicity, self.degrees = self._layout.multiplicity, self._layout.degrees
        self.count = len(self.multiplicity)

    def buffer(self, lanes: int, rows: int, like: Tensor) -> Buffer:
        """Memory for the features of one block of tokens, and for their gradients."""
        return Buffer(self._layout, lanes, rows, like)

    def write(self, x: Tensor, buffer: Buffer) -> Tensor:
        """Features of degree >= 1 of tokens ``x`` [lanes, rows, dim]: [lanes, count - 1, rows].

        The constant feature is left to the caller, for whom it is a plain sum. Degree 1 is a view
        of ``x``; higher degrees are written into ``buffer``."""
        if self.degree <= 1:
            return x.mT[:, : self.dim * self.degree]
        return buffer.write(x)

    def pull_back(self, buffer: Buffer, fill: Fill, rows: int) -> Tensor:
        """Gradient of the tokens, [lanes, dim, rows], whose features were the last to be written.
        ``fill(start, stop, out)`` writes the gradients of features start..stop."""
        if self.degree == 0:
            return buffer.memory.new_zeros(len(buffer.memory), self.dim, rows)
        return buffer.pull_back(fill, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Features of all tokens at once, [rows, count], by differentiable operations."""
        tokens, spare = x.T, self._layout.spare
        made, products = torch.cat([tokens[self.dim - spare :], tokens]), list[Tensor]()
        for step in self._layout.steps:
            if step.right.stop > len(made):  # the products so far are factors of the next degree
                made, products = torch.cat([made, *products]), []
            products.append(made[step.left] * made[step.right])
        features = torch.cat([made, *products])[spare : self._layout.rows]
        return torch.cat([torch.ones_like(tokens[:1]), features]).T
