"""Memory in which the monomials of a block of tokens are formed, and their gradients.

Memory is feature-major, [lanes, features, tokens]: a product of variables is an elementwise product
of rows. Monomials of degrees 1 and 2 are formed all at once (`Pairs`), those of other degrees one
degree after the other (`Suffixes`). Constants are left out. Views of the memory are made once for
each number of tokens: made anew for every block, they would take longer than the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 8  # rotations whose gradients are formed at a time, to be used while they are in cache

Fill = Callable[[int, int, Tensor], object]  # writes the gradients of features from..to


class Buffer(ABC):
    """Features of one block of tokens, and their gradients."""

    spare = 0  # rows of memory before the features

    def __init__(self, lanes: int, count: int, rows: int, like: Tensor):
        self.memory = like.new_empty(lanes, self.spare + count, rows)
        self._views: dict[int, Any] = {}
        self._gradient_views: dict[int, Any] = {}

    def features(self, rows: int) -> Tensor:
        """Features of the first tokens of each lane, [lanes, count, rows]."""
        return self.memory[:, self.spare :, :rows]

    @abstractmethod
    def write(self, x: Tensor) -> Tensor:
        """The features of tokens ``x`` [lanes, rows, dim]."""

    @abstractmethod
    def pull_back(self, fill: Fill, rows: int) -> Tensor:
        """Gradient of the tokens, [lanes, dim, rows], from that of their features, which ``fill``
        writes."""


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


class PairGradients(NamedTuple):
    """Views of the memory of `Pairs` for the backward pass."""

    spare: Tensor
    tokens: Tensor
    last: Tensor
    low: Tensor
    high: Tensor
    windows: tuple[Tensor, ...]
    chunk: Tensor  # [lanes, chunk * dim, rows]
    parts: tuple[Tensor, ...]  # of the chunk, by rotation


class Pairs(Buffer):
    """x_a, and x_a x_b of all pairs: the token times itself rotated by 0, 1, 2, ... variables.

    A rotation by s and one by d - s give the same pairs, so those by s < d/2 do, and for even d
    half of those by d/2. The last variables are repeated before the first, so that every
    rotation is a window on the same rows, and one product forms them all.
    """

    def __init__(self, lanes: int, dim: int, rows: int, like: Tensor):
        self.dim, self.rotations, self.spare = dim, (dim + 1) // 2, (dim - 1) // 2
        self.half = dim // 2 if dim % 2 == 0 else 0
        super().__init__(lanes, dim + dim * (dim + 1) // 2, rows, like)

    def views(self, rows: int) -> PairViews:
        if rows not in self._views:
            dim, spare, end = self.dim, self.spare, self.spare + self.dim
            memory, middle = self.memory[:, :, :rows], end + self.rotations * self.dim
            tokens, products = memory[:, spare:end], memory[:, end:middle]
            rotated = memory[:, :end].unfold(1, dim, 1).transpose(2, 3)
            products = products.unflatten(1, (self.rotations, dim))
            self._views[rows] = PairViews(
                memory[:, spare:],
                memory[:, :spare],
                tokens,
                tokens[:, dim - spare :],
                tokens[:, : self.half],
                tokens[:, dim - self.half :],
                memory[:, middle:],
                rotated.unbind(1),
                rotated,
                products,
            )
        made: PairViews = self._views[rows]
        return made

    @cached_property
    def _gradients(self) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of tokens, and of one chunk of features."""
        lanes, _, rows = self.memory.shape
        chunk = max(self.half, min(CHUNK, self.rotations) * self.dim)
        sizes = (self.spare + self.dim, chunk)
        tokens, part = (self.memory.new_empty(lanes, size, rows) for size in sizes)
        return tokens, part

    def gradients(self, rows: int) -> PairGradients:
        if rows not in self._gradient_views:
            memory, chunk = (x[:, :, :rows] for x in self._gradients)
            tokens = memory[:, self.spare :]
            whole = chunk[:, : min(CHUNK, self.rotations) * self.dim]
            self._gradient_views[rows] = PairGradients(
                memory[:, : self.spare],
                tokens,
                tokens[:, self.dim - self.spare :],
                tokens[:, : self.half],
                tokens[:, self.dim - self.half :],
                memory.unfold(1, self.dim, 1).transpose(2, 3).unbind(1),
                chunk,
                whole.unflatten(1, (-1, self.dim)).unbind(1),
            )
        made: PairGradients = self._gradient_views[rows]
        return made

    def write(self, x: Tensor) -> Tensor:
        own = self.views(x.shape[1])
        own.tokens.copy_(x.transpose(1, 2))
        own.spare.copy_(own.last)
        torch.mul(own.tokens.unsqueeze(1), own.rotated, out=own.products)
        torch.mul(own.low, own.high, out=own.opposite)
        return own.features

    def pull_back(self, fill: Fill, rows: int) -> Tensor:
        """Each product adds its gradient to both of its factors."""
        own, grads, dim = self.views(rows), self.gradients(rows), self.dim
        fill(0, dim, grads.tokens)
        grads.spare.zero_()
        for first in range(0, self.rotations, CHUNK):
            last = min(self.rotations, first + CHUNK)
            fill((1 + first) * dim, (1 + last) * dim, grads.chunk[:, : (last - first) * dim])
            for part, at in zip(grads.parts, range(first, last), strict=False):
                grads.windows[at].addcmul_(part, own.tokens)
                grads.tokens.addcmul_(part, own.windows[at])
        opposite, end = grads.chunk[:, : self.half], (1 + self.rotations) * dim
        fill(end, end + self.half, opposite)
        grads.low.addcmul_(opposite, own.high)
        grads.high.addcmul_(opposite, own.low)
        grads.last.add_(grads.spare)
        return grads.tokens


