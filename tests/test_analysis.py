"""Appendix D and Fact J.5: sub-Gaussian entries, how many are large, and what they cost."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cases
from supportbasis.analysis import (
    EntryProfile,
    chernoff_tail,
    expected_large_entries,
    log_threshold,
    sharpest_threshold,
    sub_gaussian_threshold,
    support_exponent,
    variance_proxy,
)
from supportbasis.errors import InputError
from supportbasis.problem.problem import largest_entries
from supportbasis_studies.dense_splits import large_rows, support_basis

properties = settings(derandomize=True, deadline=None, max_examples=60)
SEEDS = 400

gaussian = partial(cases.gaussian, dtype=torch.float32)


def gaussian_tail(t: float, std: float) -> float:
    """Pr(|x| > t) of a centred Gaussian."""
    return math.erfc(t / std / math.sqrt(2))


# --- the variance proxy (Definition D.1) ------------------------------------------------------


def proxy_by_sorting(x: Tensor) -> float:
    """The definition, every order statistic in turn."""
    ordered = x.double().flatten().abs().sort(descending=True).values
    rank = torch.arange(1, ordered.numel() + 1, dtype=torch.float64)
    return float((ordered**2 / (2 * ordered.numel() / rank).log()).max())


@properties
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60))
def test_proxy_is_the_smallest_that_covers_the_tail(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    proxy = variance_proxy(x)
    magnitudes = sorted(map(abs, values))

    def covers(sigma2: float) -> bool:
        shares = [(t, sum(v >= t for v in magnitudes) / len(values)) for t in magnitudes]
        return all(share <= 2 * math.exp(-t * t / sigma2) for t, share in shares)

    if magnitudes[-1] ** 2 < 1e-300:
        assert proxy < 1e-299
        return
    assert covers(proxy * (1 + 1e-12))
    assert not covers(proxy * (1 - 1e-9))


LAWS = {
    "gaussian": lambda n: gaussian(n, seed=1),
    "uniform": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(2)) * 2 - 1,
    "heavy": lambda n: gaussian(n, seed=3) ** 3,
    "one outlier": lambda n: torch.cat([gaussian(n - 1, seed=4), torch.tensor([1e4])]),
    "signs": lambda n: gaussian(n, seed=5).sign(),
    "constant": lambda n: torch.full((n,), -3.0),
    "mostly zero": lambda n: gaussian(n, seed=6) * (torch.arange(n) % 50 == 0),
    "tiny": lambda n: gaussian(n, seed=7) * 1e-30,
    "two scales": lambda n: torch.where(
        torch.arange(n) % 2 == 0, gaussian(n, seed=8), 7.9 + 1e-4 * gaussian(n, seed=9)
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("n", [4097, 50_001])
def test_proxy_is_that_of_the_sorted_entries(law: str, n: int) -> None:
    x = LAWS[law](n)
    assert variance_proxy(x) == pytest.approx(proxy_by_sorting(x), rel=1e-12)
    assert variance_proxy(x.double()) == pytest.approx(proxy_by_sorting(x), rel=1e-12)


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_proxy_of_a_gaussian(std: float, seed: int) -> None:
    """At most 2s² but for the sample's extremes, and above s² as soon as t = 3s is seen.

    With N = 10⁵ the k-th largest magnitude passes (1 + η)·2s²·ln(2N/k) with probability at most
    C(N, k)·(k/2N)^((1+η)k) ≤ (e/2)^k·(k/2N)^(ηk), as Pr(|x| > t) ≤ exp(-t²/2s²): at η = 0.25
    that is 0.07 for k = 1 and 0.006 for k = 2.
    """
    proxy = variance_proxy(gaussian(100_000, seed=seed, std=std))
    assert std**2 <= proxy <= 2 * std**2 * 1.25


@properties
@given(st.integers(0, 10_000), st.sampled_from([0.25, 2.0, 1024.0]), st.booleans())
def test_proxy_is_scale_equivariant(seed: int, factor: float, negate: bool) -> None:
    x = gaussian(5000, seed=seed)
    scaled = -factor * x if negate else factor * x
    assert variance_proxy(scaled) == pytest.approx(factor**2 * variance_proxy(x), rel=1e-12)


def test_proxy_of_constants() -> None:
    """|x| = c gives share 1 at t = c, so 1 = 2·exp(-c²/σ²)."""
    assert variance_proxy(torch.zeros(3, 4)) == 0.0
    assert variance_proxy(torch.full((3, 4), 2.0)) == pytest.approx(4 / math.log(2))
    assert variance_proxy(torch.full((100, 100), -2.0)) == pytest.approx(4 / math.log(2))
    assert variance_proxy(torch.tensor(2.0)) == pytest.approx(4 / math.log(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_proxy_of_other_dtypes(dtype: torch.dtype) -> None:
    x = gaussian(50, 200, seed=0).to(dtype)
    assert variance_proxy(x) == pytest.approx(proxy_by_sorting(x), rel=1e-12)


# --- Lemma D.2, Fact J.5, Lemma D.3 over many seeds -------------------------------------------


def large_counts(n: int, d: int, std: float, threshold: float) -> Tensor:
    """|supp(M^(L))| for SEEDS Gaussian matrices."""
    counts = [int((gaussian(n, d, seed=s, std=std).abs() > threshold).sum()) for s in range(SEEDS)]
    return torch.tensor(counts, dtype=torch.float64)


CASES = [(1024, 8, 0.5, 0.3), (512, 16, 0.7, 0.8), (2048, 4, 1.0, 0.9)]  # n, d, std, c


@pytest.mark.parametrize(("n", "d", "std", "c"), CASES)
def test_number_of_large_entries(n: int, d: int, std: float, c: float) -> None:
    """Lemma D.2 holds, and the counts are those of the law (so that holding means something)."""
    threshold = log_threshold(n, c)
    counts = large_counts(n, d, std, threshold)
    bound = expected_large_entries(n, d, threshold, 2 * std**2)
    share = gaussian_tail(threshold, std)
    truth = n * d * share
    error = math.sqrt(n * d * share * (1 - share) / SEEDS)
    assert abs(float(counts.mean()) - truth) <= 4 * error
    assert float(counts.mean()) + 4 * error <= bound
    assert bound == pytest.approx(2 * d * n ** (1 - c / (2 * std**2)))


@pytest.mark.parametrize("mean", [2.0, 6.0, 20.0])
@pytest.mark.parametrize("delta", [0.3, 0.7, 1.0, 1.6, 2.5])
def test_chernoff_covers_the_counts(mean: float, delta: float) -> None:
    """Fact J.5 with the true mean, where it is sharp: the threshold with that expected count."""
    n, d = 256, 8
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if n * d * gaussian_tail(middle, 1.0) > mean else (low, middle)
    counts = large_counts(n, d, 1.0, low)
    bound = chernoff_tail(mean, (1 + delta) * mean)
    seen = float((counts >= (1 + delta) * mean).double().mean())
    assert seen <= bound + 4 * math.sqrt(bound * (1 - bound) / SEEDS)


@pytest.mark.parametrize(("n", "d", "std", "c"), CASES)
def test_large_entries_stay_below_n_to_the_alpha(n: int, d: int, std: float, c: float) -> None:
    """Lemma D.3, with its condition: α > 1 - c/σ² (plus the constant's ln(2d)/ln n)."""
    threshold, proxy = log_threshold(n, c), 2 * std**2
    counts = large_counts(n, d, std, threshold)
    bound = expected_large_entries(n, d, threshold, proxy)
    alpha = support_exponent(1.3 * bound, n)
    limit = chernoff_tail(bound, n**alpha)
    exceeding = float((counts > n**alpha).double().mean())
    assert exceeding <= limit + 4 * math.sqrt(limit * (1 - limit) / SEEDS)
    too_small = support_exponent(0.5 * float(counts.min()), n)
    assert too_small < 1 - c / proxy + math.log(2 * d) / math.log(n)
    assert bool((counts > n**too_small).all())  # "there exists α" is not "every α"


@properties
@given(st.floats(0, 60), st.floats(0, 120))
def test_chernoff_tail_formula(mean: float, count: float) -> None:
    tail = chernoff_tail(mean, count)
    if count <= mean:
        assert tail == 1.0
    elif mean == 0:
        assert tail == pytest.approx(math.exp(-count / 3))
    else:
        delta = count / mean - 1
        power = delta**2 if delta <= 1 else delta
        assert tail == pytest.approx(math.exp(-power * mean / 3), rel=1e-6, abs=1e-300)


@pytest.mark.parametrize(
    ("mean", "count", "exponent"),
    [(3, 3, 0), (3, 4.5, 0.25), (3, 6, 1), (3, 9, 2), (3, 7.5, 1.5), (0, 3, 1), (8, 2, 0)],
)
def test_chernoff_tail_by_hand(mean: float, count: float, exponent: float) -> None:
    assert chernoff_tail(mean, count) == pytest.approx(math.exp(-exponent))


def test_chernoff_tail_exceeds_the_poisson_tail() -> None:
    """A bound from above for any law of independent indicators; Poisson is their limit."""
    for mean in (0.5, 3.0, 12.0):
        below = 0.0
        for count in range(60):
            assert 1 - below <= chernoff_tail(mean, count) + 1e-12
            below += math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1))


