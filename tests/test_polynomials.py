"""Certificates of the polynomials against 50-digit arithmetic."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polynomial_cases import (
    BUILDERS,
    UNIT,
    any_degree,
    any_kind,
    checked,
    ratio,
    true_error,
    true_range,
)
from supportbasis.polynomials import certified as polynomials
from supportbasis.polynomials import proofs
from supportbasis.polynomials.certified import chebyshev, minimax, taylor

BOUNDS = [1e-8, 1e-3, 0.1, 1.0, 3.0, 10.0, 30.0]
any_bound = st.floats(math.log(1e-8), math.log(30.0)).map(math.exp)


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
    for degree in (*range(7), 9, 12):
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
    p = polynomials.certified("taylor", coefficients, bound)
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
    worse = polynomials.certified("minimax", coefficients, bound)
    assert worse.error >= 1.9 * p.error
    assert true_error(worse) <= worse.error


def test_a_flipped_sign_is_seen():
    p = taylor(3, 1.0)
    flipped = (p.coefficients[0], -p.coefficients[1], *p.coefficients[2:])
    assert polynomials.certified("taylor", flipped, 1.0).error > 4 > 0.2 > p.error


def test_a_dip_between_two_grid_points_is_covered():
    # s = (t - m)^2 + d is smallest in mid-cell, 250 times below its values on the grid
    middle = proofs.WIDTH * 100.5 - 1.0
    dip = polynomials.certified("taylor", (middle**2 + 1e-9, -2 * middle, 1.0), 1.0)
    truth = float(mpmath.log(ratio(dip, mpmath.mpf(middle))))
    assert truth - 0.01 <= dip.log_ratio[0] <= truth
    touching = polynomials.certified("taylor", (middle**2, -2 * middle, 1.0), 1.0)
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
    shifted = polynomials.certified("minimax", [3 * c for c in p.coefficients], 1.0)
    assert shifted.weight_log_spread(False) == pytest.approx(upper - lower, rel=1e-3)
    assert shifted.weight_log_spread(True) == pytest.approx(math.log(3) + upper, rel=1e-3)
    shrunk = polynomials.certified("minimax", [c / 3 for c in p.coefficients], 1.0)
    assert shrunk.weight_log_spread(True) == pytest.approx(math.log(3) - lower, rel=1e-3)
    assert taylor(1, 2.0).weight_log_spread(False) == math.inf
