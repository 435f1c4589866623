"""Appendices F, G and I: row buckets, powers of polynomials, and what is proved of their errors.

Where the printed text does not hold, the test is of its right reading, and says so.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import supportbasis as sb
from cases import beyond, dense_attention, max_error, qkv
from supportbasis.accuracy import reference
from supportbasis.accuracy.bounds import distortion
from supportbasis.components import ExactSum, PowerSum, evaluate
from supportbasis.engine import jensen
from supportbasis.errors import InputError
from supportbasis.methods import multi_threshold
from supportbasis.paper import buckets
from supportbasis.paper.split import are_disjoint, is_support_basis, row_maxima, support_size
from supportbasis.plans import BucketPair, ExactHead, HeadPlan, Plan, supports
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials.powers import (
    INNER_REACH,
    LARGEST_POWER,
    PowerKernel,
    normalising_constant,
    smallest_power,
)
from supportbasis.problem.problem import Head
from supportbasis.problem.validation import attention_problem, kernel_problem

EPS = torch.finfo(torch.float64).eps
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RATIOS = [1.25, 1.5, 2.0, 3.0, 7.3, math.inf]
properties = settings(derandomize=True, deadline=None, max_examples=100)
few = settings(derandomize=True, deadline=None, max_examples=40)  # those that make plans


@st.composite
def dyadic_matrix(draw, rows: int, columns: int, exponent: int = 0) -> Tensor:
    """Integers up to 9 times a power of two: exact in every dtype, with zero rows, equal maxima,
    and maxima at b 2^l, b 3^l and b 1.5^l."""
    count = rows * columns
    entries = draw(st.lists(st.integers(-9, 9), min_size=count, max_size=count))
    whole = torch.tensor(entries, dtype=torch.float64).reshape(rows, columns)
    kept = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    whole[~torch.tensor(kept, dtype=torch.bool)] *= draw(st.sampled_from([0.0, 1.0]))
    return whole * 2.0**exponent


@st.composite
def dyadic_pair(draw) -> tuple[Tensor, Tensor, float]:
    n, m, d = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    query_exponent = draw(st.sampled_from([-450, -4, 0, 0, 0, 3, 450]))
    key_exponent = query_exponent + draw(st.integers(-3, 3))  # products stay within float64
    query = draw(dyadic_matrix(n, d, query_exponent))
    return query, draw(dyadic_matrix(m, d, key_exponent)), draw(st.sampled_from(RATIOS))


def bucket_by_hand(maximum: float, smallest: float, ratio: float) -> int:
    """The l >= 1 with b ratio^(l-1) <= maximum < b ratio^l, in rational numbers."""
    if maximum == 0 or ratio == math.inf:
        return 1
    number, upper = 1, Fraction(smallest) * Fraction(ratio)
    while upper <= Fraction(maximum):
        number, upper = number + 1, upper * Fraction(ratio)
    return number


def buckets_by_hand(x: Tensor, smallest: float, ratio: float) -> list[int]:
    return [bucket_by_hand(float(t), smallest, ratio) for t in x.double().abs().amax(1)]


def smallest_by_hand(*matrices: Tensor) -> float:
    maxima = [float(t) for x in matrices for t in x.double().abs().amax(1)]
    return min((t for t in maxima if t > 0), default=0.0)


def head_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Head:
    return attention_problem(q, k, v, mask, 0.0, is_causal, scale, False).head(0, 0)


def log_weights(head: Head, plan: HeadPlan) -> Tensor:
    """Logarithms of the weights that a plan gives to all pairs, by the dense reference."""
    weight, top = reference.weights(head, plan)
    return weight.log() + top.unsqueeze(1)


def exact_head_plan(head: Head) -> HeadPlan:
    return ExactHead(n=head.n, m=head.m, cost=1.0, speedup=1.0)


def norm(x: Tensor, p: float) -> float:
    return float(x.abs().max() if p == math.inf else (x.abs() ** p).sum() ** (1 / p))


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
    parts = buckets.decompose(x, ratio)
    assert len(parts) == max(expected)
    assert all(part.dtype == dtype for part in parts)
    for i, l in itertools.product(range(n), range(1, len(parts) + 1)):
        row = parts[l - 1][i]
        assert torch.equal(row, x[i] if l == expected[i] else torch.zeros_like(row))
    assert torch.equal(torch.stack(parts).sum(0), x)
    numbers = buckets.bucket_numbers(row_maxima(x), smallest_by_hand(x), ratio)
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
    assert buckets.bucket_count(1e-200, 1e200, 2.0) == 1329


def test_decompose_takes_one_matrix_or_says_so():
    x = torch.tensor([[[1.0, 1.0], [4.0, 4.0]], [[8.0, 8.0], [1.0, 1.0]]])
    with pytest.raises(InputError, match="expected one matrix"):
        buckets.decompose(x, 2.0)


def test_decompose_refuses_what_it_cannot_sort():
    with pytest.raises(InputError, match=r"\bx\b"):
        buckets.decompose(torch.ones(3), 2.0)
    with pytest.raises(InputError, match="ratio"):
        buckets.decompose(torch.ones(3, 2), 1.0)
    with pytest.raises(InputError, match="they must agree"):
        buckets.support_basis(torch.ones(3, 2), torch.ones(3, 3), 2.0)


# --- Definition F.2, Example F.3, Lemma F.4 ---------------------------------------------------


@properties
@given(dyadic_pair())
def test_pieces_are_a_support_basis(case):
    """Lemma F.4, exactly: disjoint rectangles of one common b that add up to Q K^T."""
    query, key, ratio = case
    pieces = buckets.support_basis(query, key, ratio)
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
    (a11, a12), (a21, a22) = buckets.support_basis(query, key, ratio=2.5)
    assert a22.tolist() == [[0, 0, 0], [0, 0, c * k + d * l], [0, 0, 0]]
    assert a21.tolist() == [[0, 0, 0], [c * g + d * h, c * i + d * j, 0], [0, 0, 0]]
    assert a12.tolist() == [[0, 0, a * k + b * l], [0, 0, 0], [0, 0, e * k + f * l]]
    assert a11.tolist() == [
        [a * g + b * h, a * i + b * j, 0],
        [0, 0, 0],
        [e * g + h * f, e * i + f * j, 0],
    ]
    query_1, query_2 = buckets.decompose(query, 2.5)
    key_1, key_2 = buckets.decompose(key, 2.5)
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
    m = buckets.bucket_count(smallest, largest, ratio)
    flat = [piece for row in buckets.support_basis(query, key, ratio) for piece in row]
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
    m = buckets.bucket_count(b, largest, ratio)
    assert Fraction(b) * Fraction(ratio) ** m > Fraction(largest)
    assert Fraction(b) * Fraction(ratio) ** (m - 1) <= Fraction(largest)
    steps = math.log(largest / b) / math.log(ratio)
    if abs(steps - round(steps)) > 1e-9:
        assert m == math.floor(steps) + 1


def test_one_bucket_where_there_is_nothing_to_divide():
    assert buckets.bucket_count(0.0, 0.0, 2.0) == 1
    assert buckets.bucket_count(3.0, 3.0, 2.0) == 1
    assert buckets.bucket_count(1e-3, 1e3, math.inf) == 1
    assert [part.tolist() for part in buckets.decompose(torch.zeros(2, 1), 2.0)] == [[[0], [0]]]


@few
@given(dyadic_pair())
def test_plans_hold_the_buckets_that_are_not_empty(case):
    """Definition G.1 in a plan: its edges are the T_l of the non-empty buckets, B at most."""
    query, key, ratio = case
    head = head_of(query, key, scale=1 / query.shape[1])
    plan = sb.MultiThreshold(ratio).plan_head(head)
    smallest = smallest_by_hand(query, key)
    largest = max(float(query.abs().max()), float(key.abs().max()))
    m = buckets.bucket_count(smallest, largest, ratio)
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
    assert buckets.bucket_count(by_entry, largest, 2.0) > 15
    filled = buckets.bucket_numbers(row_maxima(q[0, 0]), by_entry, 2.0).unique()
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
    pieces = buckets.support_basis(query, key, ratio)
    query_parts = buckets.decompose(query, ratio, smallest)
    key_parts = buckets.decompose(key, ratio, smallest)
    for l, l2 in itertools.product(range(1, len(query_parts) + 1), range(1, len(key_parts) + 1)):
        edge, other = smallest * ratio**l, smallest * ratio**l2
        normalised = query_parts[l - 1] * root / edge, key_parts[l2 - 1] * root / other
        for part in normalised:
            maxima = row_maxima(part)
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


# --- Fact G.4: powers of approximations -------------------------------------------------------


@properties
@given(st.integers(1, 9), st.floats(1e-3, 1e3), st.floats(0, 1), st.integers(0, 999))
def test_power_of_a_perturbed_matrix(p, size, share, seed):
    """Fact G.4: |A^p - B^p| <= p beta^(p-1) eps for integers p."""
    a, noise, _ = qkv(n=6, d=6, scale=size, seed=seed)
    b = a + share * noise
    beta, epsilon = max(norm(a, math.inf), norm(b, math.inf)), norm(a - b, math.inf)
    bound = p * beta ** (p - 1) * epsilon
    assert norm(a**p - b**p, math.inf) <= bound + 4 * p * EPS * beta**p


@pytest.mark.parametrize("p", [1, 2, 5, 12])
def test_the_power_bound_is_attained_in_the_limit(p):
    beta, epsilon = 1.5, 1e-7
    change = beta**p - (beta - epsilon) ** p
    assert change == pytest.approx(p * beta ** (p - 1) * epsilon, rel=1e-5)


def test_the_power_bound_needs_powers_above_one():
    """The paper's C is real and often below 1, where the derivative has no bound: 1 > 0.5."""
    p, a, b = 0.5, 1.0, 0.0
    assert abs(a**p - b**p) > p * max(a, b) ** (p - 1) * abs(a - b)


