"""Kernel sums and kernel densities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from cases import qkv
from supportbasis.accuracy.estimates import GRID, _error_within, largest_error
from supportbasis.plans import PolynomialHead
from supportbasis.polynomials.certified import taylor
from supportbasis.problem.validation import density_problem

METHODS = [
    sb.Exact(),
    sb.Polynomial(6),
    sb.SingleThreshold(0.5, 4),
    sb.SingleThreshold(None, 3),
    sb.MultiThreshold(2.0, 2),
    sb.MultiThreshold(1.5, 1, sketch_size=32),
    sb.Auto(1e-3),
]


def dense_sum(q, k, v, scale):
    return (q.double() @ k.double().transpose(-1, -2) * scale).exp() @ v.double()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_kernel_sum_is_within_its_bound(method):
    q, k, v = qkv(2, 2, n=60, m=45, d=3, dv=4, scale=0.5, dtype=torch.float32)
    expected = dense_sum(q, k, v, 1 / math.sqrt(3))
    result = sb.kernel_sum(q, k, v, method=method, return_result=True)
    given = result.output.double() * result.log_scale.double().exp()[..., None, None]
    mass = dense_sum(q, k, torch.ones_like(v), 1 / math.sqrt(3))
    error = ((given - expected).abs() / mass).amax((-2, -1)) / v.abs().max()
    assert (error <= result.certificate.bound).all()
    plain = sb.kernel_sum(q, k, v, method=method)
    torch.testing.assert_close(plain.double(), given, rtol=1e-5, atol=1e-5)
    assert result.lse.shape == (2, 2, 60)


def test_kernel_sum_obeys_the_papers_lemma():
    """Lemma B.11: |S - AV| <= n eps_0 max|V| where eps_0 bounds |p - exp| on the small part."""
    q, k, v = qkv(1, 1, n=80, d=4, scale=0.4)
    result = sb.kernel_sum(
        q, k, v, scale=1 / 4, method=sb.SingleThreshold(0.6, 2), return_result=True
    )
    poly = result.plan.heads[0].polynomial
    eps = poly.error * math.exp(poly.bound)  # absolute, from relative
    given = result.output * result.log_scale.exp()[..., None, None]
    error = (given - dense_sum(q, k, v, 1 / 4)).abs().max()
    assert error <= 80 * eps * v.abs().max()


def test_overflow_raises_and_names_the_way_out():
    q, k, v = qkv(1, 1, n=20, d=4, dtype=torch.float32)
    with pytest.raises(sb.InputError, match="return_result"):
        sb.kernel_sum(q * 1000, k, v, method=sb.Exact())
    result = sb.kernel_sum(q * 1000, k, v, method=sb.Exact(), return_result=True)
    assert result.output.isfinite().all()
    assert float(result.output.abs().max()) == pytest.approx(1.0, rel=1e-3)
    half = sb.kernel_sum(q.half(), k.half(), v.half(), method=sb.Exact())
    assert half.dtype == torch.float16


def test_kernel_sum_without_keys_is_zero():
    q, k, v = qkv(1, 1, n=5)
    assert (sb.kernel_sum(q, k[:, :, :0], v[:, :, :0]) == 0).all()


def dense_kde(points, data, bandwidth, weights=None):
    width = torch.as_tensor(bandwidth, dtype=torch.float64)
    x, y = points.double() / width, data.double() / width
    kernel = (-torch.cdist(x, y).square() / 2).exp()
    weights = torch.ones(data.shape[:-1]).double() if weights is None else weights.double()
    volume = (width * math.sqrt(2 * math.pi)).expand(points.shape[-1]).prod()
    return (kernel @ weights.unsqueeze(-1)).squeeze(-1) / (weights.sum(-1, keepdim=True) * volume)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    n=st.integers(1, 50),
    m=st.integers(0, 30),
    d=st.integers(1, 5),
    h=st.floats(0.05, 20.0),
    shift=st.floats(-100, 100),
    weighted=st.booleans(),
    name=st.sampled_from(["exact", "single", "auto"]),
)
def test_density_of_any_cloud(n, m, d, h, shift, weighted, name):
    method = {"exact": sb.Exact(), "single": sb.SingleThreshold(), "auto": sb.Auto(1e-3)}[name]
    points, data, _ = qkv(n=m, m=n, d=d, seed=n)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(1)).double() + 0.01
    weights = weights if weighted else None
    given = sb.gaussian_kde(points + shift, data + shift, h, weights=weights, method=method)
    expected = dense_kde(points, data, h, weights)
    scale = float(expected.max()) if m else 1.0
    tolerance = 0.06 if name == "single" else 1e-9  # below the crossover Auto is exact
    assert given.shape == (m,)
    torch.testing.assert_close(given, expected, rtol=0, atol=tolerance * scale)


def test_density_integrates_to_one():
    data = qkv(n=40, d=1)[0]
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    density = sb.gaussian_kde(grid, data, 0.3)
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1.0, abs=1e-6)


def test_density_with_one_bandwidth_a_dim_and_leading_dims():
    points, data, _ = qkv(2, 3, n=7, m=9, d=2)
    width = torch.tensor([0.5, 2.0], dtype=torch.float64)
    given = sb.gaussian_kde(points, data, width)
    torch.testing.assert_close(given, dense_kde(points, data, width))
    assert given.shape == (2, 3, 7)
    low = sb.gaussian_kde(points.bfloat16(), data.bfloat16(), 1.0)
    assert low.dtype == torch.bfloat16


def test_auto_density_is_fast_in_work_and_within_tolerance():
    generator = torch.Generator().manual_seed(0)
    points, data = torch.randn(2, 30000, 3, generator=generator).unbind(0)
    result = sb.gaussian_kde(points, data, 1.0, method=sb.Auto(1e-4), return_result=True)
    assert result.plan.heads[0].kind != "exact"
    assert result.plan.cost < 0.5
    rows = torch.randperm(30000, generator=generator)[:500]
    rows = torch.cat([rows, points.norm(dim=1).topk(50).indices])
    expected = dense_kde(points[rows], data, 1.0)
    error = (result.output[rows].double() - expected).abs().max() / expected.max()
    assert float(error) <= 1e-4
    assert float(result.certificate.limit) >= float(error)
    assert result.certificate.holds(1.5e-4)


@pytest.mark.parametrize("distance", [10.0, 1e3, 1e4])
def test_density_of_clusters_many_bandwidths_apart(distance):
    """The expanded square cancels; far clusters are summed in float64."""
    points, data, _ = qkv(n=60, m=80, d=3, dtype=torch.float32)
    points[::2] += distance
    data[::2] += distance
    expected = dense_kde(points, data, 1.0)
    result = sb.gaussian_kde(points, data, 1.0, method=sb.Exact(), return_result=True)
    error = float((result.output.double() - expected).abs().max() / expected.max())
    assert error <= 2e-4
    assert result.output.dtype == torch.float32


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_limit_of_a_density_covers_its_largest_error(degree):
    points, data, _ = qkv(n=3000, m=500, d=2, dtype=torch.float32, scale=0.7)
    result = sb.gaussian_kde(points, data, 1.0, method=sb.Polynomial(degree), return_result=True)
    expected = dense_kde(points, data, 1.0)
    error = float((result.output.double() - expected).abs().max() / expected.max())
    limit = float(result.certificate.limit)
    assert error <= limit
    assert float(result.certificate.measured) <= error * 1.01
    if degree == 8:
        assert limit <= 500 * error + 1e-5  # and it is not vacuous


def test_density_that_overflows_its_dtype_is_refused():
    data = (qkv(n=400, d=1)[0] * 1e-6).half()
    with pytest.raises(sb.InputError, match=r"overflow torch\.float16"):
        sb.gaussian_kde(data, data, 1e-6)


@pytest.mark.parametrize("power", [5, 20, 30, 60])
def test_density_at_the_data_is_as_precise_for_a_small_bandwidth(power):
    """Powers of 2, whose factors cancel without rounding: the norm must not be added to them."""
    data, h = torch.tensor([[-1.0], [1.0]]).double(), 2.0**-power
    result = sb.gaussian_kde(data, data, h, method=sb.Exact(), return_result=True)
    expected = torch.full((2,), 1 / (2 * math.sqrt(2 * math.pi) * h)).double()
    torch.testing.assert_close(result.output, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(result.lse, expected.log(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bandwidths_whose_squares_vanish_are_refused(dtype):
    data = torch.tensor([[-1.0], [1.0]], dtype=dtype)
    with pytest.raises(sb.InputError, match="bandwidth is so small"):
        sb.gaussian_kde(data, data, 1e-200, return_result=True)


@pytest.mark.parametrize("bandwidth", ["a", None, 1j, True])
def test_bandwidth_of_another_kind_is_refused(bandwidth):
    with pytest.raises(sb.InputError, match="bandwidth"):
        sb.gaussian_kde(torch.zeros(2, 1), torch.zeros(2, 1), bandwidth)


def test_density_errors_speak_of_points_and_data():
    bad = torch.zeros(4, 2)
    bad[1, 0] = math.nan
    with pytest.raises(sb.InputError, match="points has 1 non-finite"):
        sb.gaussian_kde(bad, torch.zeros(4, 2), 1.0)
    with pytest.raises(sb.InputError, match=r"data has dtype torch\.float64 but points"):
        sb.gaussian_kde(torch.zeros(4, 2), torch.zeros(4, 2).double(), 1.0)


def test_the_bound_over_norm_bins_is_attained():
    """One row, two keys at the edge of their bin, a remainder of even leading power: both keys err
    the same way and by nearly the most that their norm allows."""
    points, data = torch.tensor([[1.0]]), torch.tensor([[1.0], [-1.0]])
    head = density_problem(points.double(), data.double(), 1.0, None)[0].head(0, 0)
    poly = taylor(3, 1.0)
    plan = PolynomialHead(n=1, m=2, cost=1.0, speedup=1.0, polynomial=poly)
    z = torch.tensor([1.0, -1.0], dtype=torch.float64)
    true = abs(float((poly(z) * math.e - z.exp()).sum())) * math.exp(-1.0)  # times both weights
    bound = largest_error(head, plan, 0.0)
    assert true <= bound <= 1.5 * true


def test_the_error_within_a_reach_is_bounded_from_the_grid_point_above():
    """Of 1 + z the error grows with |z|, so the point below a reach would say too little."""
    poly, top = taylor(1, 2.0), 2.0
    reach = (torch.arange(0, GRID - 1, 97, dtype=torch.float64) + 0.5) * (top / (GRID - 1))
    reach = torch.cat([reach, torch.tensor([top], dtype=torch.float64)])
    given = _error_within(poly, reach)

    def error(z):
        return (poly(z) - (z - poly.bound).exp()).abs()

    assert (given >= torch.maximum(error(reach), error(-reach))).all()
    beyond = reach + top / (GRID - 1)
    assert (given <= torch.maximum(error(beyond), error(-beyond))).all()


def test_the_largest_reach_stays_on_the_grid():
    """Where top * ((GRID - 1) / top) rounds up, the point above is not there."""
    tops = torch.linspace(1, 2, 1000, dtype=torch.float64).tolist()
    above = [top for top in tops if top * ((GRID - 1) / top) > GRID - 1]
    assert above
    for top in above[:3]:
        reach = torch.tensor([[top]], dtype=torch.float64)
        assert _error_within(taylor(1, 2.0), reach).isfinite().all()
