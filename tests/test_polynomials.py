"""Certificates of the polynomials against 50-digit arithmetic."""

import math
from functools import cache

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supportbasis.errors import InputError
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials.certified import (
    CertifiedPolynomial,
    chebyshev,
    largest_bound,
    minimax,
    paper_degree,
    paper_rank,
    smallest_degree,
    taylor,
    true_rank,
)

BUILDERS = {"taylor": taylor, "chebyshev": chebyshev, "minimax": minimax}
BOUNDS = [1e-8, 1e-3, 0.1, 1.0, 3.0, 10.0, 30.0]
UNIT = 2.0**-53

mpmath.mp.dps = 50

any_kind = st.sampled_from(sorted(BUILDERS))
any_degree = st.integers(0, 12)
any_bound = st.floats(math.log(1e-8), math.log(30.0)).map(math.exp)
checked = settings(deadline=None, derandomize=True, max_examples=25)


def ratio(p: CertifiedPolynomial, t):
    """p(z) e^{-z} at z = bound * t, the float coefficients taken as exact."""
    s = mpmath.polyval([mpmath.mpf(c) for c in reversed(p.coefficients)], t)
    return mpmath.exp(mpmath.mpf(p.bound) * (1 - t)) * s


def refine(p, left, right, sign):
    """Golden-section search for the maximum of sign * ratio in [left, right]."""
    golden = (mpmath.sqrt(5) - 1) / 2
    for _ in range(20):
        a, b = right - golden * (right - left), left + golden * (right - left)
        if sign * ratio(p, a) < sign * ratio(p, b):
            left = a
        else:
            right = b
    return ratio(p, (left + right) / 2)


@cache
def true_range(p: CertifiedPolynomial):
    """(min, max) of p(z) e^{-z}: Chebyshev-spaced points, then a search around the best."""
    count = 8 * (p.degree + 2)
    points = [-mpmath.cos(mpmath.pi * i / count) for i in range(count + 1)]
    values = [ratio(p, t) for t in points]
    ends = []
    for sign in (-1, 1):
        i = max(range(count + 1), key=lambda i: sign * values[i])
        found = refine(p, points[max(i - 1, 0)], points[min(i + 1, count)], sign)
        ends.append(sign * max(sign * found, sign * values[i]))
    return tuple(ends)


def true_error(p):
    low, high = true_range(p)
    return max(abs(low - 1), abs(high - 1))


def rounding_floor(p):
    """What float64 evaluation may add: some operations' units of sum |c_k| |t|^k e^{B(1-t)}."""
    return (4 * p.degree + 60) * UNIT * (1 + p.bound) * sum(map(abs, p.coefficients)) * math.exp(
        2 * p.bound
    ) + 60 * UNIT * (1 + p.bound)


def assert_certificate_holds(p, points):
    lower, upper = p.log_ratio
    for t in points:
        r = ratio(p, t)
        assert abs(r - 1) <= p.error
        assert r <= mpmath.exp(upper)
        assert r >= mpmath.exp(lower) or lower == -math.inf
        assert r > 0 or not p.positive


# ------------------------------------------------------------------- the certificate is a proof


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_certificate_is_never_below_the_extremes(kind, bound):
    for degree in range(13):
        p = BUILDERS[kind](degree, bound)
        low, high = true_range(p)
        assert true_error(p) <= p.error, degree
        assert mpmath.exp(p.log_ratio[0]) <= low or p.log_ratio[0] == -math.inf
        assert high <= mpmath.exp(p.log_ratio[1])


@checked
@given(any_kind, any_degree, any_bound, st.lists(st.floats(-1, 1), min_size=20, max_size=40))
def test_certificate_holds_at_random_points(kind, degree, bound, points):
    p = BUILDERS[kind](degree, bound)
    assert_certificate_holds(p, [mpmath.mpf(t) for t in (*points, -1.0, 0.0, 1.0)])


