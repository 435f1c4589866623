"""PolySketch (Theorem A.9, Definitions A.10-A.12, Lemmas H.1-H.3, Fact J.6) by its statistics.

Sketches are drawn from fixed seeds, so nothing here is flaky; the limits are nevertheless those of
a fresh draw. A mean may be 4.5 standard errors off, which a normal law exceeds once in 150 000
tests; a frequency is compared through the exact binomial tail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from supportbasis.errors import InputError
from supportbasis.sketch import PolySketch, theory_size
from supportbasis.sketch.polysketch import _draw_tree, _hadamard

BASES = ("gaussian", "srht", "tensorsketch")
properties = settings(derandomize=True, deadline=None, max_examples=60)
bases = pytest.mark.parametrize("base", BASES)

ERRORS = 4.5  # standard errors
RARE = 1e-4  # probability of a false alarm where the law is binomial


def vectors(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(vectors(*shape, seed=seed), dim=-1)


def grams(power: int, size: int, base: str, x: Tensor, count: int) -> Tensor:
    """Gram matrices of the sketched rows of x under ``count`` independent sketches."""
    images = torch.stack([PolySketch(power, size, seed, base)(x) for seed in range(count)])
    return images @ images.mT


def standard_error(samples: Tensor) -> Tensor:
    return samples.std(0) / math.sqrt(len(samples))


def assert_mean(samples: Tensor, truth: Tensor | float) -> None:
    assert bool(((samples.mean(0) - truth).abs() <= ERRORS * standard_error(samples)).all())


def binomial_tail(count: int, trials: int, share: float) -> float:
    """Pr(Bin(trials, share) ≤ count)."""
    terms = (
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(count + 1)
    )
    return math.fsum(terms)


def assert_rarer_than(delta: float, failures: Tensor) -> None:
    """So few failures would be a surprise if each had probability delta or more."""
    assert binomial_tail(int(failures.sum()), len(failures), delta) <= RARE


def assert_commoner_than(delta: float, failures: Tensor) -> None:
    """So many failures would be a surprise if each had probability delta or less."""
    assert 1 - binomial_tail(int(failures.sum()) - 1, len(failures), delta) <= RARE


# --- unbiasedness and variance ----------------------------------------------------------------

X = torch.tensor([1.0, 0.5, -0.3, 0.8, 0.2], dtype=torch.float64)
Y = torch.tensor([0.7, -0.2, 0.4, 0.9, -0.5], dtype=torch.float64)


@bases
@pytest.mark.parametrize(("power", "size"), [(1, 8), (2, 8), (3, 16), (4, 16), (7, 48)])
def test_inner_products_and_norms_are_unbiased(base: str, power: int, size: int) -> None:
    """E<S x^p, S y^p> = <x, y>^p and E|S x^p|² = |x|^2p; negative and zero products included."""
    x = torch.stack([X, Y, -X, torch.tensor([0.0, 0.3, 0.5, 0.0, 0.0], dtype=torch.float64)])
    assert abs(float(X @ x[3])) < 1e-15
    samples = grams(power, size, base, x / X.norm(), count=1200)
    assert_mean(samples, ((x @ x.T) / X.norm() ** 2) ** power)


@dataclasses.dataclass
class Moments:
    """Of a node for a pair x, y: E<u, u'>², E|u|²|u'|² and E Σ_i u_i² u'_i²."""

    product: float
    norms: float
    squares: float

    def coordinate(self, base: str) -> float:
        """E (Mu)_i² (Mu')_i²; over signs, all pairings of four equal indices but one drop out."""
        correction = 2 * self.squares if base == "srht" else 0.0
        return self.norms + 2 * self.product - correction


