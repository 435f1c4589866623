"""PolySketch: random features of the kernel <x, y>^p, short and non-negative (Theorem A.9).

S x^{⊗p} has z entries instead of d^p, and S is never formed. A binary tree with p leaves does it:
each node multiplies its two children entrywise, after a fresh random map of each,

    node = (M₁u ∘ M₂w) / √z,    u and w the children; a child that is a leaf is x itself.

All that a map has to satisfy is E[(Mu)_i (Mu')_i] = <u, u'> for each of its z coordinates i. The
two maps, and what lies below them, are independent, so E<node, node'> is the product of both
means, E<u, u'> E<w, w'>, and by induction

    E<S x^{⊗p}, S y^{⊗p}> = <x, y>^p,    E|S x^{⊗p}|² = |x|^{2p}.

A sketched kernel may be negative where the kernel is not. Weights therefore come from the
self-tensor φ'(x) = (S x^{⊗p/2})^{⊗2}: its inner products are squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError
from ..problem.checks import check_integer, check_seed
from ..problem.rounding import compute_dtype
from .draws import Source


class SketchCost(NamedTuple):
    """Operations for one vector under `PolySketch.nonnegative`, as item 3 of Theorem A.9 counts."""

    leaf_products: int  # maps R^d -> R^z
    inner_products: int  # maps R^z -> R^z
    hadamard_products: int
    self_kronecker: int
    multiply_adds: int  # of the half map, all but the self-Kronecker product


@dataclass(frozen=True)
class PolySketch:
    """x [..., d] -> S x^{⊗power} [..., size], with E<S x^{⊗power}, S y^{⊗power}> = <x, y>^power.

    A tree of random maps M, z = ``size`` wide; see the head of this module. ``base`` names M:

    - ``"gaussian"``: M has independent entries N(0, 1). Plain matrix products.
    - ``"srht"``: M = P H D, random signs D, the Walsh-Hadamard transform H and z coordinates P
      drawn with replacement; a node is a TensorSRHT.
    - ``"tensorsketch"``: M is a CountSketch, which adds each entry with a random sign s(i) to a
      random bucket h(i). Its node is the circular convolution of the two, without 1/√z: a
      CountSketch of u⊗w with buckets h₁(i) + h₂(j) mod z and signs s₁(i) s₂(j). Two large entries
      may share a bucket, so its errors have the heaviest tail.

    ``power`` = 1 has no tree: M x / √z, or the CountSketch of x. Other powers split in halves, the
    larger one first; they need not be powers of two.

    The error is relative to |x|^power |y|^power and not to <x, y>^power; its variance is about
    proportional to power/size. Results depend on the fields alone and agree over dtypes and
    devices up to rounding; torch's global generator is not touched. Float16 and bfloat16 vectors
    are computed, and returned, in float32. NaN and Inf are not checked for, and |x|^power must fit
    the dtype.

    >>> x = torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    >>> image = PolySketch(power=2, size=4096)(x)
    >>> image.shape, bool(((image @ image.T - (x @ x.T) ** 2).abs() < 0.2).all())
    (torch.Size([2, 4096]), True)
    >>> features = PolySketch(power=4, size=16).nonnegative(x)
    >>> features.shape, bool((features @ features.T >= 0).all())
    (torch.Size([2, 256]), True)
    """

    power: int
    size: int
    seed: int = 0
    base: str = "gaussian"

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", check_integer("power", self.power, 1))
        object.__setattr__(self, "size", check_integer("size", self.size, 1))
        object.__setattr__(self, "seed", check_seed(self.seed))
        if not isinstance(self.base, str) or self.base not in _BASES:
            raise InputError(f"base must be one of {sorted(_BASES)}, got {self.base!r}")

    def __call__(self, x: Tensor) -> Tensor:
        """S x^{⊗power} of every vector in ``x`` [..., d]: [..., size]."""
        if not isinstance(x, Tensor):
            raise InputError(f"x must be a tensor [..., d], got {type(x).__name__}")
        if not x.is_floating_point():
            raise InputError(f"x must be a floating-point tensor, got {x.dtype}; use x.float()")
        if x.dim() == 0 or x.shape[-1] == 0:
            raise InputError(f"x has shape {tuple(x.shape)}; expected [..., d] with d >= 1")
        x = x.to(compute_dtype(x.dtype))
        return _draw_tree(self, x.shape[-1], x.dtype, x.device)(x)[0]

    def nonnegative(self, x: Tensor) -> Tensor:
        """φ'(x) = (S x^{⊗power/2})^{⊗2} of every vector in ``x`` [..., d]: [..., size²].

        <φ'(x), φ'(y)> = <half(x), half(y)>² ≥ 0 estimates <x, y>^power for an even power; the
        sum of size² terms may round to just below zero. Where only these inner products are
        needed, squaring those of `half` is cheaper and never negative.
        """
        half = self.half(x)
        return (half.unsqueeze(-1) * half.unsqueeze(-2)).flatten(-2)

    def pull_back(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient of vectors ``x`` [..., d] from that of their sketches [..., size].

        Autograd runs through a sketch as well; this is for places that it cannot reach. Only for
        ``base="gaussian"``.
        """
        tree = _draw_tree(self, x.shape[-1], x.dtype, x.device)
        if not isinstance(tree.leaves, _Gaussian):
            raise InputError("only sketches of base 'gaussian' have a pull-back")
        return tree.leaves.adjoint(tree(x)[1](grad))

    @property
    def half(self) -> PolySketch:
        """The sketch of half the power, whose self-tensor is `nonnegative`."""
        if self.power % 2:
            raise InputError(
                f"power is {self.power}, which is odd and has no half; expected an even power, "
                "as odd powers of an inner product can be negative"
            )
        return replace(self, power=self.power // 2)

    def cost(self, dim: int) -> SketchCost:
        """Operations of `nonnegative` for one vector of ``dim`` entries (Theorem A.9, item 3).

        power/2 products with d x z matrices, max(0, power/2 - 2) with z x z matrices and
        power/2 - 1 Hadamard products (the theorem prints power/2 - 2, which is -1 at power 2).

        >>> PolySketch(power=8, size=32).cost(dim=65)
        SketchCost(leaf_products=4, inner_products=2, hadamard_products=3, self_kronecker=1, \
multiply_adds=10464)
        """
        dim = check_integer("dim", dim, 1)
        base, leaves = _BASES[self.base], self.half.power
        inner, joins = max(0, leaves - 2), leaves - 1
        leaf, join = base.work(dim, self.size)
        total = leaves * leaf + inner * base.work(self.size, self.size)[0] + joins * join
        return SketchCost(leaves, inner, joins, 1, total)


def theory_size(power: int, epsilon: float, delta: float, pairs: int = 1) -> int:
    """The sketch size z = ceil(power · ε^-2 · ln(pairs/δ)): the Θ(·) of A.9, H.2, H.3, constant 1.

    ``epsilon`` is the error relative to |x|^power |y|^power, ``delta`` the probability of failure,
    ``pairs`` the number of pairs the statement holds for at once (n·m, by the union bound).

    The constant is not 1 in truth. Over a Gaussian tree with n = power/2 > 1 leaves, |S x^{⊗n}|²
    has the variance (1 + 8/z)^(n-1) - 1 ≈ 8(n-1)/z at |x| = 1, so that a normal tail wants about
    eight times this size for an error ε of the half map, and ε(2 + ε) of its square (H.2 prints ε).

    >>> theory_size(power=4, epsilon=0.5, delta=0.1, pairs=100)
    111
    """
    power = check_integer("power", power, 1)
    pairs = check_integer("pairs", pairs, 1)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not isinstance(value, Real) or not 0 < value < 1:
            raise InputError(
                f"{name} must be a number between 0 and 1, both excluded, got {value!r}"
            )
    return math.ceil(power / epsilon / epsilon * (math.log(pairs) - math.log(delta)))


# from the gradient of a node to those of its leaves; of Gaussian maps
Pullback = Callable[[Tensor], list[Tensor]]


class _Tree(NamedTuple):
    """All random maps of a sketch: those of x, and one for each node but the root."""

    leaves: _Maps
    inner: tuple[_Maps, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """The root over ``x``, and what takes its gradient to the leaves."""
        return self._node(self.leaves(x), iter(self.inner))

    def _node(self, images: Sequence[Tensor], inner: Iterator[_Maps]) -> tuple[Tensor, Pullback]:
        """The image of the node over some leaves; the root, the last, has no map."""
        if len(images) == 1:
            return images[0], lambda grad: [grad]
        middle = (len(images) + 1) // 2
        a, pull_a = self._node(images[:middle], inner)
        b, pull_b = self._node(images[middle:], inner)
        node, maps = self.leaves.join(a, b), next(inner, None)

        def pull(grad: Tensor) -> list[Tensor]:
            grad = maps.adjoint([grad]) if isinstance(maps, _Gaussian) else grad
            return pull_a(grad * b) + pull_b(grad * a)

        return node if maps is None else maps(node)[0], pull


@lru_cache(maxsize=16)  # one entry may hold power · d · size numbers
def _draw_tree(sketch: PolySketch, dim: int, dtype: torch.dtype, device: torch.device) -> _Tree:
    """The maps of a sketch. Its fields and ``dim`` seed one stream, which all maps share."""
    fields = (sketch.power, sketch.size, sketch.seed, sketch.base, dim)
    source = Source(fields, dtype, device)
    kind, size, scale = _BASES[sketch.base], sketch.size, 1.0
    if kind is not _CountSketch:  # 1/√size over the two maps of a join
        scale = size**-0.25 if sketch.power > 1 else size**-0.5
    with torch.inference_mode(False):  # cached tensors must also serve calls that need gradients
        leaves = kind(source, dim, size, sketch.power, scale)
        inner = tuple(kind(source, size, size, 1, scale) for _ in range(sketch.power - 2))
    return _Tree(leaves, inner)


# Some independent maps R^dim -> R^size of one kind, how two images make a node (`join`), and the
# multiply-adds of one map and of one join for one vector (`work`). A call takes x [..., dim] to
# ``count`` images [..., size].


class _Gaussian:
    """x -> Gx with independent entries N(0, scale²); one matrix product serves all maps."""

    join = staticmethod(torch.mul)

    def __init__(self, source: Source, dim: int, size: int, count: int, scale: float):
        self.count = count
        self.matrix = source.normal(dim, count * size, scale=scale)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return (x @ self.matrix).chunk(self.count, -1)

    def adjoint(self, grads: list[Tensor]) -> Tensor:
        """Gradient of x from those of its images."""
        return torch.cat(grads, -1) @ self.matrix.T

    @staticmethod
    def work(dim: int, size: int) -> tuple[int, int]:
        return dim * size, size


class _Srht:
    """x -> scale · P H D x: random signs, Hadamard transform, coordinates with replacement."""

    join = staticmethod(torch.mul)

    def __init__(self, source: Source, dim: int, size: int, count: int, scale: float):
        padded = 2 ** _logarithm(dim)
        self.padding = padded - dim
        self.signs = source.signs(count, dim, scale=scale)
        self.rows = source.below(padded, count, size)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        signed = (pad(x * signs, (0, self.padding)).movedim(-1, 0) for signs in self.signs)
        sampled = (_hadamard(u)[rows] for u, rows in zip(signed, self.rows, strict=True))
        return [u.movedim(0, -1).contiguous() for u in sampled]

    @staticmethod
    def work(dim: int, size: int) -> tuple[int, int]:
        return dim + 2 ** _logarithm(dim) * _logarithm(dim), size


class _CountSketch:
    """x -> its entries, each with a random sign, added up in random buckets."""

    def __init__(self, source: Source, dim: int, size: int, count: int, scale: float):
        self.size = size
        self.signs = source.signs(count, dim, scale=scale)
        self.buckets = source.below(size, count, dim)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        empty = x.new_zeros(*x.shape[:-1], self.size)
        maps = zip(self.signs, self.buckets, strict=True)
        return [empty.index_add(-1, buckets, x * signs) for signs, buckets in maps]

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        """Circular convolution: the CountSketch of the outer product of what a and b sketch."""
        if a.numel() == 0:  # not every FFT library takes an empty tensor
            return a * b
        return torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b), n=a.shape[-1])

    @staticmethod
    def work(dim: int, size: int) -> tuple[int, int]:
        """A join: three real transforms of size · log₂ size, and the product of their results."""
        return dim, 3 * size * _logarithm(size) + 4 * (size // 2 + 1)


_Maps = _Gaussian | _Srht | _CountSketch
_BASES: dict[str, type[_Maps]] = {
    "gaussian": _Gaussian,
    "srht": _Srht,
    "tensorsketch": _CountSketch,
}


def _hadamard(x: Tensor) -> Tensor:
    """H x for ``x`` [2^k, ...]: the Walsh-Hadamard transform with entries ±1, in k passes.

    A pass pairs the entries half the length apart and writes sum and difference side by side, so
    that after k passes each entry has its own index again. The transform runs over the first
    dimension, as sums of long rows are the fast ones.
    """
    for _ in range(_logarithm(len(x))):
        a, b = x.chunk(2)
        x = torch.stack([a + b, a - b], 1).flatten(0, 1)
    return x


def _logarithm(dim: int) -> int:
    """ceil(log2(dim))."""
    return (dim - 1).bit_length()
