"""Feature maps of polynomial kernels: (<x, y>)^k = <phi_k(x), W phi_k(y)>, packed symmetric.

phi_k holds the monomials of degree k, C(d+k-1, k) of them instead of d^k; W is the diagonal of
multinomial coefficients, applied once to the sum over keys instead of to every token. All
degrees 0..g together have C(d+g, g) features (Lemma A.2 prints C(2(d+g), 2g)).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from .errors import InputError
from .polynomials import true_rank

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
    """Largest degree whose rank is within the limit."""
    degree = 0
    while true_rank(dim, degree + 1) <= RANK_LIMIT:
        degree += 1
    return degree


def block_rows(rank: int, dtype: torch.dtype) -> int:
    """Tokens a lane and block: the features of one block fill the buffer and stay in cache.

    A multiple of 8 for vector units, but not of 64: columns a power of two apart fall into the
    same cache sets, and products with the transposed features lose a third of their speed.
    """
    return odd_rows(max(16, min(MAX_BLOCK, BUFFER_BYTES // (max(1, rank) * dtype.itemsize))))


def odd_rows(rows: int) -> int:
    """The nearest multiple of 8 below that is no multiple of 64; small numbers as they are."""
    if rows < 64:
        return rows
    rows -= rows % 8
    return rows - 8 if rows % 64 == 0 else rows


def tile_width(dim: int, degree: int) -> int:
    """First variables that are multiplied in one operation; see `FeatureMap`."""
    return 4 if degree == 2 and dim >= 16 else 1


def feature_count(dim: int, degree: int) -> int:
    """Features actually formed, the constant included: the true rank, and a few repetitions."""
    width = tile_width(dim, degree)
    if width == 1:
        return true_rank(dim, degree)
    pairs = sum(min(width, dim - start) * (dim - start) for start in range(0, dim, width))
    return 1 + dim + pairs


class FeatureMap:
    """Monomials of degree 0..``degree`` in ``dim`` variables, written feature-major.

    Variables are taken in tiles of equal width. Monomials of degree k are ordered by their first
    tile: block t holds each variable of tile t times the suffix of the monomials of degree k-1
    whose variables all lie in tile t or later. So a block of tokens costs one elementwise product
    a tile and degree, on contiguous memory. With tiles of one variable every monomial appears
    once; a wider tile repeats those with two variables in it and needs fewer operations.

    The multiplicities follow from (u + s)^k - s^k = u * sum_c C(k, c+1) u^c s^(k-1-c), where u is
    the inner product over tile t and s that over later tiles: a monomial of degree k-1 with c
    variables in tile t gains the factor C(k, c+1) / C(k-1, c) = k / (c + 1).

    ``spans`` r_1 >= r_2 >= ... (r_1 = dim) leave of degree k only the monomials in the last r_k
    variables: they are the last blocks of each degree.

    >>> phi = FeatureMap(dim=2, degree=2)
    >>> phi(torch.tensor([[2.0, 3.0]]))          # 1, x, y, x*x, x*y, y*y
    tensor([[1., 2., 3., 4., 6., 9.]])
    >>> phi.multiplicity.tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 1.0]
    """

    def __init__(self, dim: int, degree: int, spans: tuple[int, ...] | None = None):
        self.dim, self.degree = dim, degree
        full = (dim,) * degree
        if spans is None or spans == full:
            check_rank(dim, degree)
        self.width = tile_width(dim, degree) if spans in (None, full) else 1
        self.multiplicity, self.order, self._steps = _layout(dim, spans or full, self.width)
        self.count = len(self.multiplicity)

    def buffer(self, lanes: int, rows: int, like: Tensor) -> Tensor:
        """Memory for the features of one block of tokens."""
        size = self.count - 1 if self.degree > 1 else 0
        return torch.empty(lanes, size, rows, dtype=like.dtype, device=like.device)

    def write(self, x: Tensor, buffer: Tensor) -> Tensor:
        """Features of degree >= 1 of tokens ``x`` [lanes, rows, dim]: [lanes, count - 1, rows].

        The constant feature is left to the caller, for whom it is a plain sum. Degree 1 is a view
        of ``x``; higher degrees are written into ``buffer``.
        """
        if self.degree <= 1:
            return x.transpose(1, 2)[:, : self.dim * self.degree]
        lanes, rows = x.shape[:2]
        out = buffer[:, :, :rows]
        out[:, : self.dim].copy_(x.transpose(1, 2))
        for first, width, start, last, end in self._steps:
            suffix, size = out[:, start:last], last - start
            if width == 1:
                torch.mul(out[:, first : first + 1], suffix, out=out[:, end : end + size])
            else:
                tile = out[:, first : first + width].unsqueeze(2)
                block = out[:, end : end + width * size].view(lanes, width, size, rows)
                torch.mul(tile, suffix.unsqueeze(1), out=block)
        return out

    def pull_back(self, features: Tensor, grad: Tensor) -> Tensor:
        """Gradient of the tokens, [lanes, dim, rows], from that of their features.

        ``features`` is what `write` returned and ``grad`` has its shape; ``grad`` is overwritten.
        Every product hands its gradient to both of its factors, the last product first.
        """
        if self.degree == 0:
            return grad.new_zeros(grad.shape[0], self.dim, grad.shape[2])
        for first, width, start, last, end in reversed(self._steps):
            suffix, size = features[:, start:last], last - start
            block = grad[:, end : end + width * size].unflatten(1, (width, size))
            grad_suffix = grad[:, start:last]
            variables = features[:, first : first + width].unsqueeze(2).unbind(1)
            for part, variable in zip(block.unbind(1), variables, strict=True):
                grad_suffix.addcmul_(part, variable)
            block.mul_(suffix.unsqueeze(1))
            grad[:, first : first + width].add_(block.sum(2))
        return grad[:, : self.dim]

    def __call__(self, x: Tensor) -> Tensor:
        """Features of all tokens at once, [rows, count], by operations that autograd knows."""
        tokens = x.T
        levels = [torch.ones_like(tokens[:1]), tokens[: self.dim * self.degree]]
        base = 0
        for last, steps in groupby(self._steps, key=lambda step: step[3]):
            blocks = [
                tokens[first : first + width].unsqueeze(1) * levels[-1][start - base :]
                for first, width, start, _, _ in steps
            ]
            levels.append(torch.cat([block.flatten(0, 1) for block in blocks]))
            base = last
        return torch.cat(levels).T


Step = tuple[int, int, int, int, int]  # first variable, how many, suffix from, to, written to


@lru_cache(maxsize=64)
def _layout(dim: int, spans: tuple[int, ...], width: int) -> tuple[Tensor, Tensor, list[Step]]:
    """Multiplicity and degree of each feature, and the products that form them in order.

    Positions in the steps count features of degree >= 1, which start with the variables.
    """
    levels = [torch.ones(1, dtype=torch.float64)]
    steps: list[Step] = []
    if spans:
        levels.append(torch.ones(dim, dtype=torch.float64))
    repeats = torch.ones(dim, dtype=torch.float64)  # variables of each monomial in its first tile
    tiles = list(range(0, dim, width))  # by their first variable
    starts = tiles  # of each tile's block within the level
    base, end = 0, dim  # of the level that is multiplied
    for k, span in enumerate(spans[1:], 2):
        level, last = levels[-1], end
        blocks, counts, next_starts = [], [], []
        skipped = sum(first < dim - span for first in tiles)
        tiles, starts = tiles[skipped:], starts[skipped:]
        for first, start, stop in zip(tiles, starts, [*starts[1:], level.numel()], strict=True):
            count = torch.ones(level.numel() - start, dtype=torch.float64)
            count[: stop - start] = repeats[start:stop] + 1
            variables = min(width, dim - first)
            blocks.append((level[start:] * k / count).repeat(variables))
            counts.append(count.repeat(variables))
            next_starts.append(end - last)
            steps.append((first, variables, base + start, last, end))
            end += count.numel() * variables
        levels.append(torch.cat(blocks))
        repeats, starts, base = torch.cat(counts), next_starts, last
    order = torch.cat([torch.full_like(level, k) for k, level in enumerate(levels)])
    return torch.cat(levels), order.long(), steps
