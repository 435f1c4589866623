"""Certified polynomials at the extremes of their interval, on other intervals, and by search."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polynomial_cases import BUILDERS, UNIT, any_degree, any_kind, checked, ratio, true_error
from supportbasis.errors import InputError
from supportbasis.polynomials.certified import (
    chebyshev,
    largest_bound,
    minimax,
    paper_degree,
    paper_rank,
    smallest_degree,
    taylor,
    true_rank,
)

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