KERNELS = [
    PowerKernel(power, getattr(polynomials, kind)(degree, reach))
    for power in (2, 4, 10, 64)
    for kind in ("taylor", "chebyshev", "minimax")
    for degree in (0, 1, 2, 3)
    for reach in (0.05, 0.5)
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_certified_ratio_of_a_power(kernel):
    """Fact G.4 relatively: log(weight / e^z) is within p log_ratio, so errors stay below
    (1 + eps0)^p - 1; and absolutely, as printed: below p beta^(p-1) eps0."""
    p, poly = kernel.power, kernel.polynomial
    z = torch.linspace(-p * poly.bound, p * poly.bound, 20001, dtype=torch.float64)
    log_ratio = kernel.log(z) - z
    low, high = kernel.log_ratio
    rounding = 8 * p * EPS
    assert low - rounding <= float(log_ratio.min()) <= low + 1e-2 * (high - low) + rounding
    assert high - 1e-2 * (high - low) - rounding <= float(log_ratio.max()) <= high + rounding
    relative = math.expm1(p * math.log1p(poly.error))
    assert float(log_ratio.expm1().abs().max()) <= relative * (1 + 1e-9) + rounding
    inner, root = poly(z / p) * math.exp(poly.bound), (z / p).exp()
    epsilon, beta = norm(inner - root, math.inf), max(norm(inner, math.inf), norm(root, math.inf))
    error = norm(kernel.log(z).exp() - z.exp(), math.inf)
    assert error <= p * beta ** (p - 1) * epsilon * (1 + 1e-9) + rounding * beta**p


def test_the_relative_form_says_more_about_small_weights():
    """At z = -reach the printed bound exceeds the weight itself; (1 + eps0)^p - 1 does not."""
    power, reach = 16, 0.5
    poly = polynomials.minimax(2, reach)
    relative = math.expm1(power * math.log1p(poly.error))
    assert relative < 0.1
    beta, epsilon = math.exp(reach) * (1 + poly.error), math.exp(reach) * poly.error
    absolute = power * beta ** (power - 1) * epsilon
    assert absolute / math.exp(power * reach) == pytest.approx(relative, rel=0.2)
    assert absolute / math.exp(-power * reach) > 1e5


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_kernel_recertified_on_a_wider_range_is_the_same_function(degree):
    kernel = PowerKernel(6, polynomials.minimax(degree, 0.4))
    assert kernel.on(2.0) is kernel
    wide = kernel.on(4.5)
    z = torch.linspace(-4.5, 4.5, 20001, dtype=torch.float64)
    torch.testing.assert_close(wide.log(z), kernel.log(z), rtol=1e-11, atol=1e-11)
    low, high = wide.log_ratio
    ratio = kernel.log(z) - z
    assert low < 10 * kernel.log_ratio[0] < 0
    slack = 1e-10 + 1e-2 * (high - low)  # the certificate is nearly attained
    assert low - 1e-10 <= float(ratio.min()) <= low + slack
    assert high - slack <= float(ratio.max()) <= high + 1e-10


def test_certified_ratio_of_a_power_whose_polynomial_changes_sign():
    """s(z) = 1 + z is -2 at -3; its square is 4, not 0: the weight is far above e^-6."""
    kernel = PowerKernel(2, polynomials.taylor(1, 3.0))
    z = torch.linspace(-6.0, 6.0, 2001, dtype=torch.float64)
    low, high = kernel.log_ratio
    assert low == -math.inf
    # an even power of a negative value counts too: 7.39 is reached
    assert float((kernel.log(z) - z).max()) <= high + 1e-9


# --- Remark G.5, Fact G.6: ones outside the buckets -------------------------------------------


def test_exponential_of_a_multiple_is_a_power():
    """Fact G.6, part 1 in its right reading: inside each rectangle exp(A/d) = exp(A'/d)^C, and
    nothing outside."""
    n, d, ratio = 40, 3, 2.0
    query, key, _ = qkv(n=n, d=d, scale=1.5, seed=4)
    smallest = smallest_by_hand(query, key)
    rows, keys = (torch.tensor(buckets_by_hand(x, smallest, ratio)) for x in (query, key))
    total = torch.zeros(n, n, dtype=torch.float64)
    for l, l2 in itertools.product(set(rows.tolist()), set(keys.tolist())):
        edges = smallest * ratio**l, smallest * ratio**l2
        constant = normalising_constant(*edges, 1 / d, d, n)
        inside = (rows == l).unsqueeze(1) & (keys == l2)
        total[inside] += (query @ key.T / d / constant).exp()[inside] ** constant
    torch.testing.assert_close(total, (query @ key.T / d).exp(), rtol=1e-12, atol=0)


def test_the_literal_sum_over_pieces_is_wrong_by_the_ones():
    """Remark G.5 redefines p(0) = 0. Taken literally, every piece gives s(0)^p, about 1, to all
    pairs outside it; restricting rows, as the library does, needs no subtraction."""
    q, k, v = qkv(1, 1, n=30, d=3, scale=0.5, seed=2)
    head, scale = head_of(q, k, v, scale=1 / 3), 1 / 3
    kernel = PowerKernel(4, polynomials.chebyshev(1, 0.2))
    plan = sb.plan(q, k, v, scale=scale, method=sb.MultiThreshold(2.0))
    one = plan.heads[0]
    one = replace(one, pairs=tuple(replace(pair, kernel=kernel) for pair in one.pairs))
    result = sb.attention(
        q, k, v, scale=scale, plan=replace(plan, heads=(one,)), return_result=True
    )
    pieces = [p * scale for row in buckets.support_basis(q[0, 0], k[0, 0], 2.0) for p in row]
    count = len(pieces)
    assert count == len(one.pairs) >= 4
    literal = torch.stack([kernel.log(piece).exp() for piece in pieces]).sum(0)
    restricted = kernel.log(torch.stack(pieces).sum(0)).exp()
    at_zero = float(kernel.log(torch.zeros(1, dtype=torch.float64)).exp())
    assert at_zero == pytest.approx(math.cosh(0.2 / math.sqrt(2)) ** 4, rel=1e-9)
    expected = torch.full_like(literal, (count - 1) * at_zero)
    torch.testing.assert_close(literal - restricted, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(log_weights(head, one).exp(), restricted, rtol=1e-12, atol=0)
    output = restricted @ v[0, 0] / restricted.sum(1, keepdim=True)
    torch.testing.assert_close(result.output[0, 0], output, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.lse[0, 0], restricted.sum(1).log(), rtol=0, atol=1e-13)
    exact, _ = dense_attention(q, k, v, scale=scale)
    shrunk = literal @ v[0, 0] / literal.sum(1, keepdim=True)
    minus_ones = (literal - (count - 1)) @ v[0, 0]
    minus_ones = minus_ones / (literal - (count - 1)).sum(1, keepdim=True)
    errors = [max_error(x, exact[0, 0], v) for x in (output, minus_ones, shrunk)]
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] > 5 * errors[0]


# --- Definition G.7: polynomial attention -----------------------------------------------------


def dense_power(q, k, v, power, bias=None, is_causal=False, scale=None):
    """D^-1 (scale Q K^T)^p V on a blackboard: (output, log of the row sums)."""
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weight = (q @ k.mT * scale) ** power
    if bias is not None:
        weight = weight * (bias.double() if bias.dtype == torch.bool else bias.exp())
    if is_causal:
        weight = weight.tril()
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight @ v / total, 0.0), total.squeeze(-1).log()


