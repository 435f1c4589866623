"""Facts G.4-G.13: errors of entrywise powers, and of the matrix that they make.

Where the printed text does not hold, the test is of its right reading, and says so.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import supportbasis as sb
from cases import dense_attention, max_error, qkv
from paper_cases import (
    EPS,
    buckets_by_hand,
    dense_power,
    dyadic_matrix,
    head_of,
    log_weights,
    matrix_errors,
    norm,
    properties,
    smallest_by_hand,
)
from supportbasis.components import PowerSum, evaluate
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials.powers import PowerKernel, normalising_constant
from supportbasis_studies.dense_splits import are_disjoint, bucket_basis, support_size

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
    pieces = [p * scale for row in bucket_basis(q[0, 0], k[0, 0], 2.0) for p in row]
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
