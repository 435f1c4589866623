"""Appendices F and G.1-G.3: rows in buckets, and the pieces that they cut from the scores.

Where the printed text does not hold, the test is of its right reading, and says so.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import supportbasis as sb
from cases import qkv
from paper_cases import (
    DTYPES,
    EPS,
    RATIOS,
    buckets_by_hand,
    dyadic_matrix,
    dyadic_pair,
    few,
    head_of,
    properties,
    smallest_by_hand,
)
from supportbasis.errors import InputError
from supportbasis.paper import buckets
from supportbasis.polynomials.powers import normalising_constant
from supportbasis.problem.problem import largest_entries
from supportbasis_studies.dense_splits import (
    are_disjoint,
    bucket_basis,
    bucket_count,
    decompose,
    is_support_basis,
)

# --- Definitions F.1 and G.1: rows in buckets -------------------------------------------------


@properties
@given(
    st.data(),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(RATIOS),
    st.sampled_from(DTYPES),
)
def test_every_row_lies_whole_in_its_bucket(data, n, d, ratio, dtype):
    """Definitions F.1 and G.1, exactly: T_(l-1) <= max < T_l, zero rows in bucket 1."""
    exponents = [-4, 0, 4] if dtype == torch.float16 else [-60, -4, 0, 4, 60]
    x = data.draw(dyadic_matrix(n, d, data.draw(st.sampled_from(exponents)))).to(dtype)
    expected = buckets_by_hand(x, smallest_by_hand(x), ratio)
    parts = decompose(x, ratio)
    assert len(parts) == max(expected)
    assert all(part.dtype == dtype for part in parts)
    for i, l in itertools.product(range(n), range(1, len(parts) + 1)):
        row = parts[l - 1][i]
        assert torch.equal(row, x[i] if l == expected[i] else torch.zeros_like(row))
    assert torch.equal(torch.stack(parts).sum(0), x)
    numbers = buckets.bucket_numbers(largest_entries(x), smallest_by_hand(x), ratio)
    assert numbers.tolist() == expected


@properties
@given(
    st.integers(1, 2**20),
    st.sampled_from([1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 10.0]),
    st.integers(0, 30),
    st.integers(-900, 900),
)
def test_borders_belong_to_the_upper_bucket(smallest, ratio, l, exponent):
    """T_l itself is in bucket l + 1, the number just below it in bucket l."""
    b = smallest * 2.0**exponent
    border = Fraction(b) * Fraction(ratio) ** l
    top = float(border)
    around = [math.nextafter(top, 0.0), top, math.nextafter(top, math.inf)]
    maxima = torch.tensor(around, dtype=torch.float64)
    numbers = buckets.bucket_numbers(maxima, b, ratio).tolist()
    if Fraction(top) == border:  # else T_l is no floating-point number
        assert numbers == [max(l, 1), l + 1, l + 1]
    else:
        assert set(numbers) <= {l, l + 1}
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_edges_are_not_rounded_to_the_dtype(dtype):
    """0.35 is no number of these dtypes; rows on either side of it keep to their side."""
    near, zero = torch.tensor(0.35, dtype=dtype), torch.zeros((), dtype=dtype)
    maxima = torch.stack([torch.nextafter(near, zero), near, torch.nextafter(near, zero + 1)])
    assert buckets.bucket_of(maxima, (0.35, 1.0)).tolist() == (maxima.double() >= 0.35).tolist()


def test_ratios_beyond_float64_still_have_their_buckets():
    """Maxima 1e-200 and 1e200 are 1328 doublings apart, though their quotient overflows."""
    maxima = torch.tensor([1e-200, 1e200], dtype=torch.float64)
    # their quotient is infinite in float64
    assert buckets.bucket_numbers(maxima, 1e-200, 2.0).tolist() == [1, 1329]
    assert bucket_count(1e-200, 1e200, 2.0) == 1329


def test_pieces_need_a_ratio_and_one_dimension():
    with pytest.raises(InputError, match="ratio"):
        decompose(torch.ones(3, 2), 1.0)
    with pytest.raises(InputError, match="they must agree"):
        bucket_basis(torch.ones(3, 2), torch.ones(3, 3), 2.0)


# --- Definition F.2, Example F.3, Lemma F.4 ---------------------------------------------------


@properties
@given(dyadic_pair())
def test_pieces_are_a_support_basis(case):
    """Lemma F.4, exactly: disjoint rectangles of one common b that add up to Q K^T."""
    query, key, ratio = case
    pieces = bucket_basis(query, key, ratio)
    smallest = smallest_by_hand(query, key)
    rows, keys = (torch.tensor(buckets_by_hand(x, smallest, ratio)) for x in (query, key))
    scores = query @ key.T
    for l, l2 in itertools.product(range(len(pieces)), range(len(pieces[0]))):
        inside = (rows == l + 1).unsqueeze(1) & (keys == l2 + 1)
        assert torch.equal(pieces[l][l2], torch.where(inside, scores, 0.0))
    flat = [piece for row in pieces for piece in row]
    assert len(flat) == int(rows.max()) * int(keys.max())
    if len(flat) == 1:
        assert torch.equal(flat[0], scores)
    else:
        assert are_disjoint(*flat)
        assert is_support_basis(flat, scores)


def test_the_two_threshold_example_as_printed():
    """Example F.3: |c|, |k| >= T_1 = 2.5 and every other entry below; T_2 is beyond them all."""
    a, b, c, d, e, f = 1.0, -0.5, -3.0, 0.25, 1.5, -1.25
    g, h, i, j, k, l = 0.75, 1.0, -1.5, 0.5, 5.0, 1.75
    query = torch.tensor([[a, b], [c, d], [e, f]])
    key = torch.tensor([[g, i, k], [h, j, l]]).T
    (a11, a12), (a21, a22) = bucket_basis(query, key, ratio=2.5)
    assert a22.tolist() == [[0, 0, 0], [0, 0, c * k + d * l], [0, 0, 0]]
    assert a21.tolist() == [[0, 0, 0], [c * g + d * h, c * i + d * j, 0], [0, 0, 0]]
    assert a12.tolist() == [[0, 0, a * k + b * l], [0, 0, 0], [0, 0, e * k + f * l]]
    assert a11.tolist() == [
        [a * g + b * h, a * i + b * j, 0],
        [0, 0, 0],
        [e * g + h * f, e * i + f * j, 0],
    ]
    query_1, query_2 = decompose(query, 2.5)
    key_1, key_2 = decompose(key, 2.5)
    assert query_1.tolist() == [[a, b], [0, 0], [e, f]]
    assert query_2.tolist() == [[0, 0], [c, d], [0, 0]]
    assert key_1.T.tolist() == [[g, i, 0], [h, j, 0]]
    assert key_2.T.tolist() == [[0, 0, k], [0, 0, l]]


# --- Lemma F.5 --------------------------------------------------------------------------------


@properties
@given(dyadic_pair())
def test_exponentials_of_the_pieces_add_up_less_the_ones(case):
    """Lemma F.5: exp(QK^T) = sum exp(A^(l,l')) - (m^2 - 1), and only with that subtraction."""
    query, key, ratio = case
    smallest = smallest_by_hand(query, key)
    largest = max(float(query.abs().max()), float(key.abs().max()))
    m = bucket_count(smallest, largest, ratio)
    flat = [piece for row in bucket_basis(query, key, ratio) for piece in row]
    flat += [torch.zeros_like(flat[0])] * (m * m - len(flat))  # one side may have no large row
    assert len(flat) == m * m
    scores = query @ key.T
    unit = 3 / float(scores.abs().max()) if scores.any() else 1.0  # exponents within [-3, 3]
    total = torch.stack([(piece * unit).exp() for piece in flat]).sum(0)
    atol = 2 * (m * m + 1) * (math.exp(3) + m * m) * EPS
    exact = (scores * unit).exp()
    torch.testing.assert_close(total - (m * m - 1), exact, rtol=0, atol=atol)
    torch.testing.assert_close(
        total - exact, torch.full_like(exact, m * m - 1.0), rtol=0, atol=atol
    )


# --- Definition G.1, Fact G.2: how many buckets -----------------------------------------------


@properties
@given(
    st.integers(1, 2**10),
    st.integers(0, 2**20),
    st.sampled_from([1.125, 1.25, 1.5, 2.0, 3.0, 7.3]),
    st.sampled_from([-1000, -20, 0, 20, 900]),
)
def test_the_number_of_buckets_is_the_smallest_cover(low, more, ratio, exponent):
    """Fact G.2: T_m > B >= T_(m-1), which is floor(log_ratio(B/b)) + 1."""
    b, largest = low * 2.0**exponent, (low + more) * 2.0**exponent
    m = bucket_count(b, largest, ratio)
    assert Fraction(b) * Fraction(ratio) ** m > Fraction(largest)
    assert Fraction(b) * Fraction(ratio) ** (m - 1) <= Fraction(largest)
    steps = math.log(largest / b) / math.log(ratio)
    if abs(steps - round(steps)) > 1e-9:
        assert m == math.floor(steps) + 1


def test_one_bucket_where_there_is_nothing_to_divide():
    assert bucket_count(0.0, 0.0, 2.0) == 1
    assert bucket_count(3.0, 3.0, 2.0) == 1
    assert bucket_count(1e-3, 1e3, math.inf) == 1
    assert [part.tolist() for part in decompose(torch.zeros(2, 1), 2.0)] == [[[0], [0]]]


@few
@given(dyadic_pair())
def test_plans_hold_the_buckets_that_are_not_empty(case):
    """Definition G.1 in a plan: its edges are the T_l of the non-empty buckets, B at most."""
    query, key, ratio = case
    head = head_of(query, key, scale=1 / query.shape[1])
    plan = sb.MultiThreshold(ratio).plan_head(head)
    smallest = smallest_by_hand(query, key)
    largest = max(float(query.abs().max()), float(key.abs().max()))
    m = bucket_count(smallest, largest, ratio)
    members = plan.buckets(head)
    for x, edges, sets in zip((query, key), (plan.row_edges, plan.key_edges), members, strict=True):
        numbers = buckets_by_hand(x, smallest, ratio)
        kept = sorted(set(numbers))
        assert len(edges) == len(kept) <= m
        for l, edge, index in zip(kept, edges, sets, strict=True):
            here = range(len(x)) if index is None else index.tolist()
            assert list(here) == [i for i, number in enumerate(numbers) if number == l]
            upper = Fraction(largest)
            if ratio != math.inf and smallest > 0:
                upper = min(upper, Fraction(smallest) * Fraction(ratio) ** l)
            assert edge == pytest.approx(float(upper), rel=4 * EPS, abs=0)
            assert float(x[list(here)].abs().max()) <= edge
    assert len(plan.pairs) == len(plan.row_edges) * len(plan.key_edges) <= m * m
    assert all(pair.rows > 0 and pair.keys > 0 for pair in plan.pairs)


def test_padded_keys_make_no_buckets():
    q, k, v = qkv(1, 1, n=20, d=3)
    mask = torch.arange(20) < 15
    far = k.clone()
    far[..., 15:, :] = 1e6
    far[..., 18:, :] = 1e-6
    plans = [sb.plan(q, x, v, mask, method=sb.MultiThreshold()).heads[0] for x in (k, far)]
    assert plans[0].row_edges == plans[1].row_edges
    assert plans[0].key_edges == plans[1].key_edges
    assert sum(pair.keys for pair in plans[0].pairs if pair.row == 0) == 15


def test_the_smallest_entry_makes_most_buckets_empty():
    """Definition G.1 takes b over entries: 20 thresholds, of which Gaussian rows fill two."""
    q, k, _ = qkv(1, 1, n=4096, d=64)
    largest = max(float(q.abs().max()), float(k.abs().max()))
    by_entry = min(float(q.abs().min()), float(k.abs().min()))
    assert bucket_count(by_entry, largest, 2.0) > 15
    filled = buckets.bucket_numbers(largest_entries(q[0, 0]), by_entry, 2.0).unique()
    plan = sb.plan(q, k, method=sb.MultiThreshold(ratio=2.0)).heads[0]
    for count in (len(filled), len(plan.row_edges), len(plan.key_edges)):
        assert 2 <= count <= 3


# --- Lemma G.3: normalised pieces -------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.3, 2.0, 5.0])
def test_normalised_pieces(ratio):
    """Lemma G.3: A^(T_l,T_l') = C Q^(l) K^(l')^T with entries of at most sqrt(ln n)."""
    n, d = 60, 4
    query, key, _ = qkv(n=n, d=d, seed=1)
    smallest, root = smallest_by_hand(query, key), math.sqrt(math.log(n))
    pieces = bucket_basis(query, key, ratio)
    query_parts = decompose(query, ratio, smallest)
    key_parts = decompose(key, ratio, smallest)
    for l, l2 in itertools.product(range(1, len(query_parts) + 1), range(1, len(key_parts) + 1)):
        edge, other = smallest * ratio**l, smallest * ratio**l2
        normalised = query_parts[l - 1] * root / edge, key_parts[l2 - 1] * root / other
        for part in normalised:
            maxima = largest_entries(part)
            assert (maxima <= root * (1 + 4 * EPS)).all()
            assert (maxima[maxima > 0] >= root / ratio * (1 - 4 * EPS)).all()
        constant = normalising_constant(edge, other, 1 / d, d, n)
        paper = smallest**2 * ratio ** (l + l2) / math.log(n)
        assert constant == pytest.approx(paper, rel=1e-13)
        whole = constant * normalised[0] @ normalised[1].T
        torch.testing.assert_close(whole, pieces[l - 1][l2 - 1], rtol=1e-12, atol=1e-12)
        scores = normalised[0] @ normalised[1].T / d
        assert float(scores.abs().max()) <= math.log(n) * (1 + 1e-12)  # Fact G.6, part 2


def test_the_constant_carries_the_scale():
    """With 1/sqrt(d) in place of 1/d every C grows by sqrt(d); its sign is no matter."""
    paper = normalising_constant(3.0, 5.0, 1 / 16, 16, 100)
    assert paper == pytest.approx(15 / math.log(100))
    assert normalising_constant(3.0, 5.0, 1 / 4, 16, 100) == pytest.approx(4 * paper)
    assert normalising_constant(3.0, 5.0, -1 / 16, 16, 100) == paper
    assert math.isfinite(normalising_constant(3.0, 5.0, 1.0, 16, 1))