MASK = torch.arange(41) % 4 != 1
BIAS = torch.linspace(-3, 2, 41, dtype=torch.float64)
POWER_CASES = {
    "plain": ((1, 1), {}, {}),
    "no heads": ((), {}, {}),
    "many leading": ((2, 1, 3), {}, {}),
    "lengths": ((1, 2), {"n": 17, "m": 41}, {}),
    "values": ((1, 2), {"n": 23, "dv": 9}, {}),
    "groups": ((2, 6), {"key_heads": 2, "m": 19}, {"enable_gqa": True}),
    "mask": ((2, 2), {"m": 41}, {"attn_mask": MASK}),
    "bias": ((2, 2), {"m": 41}, {"attn_mask": BIAS}),
    "causal": ((1, 2), {}, {"is_causal": True}),
    "causal, longer": ((1, 2), {"n": 41, "m": 20}, {"is_causal": True}),
    "causal, masked": ((1, 1), {"n": 41}, {"is_causal": True, "attn_mask": MASK}),
    "scaled": ((1, 1), {"scale": 3.0}, {"scale": 0.2}),
}


@pytest.mark.parametrize("power", [2, 4, 10])
@pytest.mark.parametrize("case", POWER_CASES.values(), ids=POWER_CASES)
def test_power_attention_is_the_polynomial_attention_matrix(case, power):
    """Definition G.7, normalised; the certificate has nothing but rounding to bound."""
    leading, shape, call = case
    q, k, v = qkv(*leading, **shape)
    result = sb.attention(q, k, v, method=sb.PowerAttention(power), return_result=True, **call)
    dense = {"bias": call.get("attn_mask"), "is_causal": call.get("is_causal", False)}
    exact, lse = dense_power(q, k, v, power, scale=call.get("scale"), **dense)
    assert result.output.shape == exact.shape
    assert float(result.certificate.bound.max()) < 1e-10
    assert max_error(result.output, exact, v) <= float(result.certificate.bound.max())
    torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e-10)