def pair_multiplicity(dim: int) -> tuple[Tensor, Tensor]:
    """How often each feature of `Pairs`, after a constant, occurs in a power; and its degree."""
    pairs = dim * (dim + 1) // 2
    degrees = torch.tensor([0] + [1] * dim + [2] * pairs)
    multiplicity = torch.ones(1 + dim + pairs, dtype=torch.float64)
    squares = dim * ((dim + 1) // 2)  # end here: those rotated by 0 are the last rotation
    multiplicity[1 + dim :] = 2.0
    multiplicity[1 + squares : 1 + dim + squares] = 1.0
    return multiplicity, degrees


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
            self._views[rows] = self._cut(self.memory[:, :, :rows])
        made: list[StepViews] = self._views[rows]
        return made

    def _cut(self, memory: Tensor) -> list[StepViews]:
        return [
            StepViews(memory[:, t : t + 1], memory[:, a:b], memory[:, to : to + b - a])
            for t, a, b, to in self.steps
        ]

    @cached_property
    def _gradients(self) -> Tensor:
        return torch.empty_like(self.memory)

    def write(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        self.memory[:, : self.dim, :rows].copy_(x.transpose(1, 2))
        for variable, suffix, products in self.views(rows):
            torch.mul(variable, suffix, out=products)
        return self.features(rows)

    def pull_back(self, fill: Fill, rows: int) -> Tensor:
        """Each product, the last one first, adds its gradient to both of its factors."""
        grad = self._gradients[:, :, :rows]
        fill(0, grad.shape[1], grad)
        if rows not in self._gradient_views:
            self._gradient_views[rows] = self._cut(grad)
        steps = zip(reversed(self.views(rows)), reversed(self._gradient_views[rows]), strict=True)
        for own, grads in steps:
            grads.suffix.addcmul_(grads.products, own.variable)
            grads.products.mul_(own.suffix)
            grads.variable.add_(grads.products.sum(1, keepdim=True))
        return grad[:, : self.dim]


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
    degrees = torch.cat([torch.full_like(level, k) for k, level in enumerate(levels)])
    return torch.cat(levels), degrees.long(), steps
