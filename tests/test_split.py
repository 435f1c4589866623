"""Appendix B and the facts of Appendix J on supports: the paper's statements as properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import gaussian
from paper_cases import disjoint_matrices, integer_matrix, properties
from supportbasis.errors import InputError
from supportbasis.problem.problem import largest_entries
from supportbasis_studies.dense_splits import (
    are_disjoint,
    is_support_basis,
    large_rows,
    split,
    split_entries,
    support_basis,
    support_basis_entries,
    support_size,
)

BOTH = pytest.mark.parametrize("basis", [support_basis, support_basis_entries])


@st.composite
def query_key(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    n, m, d = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    threshold = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 3.5, 9.0]))
    return draw(integer_matrix(n, d)), draw(integer_matrix(m, d)), threshold


# --- Definition B.1, Fact B.2, Definition B.5 -------------------------------------------------


@properties
@given(disjoint_matrices())
def test_parts_of_a_matrix_are_disjoint_until_two_overlap(parts: list[Tensor]) -> None:
    assert are_disjoint(*parts)
    assert is_support_basis(parts, sum(parts[1:], parts[0]))
    for first, second in itertools.combinations(range(len(parts)), 2):
        if support_size(parts[first]) == 0:
            continue
        spoiled = [part.clone() for part in parts]
        row, column = parts[first].nonzero()[0].tolist()
        spoiled[second][row, column] = 1.0
        assert not are_disjoint(*spoiled)
        assert not is_support_basis(spoiled, sum(spoiled[1:], spoiled[0]))


def test_overlap_that_cancels_in_the_sum_is_still_overlap() -> None:
    assert not are_disjoint(torch.tensor([[1.0]]), torch.tensor([[-1.0]]))


def test_a_support_basis_must_sum_to_the_whole() -> None:
    parts = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])]
    assert is_support_basis(parts, torch.tensor([[1.0, 2.0]]))
    assert not is_support_basis(parts, torch.tensor([[1.0, 2.0 + 2.0**-20]]))
    assert not is_support_basis(parts, torch.tensor([[1.0, math.nan]]))


@properties
@given(disjoint_matrices(parts=2))
def test_exp_of_a_disjoint_sum(parts: list[Tensor]) -> None:
    """Fact B.2. Each position is exp(z) + exp(0) - 1: two roundings of numbers below e⁴ + 1."""
    b, c = parts
    atol = 2 * (math.exp(4) + 1) * torch.finfo(torch.float64).eps
    torch.testing.assert_close((b + c).exp(), b.exp() + c.exp() - 1, rtol=0, atol=atol)


def test_exp_of_an_overlapping_sum_is_not_additive() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    assert abs((one + one).exp() - (one.exp() + one.exp() - 1)).item() > 1


# --- Definition B.3: the split ----------------------------------------------------------------


@properties
@given(query_key())
def test_split_by_rows_moves_whole_rows(case: tuple[Tensor, Tensor, float]) -> None:
    x, _, threshold = case
    large, small = split(x, threshold)
    assert torch.equal(large + small, x)
    rows = [i for i, row in enumerate(x.tolist()) if max(map(abs, row)) > threshold]
    assert large_rows(x, threshold).tolist() == rows
    for i in range(x.shape[0]):
        whole, empty = (large, small) if i in rows else (small, large)
        assert torch.equal(whole[i], x[i])
        assert not empty[i].any()


@properties
@given(query_key())
def test_split_by_entries_as_printed(case: tuple[Tensor, Tensor, float]) -> None:
    x, _, threshold = case
    large, small = split_entries(x, threshold)
    for i, j in itertools.product(*map(range, x.shape)):
        value = x[i, j].item()
        expected = (value, 0.0) if abs(value) > threshold else (0.0, value)
        assert (large[i, j].item(), small[i, j].item()) == expected


def test_an_entry_equal_to_the_threshold_is_small() -> None:
    x = torch.tensor([[-2.0, 1.0], [2.0, 0.0], [0.0, math.nextafter(2.0, 3.0)]]).double()
    x[2, 1] = math.nextafter(2.0, 3.0)
    assert large_rows(x, 2.0).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_threshold_is_not_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    """0.35 rounded to the dtype is larger or smaller than 0.35; either way |small| ≤ T holds."""
    near = torch.tensor(0.35, dtype=dtype)
    zero = torch.zeros((), dtype=dtype)
    x = torch.stack([torch.nextafter(near, zero), near, torch.nextafter(near, zero + 1)])[:, None]
    for part in (split, split_entries):
        large, small = part(x, 0.35)
        assert small.double().abs().max() <= 0.35
        assert large.dtype == small.dtype == dtype
        assert support_size(large) == int((x.double() > 0.35).sum())


@pytest.mark.parametrize(
    "shape", [(7, 5), (3, 7, 5), (2, 3, 7, 5), (0, 5), (7, 0), (2, 7, 0), (2, 0, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_row_maxima(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = gaussian(*shape, seed=0).to(dtype)
    maxima = largest_entries(x)
    assert maxima.shape == x.shape[:-1]
    assert maxima.dtype == dtype
    rows = x.double().reshape(-1, shape[-1]).tolist() if x.numel() else []
    expected = [max(map(abs, row)) for row in rows]
    assert maxima.flatten().tolist() == (expected or [0.0] * maxima.numel())
    large, small = split(x, 1.0)
    assert torch.equal(large + small, x)


def test_row_maxima_pass_non_finite_entries_through() -> None:
    x = torch.tensor([[1.0, math.nan], [-math.inf, 1.0], [0.0, -2.0]])
    maxima = largest_entries(x)
    assert maxima[0].isnan()
    assert maxima[1:].tolist() == [math.inf, 2.0]


def test_split_of_heads_is_the_split_of_each_head() -> None:
    x = gaussian(2, 3, 11, 4, seed=1)
    large, small = split(x, 1.5)
    for head in itertools.product(range(2), range(3)):
        one_large, one_small = split(x[head], 1.5)
        assert torch.equal(large[head], one_large)
        assert torch.equal(small[head], one_small)


# --- Definition B.4, Lemma B.6, Example B.7 ---------------------------------------------------


@BOTH
@properties
@given(case=query_key())
def test_support_basis_of_the_scores(basis, case) -> None:  # type: ignore[no-untyped-def]
    """Lemma B.6, exactly: the entries are integers."""
    query, key, threshold = case
    parts = basis(query, key, threshold)
    assert are_disjoint(*parts)
    assert is_support_basis(parts, query @ key.T)


@properties
@given(query_key())
def test_rows_satisfy_the_printed_definition(case: tuple[Tensor, Tensor, float]) -> None:
    """Definition B.4 verbatim with the row-wise parts gives `support_basis`, zeros included."""
    query, key, threshold = case
    query_l, query_s = split(query, threshold)
    key_l, key_s = split(key, threshold)
    mixed = query_l @ key_l.T + query_s @ key_l.T + query_l @ key_s.T
    large, small = support_basis(query, key, threshold)
    assert torch.equal(large, torch.where(mixed != 0, query @ key.T, 0.0))
    assert torch.equal(small, torch.where(mixed != 0, 0.0, query_s @ key_s.T))


@properties
@given(query_key())
def test_entrywise_large_part_lies_inside_the_row_wise(case: tuple[Tensor, Tensor, float]) -> None:
    query, key, threshold = case
    by_rows, _ = support_basis(query, key, threshold)
    by_entries, _ = support_basis_entries(query, key, threshold)
    inside = by_entries != 0
    assert torch.equal(by_rows[inside], by_entries[inside])


def test_the_worked_example_as_printed() -> None:
    """Example B.7: c, k > T and every other entry below T."""
    threshold = 2.0
    a, b, c, d, e, f = 1.0, -0.5, 3.0, 0.25, 1.5, -1.25
    g, h, i, j, k, l = 0.75, 1.0, -1.5, 0.5, 5.0, 1.75
    query = torch.tensor([[a, b], [c, d], [e, f]])
    key = torch.tensor([[g, i, k], [h, j, l]]).T
    query_l, query_s = split_entries(query, threshold)
    key_l, key_s = split_entries(key, threshold)
    assert query_l.tolist() == [[0, 0], [c, 0], [0, 0]]
    assert query_s.tolist() == [[a, b], [0, d], [e, f]]
    assert key_l.T.tolist() == [[0, 0, k], [0, 0, 0]]
    assert key_s.T.tolist() == [[g, i, 0], [h, j, l]]
    large = [
        [0, 0, a * k + b * l],
        [c * g + d * h, c * i + d * j, c * k + d * l],
        [0, 0, e * k + f * l],
    ]
    small = [
        [a * g + b * h, a * i + b * j, 0],
        [0, 0, 0],
        [e * g + h * f, e * i + f * j, 0],
    ]
    for basis in (support_basis, support_basis_entries):
        assert [part.tolist() for part in basis(query, key, threshold)] == [large, small]
    assert (query_l @ key_l.T).tolist() == [[0, 0, 0], [0, 0, c * k], [0, 0, 0]]
    assert (query_l @ key_s.T).tolist() == [[0, 0, 0], [c * g, c * i, 0], [0, 0, 0]]
    assert (query_s @ key_l.T).tolist() == [[0, 0, a * k], [0, 0, 0], [0, 0, e * k]]
    assert (query_s @ key_s.T).tolist() == [
        [a * g + b * h, a * i + b * j, b * l],
        [d * h, d * j, d * l],
        [e * g + h * f, e * i + f * j, f * l],
    ]


def test_support_basis_of_heads() -> None:
    query, key = gaussian(2, 3, 9, 4, seed=2), gaussian(2, 3, 7, 4, seed=3)
    for basis in (support_basis, support_basis_entries):
        large, small = basis(query, key, 1.5)
        one_large, one_small = basis(query[1, 2], key[1, 2], 1.5)
        torch.testing.assert_close(large[1, 2], one_large)
        torch.testing.assert_close(small[1, 2], one_small)
        assert 0 < support_size(large) < large.numel()


# --- Lemma B.8, Lemma B.9 ---------------------------------------------------------------------


@BOTH
@properties
@given(case=query_key())
def test_small_scores_are_bounded(basis, case) -> None:  # type: ignore[no-untyped-def]
    """Lemma B.8: ‖A^(s)/d‖∞ ≤ T²."""
    query, key, threshold = case
    _, small = basis(query, key, threshold)
    assert (small / query.shape[-1]).abs().max() <= threshold**2


def test_the_entry_bound_is_attained() -> None:
    x = torch.full((3, 4), 1.5)
    _, small = support_basis(x, x, 1.5)
    assert (small / 4).max() == 1.5**2


@BOTH
@properties
@given(case=query_key())
def test_large_part_is_sparse(basis, case) -> None:  # type: ignore[no-untyped-def]
    """Lemma B.9: |supp(A^(L))| ≤ rows_Q·m + rows_K·n, less the overlap counted twice."""
    query, key, threshold = case
    large, _ = basis(query, key, threshold)
    rows = large_rows(query, threshold).numel()
    keys = large_rows(key, threshold).numel()
    n, m = large.shape
    assert support_size(large) <= rows * m + keys * n - rows * keys


def test_the_sparsity_bound_is_attained() -> None:
    query, key = gaussian(31, 5, seed=4), gaussian(29, 5, seed=5)
    large, _ = support_basis(query, key, 1.8)
    rows, keys = large_rows(query, 1.8).numel(), large_rows(key, 1.8).numel()
    assert rows > 0
    assert keys > 0
    assert support_size(large) == rows * 29 + keys * 31 - rows * keys


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [split, split_entries, large_rows])
@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, "2", None, True])
def test_a_threshold_must_be_positive(function, threshold) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="threshold"):
        function(torch.ones(2, 2), threshold)


@pytest.mark.parametrize("function", [split, split_entries, large_rows])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_entries_must_be_finite(function, value) -> None:  # type: ignore[no-untyped-def]
    x = torch.ones(3, 2)
    x[1, 0] = value
    with pytest.raises(InputError, match=r"\bx\b.*\(1, 0\)"):
        function(x, 1.0)


@BOTH
def test_the_pair_is_checked(basis) -> None:  # type: ignore[no-untyped-def]
    ones = torch.ones(3, 2)
    with pytest.raises(InputError, match=r"key has 3 columns but query has 2"):
        basis(ones, torch.ones(3, 3), 1.0)
    with pytest.raises(InputError, match=r"query has shape \(3,\)"):
        basis(torch.ones(3), ones, 1.0)
    with pytest.raises(
        InputError, match=r"key must be a floating-point torch.Tensor, got torch.int64"
    ):
        basis(ones, torch.ones(3, 2, dtype=torch.int64), 1.0)
    with pytest.raises(InputError, match="threshold"):
        basis(ones, ones, 0.0)