def test_power_attention_of_a_query_without_weights():
    q, k, v = qkv(n=3, d=2)
    q[1] = 0.0
    with pytest.warns(UserWarning, match="no usable denominator"):
        result = sb.attention(q, k, v, method=sb.PowerAttention(2), return_result=True)
    exact, _ = dense_power(q, k, v, 2)
    torch.testing.assert_close(result.output, exact, rtol=0, atol=1e-14)
    assert result.output[1].tolist() == [0, 0]
    assert result.lse[1] == -math.inf
    assert int(result.certificate.invalid_rows) == 1


@pytest.mark.parametrize("power", [2, 10])
def test_power_attention_bounds_its_rounding(power):
    """Queries nearly orthogonal to all keys: in float32 the scores lose most of their digits."""
    worst = 0.0
    for seed in range(5):
        q, k, v = qkv(1, 1, n=30, d=16, seed=seed)
        k = k - (k @ q[..., :1, :].mT) * q[..., :1, :] / q[..., :1, :].square().sum()
        q = (q[..., :1, :] + 1e-5 * q).float()
        k, v = k.float(), v.float()
        result = sb.attention(q, k, v, method=sb.PowerAttention(power), return_result=True)
        exact, _ = dense_power(q.double(), k.double(), v.double(), power)
        error = max_error(result.output, exact, v)
        assert error <= float(result.certificate.bound)
        worst = max(worst, error)
    assert worst > 1e-3


@pytest.mark.parametrize("bias", [0.0, 3e4])
def test_powers_bound_the_rounding_of_their_logarithms(bias):
    """Log-weights of 3e4 have 2e-3 of rounding in float32: far more than scores and sums."""
    q, k, v = qkv(n=12, m=9, d=4, scale=1.0, dtype=torch.float32)
    weight = torch.full((9,), bias) + torch.linspace(0, 1, 9)

    def sums(dtype):
        head = replace(head_of(q, k, v), key_log_weight=weight, precision=dtype)
        total = evaluate([PowerSum(None, kernel=PowerKernel(2, None))], head, None)
        return total.den.double().log() + total.log_scale.double(), total.noise / total.den

    (given, noise), (exact, _) = sums(torch.float32), sums(torch.float64)
    error = torch.expm1(given - exact).abs()
    assert (error <= noise).all() and noise.max() <= 4 * (bias + 100) * 2**-24 * 1.1 + 2e-5
    assert bias == 0 or error.max() > 1e-4


# --- Lemmas G.8 to G.13: errors of the matrix -------------------------------------------------


def piece_bound(kernel: PowerKernel) -> float:
    """p beta^(p-1) eps0 of one piece, from its certificate (Fact G.4)."""
    poly = kernel.polynomial
    beta = math.exp(poly.bound) * (1 + poly.error)
    return kernel.power * beta ** (kernel.power - 1) * math.exp(poly.bound) * poly.error


def with_polynomial(pair: BucketPair, kind: str) -> BucketPair:
    old = pair.kernel.polynomial
    poly = getattr(polynomials, kind)(old.degree, old.bound)
    return replace(pair, kernel=replace(pair.kernel, polynomial=poly))


def matrix_errors(
    q: Tensor, k: Tensor, method: sb.MultiThreshold, kind: str | None = None
) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """A~ - exp(QK^T / d), and for each piece its mask and its bound; with polynomials of one kind
    in all pieces where it is given."""
    head = head_of(q, k, scale=1 / q.shape[-1])
    plan = method.plan_head(head)
    if kind is not None:
        plan = replace(plan, pairs=tuple(with_polynomial(pair, kind) for pair in plan.pairs))
    row_sets, key_sets = plan.buckets(head)
    pieces = []
    for pair in plan.pairs:
        inside = torch.zeros(head.n, head.m, dtype=torch.bool)
        rows, keys = row_sets[pair.row], key_sets[pair.key]
        rows = torch.arange(head.n) if rows is None else rows
        keys = torch.arange(head.m) if keys is None else keys
        inside[rows.unsqueeze(1), keys] = True
        pieces.append((inside, piece_bound(pair.kernel)))
    exact = (head.query @ head.key.T * head.scale).exp()
    return log_weights(head, plan).exp() - exact, pieces


