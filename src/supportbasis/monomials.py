"""Memory in which the monomials of a block of tokens are formed, and the way back through them.

Memory is feature-major, [lanes, features, tokens]: a product of variables is an elementwise product
of rows. Monomials of degrees 1 and 2 are formed all at once (`Pairs`), those of other degrees one
degree after the other (`Suffixes`). Constants are left out. Views of the memory are made once for
each number of tokens: made anew for every block, they would take longer than the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Buffer(ABC):
    """Features of one block of tokens, or gradients of these features."""

    spare = 0  # rows of memory before the features

    def __init__(self, lanes: int, count: int, rows: int, like: Tensor):
        self.memory = like.new_empty(lanes, self.spare + count, rows)
        self._views: dict[int, Any] = {}

    def features(self, rows: int) -> Tensor:
        """Those of the first tokens of each lane, [lanes, count, rows]."""
        return self.memory[:, self.spare :, :rows]

    @abstractmethod
    def write(self, x: Tensor) -> Tensor:
        """The features of tokens ``x`` [lanes, rows, dim]."""

    @abstractmethod
    def pull_back(self, grad: Buffer, rows: int) -> Tensor:
        """Gradient of the tokens, [lanes, dim, rows], from that of their features, which is
        overwritten."""


class PairViews(NamedTuple):
    """Of the memory of `Pairs`: spare rows, tokens, products of all rotations, opposite pairs."""

    features: Tensor
    spare: Tensor
    tokens: Tensor  # [lanes, dim, rows]
    last: Tensor  # tokens that the spare rows repeat
    low: Tensor  # of the opposite pairs, first
    high: Tensor  # and second variable
    opposite: Tensor  # their products
    windows: tuple[Tensor, ...]  # tokens from each row of the memory on, [lanes, dim, rows]
    rotated: Tensor  # the same in one, [lanes, rotations, dim, rows]
    products: Tensor  # with the tokens
    parts: tuple[Tensor, ...]  # of the products, by rotation


class Pairs(Buffer):
    """x_a, and x_a x_b of all pairs: the token times itself rotated by 0, 1, 2, ... variables.

    A rotation by s and one by d - s give the same pairs, so those by s < d/2 do, and for even d
    half of those by d/2. The last variables stand once more before the first, so that every
    rotation is a window on the same rows, and one product forms them all.
    """

    def __init__(self, lanes: int, dim: int, rows: int, like: Tensor):
        self.dim, self.rotations, self.spare = dim, (dim + 1) // 2, (dim - 1) // 2
        super().__init__(lanes, dim + dim * (dim + 1) // 2, rows, like)

    def views(self, rows: int) -> PairViews:
        if rows not in self._views:
            dim, spare, end = self.dim, self.spare, self.spare + self.dim
            memory, middle = self.memory[:, :, :rows], end + self.rotations * self.dim
            tokens, products = memory[:, spare:end], memory[:, end:middle]
            half = dim // 2 if dim % 2 == 0 else 0
            rotated = memory[:, :end].unfold(1, dim, 1).transpose(2, 3)
            products = products.unflatten(1, (self.rotations, dim))
            self._views[rows] = PairViews(
                memory[:, spare:],
                memory[:, :spare],
                tokens,
                tokens[:, dim - spare :],
                tokens[:, :half],
                tokens[:, dim - half :],
                memory[:, middle:],
                rotated.unbind(1),
                rotated,
                products,
                products.unbind(1),
            )
        made: PairViews = self._views[rows]
        return made

    def write(self, x: Tensor) -> Tensor:
        own = self.views(x.shape[1])
        own.tokens.copy_(x.transpose(1, 2))
        own.spare.copy_(own.last)
        torch.mul(own.tokens.unsqueeze(1), own.rotated, out=own.products)
        torch.mul(own.low, own.high, out=own.opposite)
        return own.features

    def pull_back(self, grad: Buffer, rows: int) -> Tensor:
        assert isinstance(grad, Pairs)
        own, back = self.views(rows), grad.views(rows)
        back.spare.zero_()
        back.low.addcmul_(back.opposite, own.high)
        back.high.addcmul_(back.opposite, own.low)
        for part, window, to in zip(back.parts, own.windows, back.windows, strict=True):
            to.addcmul_(part, own.tokens)
            back.tokens.addcmul_(part, window)
        back.last.add_(back.spare)
        return back.tokens


def pair_multiplicity(dim: int) -> tuple[Tensor, Tensor]:
    """How often each feature of `Pairs`, after a constant, occurs in a power; and its degree."""
    pairs = dim * (dim + 1) // 2
    order = torch.tensor([0] + [1] * dim + [2] * pairs)
    multiplicity = torch.ones(1 + dim + pairs, dtype=torch.float64)
    squares = dim * ((dim + 1) // 2)  # end here: those rotated by 0 are the last rotation
    multiplicity[1 + dim :] = 2.0
    multiplicity[1 + squares : 1 + dim + squares] = 1.0
    return multiplicity, order


class Step(NamedTuple):
    """One product: a variable times a suffix of the monomials of the degree below."""

    variable: int
    start: int  # of the suffix
    stop: int
    to: int  # where the products begin


class StepViews(NamedTuple):
    """Of the memory of `Suffixes`, for one step: [lanes, 1 or size, rows] each."""

    variable: Tensor
    suffix: Tensor
    products: Tensor


class Suffixes(Buffer):
    """Monomials of degree 1..g, ordered within each degree by their first variable: block t holds
    variable t times the suffix of the monomials of the degree below whose variables are t or later.
    So a block of tokens costs one elementwise product a variable and degree.
    """

    def __init__(
        self, lanes: int, count: int, rows: int, like: Tensor, dim: int, steps: list[Step]
    ):
        self.dim, self.steps = dim, steps
        super().__init__(lanes, count, rows, like)

    def views(self, rows: int) -> list[StepViews]:
        if rows not in self._views:
            memory = self.memory[:, :, :rows]
            self._views[rows] = [
                StepViews(memory[:, t : t + 1], memory[:, a:b], memory[:, to : to + b - a])
                for t, a, b, to in self.steps
            ]
        made: list[StepViews] = self._views[rows]
        return made

    def write(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        self.memory[:, : self.dim, :rows].copy_(x.transpose(1, 2))
        for variable, suffix, products in self.views(rows):
            torch.mul(variable, suffix, out=products)
        return self.features(rows)

    def pull_back(self, grad: Buffer, rows: int) -> Tensor:
        """Every product hands its gradient to both of its factors, the last product first."""
        assert isinstance(grad, Suffixes)
        for own, back in zip(reversed(self.views(rows)), reversed(grad.views(rows)), strict=True):
            back.suffix.addcmul_(back.products, own.variable)
            back.products.mul_(own.suffix)
            back.variable.add_(back.products.sum(1, keepdim=True))
        return grad.features(rows)[:, : self.dim]


@lru_cache(maxsize=64)
def suffix_steps(dim: int, spans: tuple[int, ...]) -> tuple[Tensor, Tensor, list[Step]]:
    """Multiplicity and degree of each feature of `Suffixes`, after a constant, and the products
    that form them in order. Of degree k only the monomials in the last ``spans[k - 1]`` variables
    are formed: they are the last blocks of each degree.

    The multiplicities follow from (u + s)^k - s^k = u * sum_c C(k, c+1) u^c s^(k-1-c), where u is
    the part of an inner product that belongs to variable t and s that of later ones: a monomial of
    degree k-1 with c factors of variable t gains the factor C(k, c+1) / C(k-1, c) = k / (c + 1).
    """
    levels = [torch.ones(1, dtype=torch.float64)]
    steps: list[Step] = []
    if spans:
        levels.append(torch.ones(dim, dtype=torch.float64))
    repeats = torch.ones(dim, dtype=torch.float64)  # factors of each monomial's first variable
    variables = list(range(dim))
    starts = variables  # of each variable's block within the level
    base, end = 0, dim  # of the level that is multiplied
    for k, span in enumerate(spans[1:], 2):
        level, last = levels[-1], end
        blocks, counts, next_starts = [], [], []
        skipped = sum(variable < dim - span for variable in variables)
        variables, starts = variables[skipped:], starts[skipped:]
        stops = [*starts[1:], level.numel()]
        for variable, start, stop in zip(variables, starts, stops, strict=True):
            count = torch.ones(level.numel() - start, dtype=torch.float64)
            count[: stop - start] = repeats[start:stop] + 1
            blocks.append(level[start:] * k / count)
            counts.append(count)
            next_starts.append(end - last)
            steps.append(Step(variable, base + start, last, end))
            end += count.numel()
        levels.append(torch.cat(blocks))
        repeats, starts, base = torch.cat(counts), next_starts, last
    order = torch.cat([torch.full_like(level, k) for k, level in enumerate(levels)])
    return torch.cat(levels), order.long(), steps
