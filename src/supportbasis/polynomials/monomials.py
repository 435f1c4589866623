"""Memory in which the monomials of a block of tokens are formed, and their gradients.

Memory is feature-major, [lanes, features, tokens]: a product of variables is an elementwise product
of rows. Monomials of degrees 1 and 2 are formed all at once (`Pairs`), those of other degrees one
degree after the other (`Suffixes`). Constants are left out. Views of the memory are made once for
each number of tokens: made anew for every block, they would take longer than the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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


class Rotations(NamedTuple):
    """Views of memory whose first rows are the repeated variables and then all of them."""

    spare: Tensor
    tokens: Tensor  # [lanes, dim, rows]
    last: Tensor  # tokens that the spare rows repeat
    low: Tensor  # of the opposite pairs, first
    high: Tensor  # and second variable
    rotated: Tensor  # tokens from each row of the memory on, [lanes, rotations, dim, rows]
    windows: tuple[Tensor, ...]  # the same one by one

    @staticmethod
    def of(memory: Tensor, dim: int) -> Rotations:
        spare, half = (dim - 1) // 2, dim // 2 if dim % 2 == 0 else 0
        tokens = memory[:, spare : spare + dim]
        rotated = memory[:, : spare + dim].unfold(1, dim, 1).transpose(2, 3)
        ends = tokens[:, dim - spare :], tokens[:, :half], tokens[:, dim - half :]
        return Rotations(memory[:, :spare], tokens, *ends, rotated, rotated.unbind(1))


class Pairs(Buffer):
    """x_a, and x_a x_b of all pairs: the token times itself rotated by 0, 1, 2, ... variables.

    A rotation by s and one by d - s give the same pairs, so those by s < d/2 do, and for even d
    half of those by d/2. The last variables are repeated before the first, so that every
    rotation is a window on the same rows, and one product forms them all.
    """

    def __init__(self, lanes: int, dim: int, rows: int, like: Tensor):
        self.dim, self.rotations, self.spare = dim, (dim + 1) // 2, (dim - 1) // 2
        super().__init__(lanes, dim + dim * (dim + 1) // 2, rows, like)

    def views(self, rows: int) -> tuple[Rotations, Tensor, Tensor]:
        """Tokens, products of all rotations [lanes, rotations, dim, rows], opposite pairs."""
        if rows not in self._views:
            memory, end = self.memory[:, :, :rows], self.spare + self.dim
            middle = end + self.rotations * self.dim
            products = memory[:, end:middle].unflatten(1, (self.rotations, self.dim))
            self._views[rows] = Rotations.of(memory, self.dim), products, memory[:, middle:]
        made: tuple[Rotations, Tensor, Tensor] = self._views[rows]
        return made

    @cached_property
    def _gradients(self) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of tokens, and of one chunk of features."""
        lanes, _, rows = self.memory.shape
        chunk = min(CHUNK, self.rotations) * self.dim
        sizes = (self.spare + self.dim, chunk)
        tokens, part = (self.memory.new_empty(lanes, size, rows) for size in sizes)
        return tokens, part

    def gradients(self, rows: int) -> tuple[Rotations, Tensor, tuple[Tensor, ...]]:
        """Gradients of the tokens, of a chunk of features, and that chunk by rotation."""
        if rows not in self._gradient_views:
            memory, chunk = (x[:, :, :rows] for x in self._gradients)
            parts = chunk.unflatten(1, (-1, self.dim)).unbind(1)
            self._gradient_views[rows] = Rotations.of(memory, self.dim), chunk, parts
        made: tuple[Rotations, Tensor, tuple[Tensor, ...]] = self._gradient_views[rows]
        return made

    def write(self, x: Tensor) -> Tensor:
        own, products, opposite = self.views(x.shape[1])
        own.tokens.copy_(x.transpose(1, 2))
        own.spare.copy_(own.last)
        torch.mul(own.tokens.unsqueeze(1), own.rotated, out=products)
        torch.mul(own.low, own.high, out=opposite)
        return self.features(x.shape[1])

    def pull_back(self, fill: Fill, rows: int) -> Tensor:
        """Each product adds its gradient to both of its factors."""
        own, (grads, chunk, parts), dim = self.views(rows)[0], self.gradients(rows), self.dim
        fill(0, dim, grads.tokens)
        grads.spare.zero_()
        for first in range(0, self.rotations, CHUNK):
            last = min(self.rotations, first + CHUNK)
            fill((1 + first) * dim, (1 + last) * dim, chunk[:, : (last - first) * dim])
            for part, at in zip(parts, range(first, last), strict=False):
                grads.windows[at].addcmul_(part, own.tokens)
                grads.tokens.addcmul_(part, own.windows[at])
        half, end = own.low.shape[1], (1 + self.rotations) * dim
        opposite = chunk[:, :half]
        fill(end, end + half, opposite)
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

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and size of the variable, the suffix and the products."""
        size = self.stop - self.start
        return (self.variable, 1), (self.start, size), (self.to, size)


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

    def _cut(self, memory: Tensor, rows: int, views: dict[int, Any]) -> Sequence[list[Tensor]]:
        """Of each step the variable, the suffix and their products, [lanes, 1 or size, rows]."""
        if rows not in views:
            views[rows] = [
                [memory[:, at : at + size, :rows] for at, size in step.spans] for step in self.steps
            ]
        made: Sequence[list[Tensor]] = views[rows]
        return made

    @cached_property
    def _gradients(self) -> Tensor:
        return torch.empty_like(self.memory)

    def write(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        self.memory[:, : self.dim, :rows].copy_(x.transpose(1, 2))
        for variable, suffix, products in self._cut(self.memory, rows, self._views):
            torch.mul(variable, suffix, out=products)
        return self.features(rows)

    def pull_back(self, fill: Fill, rows: int) -> Tensor:
        """Each product, the last one first, adds its gradient to both of its factors."""
        grad = self._gradients[:, :, :rows]
        fill(0, grad.shape[1], grad)
        own = self._cut(self.memory, rows, self._views)
        grads = self._cut(self._gradients, rows, self._gradient_views)
        for (variable, suffix, _), of in zip(reversed(own), reversed(grads), strict=True):
            to_variable, to_suffix, products = of
            to_suffix.addcmul_(products, variable)
            products.mul_(suffix)
            to_variable.add_(products.sum(1, keepdim=True))
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