@pytest.mark.parametrize("ratio", [1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_errors_of_the_matrix(ratio, degree):
    """Lemmas G.8-G.13 in their right reading, with numbers for the O(.): pieces are disjoint, so
    the largest error is at most the largest bound of a piece (G.8; G.9 has one piece), the sum of
    errors at most sum |supp| bound (G.10, G.11), and the l_p error as that of its pieces (G.12),
    hence at most |supp|^(1/p) times the largest bound (G.13)."""
    for seed in range(4):
        q, k, _ = qkv(1, 1, n=24, m=31, d=4, seed=seed)
        q[..., ::6, :] *= 3
        error, pieces = matrix_errors(q, k, sb.MultiThreshold(ratio, degree))
        assert sum(inside.long() for inside, _ in pieces).eq(1).all()
        slack = 1 + 1e-9
        worst = max(bound for _, bound in pieces)
        assert norm(error, math.inf) <= worst * slack
        for inside, bound in pieces:
            assert norm(error[inside], math.inf) <= bound * slack
        for p in (1, 2, 5):
            by_piece = sum(norm(error[inside], p) ** p for inside, _ in pieces)
            assert norm(error, p) ** p == pytest.approx(by_piece, rel=1e-9)
            stated = sum(int(inside.sum()) * bound**p for inside, bound in pieces)
            assert norm(error, p) ** p <= stated * slack
            assert norm(error, p) <= error.numel() ** (1 / p) * worst * slack


def test_the_piece_bound_is_of_the_right_order():
    """Of a few per cent of pairs at the end of the range it is attained within a small factor."""
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)[None, None, :, None]
    error, pieces = matrix_errors(x, x, sb.MultiThreshold(math.inf, 1))
    assert len(pieces) == 1
    assert norm(error, math.inf) >= pieces[0][1] / 4


def test_buckets_lower_the_sum_of_errors_but_not_the_largest():
    """G.8 against G.9, G.10 against G.11: a few large rows set the largest bound either way, but
    without buckets everyone pays it."""
    q, k, _ = qkv(1, 1, n=120, d=4, scale=0.3, seed=3)
    q[..., :3, :] *= 8
    k[..., -3:, :] *= 8
    largest, stated, actual = [], [], []
    for ratio in (2.0, math.inf):
        error, pieces = matrix_errors(q, k, sb.MultiThreshold(ratio, 1), "chebyshev")
        largest.append(max(bound for _, bound in pieces))
        stated.append(sum(int(inside.sum()) * bound for inside, bound in pieces))
        actual.append(norm(error, 1))
    assert largest[0] == pytest.approx(largest[1], rel=1e-9)
    assert stated[0] < stated[1] / 100
    assert actual[0] < actual[1] / 2


def test_signed_errors_may_cancel_where_the_norm_does_not():
    """G.10 leaves the absolute values out of its l_1 norm: a minimax error changes sign."""
    q, k, _ = qkv(1, 1, n=40, d=4, scale=0.4, seed=5)
    error, _ = matrix_errors(q, k, sb.MultiThreshold(2.0, 1))
    assert (error > 0).any() and (error < 0).any()
    assert abs(float(error.sum())) < 0.9 * norm(error, 1)


@properties
@given(st.integers(1, 20), st.integers(1, 8), st.floats(1e-6, 10))
def test_the_p_norm_grows_with_the_pth_root_of_the_pairs(n, p, size):
    """G.13 prints n^2 and proves n^(2/p), which equal errors attain."""
    error = torch.full((n, n), size, dtype=torch.float64)
    error[::2] *= -1
    assert norm(error, p) == pytest.approx(n ** (2 / p) * size, rel=1e-9)
    if n > 1 and p > 1:
        assert norm(error, p) < n**2 * size


def test_powers_do_not_commute_with_differences():
    """G.12 uses |a^k - b^k| <= |a - b|^k. For a = 2, b = 1: 3 > 1; for exp and its fit as well."""
    assert abs(2**2 - 1**2) > abs(2 - 1) ** 2
    z = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64)
    root, poly = z.exp(), polynomials.chebyshev(1, 0.5)
    inner = poly(z) * math.exp(0.5)
    for p, k in itertools.product((1, 2, math.inf), (2, 4)):
        assert norm(root**k - inner**k, p) > norm(root - inner, p) ** k


@properties
@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_powers_of_disjoint_matrices_do(data, n, k, p):
    """What G.12 needs is true of disjoint matrices (Fact J.9), which exp and its fit are not."""
    whole = data.draw(dyadic_matrix(n, n))
    owners = data.draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))
    mine = torch.tensor(owners).reshape(n, n)
    a, b = torch.where(mine, whole, 0.0), torch.where(mine, 0.0, whole)
    if n > 1:
        assert are_disjoint(a, b)
        assert support_size(a) + support_size(b) == support_size(whole)
    assert norm(a**k - b**k, p) <= norm(a - b, p) ** k * (1 + 1e-12)


# --- the power of a pair ----------------------------------------------------------------------


@properties
@given(
    st.one_of(st.floats(0, 1e9), st.integers(0, 200).map(float)),
    st.one_of(st.floats(0, 1e9), st.integers(0, 200).map(float)),
)
def test_the_smallest_power(reach, constant):
    """p is even, at least max(2, C), brings |z / p| within 0.5, and p - 2 would not do."""
    p = smallest_power(reach, constant)

    def serves(power: int) -> bool:
        return power >= max(2, constant) and Fraction(reach) <= Fraction(power) / 2

    assert INNER_REACH == 0.5
    assert isinstance(p, int) and p % 2 == 0
    assert serves(p) and not serves(p - 2)


def test_powers_have_a_limit():
    assert smallest_power(0.0, 0.0) == 2
    assert smallest_power(1e300, 0.0) == smallest_power(1.0, math.inf) == LARGEST_POWER


@few
@given(dyadic_pair(), st.floats(0.01, 3.0))
def test_every_pair_of_a_plan_has_that_power(case, scale):
    query, key, ratio = case
    head = head_of(query, key, scale=scale)
    plan = sb.MultiThreshold(ratio).plan_head(head)
    n = max(head.n, head.m)
    row_sets, key_sets = plan.buckets(head)
    for pair in plan.pairs:
        edges = plan.row_edges[pair.row], plan.key_edges[pair.key]
        constant = normalising_constant(*edges, scale, head.dim, n)
        rows, keys = (
            x if at is None else x[at]
            for x, at in ((query, row_sets[pair.row]), (key, key_sets[pair.key]))
        )
        assert float((rows @ keys.T).abs().max()) * scale <= pair.reach * (1 + 1e-12)
        assert pair.reach <= scale * head.dim * edges[0] * edges[1] * (1 + 1e-12)
        power = smallest_power(pair.reach, constant)
        if power >= LARGEST_POWER:
            assert pair.kernel is None
        else:
            assert pair.kernel.power == power
            assert pair.kernel.polynomial.bound == pair.reach / power <= 0.5
            assert pair.kernel.polynomial.degree == 1


# --- plans are disjoint covers, whatever the data ---------------------------------------------

METHODS = [
    sb.MultiThreshold(),
    sb.MultiThreshold(1.4, 2),
    sb.MultiThreshold(math.inf),
    sb.MultiThreshold(3.0, sketch_size=8),
    sb.PowerAttention(4),
    sb.PowerAttention(2, sketch_size=8),
]


def times_covered(plan: HeadPlan, head: Head) -> Tensor:
    count = torch.zeros(head.n, head.m, dtype=torch.long)
    for group in plan.basis(head):
        rows = torch.arange(head.n) if group.rows is None else group.rows
        for component in group.components:
            keys = torch.arange(head.m) if component.keys is None else component.keys
            assert torch.equal(keys, keys.sort().values)
            count[rows.unsqueeze(1), keys] += 1
    return count