@checked
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=9),
    st.floats(0, 8),
    st.lists(st.floats(-1, 1), min_size=20, max_size=20),
)
def test_certificate_holds_for_any_coefficients(coefficients, bound, points):
    p = polynomials._certified("taylor", coefficients, bound)
    if bound == 0.0:
        points = [0.0]
    assert_certificate_holds(p, [mpmath.mpf(t) for t in points])


@checked
@given(any_degree, st.floats(0.01, 5.0), any_degree, st.sampled_from([-1, 1]))
def test_certificate_grows_when_a_coefficient_is_perturbed(degree, bound, which, sign):
    p = minimax(degree, bound)
    k = which % (degree + 1)
    coefficients = list(p.coefficients)
    # |r - 1| grows to at least amount e^{B(1-t)} - error at t = -1
    amount = 3 * p.error * math.exp(-2 * bound)
    coefficients[k] += sign * amount
    worse = polynomials._certified("minimax", coefficients, bound)
    assert worse.error >= 1.9 * p.error
    assert true_error(worse) <= worse.error


def test_a_flipped_sign_is_seen():
    p = taylor(3, 1.0)
    flipped = (p.coefficients[0], -p.coefficients[1], *p.coefficients[2:])
    assert polynomials._certified("taylor", flipped, 1.0).error > 4 > 0.2 > p.error


def test_a_dip_between_two_grid_points_is_covered():
    # s = (t - m)^2 + d is smallest in mid-cell, 250 times below its values on the grid
    middle = polynomials._WIDTH * 100.5 - 1.0
    dip = polynomials._certified("taylor", (middle**2 + 1e-9, -2 * middle, 1.0), 1.0)
    truth = float(mpmath.log(ratio(dip, mpmath.mpf(middle))))
    assert truth - 0.01 <= dip.log_ratio[0] <= truth
    touching = polynomials._certified("taylor", (middle**2, -2 * middle, 1.0), 1.0)
    assert not touching.positive
    assert touching.error >= 1.0


# ------------------------------------------------------------------------------- and it is tight


@pytest.mark.parametrize("bound", [0.01, 0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("kind", BUILDERS)
def test_certificate_is_within_one_percent(kind, bound):
    for degree in range(9):
        p = BUILDERS[kind](degree, bound)
        assert p.error <= 1.01 * true_error(p) + rounding_floor(p), degree


@pytest.mark.parametrize("kind", BUILDERS)
def test_log_ratio_is_tight_where_positive(kind):
    for degree in range(0, 9, 2):
        p = BUILDERS[kind](degree, 1.0)
        low, high = true_range(p)
        gap = 0.01 * float(true_error(p)) + rounding_floor(p)
        assert p.positive
        assert p.log_ratio[0] >= float(mpmath.log(low)) - gap
        assert p.log_ratio[1] <= float(mpmath.log(high)) + gap


@pytest.mark.parametrize("bound", [1e-6, 0.01, 1.0, 5.0])
def test_degree_zero_has_the_analytic_errors(bound):
    assert taylor(0, bound).error == pytest.approx(math.expm1(bound), rel=1e-4, abs=1e-14)
    assert chebyshev(0, bound).error == pytest.approx(math.expm1(bound), rel=1e-4, abs=1e-14)
    assert minimax(0, bound).error == pytest.approx(math.tanh(bound), rel=1e-4, abs=1e-14)


def test_taylor_error_is_the_remainder_at_the_left_end():
    for degree, bound in [(1, 0.3), (2, 1.0), (3, 2.0), (6, 4.0)]:
        partial = math.fsum((-bound) ** k / math.factorial(k) for k in range(degree + 1))
        expected = abs(partial * math.exp(bound) - 1)
        assert taylor(degree, bound).error == pytest.approx(expected, rel=1e-3)


# --------------------------------------------------------------------------------- the builders


def test_chebyshev_interpolates_at_its_nodes():
    for degree, bound in [(0, 1.0), (3, 2.0), (8, 5.0), (25, 3.0), (40, 3.0)]:
        p = chebyshev(degree, bound)
        for i in range(degree + 1):
            t = mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * degree + 2))
            assert abs(ratio(p, t) - 1) <= rounding_floor(p)


