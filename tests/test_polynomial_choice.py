"""Degrees derived from an error, kinds of polynomials, and the constant of sqrt(c ln n)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from supportbasis.methods import Method
from supportbasis.methods.base import derived_degree
from supportbasis.plans import BucketHead, PolynomialHead, ThresholdHead
from supportbasis.polynomials import certified
from supportbasis.polynomials.certified import smallest_degree
from supportbasis.polynomials.proofs import widest_bound

KINDS = ("taylor", "chebyshev", "minimax")


def head(spread: float = 0.6, n: int = 300, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, n, d, generator=generator, dtype=torch.float64)
    return spread * q, spread * k, v


def only(plan: sb.Plan) -> PolynomialHead:
    (found,) = plan.heads
    assert isinstance(found, PolynomialHead)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.3, 1e-3])
def test_epsilon_derives_the_smallest_certified_degree(kind: str, epsilon: float) -> None:
    """Algorithm 2: the error holds on the whole range, and one degree less does not."""
    q, k, v = head()
    method = sb.Polynomial(epsilon=epsilon, polynomial=kind)
    found = only(sb.plan(q, k, v, method=method)).polynomial
    reach = found.bound
    true = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(4)
    assert reach == pytest.approx(true, rel=1e-5) and found.kind == kind
    assert found.error <= epsilon
    assert found == smallest_degree(epsilon, reach, kind)
    with pytest.raises(sb.InputError):
        smallest_degree(epsilon, reach, kind, limit=found.degree - 1)
    result = sb.attention(q, k, v, method=method, return_result=True)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    limit = 2 * epsilon / (1 - epsilon)
    error = (result.output - exact).abs().max() / v.abs().max()
    assert float(error) <= limit and result.certificate.bound_holds(limit * 1.001)


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_epsilon_with_a_threshold(kind: str) -> None:
    """Algorithm 1: the range is that of small rows, so the degree is lower than without one."""
    q, k, v = head(spread=1.0)
    q[..., :3, :] *= 9
    method = sb.SingleThreshold(2.5, epsilon=1e-2, polynomial=kind)
    found = only(sb.plan(q, k, v, method=method))
    assert isinstance(found, ThresholdHead) and found.threshold == 2.5 and found.large[0] >= 3
    assert found.polynomial.error <= 1e-2
    strict = "minimax" if kind == "auto" else kind
    assert found.degree == smallest_degree(1e-2, found.polynomial.bound, strict).degree
    assert kind in ("auto", found.polynomial.kind)


def test_without_a_threshold_epsilon_finds_the_cheapest_of_all_degrees() -> None:
    q, k, v = head(spread=0.5, n=2000)
    q[..., :4, :] *= 12
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(epsilon=0.05))
    fixed = [sb.plan(q, k, v, method=sb.SingleThreshold(degree=g)) for g in range(6)]
    assert plan.cost == pytest.approx(min(one.cost for one in fixed)) and plan.cost < 1
    assert only(plan).polynomial.error <= 0.05


def test_a_degree_with_too_many_features() -> None:
    """A polynomial says so; a threshold computes the head exactly and says why."""
    q, k, v = head(spread=4.0, d=64)
    with pytest.raises(sb.InputError, match=r"epsilon=0\.01: no chebyshev polynomial.*head dim 64"):
        sb.plan(q, k, v, method=sb.Polynomial(epsilon=0.01))
    (found,) = sb.plan(q, k, v, method=sb.SingleThreshold(30.0, epsilon=0.01)).heads
    assert found.kind == "exact" and "the highest for head dim 64" in found.reason


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_takes_the_kind_it_is_given(kind: str) -> None:
    q, k, v = head()
    for method in (sb.Polynomial(3, polynomial=kind), sb.SingleThreshold(1.5, 3, polynomial=kind)):
        assert only(sb.plan(q, k, v, method=method)).polynomial.kind == kind
    (found,) = sb.plan(q, k, v, method=sb.MultiThreshold(polynomial=kind)).heads
    assert isinstance(found, BucketHead)
    kernels = [pair.kernel for pair in found.pairs if pair.kernel is not None]
    assert kernels and {x.polynomial.kind for x in kernels if x.polynomial} == {kind}


def test_auto_takes_the_kind_of_least_error() -> None:
    q, k, v = head()
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def error(kind: str) -> float:
        method = sb.Polynomial(2, polynomial=kind)
        return float((sb.attention(q, k, v, method=method) - exact).norm())

    assert error("auto") <= 1.001 * min(map(error, KINDS))


@pytest.mark.parametrize("c", [0.25, 0.5])
def test_the_constant_of_the_papers_threshold(c: float) -> None:
    """Theorem 1.3: T = sqrt(c ln n) with c < 1."""
    q, k, v = head(spread=0.3, n=500)
    method = sb.SingleThreshold("sqrt-log", c=c)
    found = only(sb.plan(q, k, v, method=method))
    assert isinstance(found, ThresholdHead)
    assert found.threshold == pytest.approx(math.sqrt(c * math.log(500)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sb.Polynomial(2, epsilon=0.1), "degree is 2 and epsilon is 0.1"),
        (lambda: sb.SingleThreshold(1.0, 2, epsilon=0.1), "expected one of them"),
        (lambda: sb.Polynomial(epsilon=-1.0), "epsilon must be a finite number > 0"),
        (lambda: sb.SingleThreshold(epsilon="small"), "epsilon must be"),
        (lambda: sb.Polynomial(polynomial="best"), "polynomial must be one of"),
        (lambda: sb.MultiThreshold(polynomial=3), "polynomial must be one of"),
        (lambda: sb.SingleThreshold(1.0, c=0.5), "only threshold='sqrt-log' has a constant"),
        (lambda: sb.SingleThreshold("sqrt-log", c=-2), "c must be a finite number > 0"),
    ],
)
def test_what_is_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(sb.InputError, match=said):
        make()


@pytest.mark.parametrize(
    "method",
    [
        sb.Polynomial(epsilon=0.05, polynomial="taylor"),
        sb.SingleThreshold("sqrt-log", epsilon=0.05, c=0.5),
        sb.SingleThreshold(1.5, polynomial="chebyshev"),
        sb.MultiThreshold(polynomial="minimax"),
    ],
    ids=str,
)
def test_plans_are_saved_and_do_the_same_after_loading(method: Method, tmp_path: Path) -> None:
    q, k, v = head(spread=0.4)
    plan = sb.plan(q, k, v, method=method)
    plan.save(tmp_path / "plan.json")
    loaded = sb.Plan.load(tmp_path / "plan.json")
    assert loaded.method == method and str(loaded) == str(plan)
    assert torch.equal(sb.attention(q, k, v, plan=plan), sb.attention(q, k, v, plan=loaded))
    assert eval(repr(method), {type(method).__name__: type(method)}) == method


def test_a_batch_has_the_degree_of_its_widest_element() -> None:
    q, k, v = head(spread=0.5)
    both = [torch.cat([x, y]) for x, y in ((q, 0.5 * q), (k, k), (v, v))]
    method = sb.Polynomial(epsilon=0.01)
    assert (
        only(sb.plan(*both, method=method)).degree == only(sb.plan(q, k, v, method=method)).degree
    )


def test_buckets_that_cost_more_than_exact_attention_say_so() -> None:
    q, k, v = head()
    plan = sb.plan(q, k, v, method=sb.MultiThreshold())
    assert plan.cost > 1 and f"costs {plan.cost:.3g} times exact attention" in str(plan)


@pytest.mark.parametrize("method", [sb.SingleThreshold(1.5, epsilon=0.3), sb.SingleThreshold()])
def test_the_polynomial_of_a_density_is_certified_to_epsilon(method: sb.SingleThreshold) -> None:
    """Least expected error alone chooses a Taylor polynomial of any certified error."""
    x = 0.7 * torch.randn(900, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = sb.gaussian_kde(x, x, 1.5, method=method, return_result=True)
    found = only(result.plan)
    assert found.polynomial.error <= (method.epsilon or 0.05)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The degrees of the Remez exchanges that are done from now on."""
    degrees: list[int] = []
    original = certified.remez

    def remez(degree: int, bound: float) -> tuple[float, ...] | None:
        degrees.append(degree)
        return original(degree, bound)

    monkeypatch.setattr(certified, "remez", remez)
    certified.built.cache_clear()
    return degrees