@few
@given(
    st.sampled_from(METHODS),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from([1e-3, 0.2, 1.0, 5.0, 1e3]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_plan_covers_any_data_once(method, dtype, made_for, used_on, size, masked, seed):
    """Lemma F.4 for plans: also on data of another scale, length and mask than they were made
    for; and the output is the sum over that cover."""
    (n, m), (n2, m2) = made_for, used_on
    q, k, v = qkv(1, 1, n=n, m=m, d=2, scale=0.7, dtype=dtype, seed=seed)
    plan = sb.plan(q, k, v, method=method)
    first = head_of(q, k, v)
    assert times_covered(plan.heads[0], first).eq(1).all()
    q, k, v = qkv(1, 1, n=n2, m=m2, d=2, scale=0.7 * size, dtype=dtype, seed=seed + 1)
    k[..., ::3, :] = 0.0
    mask = torch.arange(m2) % 3 != 2 if masked else None
    head = head_of(q, k, v, mask)
    live = torch.ones(m2, dtype=torch.long) if mask is None else mask.long()
    assert times_covered(plan.heads[0], head).eq(live).all()


@pytest.mark.parametrize("size", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_a_reused_plan_computes_its_own_weights(size, masked):
    """The dense reference of the plan on the new data; and its certificate is of the new data."""
    q, k, v = qkv(1, 1, n=31, d=3, scale=0.8)
    plan = beyond(sb.plan(q, k, v, method=sb.MultiThreshold(2.0, 1)))
    q, k, v = qkv(1, 1, n=44, m=29, d=3, scale=0.8 * size, seed=1)
    mask = torch.arange(29) % 3 != 2 if masked else None
    result = sb.attention(q, k, v, attn_mask=mask, plan=plan, return_result=True)
    expected, lse = reference.run_head(head_of(q, k, v, mask), plan.heads[0])
    torch.testing.assert_close(result.output[0, 0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.lse[0, 0], lse, rtol=0, atol=1e-12)
    exact, _ = dense_attention(q, k, v, mask)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_saved_plan_gives_the_same_output(method, tmp_path):
    q, k, v = qkv(1, 2, n=90, d=3, scale=1.4)
    plan = sb.plan(q, k, v, method=method)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.method == method
    for mine, theirs in zip(plan.heads, loaded.heads, strict=True):
        assert theirs.pairs == mine.pairs and theirs.kernel == mine.kernel
        assert (theirs.row_edges, theirs.key_edges) == (mine.row_edges, mine.key_edges)
    other_q, other_k, other_v = qkv(1, 2, n=70, m=50, d=3, scale=1.4, seed=1)
    for x, y, z in ((q, k, v), (other_q, other_k, other_v)):
        given, again = (sb.attention(x, y, z, plan=p) for p in (plan, loaded))
        assert torch.equal(given, again)


def test_small_high_powers_are_exact_beside_sketches():
    """The basis of a sketched plan holds exact components too, one per row bucket."""
    q, k, v = qkv(1, 1, n=64, d=2)
    q[..., :2, :] *= 40
    plan = sb.plan(q, k, v, method=sb.MultiThreshold(2.0, sketch_size=4)).heads[0]
    ways = {pair.kernel is None for pair in plan.pairs}
    assert ways == {True, False}
    assert len(plan.key_edges) > 1
    head = head_of(q, k, v)
    assert times_covered(plan, head).eq(1).all()
    for group in plan.basis(head):
        assert sum(type(component) is ExactSum for component in group.components) <= 1


@pytest.mark.parametrize("ratio", [2.0, 1.3])
@pytest.mark.parametrize("sketch_size", [None, 16])
def test_heavy_tails_make_few_polynomials(sketch_size, ratio, monkeypatch):
    """Hundreds of pairs hold a few tokens each; a polynomial takes longer than their sums."""
    found = []
    original = multi_threshold.best_polynomial
    counted = lambda *x, **y: found.append(x) or original(*x, **y)  # noqa: E731
    monkeypatch.setattr(multi_threshold, "best_polynomial", counted)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.empty(1, 1, 700, 4).cauchy_(generator=generator) for _ in range(3))
    plan = sb.plan(q, k, v, method=sb.MultiThreshold(ratio, sketch_size=sketch_size))
    head = plan.heads[0]
    powers = [pair for pair in head.pairs if pair.kernel is not None]
    assert len(head.pairs) > 100 and len(powers) == len(found) <= 64
    assert times_covered(head, head_of(q, k, v)).eq(1).all()
    if sketch_size is None:
        assert len(powers) == 64
        left = f"{len(head.pairs) - 64} of {len(head.pairs)} bucket pairs, the smallest, are exact"
        assert left in str(plan)
        smallest = min(pair.rows * pair.keys for pair in powers)
        others = [pair.rows * pair.keys for pair in head.pairs if pair.kernel is None]
        assert max(others) <= smallest


def test_pairs_whose_sums_take_long_all_get_a_polynomial(monkeypatch):
    monkeypatch.setattr(multi_threshold, "MOST_POLYNOMIALS", 2)
    q, k, v = qkv(1, 1, n=200, d=3)
    plan = sb.plan(q, k, v, method=sb.MultiThreshold(1.5)).heads[0]
    assert sum(pair.kernel is not None for pair in plan.pairs) == 2
    limit = sorted(pair.rows * pair.keys for pair in plan.pairs)[-4] * 6 - 1
    monkeypatch.setattr(multi_threshold, "POLYNOMIAL_WORK", limit)
    plan = sb.plan(q, k, v, method=sb.MultiThreshold(1.5)).heads[0]
    assert sum(pair.kernel is not None for pair in plan.pairs) >= 4


def test_a_ratio_too_close_to_one_is_refused():
    q, k, _ = qkv(1, 1, n=300, d=3)
    with pytest.raises(InputError, match=r"ratio=1\.0001 .* larger ratio"):
        sb.plan(q, k, method=sb.MultiThreshold(ratio=1.0001))
    few_rows = sb.plan(q[..., :9, :], k[..., :9, :], method=sb.MultiThreshold(ratio=1.0001))
    assert len(few_rows.heads[0].pairs) == 81


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ratio", x) for x in (1, 1.0, 0.5, -2.0, 0, math.nan, -math.inf, True, "2", None)),
        *(("degree", x) for x in (-1, 1.5, True, "1", None)),
        *(("sketch_size", x) for x in (0, -4, 2.0, True, "8", 10**9)),
        *(("seed", x) for x in (-1, 0.5, True, "0", None)),
    ],
)
def test_bad_arguments_of_multi_threshold_are_named(name, value):
    with pytest.raises(InputError, match=rf"^{name} must be .*got {value!r}"):
        sb.MultiThreshold(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("power", x) for x in (0, 1, 3, -2, 2.0, True, "4", None)),
        *(("sketch_size", x) for x in (0, 1.0, True)),
        *(("seed", x) for x in (-1, None)),
    ],
)
def test_bad_arguments_of_power_attention_are_named(name, value):
    with pytest.raises(InputError, match=rf"^{name} must be .*got {value!r}"):
        sb.PowerAttention(**{name: value})