@pytest.mark.parametrize("bound", [0.1, 1.0, 5.0])
def test_minimax_equioscillates(bound):
    for degree in range(7):
        p = minimax(degree, bound)
        if p.error < 1e-11:
            continue
        t = torch.linspace(-1, 1, 20001, dtype=torch.float64)
        deviation = p(t * bound) * torch.exp(bound * (1 - t)) - 1
        near = deviation[deviation.abs() > 0.999 * p.error].sign()
        assert int((near[1:] != near[:-1]).sum()) + 1 == degree + 2


@pytest.mark.parametrize("bound", [*BOUNDS, 100.0, 400.0])
def test_minimax_is_never_worse(bound):
    for degree in range(13):
        best = minimax(degree, bound).error
        assert best <= chebyshev(degree, bound).error
        assert best <= taylor(degree, bound).error


@pytest.mark.parametrize("bound", [0.1, 1.0, 5.0, 30.0])
def test_error_falls_with_the_degree(bound):
    for degree in range(12):
        here, after = minimax(degree, bound), minimax(degree + 1, bound)
        assert after.error <= here.error * (1 + 1e-6) + rounding_floor(after)


@pytest.mark.parametrize("kind", BUILDERS)
def test_error_grows_with_the_bound(kind):
    for degree in range(6):
        errors = [BUILDERS[kind](degree, b).error for b in (0.1, 0.3, 1.0, 2.0, 4.0)]
        assert errors == sorted(errors)


def test_minimax_stays_positive_for_large_bounds():
    for degree in range(6):
        for bound in (5.0, 10.0, 30.0):
            p = minimax(degree, bound)
            assert p.positive
            assert p.error <= 1 + 1e-3


def test_high_degrees_keep_their_accuracy():
    for builder in (taylor, chebyshev, minimax):
        p = builder(60, 8.0)
        assert true_error(p) <= p.error <= rounding_floor(p)


# ------------------------------------------------------------------------------------ positivity


def test_positive_flag():
    assert taylor(2, 5.0).positive
    assert taylor(4, 20.0).positive
    assert not taylor(1, 1.0).positive
    assert not taylor(3, 3.0).positive
    assert taylor(1, 0.99).positive
    assert taylor(3, 1.59).positive
    assert not chebyshev(2, 5.0).positive
    assert taylor(1, 1.0).log_ratio[0] == -math.inf


@checked
@given(any_kind, any_degree, any_bound)
def test_positive_agrees_with_the_error(kind, degree, bound):
    p = BUILDERS[kind](degree, bound)
    assert p.positive or p.error >= 1.0
    assert (p.log_ratio[0] > -math.inf) == p.positive


def test_weight_log_spread():
    p = minimax(2, 1.0)
    lower, upper = p.log_ratio
    assert p.weight_log_spread(False) == upper - lower
    assert p.weight_log_spread(True) == upper - lower  # the ratio 1 lies inside
    shifted = polynomials._certified("minimax", [3 * c for c in p.coefficients], 1.0)
    assert shifted.weight_log_spread(False) == pytest.approx(upper - lower, rel=1e-3)
    assert shifted.weight_log_spread(True) == pytest.approx(math.log(3) + upper, rel=1e-3)
    shrunk = polynomials._certified("minimax", [c / 3 for c in p.coefficients], 1.0)
    assert shrunk.weight_log_spread(True) == pytest.approx(math.log(3) - lower, rel=1e-3)
    assert taylor(1, 2.0).weight_log_spread(False) == math.inf


# --------------------------------------------------------------------------- extremes of the bound


