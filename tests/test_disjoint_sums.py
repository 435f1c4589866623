"""Sums of disjoint matrices (Facts J.1, J.2, J.9), and why Algorithm 3 needs rows and no "-1"."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import gaussian
from paper_cases import disjoint_matrices, integer_matrix, properties
from supportbasis.problem.problem import largest_entries
from supportbasis_studies.dense_splits import (
    split,
    split_entries,
    support_basis,
    support_basis_entries,
    support_size,
)

# --- Facts J.1, J.2, J.9 ----------------------------------------------------------------------


@properties
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_support_of_a_sum(data: st.DataObject, n: int, m: int) -> None:
    """Fact J.1: |supp(A + B)| ≤ |supp A| + |supp B|."""
    a, b = data.draw(integer_matrix(n, m)), data.draw(integer_matrix(n, m))
    assert support_size(a) == sum(v != 0 for row in a.tolist() for v in row)
    assert support_size(a + b) <= support_size(a) + support_size(b)


@properties
@given(disjoint_matrices())
def test_supports_of_a_basis_add_up(parts: list[Tensor]) -> None:
    """Fact J.2: Σ |supp A_k| = |supp A| ≤ n·m."""
    whole = sum(parts[1:], parts[0])
    assert sum(map(support_size, parts)) == support_size(whole) <= whole.numel()


@properties
@given(disjoint_matrices(parts=2), st.integers(1, 6), st.integers(1, 3))
def test_powers_and_norms_of_a_disjoint_sum(parts: list[Tensor], p: int, k: int) -> None:
    """Fact J.9. Integers up to 4^18 and sums of 25 of them are exact in float64."""
    a, b = parts
    assert torch.equal((a + b) ** p, a**p + b**p)
    assert torch.equal(norm_power(a + b, p), norm_power(a, p) + norm_power(b, p))
    assert norm_power(a**k, p) <= norm_power(a, p) ** k


def norm_power(x: Tensor, p: int) -> Tensor:
    """‖x‖_p^p, with absolute values (which the paper's proof of J.9 leaves out)."""
    return (x.abs() ** p).sum()


# --- Algorithm 3: why rows, and why no "-1" ---------------------------------------------------


def literal_algorithm_3(splitter, basis, kernel, query, key, value, threshold):  # type: ignore[no-untyped-def]
    """C₁ + C₂ as printed; `kernel` stands for the polynomial approximation of exp."""
    d = query.shape[-1]
    (_, query_s), (_, key_s) = splitter(query, threshold), splitter(key, threshold)
    large, _ = basis(query, key, threshold)
    return kernel(query_s @ key_s.T / d) @ value + ((large / d).exp() - 1) @ value


def disjoint_rectangles(kernel, query, key, value, threshold):  # type: ignore[no-untyped-def]
    """Large rows × all and small rows × large keys exactly; small × small by the kernel."""
    scores = query @ key.T / query.shape[-1]
    rows, keys = (largest_entries(x) > threshold for x in (query, key))
    small = ~rows[:, None] & ~keys[None, :]
    return torch.where(small, kernel(scores), scores.exp()) @ value


def paper_setting(n: int = 256, d: int = 64) -> tuple[Tensor, Tensor, Tensor, float]:
    query, key, value = (0.1 * gaussian(n, d, seed=seed) for seed in (6, 7, 8))
    return query, key, value, 0.35


def test_the_entrywise_split_makes_algorithm_3_wrong() -> None:
    """With exp itself as the polynomial nothing but the split is at fault."""
    query, key, value, threshold = paper_setting()
    exact = (query @ key.T / 64).exp() @ value
    rounding = 10 * 256 * torch.finfo(torch.float64).eps * value.abs().max()
    by_entries = literal_algorithm_3(
        split_entries, support_basis_entries, torch.exp, query, key, value, threshold
    )
    by_rows = literal_algorithm_3(split, support_basis, torch.exp, query, key, value, threshold)
    assert (by_rows - exact).abs().max() <= rounding
    assert (by_entries - exact).abs().max() > 1e8 * rounding
    (_, query_s), (_, key_s) = split_entries(query, threshold), split_entries(key, threshold)
    overlap = support_basis_entries(query, key, threshold)[0] != 0
    twice = torch.where(overlap, (query_s @ key_s.T / 64).exp() - 1, 0.0) @ value
    torch.testing.assert_close(by_entries - exact, twice, rtol=0, atol=float(rounding))


def test_disjoint_rectangles_need_no_minus_one() -> None:
    """With p(0) ≠ 1 even the row-wise Algorithm 3 errs on A^(L); disjoint rectangles do not."""
    query, key, value, threshold = paper_setting()

    def kernel(z: Tensor) -> Tensor:
        return 1.001 + z + z**2 / 2  # p(0) = 1.001, as a Chebyshev fit has p(0) ≠ 1

    scores = query @ key.T / 64
    large, small = support_basis(query, key, threshold)
    only_large = (large != 0) & (small == 0)
    exact = scores.exp() @ value
    intended = torch.where(only_large, 0.0, kernel(scores) - scores.exp()) @ value
    rounding = 10 * 256 * torch.finfo(torch.float64).eps * float(value.abs().max())
    rectangles = disjoint_rectangles(kernel, query, key, value, threshold)
    torch.testing.assert_close(rectangles - exact, intended, rtol=0, atol=rounding)
    literal = literal_algorithm_3(split, support_basis, kernel, query, key, value, threshold)
    excess = only_large.double() * 0.001 @ value
    torch.testing.assert_close(literal - rectangles, excess, rtol=0, atol=rounding)
    assert excess.abs().max() > 1e6 * rounding
    exactly = disjoint_rectangles(torch.exp, query, key, value, threshold)
    torch.testing.assert_close(exactly, exact, rtol=0, atol=rounding)