def test_integers_beyond_float64_are_refused_by_name():
    with pytest.raises(InputError, match="ratio"):
        sb.MultiThreshold(ratio=10**400)
    with pytest.raises(InputError, match="power"):
        sb.attention(*qkv(1, 1, n=4), method=sb.PowerAttention(power=10**400))


# --- Definition I.1, Lemmas I.2 and I.4, Theorem I.5, without a sketch ------------------------


@st.composite
def call(draw) -> dict:
    """A small head: any dtype, scale, causality, biases and padding."""
    n, m, d = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 5))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    size = 10 ** draw(st.floats(-3, 0.9))
    q, k, v = qkv(1, 1, n=n, m=m, d=d, scale=size, dtype=dtype, seed=seed)
    if draw(st.booleans()):
        q[..., ::4, :] *= 3  # another bucket
        k[..., ::5, :] = 0.0
    bias = None
    if draw(st.booleans()):
        bias = 3 * torch.randn(m, generator=torch.Generator().manual_seed(seed))
        bias = bias.to(dtype)
        bias[::4] = -math.inf
    return {"q": q, "k": k, "v": v, "attn_mask": bias, "is_causal": draw(st.booleans())}


UNSKETCHED = [
    sb.MultiThreshold(2.0, 0),
    sb.MultiThreshold(2.0, 1),
    sb.MultiThreshold(3.0, 2),
    sb.MultiThreshold(math.inf, 3),
]


@settings(derandomize=True, deadline=None, max_examples=120)
@given(call(), st.sampled_from(UNSKETCHED))
def test_bound_is_never_below_the_true_error(case, method):
    """Theorem I.5 with numbers: max|P - D^-1 A V| <= bound max|V|, in every dtype."""
    q, k, v = case.pop("q"), case.pop("k"), case.pop("v")
    result = sb.attention(q, k, v, method=method, return_result=True, **case)
    exact, _ = dense_attention(q, k, v, case["attn_mask"], case["is_causal"])
    bound = float(result.certificate.bound)
    assert max_error(result.output, exact, v) <= bound <= 2 + 1e-3
    assert int(result.certificate.invalid_rows) == 0


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_bound_is_nearly_attained(degree):
    """Two keys with the smallest and the largest distortion, as far below as above in mass."""
    one = torch.ones(1, 1, dtype=torch.float64)
    keys = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    plan = sb.plan(one, keys[:, None], scale=3.0, method=sb.MultiThreshold(math.inf, degree))
    ratio = plan.heads[0].pairs[0].kernel.log(3 * keys) - 3 * keys
    at = [int(ratio.argmin()), int(ratio.argmax())]
    k, v = keys[at, None], torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    bias = -3 * keys[at] - ratio[at] / 2
    result = sb.attention(one, k, v, attn_mask=bias, scale=3.0, plan=plan, return_result=True)
    exact, _ = dense_attention(one, k, v, bias, scale=3.0)
    bound = float(result.certificate.bound)
    assert 0.95 * bound <= max_error(result.output, exact, v) <= bound


@settings(derandomize=True, deadline=None, max_examples=80)
@given(call(), st.sampled_from(UNSKETCHED))
def test_kernel_sums_are_within_the_bound_of_their_row_sums(case, method):
    """Lemma I.4, row by row: |S - AV|_i <= bound (A1)_i max|V|."""
    q, k, v = case["q"], case["k"], case["v"]
    result = sb.kernel_sum(q, k, v, method=method, return_result=True)
    mean, lse = dense_attention(q, k, v)  # (AV)_i / (A1)_i and ln (A1)_i
    output = result.output.double()
    log_size = output.abs().log() + result.log_scale.double().reshape(1, 1, 1, 1)
    relative = output.sign() * (log_size - lse.unsqueeze(-1)).exp()
    bound = float(result.certificate.bound)
    assert max_error(relative, mean, v) <= bound + 64 * EPS * (1 + float(lse.abs().max()))


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_errors_follow_from_that_of_the_matrix(degree):
    """Lemmas I.2 and I.4 and Theorem I.5 from eps2 = max|A~ - A|, with the paper's scale 1/d.

    I.5 assumes D~ >= n e^(-B^2), which is not proved. It is not needed: weights are non-negative,
    so |A~ V| <= D~ max|V|, and the error is at most 2 eps2 n / min D <= 2 eps2 e^(B^2) max|V|.
    """
    for seed, size in itertools.product(range(3), (0.5, 1.0)):
        q, k, v = qkv(1, 1, n=35, d=4, scale=size, seed=seed)
        method = sb.MultiThreshold(2.0, degree)
        error, _ = matrix_errors(q, k, method)
        eps2, largest = norm(error, math.inf), norm(v, math.inf)
        mass = (q @ k.mT / 4).exp()
        b_squared = float(q.abs().max() * k.abs().max())
        head = head_of(q, k, v, scale=1 / 4)
        certified = distortion(head, method.plan_head(head)).error
        assert eps2 <= certified * float(mass.max()) * (1 + 1e-9)  # I.2
        sums = sb.kernel_sum(q, k, v, scale=1 / 4, method=method)
        assert norm(sums - mass @ v, math.inf) <= 35 * eps2 * largest * (1 + 1e-9)  # I.4
        output = sb.attention(q, k, v, scale=1 / 4, method=method)
        exact, _ = dense_attention(q, k, v, scale=1 / 4)
        wrong = norm(output - exact, math.inf)
        least = float(mass.sum(-1).min())
        assert least >= 35 * math.exp(-b_squared)
        assert 0 < wrong <= 2 * eps2 * 35 / least * largest
        assert 2 * eps2 * 35 / least <= 2 * eps2 * math.exp(b_squared)