@pytest.mark.parametrize("kind", BUILDERS)
def test_zero_bound_is_exact(kind):
    for degree in (0, 1, 5):
        p = BUILDERS[kind](degree, 0.0)
        assert p.coefficients == (1.0,) + (0.0,) * degree
        assert (p.error, p.log_ratio, p.positive) == (0.0, (0.0, 0.0), True)
        assert torch.equal(p(torch.zeros(3)), torch.ones(3))


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("bound", [400.0, 1e4, 1e200, 1.7e308])
def test_huge_bounds_stay_finite_where_they_can(kind, bound):
    for degree in (0, 1, 2, 7):
        p = BUILDERS[kind](degree, bound)
        assert all(map(math.isfinite, p.coefficients))
        assert p.error > 0.99
        assert not math.isnan(p.error)
        assert p.error == math.inf or bound == 400.0
        assert not any(map(math.isnan, p.log_ratio))
        value = p(torch.tensor([-bound, 0.0, bound], dtype=torch.float64))
        assert torch.isfinite(value).all()


def test_an_error_that_overflows_is_infinite():
    p = chebyshev(7, 400.0)
    assert p.error == math.inf
    assert not p.positive
    assert p.log_ratio[0] == -math.inf
    assert math.isfinite(p.log_ratio[1])


@pytest.mark.parametrize("bound", [1e-30, 1e-200, 5e-324])
@pytest.mark.parametrize("kind", BUILDERS)
def test_tiny_bounds_are_exact_up_to_rounding(kind, bound):
    p = BUILDERS[kind](3, bound)
    assert p.error < 1e-14
    assert torch.equal(p(torch.zeros(2)), torch.ones(2))


# ------------------------------------------------------------------------------------- evaluation