# --- Theorem D.4: the measured work exponent --------------------------------------------------


def exact_pairs(n: int, d: int, std: float, threshold: float, seed: int) -> int:
    rows, keys = (
        int((largest_entries(gaussian(n, d, seed=2 * seed + side, std=std)) > threshold).sum())
        for side in range(2)
    )
    return rows * n + (n - rows) * keys


def slope(xs: list[float], ys: list[float]) -> float:
    x, y = torch.tensor([xs, ys], dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def test_exact_pairs_are_those_of_the_support_basis() -> None:
    n, d, threshold = 64, 4, 2.0
    query, key = (gaussian(n, d, seed=2 * 3 + side) for side in range(2))
    large, _ = support_basis(query, key, threshold)
    assert 0 < exact_pairs(n, d, 1.0, threshold, seed=3) == int((large != 0).sum()) < n * n


@pytest.mark.parametrize(("std", "c"), [(0.7, 0.5), (0.7, 0.6), (1.0, 0.9)])
def test_work_exponent(std: float, c: float) -> None:
    """Pairs computed exactly at T = sqrt(c·ln n) grow like n^(1+α), α = 1 - c/σ², or slower."""
    d, sizes = 4, [2**e for e in range(10, 18)]
    alpha = 1 - c / (2 * std**2)
    measured, truth = [], []
    for n in sizes:
        threshold = log_threshold(n, c)
        row = 1 - (1 - gaussian_tail(threshold, std)) ** d
        repeats = math.ceil(100 / (n * row))
        pairs = [exact_pairs(n, d, std, threshold, seed) for seed in range(repeats)]
        assert max(pairs) <= 2 * n * expected_large_entries(n, d, threshold, 2 * std**2)
        measured.append(math.log(sum(pairs) / repeats))
        truth.append(math.log(n * n * (2 * row - row * row)))
    logs = [math.log(n) for n in sizes]
    # At least 200 large rows for each n: log(pairs) has noise 1/sqrt(200), and the slope over the
    # eight sizes has that over sqrt(Σ(x - x̄)²) = ln(2)·sqrt(42).
    noise = 1 / math.sqrt(200) / (math.log(2) * math.sqrt(42))
    assert abs(slope(logs, measured) - slope(logs, truth)) <= 4 * noise
    assert slope(logs, truth) <= 1 + alpha
    assert 1 + alpha - 0.15 <= slope(logs, measured) <= 1 + alpha + 4 * noise


# --- thresholds -------------------------------------------------------------------------------


@properties
@given(st.integers(1, 10**6), st.integers(1, 256), st.floats(1e-3, 1e3), st.floats(0.01, 1.0))
def test_sharpest_threshold_is_sharp(n: int, d: int, proxy: float, alpha: float) -> None:
    threshold = sharpest_threshold(n, d, proxy, alpha)
    assert expected_large_entries(n, d, threshold, proxy) == pytest.approx(n**alpha, rel=1e-9)
    assert expected_large_entries(n, d, threshold * 0.99, proxy) > n**alpha


def test_log_threshold_and_exponent() -> None:
    assert log_threshold(1000) == pytest.approx(math.sqrt(math.log(1000)))
    assert log_threshold(1000, 0.25) == pytest.approx(log_threshold(1000) / 2)
    assert support_exponent(1, 100) == 0.0
    assert support_exponent(0, 100) == -math.inf
    assert 100 ** support_exponent(37, 100) == pytest.approx(37)


def test_extreme_thresholds_do_not_overflow() -> None:
    assert expected_large_entries(10, 10, 1e200, 1.0) == 0.0
    assert expected_large_entries(10, 10, 1.0, 0.0) == 0.0
    assert chernoff_tail(1e200, 2.1e200) == 0.0


def test_threshold_from_data_keeps_its_promise() -> None:
    """The fitted proxy covers the sample, so that at most n^α entries per matrix are large."""
    query, key = gaussian(3, 500, 16, seed=1), gaussian(3, 700, 16, seed=2, std=2.0)
    for alpha in (0.25, 0.5, 0.9):
        threshold = sub_gaussian_threshold(query, key, alpha)
        each = [sharpest_threshold(x.shape[-2], 16, variance_proxy(x), alpha) for x in (query, key)]
        assert threshold == max(each) == each[1]
        assert sub_gaussian_threshold(key, query, alpha) == threshold
        for x in (query, key):
            assert int((x.abs() > threshold).sum()) / 3 <= x.shape[-2] ** alpha


def test_threshold_of_zeros_is_usable() -> None:
    zeros = torch.zeros(8, 4)
    assert large_rows(zeros, sub_gaussian_threshold(zeros, zeros)).numel() == 0


# --- bad input --------------------------------------------------------------------------------

X = torch.ones(4, 2)
BAD: list[tuple[str, Any]] = [
    ("alpha", lambda: sharpest_threshold(4, 2, 1.0, 0.0)),
    ("alpha", lambda: sharpest_threshold(4, 2, 1.0, 1.5)),
    ("alpha", lambda: sub_gaussian_threshold(X, X, math.nan)),
    ("alpha", lambda: EntryProfile.of(X, alpha=-0.5)),
    (r"\bc\b", lambda: log_threshold(10, 0.0)),
    (r"\bc\b", lambda: log_threshold(10, math.inf)),
    (r"\bn\b", lambda: log_threshold(1)),
    (r"\bn\b", lambda: support_exponent(3, 1)),
    (r"\bn\b", lambda: expected_large_entries(-1, 2, 1.0, 1.0)),
    (r"\bd\b", lambda: expected_large_entries(1, 2.5, 1.0, 1.0)),  # type: ignore[arg-type]
    ("count", lambda: support_exponent(-1, 10)),
    ("count", lambda: chernoff_tail(1.0, math.nan)),
    ("mean", lambda: chernoff_tail(-1.0, 2.0)),
    ("proxy", lambda: expected_large_entries(1, 2, 1.0, -1.0)),
    ("proxy", lambda: sharpest_threshold(4, 2, math.inf, 0.5)),
    ("threshold", lambda: expected_large_entries(1, 2, 0.0, 1.0)),
    ("threshold", lambda: EntryProfile.of(X, threshold=-1.0)),
    ("threshold", lambda: EntryProfile.of(X, threshold=math.inf)),
    (r"x .*got list", lambda: variance_proxy([1.0])),  # type: ignore[arg-type]
    (r"x .*torch.int64", lambda: variance_proxy(torch.tensor([1]))),
    (r"x has shape \(0, 3\)", lambda: variance_proxy(torch.ones(0, 3))),
    (r"x has 1 non-finite", lambda: variance_proxy(torch.tensor([1.0, math.nan]))),
    (r"query has shape \(3,\)", lambda: EntryProfile.of(torch.ones(3))),
    ("key has 2 non-finite", lambda: EntryProfile.of(X, torch.tensor([[math.inf, math.nan]]))),
    ("key has 3 columns", lambda: EntryProfile.of(X, torch.ones(4, 3))),
    ("key has 3 columns", lambda: sub_gaussian_threshold(X, torch.ones(4, 3))),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_named(message: str, call: Any) -> None:
    with pytest.raises(InputError, match=message):
        call()