def tree_moments(x: Tensor, y: Tensor, power: int, size: int, base: str) -> Moments:
    """Second moments of the tree, node by node.

    The z coordinates of (M₁u ∘ M₂w)/√z are alike, and so are all pairs of two. One coordinate
    gives m = E(M₁u)_i² (M₁u')_i² · E(M₂w)_i² (M₂w')_i²; for Gaussians the first factor is
    |u|²|u'|² + 2<u, u'>². Two coordinates give <u, u'>² <w, w'>² in E<·,·>², and
    |u|²|u'|² |w|²|w'|² in E|·|²|·|²: Gaussian rows are independent, and for SRHT this is the mean
    over the drawn coordinates whatever the signs, as H is orthogonal. So each moment is m/z plus
    (1 - 1/z) times the product of the children's.
    """
    if power == 1:
        c, n, q = float(x @ y), float((x @ x) * (y @ y)), float((x * x) @ (y * y))
        return Moments(c * c, n, q)
    a = tree_moments(x, y, (power + 1) // 2, size, base)
    b = tree_moments(x, y, power // 2, size, base)
    same = a.coordinate(base) * b.coordinate(base) / size
    others = 1 - 1 / size
    return Moments(same + others * a.product * b.product, same + others * a.norms * b.norms, same)


def variance(x: Tensor, y: Tensor, power: int, size: int, base: str) -> float:
    """Var<S x^p, S y^p>, exactly."""
    leaf = tree_moments(x, y, 1, size, base)
    if power == 1:
        signs = 0.0 if base == "gaussian" else 2 * leaf.squares
        return (leaf.norms + leaf.product - signs) / size
    if base == "tensorsketch":
        return convolution_variance(leaf, power, size)
    return tree_moments(x, y, power, size, base).product - leaf.product**power


def convolution_variance(leaf: Moments, power: int, size: int) -> float:
    """TensorSketch of x ⊗ x, in Fourier space: <S, S'> = (1/z) Σ_k a_k ā'_k b_k b̄'_k.

    With a_k = Σ_i s_i x_i ω^(k h_i), E[a_k ā'_k ā_l a'_l] is <x, y>² plus |x|²|y|² - q where k = l
    and <x, y>² - q where k = -l, q = Σ x_i² y_i². Both hold for one k, or two if z is even.
    """
    assert power == 2
    c, same, mirror = leaf.product, leaf.norms - leaf.squares, leaf.product - leaf.squares
    both = 1 if size % 2 else 2
    first = 2 * c * (same + mirror) + same * same + mirror * mirror
    return first / size + 2 * both * same * mirror / size**2


VARIANCES = [(base, power) for base in BASES for power in (1, 2, 3, 4, 5)]
VARIANCES = [case for case in VARIANCES if case[0] != "tensorsketch" or case[1] <= 2]


@pytest.mark.parametrize(("base", "power"), VARIANCES)
def test_variance_is_that_of_the_recursion(base: str, power: int) -> None:
    size = 9 if power <= 2 else 64  # squared errors of a narrow deep tree have too long a tail
    count = 2500 if base == "srht" else 6000
    x = torch.stack([X / X.norm(), Y / Y.norm()])
    errors = grams(power, size, base, x, count) - (x @ x.T) ** power
    for i, j in ((0, 0), (1, 1), (0, 1)):
        assert_mean(errors[:, i, j].square(), variance(x[i], x[j], power, size, base))


def test_the_recursion_gives_the_closed_forms() -> None:
    n, c = float((X @ X) * (Y @ Y)), float(X @ Y)  # |x|²|y|² and <x, y>
    assert variance(X, Y, 1, 10, "gaussian") == pytest.approx((n + c**2) / 10)
    assert variance(X, Y, 2, 10, "gaussian") == pytest.approx(((n + 2 * c**2) ** 2 - c**4) / 10)
    x = X / X.norm()
    for power in range(2, 9):  # what `theory_size` says of the norm
        exact = (1 + 8 / 10) ** (power - 1) - 1
        assert variance(x, x, power, 10, "gaussian") == pytest.approx(exact)


@bases
def test_error_falls_like_one_over_the_root_of_the_size(base: str) -> None:
    x, sizes = unit(12, 6, seed=3), [16, 32, 64, 128, 256]
    logs = []
    for size in sizes:
        error = grams(2, size, base, x, count=250) - (x @ x.T) ** 2
        logs.append(0.5 * math.log(float(error.square().mean())))
    steps = torch.tensor(sizes, dtype=torch.float64).log()
    steps -= steps.mean()
    slope = float(steps @ torch.tensor(logs, dtype=torch.float64) / (steps @ steps))
    # A sum of squares over 250 sketches, kurtosis below 10 as 78 products are averaged: the log of
    # its root has noise ½·3/√250 = 0.09 at most, and the slope that over ln(2)·√10, so 0.04.
    assert abs(slope + 0.5) <= 0.1


# --- the JL moment property (A.10-A.12) and what follows from it (H.1-H.3, A.9) ---------------


def jl_size(power: int, bound: float) -> int:
    """Smallest size at which the Gaussian tree has Var|Sx|² ≤ bound for unit x."""
    if power == 1:
        return math.ceil(2 / bound)
    return math.ceil(8 / ((1 + bound) ** (1 / (power - 1)) - 1))


def moment_limits(samples: Tensor, t: int) -> tuple[float, float]:
    """Confidence limits of E|sample|^t."""
    powers = samples.abs() ** t
    mean, error = float(powers.mean()), ERRORS * float(standard_error(powers))
    return mean - error, mean + error


@bases
@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_jl_moment_property(base: str, power: int) -> None:
    """‖|Sx|² - 1‖_{L_t} ≤ ε δ^{1/t} for t = 2 and t = 4, and its two-vector version (A.12).

    The size is four times the one at which t = 2 holds with equality for Gaussians: the fourth
    powers have a long tail, and so a wide confidence interval. Other bases vary no more.
    """
    epsilon, delta = 0.95, 0.25
    size = 4 * jl_size(power, epsilon**2 * delta)
    x = torch.cat([torch.stack([X / X.norm(), Y / Y.norm()]), unit(1, 5, seed=7)])
    samples = grams(power, size, base, x, count=500)
    assert_mean(samples.diagonal(dim1=1, dim2=2), 1.0)
    errors = samples - (x @ x.T) ** power
    for t in (2, 4):
        for i, j in ((0, 0), (1, 1), (0, 1), (0, 2), (1, 2)):
            assert moment_limits(errors[:, i, j], t)[1] <= epsilon**t * delta


@pytest.mark.parametrize("power", [1, 2, 3])
def test_jl_moment_property_needs_its_size(power: int) -> None:
    """A third of the size is too little. There is no ln(1/δ) at t = 2: the size grows like 1/δ."""
    epsilon, delta = 0.9, 0.2
    needed = jl_size(power, epsilon**2 * delta)
    x = (X / X.norm()).unsqueeze(0)
    errors = grams(power, needed // 3, "gaussian", x, count=1500)[:, 0, 0] - 1
    assert moment_limits(errors, 2)[0] > epsilon**2 * delta
    limit = 4 / (delta * math.log(1 / delta))  # of the constant in Θ(·), given δ
    assert 1 < needed / theory_size(2 * power, epsilon, delta) <= limit


@pytest.mark.parametrize("base", ["gaussian", "srht"])
@pytest.mark.parametrize("power", [1, 2])
def test_jl_moment_property_with_the_logarithm(base: str, power: int) -> None:
    """The moment t ~ ln(1/δ) makes the size grow like ln(1/δ): t = 4 at δ = e^-4, constant 32.

    Not so for CountSketch: two large entries share a bucket with probability 1/z, and then the
    error is large, so its size grows like 1/δ.
    """
    epsilon, delta, t = 0.9, math.exp(-4), 4
    size = 32 * theory_size(2 * power, epsilon, delta)
    errors = grams(power, size, base, (X / X.norm()).unsqueeze(0), count=700)[:, 0, 0] - 1
    assert moment_limits(errors, t)[1] <= epsilon**t * delta


CONSTANT = 8  # of Θ(p ε^-2 ln(1/δ)); 8n/z is the variance of n leaves, 2 ln(1/δ) a normal tail


@bases
@pytest.mark.parametrize("power", [2, 4, 6, 8])
def test_pointwise_bounds(base: str, power: int) -> None:
    """H.1: |<Sx, Sy> - <x, y>| ≤ ε|x||y|, and H.2: |<φ'x, φ'y> - <x, y>^p| ≤ ε(2 + ε)|x|^p|y|^p.

    Each with probability 1 - δ, for S of x^{⊗p/2}. The factor 2 + ε is that of the lemma's proof
    (a² - b² = (a - b)(a + b)); the lemma's statement drops it.
    """
    epsilon, delta = 0.6, 0.15
    size = CONSTANT * theory_size(power, epsilon, delta)
    x = torch.stack([X / X.norm(), Y / Y.norm()])
    products = grams(power // 2, size, base, x, count=200)
    truth = (x @ x.T) ** (power // 2)
    half, whole = (products - truth).abs(), (products.square() - truth.square()).abs()
    for i, j in ((0, 0), (1, 1), (0, 1)):
        assert_rarer_than(delta, half[:, i, j] > epsilon)
        assert_rarer_than(delta, whole[:, i, j] > epsilon * (2 + epsilon))
    assert bool((whole <= half * (2 + half) + 1e-12).all())  # never more, sketch by sketch


def test_constants_that_do_not_suffice() -> None:
    """Θ(·) with the constant 1 fails more often than δ, and so does H.2 with its printed ε."""
    epsilon, delta = 0.4, 0.1
    x = (X / X.norm()).unsqueeze(0)
    small = theory_size(4, epsilon, delta)
    products = grams(2, small, "gaussian", x, count=600)[:, 0, 0]
    assert_commoner_than(delta, (products - 1).abs() > epsilon)
    products = grams(2, CONSTANT * small // 2, "gaussian", x, count=600)[:, 0, 0]
    assert_rarer_than(delta, (products - 1).abs() > epsilon)
    assert_commoner_than(delta, (products.square() - 1).abs() > epsilon)


@bases
@pytest.mark.parametrize(("power", "epsilon"), [(2, 0.4), (4, 0.4), (6, 0.6)])
def test_bound_for_all_pairs(base: str, power: int, epsilon: float) -> None:
    """H.3: with probability 1 - δ all n·m entries are within ε(2 + ε)|x|^p|y|^p (union bound)."""
    delta, n, m = 0.15, 10, 12
    query, key = vectors(n, 6, seed=11), vectors(m, 6, seed=12)
    key[:4] = 2 * query[:4]  # the worst pairs
    size = CONSTANT * theory_size(power, epsilon, delta, pairs=n * m)
    assert size > CONSTANT * theory_size(power, epsilon, delta)
    scale = (query.norm(dim=1, keepdim=True) * key.norm(dim=1)) ** power
    failures = []
    for seed in range(100):
        half = PolySketch(power, size, seed, base).half
        error = ((half(query) @ half(key).T).square() - (query @ key.T) ** power).abs()
        failures.append(bool((error > epsilon * (2 + epsilon) * scale).any()))
    assert_rarer_than(delta, torch.tensor(failures))


@bases
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("cloud", ["spread", "collinear"])
def test_frobenius_bound(base: str, power: int, cloud: str) -> None:
    """A.9, item 2: Σ|<φ'q, φ'k> - <q, k>^p|² ≤ ε² Σ|q|^2p|k|^2p, with probability 1 - δ.

    The half map gets the error e with e(2 + e) = ε, for collinear vectors need no less.
    """
    epsilon, delta = 0.49, 0.15
    size = CONSTANT * theory_size(power, math.sqrt(1 + epsilon) - 1, delta)
    query, key = vectors(9, 6, seed=21), vectors(11, 6, seed=22)
    if cloud == "collinear":
        query, key = query[:, :1] * query[0], key[:, :1] * query[0]
    limit = epsilon**2 * (query.norm(dim=1, keepdim=True) * key.norm(dim=1)).pow(2 * power).sum()
    failures = []
    for seed in range(100):
        half = PolySketch(power, size, seed, base).half
        error = (half(query) @ half(key).T).square() - (query @ key.T) ** power
        failures.append(bool(error.square().sum() > limit))
    assert_rarer_than(delta, torch.tensor(failures))


def test_theory_size() -> None:
    assert theory_size(4, 0.5, 0.1) == math.ceil(4 * 4 * math.log(10))
    assert theory_size(2, 0.25, 0.01, pairs=300) == math.ceil(2 * 16 * math.log(30_000))
    assert theory_size(1, 0.99, 0.99) == 1
    assert theory_size(1, 0.5, 5e-324) == math.ceil(4 * -math.log(5e-324))


# --- the self-tensor (A.9, item 1) ------------------------------------------------------------


@properties
@given(
    base=st.sampled_from(BASES),
    power=st.sampled_from([2, 4, 6, 8, 10]),
    d=st.integers(1, 9),
    size=st.integers(1, 12),
    seed=st.integers(0, 10**9),
)
def test_self_tensor_products_are_squares(
    base: str, power: int, d: int, size: int, seed: int
) -> None:
    """<φ'(x), φ'(y)> = <half(x), half(y)>² ≥ 0 up to the rounding of a sum of size² terms."""
    sketch = PolySketch(power, size, seed, base)
    x, y = unit(2, 5, d, seed=seed % 1000).unbind(0)
    y[0] = -x[0]
    phi_x, phi_y = sketch.nonnegative(x), sketch.nonnegative(y)
    half_x, half_y = sketch.half(x), sketch.half(y)
    rounding = (size**2 + 4) * 2.0**-53 * (phi_x.abs() @ phi_y.abs().T + 1e-300)
    kernel = phi_x @ phi_y.T
    assert phi_x.shape == (5, size**2)
    assert bool((kernel >= -rounding).all())
    assert bool(((kernel - (half_x @ half_y.T).square()).abs() <= 2 * rounding).all())
    assert bool(((half_x @ half_y.T).square() >= 0).all())


@bases
def test_sketched_kernels_do_go_negative_without_it(base: str) -> None:
    """The reason for φ': <x, y>⁴ ≥ 0, its plain sketch is not."""
    x = unit(40, 6, seed=1)
    plain, sketch = PolySketch(4, 16, 0, base)(x), PolySketch(4, 16, 0, base)
    assert float((plain @ plain.T).min()) < -0.01
    assert float((sketch.nonnegative(x) @ sketch.nonnegative(x).T).min()) > -1e-12


@bases
def test_half(base: str) -> None:
    for power in (2, 6, 10):
        half = PolySketch(power, 7, 3, base).half
        assert half == PolySketch(power // 2, 7, 3, base)
    x = vectors(3, 4)
    torch.testing.assert_close(
        PolySketch(6, 5, 2, base).nonnegative(x),
        torch.stack([torch.kron(h, h) for h in PolySketch(3, 5, 2, base)(x)]),
    )


# --- Kronecker powers (J.6): the sketch is one matrix times x^{⊗p} ----------------------------


def kronecker_power(x: Tensor, power: int) -> Tensor:
    out = torch.ones(1, dtype=x.dtype)
    for _ in range(power):
        out = torch.kron(out, x)
    return out


@properties
@given(power=st.integers(1, 5), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_kronecker_facts(power: int, d: int, seed: int) -> None:
    a, b = unit(2, d, seed=seed)
    left, right = kronecker_power(a, power), kronecker_power(b, power)
    assert float(left @ right) == pytest.approx(float(a @ b) ** power, abs=1e-14)
    assert float(left.norm()) == pytest.approx(float(a.norm()) ** power)


@bases
def test_square_is_linear_in_the_kronecker_square(base: str) -> None:
    """S(e_i ⊗ e_j) by polarisation of the sketch alone, and then S (x ⊗ x) for other x."""
    d, sketch = 4, PolySketch(2, 6, 1, base)
    e = torch.eye(d, dtype=torch.float64)
    pairs = sketch(e[:, None] + e[None]) - sketch(e)[:, None] - sketch(e)[None]  # [d, d, size]
    matrix = pairs.flatten(0, 1).T / 2
    assert int(torch.linalg.matrix_rank(matrix)) > 1
    for x in vectors(5, d, seed=2):
        torch.testing.assert_close(sketch(x), matrix @ torch.kron(x, x))


Join = Callable[[Tensor, Tensor], Tensor]


def entrywise(a: Tensor, b: Tensor) -> Tensor:
    """Row k is the Kronecker product of both rows k."""
    return torch.stack([torch.kron(row, other) for row, other in zip(a, b, strict=True)])


def convolved(a: Tensor, b: Tensor) -> Tensor:
    """Row k is the sum of the Kronecker products of rows i and j over i + j = k mod z."""
    size = len(a)
    rows = [[torch.kron(a[i], b[(k - i) % size]) for i in range(size)] for k in range(size)]
    return torch.stack([torch.stack(row).sum(0) for row in rows])


TREES: dict[int, Callable[[Join, Any, Any], Tensor]] = {
    1: lambda join, x, m: x[0],
    2: lambda join, x, m: join(x[0], x[1]),
    3: lambda join, x, m: join(m[0] @ join(x[0], x[1]), x[2]),
    4: lambda join, x, m: join(m[0] @ join(x[0], x[1]), m[1] @ join(x[2], x[3])),
    5: lambda join, x, m: join(m[1] @ join(m[0] @ join(x[0], x[1]), x[2]), m[2] @ join(x[3], x[4])),
}


@bases
@pytest.mark.parametrize("power", TREES)
def test_the_explicit_matrix(base: str, power: int) -> None:
    """The tree written out: S from its random maps as matrices, applied to x^{⊗p}."""
    d, size, sketch = 3, 5, PolySketch(power, 5, 4, base)
    tree = _draw_tree(sketch, d, torch.float64, torch.device("cpu"))
    identity = torch.eye(size, dtype=torch.float64)
    leaves = [image.T for image in tree.leaves(torch.eye(d, dtype=torch.float64))]
    inner = [maps(identity)[0].T for maps in tree.inner]
    assert (len(leaves), len(inner)) == (power, max(0, power - 2))
    matrix = TREES[power](convolved if base == "tensorsketch" else entrywise, leaves, inner)
    assert matrix.shape == (size, d**power)
    for x in vectors(4, d, seed=5):
        torch.testing.assert_close(sketch(x), matrix @ kronecker_power(x, power))


# --- the random maps --------------------------------------------------------------------------


def all_maps(sketch: PolySketch, d: int) -> Iterator[Tensor]:
    tree = _draw_tree(sketch, d, torch.float64, torch.device("cpu"))
    yield from tree.leaves(torch.eye(d, dtype=torch.float64))
    for maps in tree.inner:
        yield maps(torch.eye(sketch.size, dtype=torch.float64))[0]


@bases
def test_every_map_is_fresh(base: str) -> None:
    """No two maps share rows, up to sign; d = size makes leaves and inner maps comparable."""
    maps = list(all_maps(PolySketch(8, 32, 0, base), 32))
    assert len(maps) == 8 + 6
    for i, one in enumerate(maps):
        for other in maps[:i]:
            equal = (one.abs() - other.abs()).abs().max(0).values == 0  # column by column
            if base == "gaussian":
                assert not bool(equal.any())
            assert not torch.equal(one, other)
            cosine = float((one * other).sum() / (one.norm() * other.norm()))
            assert abs(cosine) <= ERRORS / math.sqrt(32)  # 32 signs or buckets are drawn for each


@bases
def test_scale_of_the_maps(base: str) -> None:
    """Entries of a Gaussian map are N(0, 1)/z^¼; those of SRHT are ±1/z^¼ and of buckets ±1."""
    size, d = 64, 64
    draws = torch.stack(list(all_maps(PolySketch(8, size, 0, base), d)))
    if base == "gaussian":
        assert_mean(draws.flatten().square() * math.sqrt(size), 1.0)
        assert_mean(draws.flatten() * size**0.25, 0.0)
    elif base == "srht":
        torch.testing.assert_close(draws.abs(), torch.full_like(draws, size**-0.25))
    else:
        assert bool((draws.abs().sum(-1) == 1).all())
        assert_mean(draws.sum(-1).flatten(), 0.0)
        assert_mean((draws.abs() @ torch.arange(float(size)).double()).flatten(), (size - 1) / 2)


def test_power_one_of_unit_vectors() -> None:
    """A basis vector has the norm 1 exactly under SRHT and CountSketch, and signs for entries."""
    e = torch.eye(7, dtype=torch.float64)
    srht = PolySketch(1, 12, 0, "srht")(e)
    torch.testing.assert_close(srht.abs(), torch.full_like(srht, 12**-0.5))
    assert 0 < int((srht > 0).sum()) < srht.numel()
    count = PolySketch(1, 12, 0, "tensorsketch")(e)
    assert bool((count.abs().sum(1) == 1).all())
    assert bool((count.abs().amax(1) == 1).all())


@pytest.mark.parametrize(
    ("base", "drawn", "limit"), [("srht", "rows", 8), ("tensorsketch", "buckets", 5)]
)
def test_every_coordinate_and_bucket_can_be_drawn(base: str, drawn: str, limit: int) -> None:
    """Of the padded length, and of the size. 400 draws miss one with chance e^-50."""
    size, d = (400, 5) if base == "srht" else (5, 400)
    tree = _draw_tree(PolySketch(1, size, 0, base), d, torch.float64, torch.device("cpu"))
    assert getattr(tree.leaves, drawn).unique().tolist() == list(range(limit))


@pytest.mark.parametrize("levels", range(8))
def test_hadamard_transform(levels: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(levels):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    x = vectors(2**levels, 3)
    torch.testing.assert_close(_hadamard(x), matrix @ x)
    torch.testing.assert_close(_hadamard(_hadamard(x[:, 0])), 2**levels * x[:, 0])


# --- operation counts (A.9, item 3), from what ran --------------------------------------------


class Recorder(TorchDispatchMode):
    """The name, the shapes of the operands and that of the result, for every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            self.calls.append((func._schema.name.split("::")[1], shapes, tuple(out.shape)))
        return out

    def shapes(self, name: str) -> list[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
        return [(operands, out) for call, operands, out in self.calls if call == name]


def record(sketch: PolySketch, x: Tensor) -> Recorder:
    sketch.nonnegative(x)  # draws the maps
    with Recorder() as recorder:
        sketch.nonnegative(x)
    return recorder


def count_gaussian(ran: Recorder, n: int, d: int, z: int) -> tuple[int, int, int, int, int]:
    products = [(left[1], right[1]) for (left, right), _ in ran.shapes("mm")]  # inner, columns
    assert all(columns % z == 0 for _, columns in products)
    leaves = sum(columns // z for inner, columns in products if inner == d)
    nodes = sum(columns // z for inner, columns in products if inner == z)
    hadamard = ran.shapes("mul").count(([(n, z), (n, z)], (n, z)))
    kronecker = ran.shapes("mul").count(([(n, z, 1), (n, 1, z)], (n, z, z)))
    assert len(ran.shapes("mul")) == hadamard + kronecker
    work = sum(inner * columns for inner, columns in products) + hadamard * z
    return leaves, nodes, hadamard, kronecker, work


@pytest.mark.parametrize("power", [2, 4, 6, 8, 10, 16])
def test_gaussian_operations_are_those_of_the_theorem(power: int) -> None:
    n, d, z = 5, 7, 3
    sketch = PolySketch(power, z)
    ran = record(sketch, vectors(n, d))
    assert count_gaussian(ran, n, d, z) == tuple(sketch.cost(d))
    arithmetic = {"mm", "mul", "bmm", "addmm", "div", "add", "sub", "sum"}
    assert {name for name, _, _ in ran.calls} & arithmetic <= {"mm", "mul"}
    assert sketch.cost(d)[:4] == (power // 2, max(0, power // 2 - 2), power // 2 - 1, 1)


@pytest.mark.parametrize("power", [2, 4, 6, 8, 10, 16])
def test_operations_of_the_fast_transforms(power: int) -> None:
    n, d, z = 5, 7, 3
    x, padded = vectors(n, d), 8
    cost = PolySketch(power, z, 0, "srht").cost(d)
    ran = record(PolySketch(power, z, 0, "srht"), x)
    signs = [shapes[0] for shapes, _ in ran.shapes("mul") if len(shapes[1]) == 1]
    assert signs.count((n, d)) == cost.leaf_products
    assert signs.count((n, z)) == cost.inner_products
    joins = ran.shapes("mul").count(([(n, z), (n, z)], (n, z)))
    assert joins == cost.hadamard_products
    sums = sum(math.prod(out) for name in ("add", "sub") for _, out in ran.shapes(name)) // n
    assert sums == cost.leaf_products * padded * 3 + cost.inner_products * 4 * 2
    work = sums + cost.leaf_products * d + cost.inner_products * z + joins * z
    assert work == cost.multiply_adds

    cost = PolySketch(power, z, 0, "tensorsketch").cost(d)
    ran = record(PolySketch(power, z, 0, "tensorsketch"), x)
    added = [shapes[2] for shapes, _ in ran.shapes("index_add")]
    assert (added.count((n, d)), added.count((n, z))) == cost[:2]
    assert len(added) == sum(cost[:2])
    assert len(ran.shapes("_fft_r2c")) == 2 * cost.hadamard_products
    assert len(ran.shapes("_fft_c2r")) == cost.hadamard_products
    transforms = 3 * cost.hadamard_products * z * 2
    spectra = 4 * 2 * cost.hadamard_products
    work = cost.leaf_products * d + cost.inner_products * z + transforms + spectra
    assert work == cost.multiply_adds


# --- one function of the fields ---------------------------------------------------------------


@bases
def test_seeds(base: str) -> None:
    x = vectors(3, 5)
    first = PolySketch(4, 16, 5, base)(x)
    _draw_tree.cache_clear()
    torch.testing.assert_close(PolySketch(4, 16, 5, base)(x), first, rtol=0, atol=0)
    for other in (PolySketch(4, 16, 6, base), PolySketch(4, 16, 5 + 2**32, base)):
        assert not torch.allclose(other(x), first)


def test_sketches_of_different_power_are_independent_under_one_seed() -> None:
    """With d = 1 the first map of each would be the same numbers, the first of one stream."""
    one, two = (next(all_maps(PolySketch(power, 64**2), 1)).flatten() for power in (1, 2))
    assert abs(float(one @ two / (one.norm() * two.norm()))) <= ERRORS / 64


@bases
def test_global_generator_and_defaults_are_left_alone(base: str) -> None:
    x = vectors(3, 5).float()
    expected = PolySketch(3, 8, 0, base)(x)
    _draw_tree.cache_clear()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        actual = PolySketch(3, 8, 0, base)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@bases
@pytest.mark.parametrize("power", [1, 2, 5])
def test_single_precision_agrees_with_double(base: str, power: int) -> None:
    """Each entry passes about power·(d + z) roundings of 2^-24, relative to the sums of |terms|."""
    x, d, size = unit(50, 17, seed=4).float(), 17, 16
    sketch = PolySketch(power, size, 0, base)
    single, double = sketch(x), sketch(x.double())
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    tolerance = power * (d + size) * 2.0**-24 * float(double.abs().max())
    torch.testing.assert_close(single.double(), double, rtol=0, atol=tolerance)


@bases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(base: str, dtype: torch.dtype) -> None:
    x, sketch = vectors(4, 6).to(dtype), PolySketch(4, 8, 0, base)
    for of in (sketch, sketch.nonnegative):
        assert of(x).dtype == torch.float32
        torch.testing.assert_close(of(x), of(x.float()), rtol=0, atol=0)


@properties
@given(
    base=st.sampled_from(BASES),
    power=st.integers(1, 7),
    lead=st.lists(st.integers(0, 3), max_size=3),
    d=st.integers(1, 6),
    size=st.integers(1, 9),
)
def test_shapes_rows_and_homogeneity(
    base: str, power: int, lead: list[int], d: int, size: int
) -> None:
    """Each vector on its own, whatever the leading dims; S (tx)^{⊗p} = t^p S x^{⊗p}."""
    sketch, x = PolySketch(power, size, 1, base), vectors(*lead, d, seed=3)
    out = sketch(x)
    assert out.shape == (*lead, size)
    flat = x.reshape(-1, d)
    rows = [sketch(row) for row in flat]
    scale = 1 + float(out.abs().max()) if out.numel() else 1.0
    for row, expected in zip(rows, out.reshape(-1, size), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-13 * scale)
    torch.testing.assert_close(sketch(-2 * x), (-2) ** power * out, rtol=0, atol=1e-11 * scale)
    turned = vectors(d, *lead, seed=3).movedim(0, -1)  # not contiguous
    torch.testing.assert_close(sketch(turned), sketch(turned.contiguous()))


@bases
def test_gradients(base: str) -> None:
    """Also when the maps were first drawn, and cached, in inference mode."""
    sketch = PolySketch(6, 4, 0, base)
    _draw_tree.cache_clear()
    with torch.inference_mode():
        sketch.nonnegative(vectors(2, 3))
    x = vectors(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(sketch.nonnegative, (x,))


@pytest.mark.gpu
@bases
def test_devices_agree(base: str) -> None:
    x, sketch = unit(100, 17, seed=4), PolySketch(5, 32, 0, base)
    torch.testing.assert_close(sketch(x.cuda()).cpu(), sketch(x))
    torch.testing.assert_close(sketch(x.float().cuda()).cpu(), sketch(x).float(), rtol=0, atol=1e-4)
    assert PolySketch(4, 8, 0, base).nonnegative(x.cuda()[:0]).shape == (0, 64)


def test_cache_is_bounded() -> None:
    assert 0 < (_draw_tree.cache_info().maxsize or 0) <= 64


def test_a_sketch_is_a_value() -> None:
    sketch = PolySketch(4, 8, base="srht")
    assert sketch == PolySketch(4, 8, 0, "srht")
    assert hash(sketch) == hash(PolySketch(4, 8, 0, "srht"))
    assert len({sketch, PolySketch(4, 8), PolySketch(4, 9), PolySketch(4, 8, 1)}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        sketch.power = 2  # type: ignore[misc]
    numpy = pytest.importorskip("numpy")
    assert type(PolySketch(numpy.int64(4), numpy.int32(8)).power) is int


# --- bad input --------------------------------------------------------------------------------

SKETCH = PolySketch(4, 8)
BAD: list[tuple[str, Callable[[], Any]]] = [
    ("power .*got 0", lambda: PolySketch(0, 8)),
    ("power .*got 2.0", lambda: PolySketch(2.0, 8)),  # type: ignore[arg-type]
    ("power .*got True", lambda: PolySketch(True, 8)),
    ("size .*got 0", lambda: PolySketch(2, 0)),
    ("size .*got '8'", lambda: PolySketch(2, "8")),  # type: ignore[arg-type]
    ("seed .*got -1", lambda: PolySketch(2, 8, -1)),
    (f"seed .*got {2**63}", lambda: PolySketch(2, 8, 2**63)),
    ("seed .*got None", lambda: PolySketch(2, 8, None)),  # type: ignore[arg-type]
    ("base .*gaussian.*got 'fft'", lambda: PolySketch(2, 8, 0, "fft")),
    ("base .*got None", lambda: PolySketch(2, 8, 0, None)),  # type: ignore[arg-type]
    (r"base .*got \['srht'\]", lambda: PolySketch(2, 8, 0, ["srht"])),  # type: ignore[arg-type]
    ("power is 3.*even", lambda: PolySketch(3, 8).half),
    ("power is 5.*even", lambda: PolySketch(5, 8).nonnegative(torch.ones(2))),
    ("power is 1.*even", lambda: PolySketch(1, 8).cost(4)),
    ("dim .*got 0", lambda: SKETCH.cost(0)),
    ("x .*got list", lambda: SKETCH([1.0])),  # type: ignore[arg-type]
    ("x .*torch.int64", lambda: SKETCH(torch.tensor([1, 2]))),
    ("x .*torch.complex64", lambda: SKETCH.nonnegative(torch.ones(2, dtype=torch.complex64))),
    (r"x has shape \(\)", lambda: SKETCH(torch.tensor(1.0))),
    (r"x has shape \(3, 0\).*d >= 1", lambda: SKETCH(torch.ones(3, 0))),
    ("power .*got 0", lambda: theory_size(0, 0.5, 0.1)),
    ("epsilon .*got 0", lambda: theory_size(2, 0, 0.1)),
    ("epsilon .*got 1.5", lambda: theory_size(2, 1.5, 0.1)),
    ("epsilon .*got nan", lambda: theory_size(2, math.nan, 0.1)),
    ("delta .*got 1", lambda: theory_size(2, 0.5, 1.0)),
    ("delta .*got None", lambda: theory_size(2, 0.5, None)),  # type: ignore[arg-type]
    ("pairs .*got 0", lambda: theory_size(2, 0.5, 0.1, pairs=0)),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_named(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message):
        call()