@checked
@given(any_kind, any_degree, st.floats(1e-3, 20.0))
def test_call_is_the_scaled_value(kind, degree, bound):
    p = BUILDERS[kind](degree, bound)
    t = torch.linspace(-1, 1, 9, dtype=torch.float64)
    values = p(t * bound)
    margin = (4 * degree + 8) * UNIT * sum(map(abs, p.coefficients))
    for ti, value in zip(t.tolist(), values.tolist(), strict=True):
        exact = mpmath.polyval([mpmath.mpf(c) for c in reversed(p.coefficients)], mpmath.mpf(ti))
        assert abs(value - exact) <= margin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_call_keeps_dtype_and_shape(dtype):
    z = torch.linspace(-1, 1, 6).to(dtype).reshape(2, 3)
    p = minimax(3, 1.0)
    value = p(z)
    assert value.dtype == dtype
    assert value.shape == z.shape
    tolerance = 16 * torch.finfo(dtype).eps
    assert torch.allclose(value.double(), p(z.double()), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------ another interval


@checked
@given(any_kind, any_degree, st.floats(0.05, 10.0), st.floats(0.05, 10.0))
def test_on_is_the_same_function(kind, degree, bound, other):
    p = BUILDERS[kind](degree, bound)
    moved = p.on(other)
    assert (moved.kind, moved.degree, moved.bound) == (kind, degree, other)
    for x in (-1.0, -0.4, 0.0, 0.3, 1.0):
        z = mpmath.mpf(x) * min(bound, other)
        before, after = z / mpmath.mpf(bound), z / mpmath.mpf(other)
        size = sum(abs(c) for c in p.coefficients) * mpmath.exp(bound)
        old = ratio(p, before) * mpmath.exp(z)
        new = ratio(moved, after) * mpmath.exp(z)
        assert abs(old - new) <= 1e-12 * size


@checked
@given(any_kind, any_degree, st.floats(0.05, 10.0), st.floats(0.05, 10.0))
def test_on_certifies_the_original_function(kind, degree, bound, other):
    p = BUILDERS[kind](degree, bound)
    moved = p.on(other)
    assert true_error(moved) <= moved.error
    for i in range(41):
        z = mpmath.mpf(other) * (i - 20) / 20
        assert abs(ratio(p, z / mpmath.mpf(bound)) - 1) <= moved.error


def test_on_restricts_and_extends():
    p = minimax(3, 1.0)
    assert p.on(1.0) == p
    assert p.on(0.5).error <= p.error * (1 + 1e-6) < p.on(2.0).error
    assert p.on(0.0).error == pytest.approx(abs(float(ratio(p, mpmath.mpf(0))) - 1), abs=1e-12)
    assert taylor(4, 0.0).on(1.0).error == pytest.approx(math.expm1(1.0), rel=1e-4)
    assert taylor(3, 2.0).on(0.7).error == pytest.approx(taylor(3, 0.7).error, rel=1e-6)


def test_on_says_when_it_cannot_represent():
    far = chebyshev(7, 1e4)
    assert any(far.coefficients)
    near = far.on(1.0)
    assert near.error == math.inf
    assert not near.positive
    wide = taylor(2, 1.0).on(1e4)
    assert wide.error == math.inf
    assert all(map(math.isfinite, wide.coefficients))


# ---------------------------------------------------------------------------- degree and interval


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("bound", [0.1, 1.0, 4.0])
def test_smallest_degree_is_smallest(kind, bound):
    p = smallest_degree(1e-3, bound, kind)
    assert p.error <= 1e-3
    assert p.kind == kind
    assert p.degree == 0 or BUILDERS[kind](p.degree - 1, bound).error > 1e-3


def test_smallest_degree_beyond_the_limit():
    best = min(minimax(degree, 5.0).error for degree in range(4))
    with pytest.raises(InputError, match=rf"degree <= 3 .* error is {best:.3g}\. Use"):
        smallest_degree(1e-9, 5.0, limit=3)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("degree", [0, 1, 2, 4])
def test_largest_bound_is_largest(kind, degree):
    bound = largest_bound(degree, 0.05, kind)
    assert BUILDERS[kind](degree, bound).error <= 0.05
    assert BUILDERS[kind](degree, bound * (1 + 1e-5)).error > 0.05


def test_largest_bound_at_its_limits():
    assert largest_bound(0, 0.05) == pytest.approx(math.atanh(0.05), rel=1e-5)
    assert largest_bound(0, 1e-20) == 0.0
    assert largest_bound(0, 2.0) == 300.0


# ----------------------------------------------------------------------------- the paper's formulas


def test_ranks():
    assert paper_rank(64, 2) == 12082785
    assert [true_rank(64, g) for g in (0, 1, 2, 3)] == [1, 65, 2145, 47905]


def test_paper_degree():
    log_inverse = math.log(1e6)
    assert paper_degree(1e-6, 1.5) == pytest.approx(log_inverse / math.log(log_inverse / 2.25))
    assert paper_degree(0.1, 2.0) == 4.0  # log(1/eps) <= B^2: undefined, Theta(B^2)
    assert paper_degree(1e-6, 0.0) == 0.0
    with pytest.raises(InputError, match="epsilon"):
        paper_degree(1.5, 1.0)


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("builder", BUILDERS.values())
@pytest.mark.parametrize("degree", [-1, 2.0, 2.5, True, "2", None])
def test_bad_degrees_are_refused(builder, degree):
    builder(2, 1.0)  # 2.0 must not hit the cache entry of 2
    with pytest.raises(InputError, match="degree"):
        builder(degree, 1.0)


@pytest.mark.parametrize("builder", [*BUILDERS.values(), lambda d, b: taylor(d, 1.0).on(b)])
@pytest.mark.parametrize("bound", [-1.0, math.inf, math.nan, "wide", None])
def test_bad_bounds_are_refused(builder, bound):
    with pytest.raises(InputError, match="bound"):
        builder(2, bound)


def test_bad_search_arguments_are_refused():
    with pytest.raises(InputError, match="epsilon"):
        smallest_degree(0.0, 1.0)
    with pytest.raises(InputError, match="kind"):
        largest_bound(2, 0.1, kind="spline")
    with pytest.raises(InputError, match="limit"):
        smallest_degree(0.1, 1.0, limit=-1)
    with pytest.raises(InputError, match="dim"):
        true_rank(-1, 2)
