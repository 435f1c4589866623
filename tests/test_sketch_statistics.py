"""PolySketch (Theorem A.9, Definitions A.10-A.12, Lemmas H.1-H.3) by its statistics.

Sketches are drawn from fixed seeds, so nothing here is flaky; the limits are nevertheless those of
a fresh draw. A mean may be 4.5 standard errors off, which a normal law exceeds once in 150 000
tests; a frequency is compared through the exact binomial tail.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from cases import gaussian
from sketch_cases import BASES, ERRORS, assert_mean, bases, standard_error, unit
from supportbasis.sketch import PolySketch, theory_size

slow = pytest.mark.slow
RARE = 1e-4  # probability of a false alarm where the law is binomial


def grams(power: int, size: int, base: str, x: Tensor, count: int) -> Tensor:
    """Gram matrices of the sketched rows of x under ``count`` independent sketches."""
    images = torch.stack([PolySketch(power, size, seed, base)(x) for seed in range(count)])
    return images @ images.mT


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
@pytest.mark.parametrize(
    ("power", "size"),
    [(3, 16), *(pytest.param(*x, marks=slow) for x in ((1, 8), (2, 8), (4, 16), (7, 48)))],
)
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


VARIANCES = [(base, power) for base in BASES for power in (1, 2, 3, 4)]
VARIANCES = [case for case in VARIANCES if case[0] != "tensorsketch" or case[1] <= 2]


@slow
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


@slow
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


@slow
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


@slow
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


@slow
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


@slow
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


@slow
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


@slow
@bases
@pytest.mark.parametrize(("power", "epsilon"), [(2, 0.4), (4, 0.4), (6, 0.6)])
def test_bound_for_all_pairs(base: str, power: int, epsilon: float) -> None:
    """H.3: with probability 1 - δ all n·m entries are within ε(2 + ε)|x|^p|y|^p (union bound)."""
    delta, n, m = 0.15, 10, 12
    query, key = gaussian(n, 6, seed=11), gaussian(m, 6, seed=12)
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


@slow
@bases
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("cloud", ["spread", "collinear"])
def test_frobenius_bound(base: str, power: int, cloud: str) -> None:
    """A.9, item 2: Σ|<φ'q, φ'k> - <q, k>^p|² ≤ ε² Σ|q|^2p|k|^2p, with probability 1 - δ.

    The half map gets the error e with e(2 + e) = ε, for collinear vectors need no less.
    """
    epsilon, delta = 0.49, 0.15
    size = CONSTANT * theory_size(power, math.sqrt(1 + epsilon) - 1, delta)
    query, key = gaussian(9, 6, seed=21), gaussian(11, 6, seed=22)
    if cloud == "collinear":
        query, key = query[:, :1] * query[0], key[:, :1] * query[0]
    limit = epsilon**2 * (query.norm(dim=1, keepdim=True) * key.norm(dim=1)).pow(2 * power).sum()
    failures = []
    for seed in range(100):
        half = PolySketch(power, size, seed, base).half
        error = (half(query) @ half(key).T).square() - (query @ key.T) ** power
        failures.append(bool(error.square().sum() > limit))
    assert_rarer_than(delta, torch.tensor(failures))
