"""Appendix B and the facts of Appendix J on supports: the paper's statements as properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from supportbasis.errors import InputError
from supportbasis.paper.split import (
    are_disjoint,
    is_support_basis,
    large_rows,
    row_maxima,
    split,
    split_entries,
    support_basis,
    support_basis_entries,
    support_size,
)

properties = settings(derandomize=True, deadline=None, max_examples=60)
BOTH = pytest.mark.parametrize("basis", [support_basis, support_basis_entries])


@st.composite
def integer_matrix(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """Small integers in float64: sums and products are exact, zeros and cancellations common."""
    entry = st.integers(-4, 4)
    values = draw(st.lists(entry, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float64).reshape(rows, columns)


@st.composite
def query_key(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    n, m, d = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    threshold = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 3.5, 9.0]))
    return draw(integer_matrix(n, d)), draw(integer_matrix(m, d)), threshold


@st.composite
def disjoint_matrices(draw: st.DrawFn, parts: int | None = None) -> list[Tensor]:
    """A random matrix, each entry given to one of the parts."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = parts or draw(st.integers(2, 4))
    whole = draw(integer_matrix(n, m))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=n * m, max_size=n * m))
    owner = torch.tensor(owners).reshape(n, m)
    return [torch.where(owner == part, whole, 0.0) for part in range(count)]


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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
    assert not is_support_basis(parts, torch.tensor([[1.0, 2.5]]), atol=0.25)
    assert is_support_basis(parts, torch.tensor([[1.0, 2.5]]), atol=0.5)
    assert not is_support_basis(parts, torch.tensor([[1.0, math.nan]]), atol=1e9)


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
    maxima = row_maxima(x)
    assert maxima.shape == x.shape[:-1]
    assert maxima.dtype == dtype
    rows = x.double().reshape(-1, shape[-1]).tolist() if x.numel() else []
    expected = [max(map(abs, row)) for row in rows]
    assert maxima.flatten().tolist() == (expected or [0.0] * maxima.numel())
    large, small = split(x, 1.0)
    assert torch.equal(large + small, x)


def test_row_maxima_pass_non_finite_entries_through() -> None:
    x = torch.tensor([[1.0, math.nan], [-math.inf, 1.0], [0.0, -2.0]])
    maxima = row_maxima(x)
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
    rows, keys = (row_maxima(x) > threshold for x in (query, key))
    small = ~rows[:, None] & ~keys[None, :]
    return torch.where(small, kernel(scores), scores.exp()) @ value


def paper_setting(n: int = 256, d: int = 64) -> tuple[Tensor, Tensor, Tensor, float]:
    query, key, value = (0.1 * gaussian(n, d, seed=seed) for seed in (6, 7, 8))
    return query, key, value, 0.35


def test_the_entrywise_split_makes_algorithm_3_wrong() -> None:
    """Paper-notes error 1, with exp itself as the polynomial: nothing but the split is at fault."""
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
    with pytest.raises(InputError, match=r"key has dtype torch.int64"):
        basis(ones, torch.ones(3, 2, dtype=torch.int64), 1.0)
    with pytest.raises(InputError, match="threshold"):
        basis(ones, ones, 0.0)


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(InputError, match=r"x has shape \(2,\)"):
        row_maxima(torch.ones(2))
    with pytest.raises(InputError, match=r"x must be a torch\.Tensor, got list"):
        split([[1.0]], 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one matrix"):
        large_rows(torch.ones(2, 2, 2), 1.0)
    with pytest.raises(InputError, match="at least two"):
        are_disjoint(torch.ones(2))
    with pytest.raises(InputError, match=r"matrices\[1\] has shape \(3,\)"):
        are_disjoint(torch.ones(2), torch.ones(3))
    with pytest.raises(InputError, match="whole has shape"):
        is_support_basis([torch.zeros(2), torch.ones(2)], torch.ones(3))
    with pytest.raises(InputError, match="atol"):
        is_support_basis([torch.zeros(2), torch.ones(2)], torch.ones(2), atol=math.nan)
