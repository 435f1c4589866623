"""approximate_svd (Theorem E.3) on matrices whose singular values are known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import in_turn
from supportbasis.errors import InputError
from supportbasis.sketch import approximate_svd

FAILURE = 0.1  # of the theorem
SEEDS = 60
# Pr(Bin(60, 0.1) > 16) = 8e-5: more failures than that refute the stated probability.
MOST_FAILURES = 16
EXACT = 1e-12  # float64: a few hundred roundings of 1e-16, with room


@pytest.fixture(autouse=True)
def csr_is_in_beta() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        yield


def orthonormal(n: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(draw).Q


def spectra(k: int, rank: int) -> dict[str, Tensor]:
    number = torch.arange(1, rank + 1, dtype=torch.float64)
    return {
        "flat": torch.ones(rank, dtype=torch.float64),
        "step": torch.where(number <= k, 30.0, 1.0).double(),
        "slow": 1 / number,
        "fast": 0.8**number,
    }


def spread(values: Tensor, n: int, m: int) -> Tensor:
    """Singular vectors that no sketch of coordinates could find fault with."""
    return (orthonormal(n, len(values), 1) * values) @ orthonormal(m, len(values), 2).T


def heavy(values: Tensor, n: int, m: int) -> Tensor:
    """Singular vectors of single coordinates: two in one bucket are lost to a CountSketch."""
    matrix = torch.zeros(n, m, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(n, generator=generator)[: len(values)]
    columns = torch.randperm(m, generator=generator)[: len(values)]
    matrix[rows, columns] = values
    return matrix


def relative_error(a: Tensor, factors: tuple[Tensor, Tensor, Tensor], delta: float) -> float:
    left, values, right = factors
    return float(torch.linalg.norm(a - (left * values) @ right.T)) / delta


@pytest.mark.parametrize(
    ("kind", "make", "sparse"),
    in_turn(["flat", "step", "slow", "fast"], [spread, heavy], [True, False]),
)
@pytest.mark.parametrize(("k", "eps"), [(4, 0.5), pytest.param(1, 1.0, marks=pytest.mark.slow)])
def test_error_is_within_the_theorem(kind, make, k, eps, sparse):
    values = spectra(k, 211)[kind]
    a = make(values, 257, 263)
    delta = float(values[k:].square().sum().sqrt())
    given = a.to_sparse() if sparse else a
    errors = [relative_error(a, approximate_svd(given, k, eps, s), delta) for s in range(SEEDS)]
    assert min(errors) >= 1 - EXACT  # nothing of rank k is closer than the best
    assert sum(error > 1 + eps for error in errors) <= MOST_FAILURES
    # E(error²/Δ² - 1) is near k/ℓ ≤ eps/4: a sketch without signs or with half its rows is not
    mean = sum(error**2 - 1 for error in errors) / SEEDS
    assert mean <= 1.5 * eps / 4


def test_the_binomial_limit_is_what_the_comment_says():
    tail = sum(
        math.comb(SEEDS, i) * FAILURE**i * (1 - FAILURE) ** (SEEDS - i)
        for i in range(MOST_FAILURES + 1, SEEDS + 1)
    )
    assert tail < 1e-4


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    n=st.integers(1, 90),
    m=st.integers(1, 90),
    k=st.integers(1, 6),
    rank=st.integers(0, 8),
    eps=st.sampled_from([0.3, 1.0]),
    layout=st.sampled_from(["dense", "coo", "csr"]),
)
def test_factors_are_orthonormal_whatever_the_rank(n, m, k, rank, eps, layout):
    k, rank = min(k, n, m), min(rank, n, m)
    a = spread(2.0 ** -torch.arange(rank, dtype=torch.float64), n, m)
    given = {"dense": a, "coo": a.to_sparse(), "csr": a.to_sparse_csr()}[layout]
    left, values, right = approximate_svd(given, k, eps, seed=0)
    assert left.shape == (n, k) and values.shape == (k,) and right.shape == (m, k)
    eye = torch.eye(k, dtype=torch.float64)
    torch.testing.assert_close(left.T @ left, eye, atol=EXACT, rtol=0)
    torch.testing.assert_close(right.T @ right, eye, atol=EXACT, rtol=0)
    assert bool((values >= 0).all()) and bool((values.diff() <= 0).all())
    if rank <= k:  # Δ_k = 0: nothing may be lost
        torch.testing.assert_close((left * values) @ right.T, a, atol=EXACT, rtol=0)


def test_layouts_dtypes_and_repeated_entries_agree():
    """One seed means one result: sums of the same terms, in another order."""
    a = spread(spectra(3, 100)["step"], 120, 130)
    coo = a.to_sparse()
    halves = torch.sparse_coo_tensor(
        coo.indices().repeat(1, 2), coo.values().repeat(2) / 2, coo.shape, check_invariants=False
    )
    reference = approximate_svd(coo, 3, 0.5, 7)
    product = (reference[0] * reference[1]) @ reference[2].T
    for other in (a, a.to_sparse_csr(), halves):
        left, values, right = approximate_svd(other, 3, 0.5, 7)
        torch.testing.assert_close((left * values) @ right.T, product, atol=1e-10, rtol=0)
    for dtype in (torch.float32, torch.bfloat16):
        left, values, right = approximate_svd(a.to(dtype), 3, 0.5, 7)
        assert left.dtype == values.dtype == right.dtype == torch.float32


def test_results_depend_on_the_seed_alone_and_leave_the_generator_alone():
    a = spread(spectra(2, 60)["slow"], 80, 90)
    state = torch.get_rng_state()
    first, again, other = (approximate_svd(a, 2, 0.5, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": [[1.0]]}, "a must be a tensor"),
        ({"a": torch.ones(3)}, "a has shape"),
        ({"a": torch.ones(3, 3, dtype=torch.long)}, "a has dtype"),
        ({"a": torch.full((3, 3), math.nan)}, "a has 9 non-finite"),
        ({"a": torch.ones(3, 3).to_mkldnn()}, "a has layout"),
        ({"a": torch.ones(3, 3, requires_grad=True)}, "a requires grad"),
        ({"k": 0}, "k must be an integer"),
        ({"k": 4}, "k is 4"),
        ({"eps": 0.0}, "eps must be"),
        ({"eps": math.nan}, "eps must be"),
        ({"eps": True}, "eps must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**65}, "seed must be"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(InputError, match=words):
        approximate_svd(**{"a": torch.ones(3, 3), "k": 1, "eps": 0.5, "seed": 0, **change})
