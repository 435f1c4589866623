"""The packed feature map: its kernel is a power of the inner product, its rank is C(d+g, g)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import supportbasis as sb
from supportbasis.polynomials.features import (
    BUFFER_BYTES,
    RANK_LIMIT,
    FeatureMap,
    block_rows,
    check_rank,
    largest_degree,
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(d=st.integers(1, 7), degree=st.integers(0, 6), seed=st.integers(0, 10**6))
def test_each_degree_reproduces_a_power_of_the_inner_product(d, degree, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, 4, d, generator=generator, dtype=torch.float64)
    x, y = torch.nn.functional.normalize(tokens, dim=-1).unbind(0)
    phi = FeatureMap(d, degree)
    left, right = phi(x), phi(y) * phi.multiplicity
    for k in range(degree + 1):
        of_degree = phi.degrees == k
        kernel = left[:, of_degree] @ right[:, of_degree].T
        torch.testing.assert_close(
            kernel, (x @ y.T) ** k, rtol=0, atol=1e-13
        )  # |terms| sum to at most 1


@pytest.mark.parametrize(
    ("d", "degree"), [(1, 9), (3, 0), (5, 1), (7, 2), (8, 2), (8, 3), (64, 2), (3, 20)]
)
def test_monomials_are_packed_without_repetition(d, degree):
    phi = FeatureMap(d, degree)
    assert phi.count == len(phi.multiplicity) == len(phi.degrees)
    assert phi.count == math.comb(d + degree, degree)
    for k in range(degree + 1):  # the multiplicities of degree k count all d^k words
        assert phi.multiplicity[phi.degrees == k].sum().item() == pytest.approx(float(d) ** k)
    x = torch.arange(2.0, 2.0 + d, dtype=torch.float64).sqrt().unsqueeze(0)
    if degree <= 3 and d <= 8:
        assert len(phi(x)[0].unique()) >= phi.count // 2  # distinct monomials, not one repeated


def test_a_rank_beyond_the_limit_says_rank_limit_and_remedy():
    with pytest.raises(sb.InputError) as error:
        check_rank(128, 4)
    text = str(error.value)
    assert str(math.comb(132, 4)) in text
    assert str(RANK_LIMIT) in text
    assert "lower degree" in text
    q = torch.zeros(4, 128)
    with pytest.raises(sb.InputError, match="degree 4"):
        sb.attention(q, q, q, method=sb.Polynomial(4))
    with pytest.raises(sb.InputError, match="degree 5"):
        sb.attention(q, q, q, method=sb.SingleThreshold(1.0, 5))


def test_blocks_and_degrees_respect_their_limits():
    top = largest_degree(64)
    assert math.comb(64 + top, 64) <= RANK_LIMIT < math.comb(65 + top, 64)
    assert block_rows(2145, torch.float32) * 2145 * 4 <= BUFFER_BYTES
    assert block_rows(2145, torch.float32) % 64 != 0
    assert block_rows(RANK_LIMIT, torch.float64) == 16
