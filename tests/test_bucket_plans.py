"""Plans of MultiThreshold and PowerAttention: their powers, their cover, their arguments."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import supportbasis as sb
from cases import beyond, dense_attention, max_error, qkv
from paper_cases import DTYPES, dyadic_pair, few, head_of, properties
from supportbasis.components import ExactSum
from supportbasis.errors import InputError
from supportbasis.methods import multi_threshold
from supportbasis.plans import HeadPlan, Plan
from supportbasis.polynomials.powers import (
    INNER_REACH,
    LARGEST_POWER,
    normalising_constant,
    smallest_power,
)
from supportbasis.problem.problem import Head
from supportbasis_studies import reference

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
        assert type(theirs) is type(mine)
        for name in ("pairs", "kernel", "row_edges", "key_edges"):
            assert getattr(theirs, name, None) == getattr(mine, name, None)
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