@pytest.mark.parametrize(("reach", "dim"), [(50.0, 4), (20.0, 2), (300.0, 1), (1e4, 1)])
def test_what_rounding_rules_out_builds_no_polynomial(
    reach: float, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(monkeypatch)
    assert all(derived_degree(0.1, reach, dim, kind) is None for kind in ("auto", *KINDS))
    assert not built and not certified.built.cache_info().misses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.01, 1e-6])
@pytest.mark.parametrize("below", [0.05, 0.4, 3.0])
def test_the_degree_is_that_of_a_walk_through_all(kind: str, epsilon: float, below: float) -> None:
    """Also near the rounding floor, ``below`` the widest range that it leaves at degree 20."""
    reach = widest_bound(epsilon, 20) - below
    build = getattr(certified, kind)
    walked = (g for g in range(75) if build(g, reach).error <= epsilon)
    assert derived_degree(epsilon, reach, 2, kind) == next(walked, None)


def test_planning_with_epsilon_fits_few_polynomials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen or so a degree, up to those that could be cheaper; it was thousands."""
    q, k, v = head(spread=1.0, n=2048)
    built = counted(monkeypatch)
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(epsilon=0.01))
    assert plan.cost < 1 and len(built) <= 12 * (max(built) + 1) and max(built) <= 20


def test_padded_keys_do_not_raise_the_threshold() -> None:
    """A padded call plans as if they were absent, however large their entries are."""
    q, k, v = head(spread=0.3)
    long = [torch.cat([x, 50 * x[..., :5, :]], 2) for x in (k, v)]
    mask = torch.arange(305) < 300
    found, plain = (
        only(sb.plan(q, *tensors, attn_mask=shown, method=sb.SingleThreshold()))
        for tensors, shown in ((long, mask), ((k, v), None))
    )
    assert isinstance(found, ThresholdHead) and isinstance(plain, ThresholdHead)
    assert found.threshold == plain.threshold and found.bound == plain.bound