def test_a_bound_that_says_nothing_is_called_vacuous():
    q, k, v = qkv(1, 1, n=40, d=3, scale=4.0)
    loose = sb.attention(q, k, v, method=sb.MultiThreshold(2.0, 0), return_result=True)
    assert float(loose.certificate.bound) >= 1
    assert "vacuous" in str(loose.certificate)
    tight = sb.attention(0.05 * q, 0.1 * k, v, method=sb.MultiThreshold(), return_result=True)
    assert float(tight.certificate.bound) < 0.1
    assert "vacuous" not in str(tight.certificate)


def distorted(head: Head, plan: HeadPlan) -> Tensor:
    """Values of log(given / exact) at the live pairs, row by row (NaN: no pair)."""
    exact = log_weights(head, exact_head_plan(head))
    return torch.where(exact > -600, log_weights(head, plan) - exact, math.nan)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(call(), st.sampled_from(UNSKETCHED), st.sampled_from([1.0, 1.0, 0.3]))
def test_distortion_bounds_every_weight(case, method, shrink):
    """Lemma I.2 entry by entry, relatively; also of a plan that was made for larger scores."""
    q, k, v = (case[name].double() for name in "qkv")
    mask, causal = case["attn_mask"], case["is_causal"]
    mask = None if mask is None else mask.double()
    plan = method.plan_head(head_of(q, k, v, mask, causal))
    head = head_of(shrink * q, k, v, mask, causal)
    spread, error, nonnegative = distortion(head, plan)
    assert nonnegative
    ratio = distorted(head, plan)
    seen = ~ratio.isnan()
    rounding = 1e-11
    assert float(ratio[seen].expm1().abs().max() if seen.any() else 0.0) <= error + rounding
    low, high = ratio.nan_to_num(math.inf).amin(1), ratio.nan_to_num(-math.inf).amax(1)
    rows = seen.any(1)
    assert (high - low)[rows].le(spread + rounding).all()


@pytest.mark.parametrize("growth", [1.5, 8.0])
def test_distortion_bounds_every_weight_of_a_plan_made_for_smaller_scores(growth):
    """Beyond the range of its polynomial a plan may be far off, and says how far."""
    q, k, v = qkv(1, 1, n=30, d=3, scale=0.6)
    plan = sb.MultiThreshold(2.0, 1).plan_head(head_of(q, k, v))
    head = head_of(growth * q, k, v)
    ratio = distorted(head, plan)
    worst = float(ratio.expm1().abs().max())
    assert worst > 1e-3
    # at growth 8 the inner 1 + z / p is far below zero
    assert worst <= distortion(head, plan).error * (1 + 1e-9)


def test_norms_of_tiny_rows_are_not_lost():
    """Scores of order one from entries of order 1e180 and 1e-180: the certified range is theirs."""
    q, k, v = qkv(1, 1, n=6, d=4, scale=3.0)
    huge, tiny = q * 1e180, k * 1e-180
    head = head_of(huge, tiny, v)
    # squares of 1e-180 vanish: with norms of 0 every score would be "within 0"
    assert supports.score_reach(head, None, None) >= float((q @ k.mT).abs().max()) / 2
    result = sb.attention(huge, tiny, v, method=sb.MultiThreshold(), return_result=True)
    exact, _ = dense_attention(huge, tiny, v)
    assert max_error(result.output, exact, v) <= float(result.certificate.bound)


# --- the lower bound of a row's sum -----------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(call(), st.sampled_from([None, 2, 4, 10]), st.booleans(), st.sampled_from([3, 4096]))
def test_jensen_is_below_every_row_sum(case, power, some_rows, block):
    """sum_j w_j f(z_ij) >= W f(<q_i, kbar> scale) for f = exp and even powers."""
    q, k, v = (case[name].double() for name in "qkv")
    mask, causal = case["attn_mask"], case["is_causal"]
    mask = None if mask is None else mask.double()
    head = head_of(q, k, v, mask, causal)
    plan = exact_head_plan(head)
    if power is None:
        _, exact = dense_attention(q, k, v, mask, causal)
    else:
        plan = replace(plan, kind="power", kernel=PowerKernel(power, None))
        _, exact = dense_power(q, k, v, power, mask, causal)
    rows = torch.arange(1, head.n, 2) if some_rows else None
    exact = exact[0, 0] if rows is None else exact[0, 0, rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jensen, "BLOCK", block)
        lower = jensen.lower_lse(plan, head, rows)
    assert lower.shape == exact.shape
    assert not lower.isnan().any()
    reach = head.scale * float(head.query_norms.max() * head.key_norms.max())
    rounding = 64 * EPS * (power or 1) * (10 + reach)
    blank = exact == -math.inf
    assert (lower[blank] == -math.inf).all()
    assert (lower <= exact + rounding)[~blank].all()


@pytest.mark.parametrize("power", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [2, 5, 4096])
def test_jensen_is_attained_by_equal_keys(power, causal, block, monkeypatch):
    """With one key repeated every weight is the mean's; causal rows count the keys so far."""
    q, k, v = qkv(1, 1, n=12, m=9, d=3)
    k = k[..., :1, :].expand_as(k)
    bias = torch.linspace(-2, 1, 9, dtype=torch.float64)
    bias[2] = -math.inf
    head = head_of(q, k, v, bias, causal)
    plan = exact_head_plan(head)
    if power is None:
        _, exact = dense_attention(q, k, v, bias, causal)
    else:
        plan = replace(plan, kind="power", kernel=PowerKernel(power, None))
        _, exact = dense_power(q, k, v, power, bias, causal)
    monkeypatch.setattr(jensen, "BLOCK", block)
    some = torch.tensor([0, 3, 4, 11])
    for rows, expected in ((None, exact[0, 0]), (some, exact[0, 0, some])):
        lower = jensen.lower_lse(plan, head, rows)
        torch.testing.assert_close(lower, expected, rtol=0, atol=1e-12)


def test_jensen_of_a_kernel_sum_is_of_its_plain_weights():
    q, k, v = qkv(1, 1, n=14, d=3)
    head = kernel_problem(q, k, v, None).head(0, 0)
    _, exact = dense_attention(q, k, v)
    lower = jensen.lower_lse(exact_head_plan(head), head, None)
    assert (lower <= exact[0, 0]).all()
    assert (lower >= exact[0, 0] - 3).all()
