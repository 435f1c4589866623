"""Partial sums add: in any order, in any split, in any units."""

import math

import torch

from cases import qkv
from supportbasis.components import ExactSum, PolynomialSum, evaluate
from supportbasis.components.partial import Partial
from supportbasis.polynomials.certified import taylor
from supportbasis.problem.problem import Head


def head(n=20, m=30, d=4, is_causal=False, scale=0.5, seed=0, key_log_weight=None):
    q, k, v = qkv(n=n, m=m, d=d, seed=seed)
    return Head(q, k, v, key_log_weight, None, scale, is_causal, True)


def linear(partial: Partial):
    unit = partial.log_scale.exp()
    return partial.num * unit[:, None], partial.den * unit


def assert_same_sums(left: Partial, right: Partial):
    for a, b in zip(linear(left), linear(right), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_an_exact_sum_is_the_sum_of_its_parts():
    for causal in (False, True):
        problem = head(is_causal=causal)
        keys = torch.arange(30)
        first, second = ExactSum(keys[::2].clone()), ExactSum(keys[1::2].clone())
        whole = evaluate([ExactSum(None)], problem, None)
        parts = evaluate([first], problem, None).add_(evaluate([second], problem, None))
        assert_same_sums(whole, parts)
        swapped = evaluate([second], problem, None).add_(evaluate([first], problem, None))
        assert_same_sums(whole, swapped)


def test_a_polynomial_sum_is_the_sum_of_its_parts():
    poly = taylor(3, 4.0)
    for causal in (False, True):
        problem = head(is_causal=causal)
        even, odd = torch.arange(0, 30, 2), torch.arange(1, 30, 2)
        whole = evaluate([PolynomialSum(poly, None)], problem, None)
        parts = evaluate([PolynomialSum(poly, even)], problem, None)
        parts.add_(evaluate([PolynomialSum(poly, odd)], problem, None))
        assert_same_sums(whole, parts)


def test_the_kernel_and_the_tiles_give_the_same_sums(monkeypatch):
    monkeypatch.setattr("supportbasis.components.exact_sum.KERNEL_KEYS", 7)
    bias = torch.randn(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for weight in (None, bias):
        for keys in (None, torch.arange(1, 30, 3)):
            for rows in (None, torch.tensor([2, 3, 11])):
                problem = head(key_log_weight=weight)
                by_kernel = evaluate([ExactSum(keys)], problem, rows)
                with monkeypatch.context() as patch:
                    patch.setattr(
                        "supportbasis.components.exact_sum._kernel_takes", lambda *_: False
                    )
                    by_tiles = evaluate([ExactSum(keys)], problem, rows)
                assert_same_sums(by_kernel, by_tiles)


def test_rows_are_independent():
    rows = torch.tensor([0, 3, 4, 17])
    for component in (ExactSum(None), PolynomialSum(taylor(2, 4.0), None)):
        for causal in (False, True):
            problem = head(is_causal=causal)
            assert_same_sums(
                evaluate([component], problem, None)[rows], evaluate([component], problem, rows)
            )


def test_units_do_not_matter():
    part = evaluate([ExactSum(None)], head(), None)
    shifted = Partial(part.num / 7, part.den / 7, part.log_scale + math.log(7), part.noise)
    empty = Partial.empty(20, 4, part.num, torch.float64)
    assert_same_sums(empty.add_(part), shifted)


def test_a_row_without_keys_stays_empty():
    empty = Partial.empty(3, 2, torch.zeros(1), torch.float64)
    again = Partial.empty(3, 2, torch.zeros(1), torch.float64).add_(empty)
    assert not again.has_keys.any()
    output, lse = again.divide_(again.has_keys)
    assert (output == 0).all()
    assert (lse == -math.inf).all()


def test_causal_polynomial_sums_span_many_chunks(monkeypatch):
    monkeypatch.setattr("supportbasis.components.streaming.CAUSAL_CHUNK", 32)
    poly = taylor(2, 3.0)
    generator = torch.Generator().manual_seed(1)
    for n, m in ((150, 150), (150, 70), (70, 150), (33, 1), (1, 40)):
        bias = torch.randn(m, generator=generator, dtype=torch.float64) * 50
        for weight in (None, bias):
            problem = head(n=n, m=m, is_causal=True, key_log_weight=weight)
            rows = torch.arange(0, n, 3)
            keys = torch.arange(m)[torch.rand(m, generator=generator) < 0.7]
            part = evaluate([PolynomialSum(poly, keys)], problem, rows)
            score = problem.query[rows] @ problem.key[keys].T * problem.scale
            log_weight = torch.zeros(len(keys)).double() if weight is None else weight[keys]
            visible = keys <= rows[:, None]
            kernel = poly(score) * math.exp(3.0) * visible
            top = log_weight.masked_fill(~visible, -math.inf).amax(1) if len(keys) else None
            seen = visible.any(1)
            assert (part.has_keys == seen).all()
            if not seen.any():
                continue
            weights = kernel[seen] * (log_weight - top[seen][:, None]).exp()
            den = weights.sum(1) * (top[seen] - part.log_scale[seen]).exp()
            torch.testing.assert_close(part.den[seen], den, rtol=1e-9, atol=1e-12)
            num = weights @ problem.value[keys] * (top[seen] - part.log_scale[seen]).exp()[:, None]
            torch.testing.assert_close(part.num[seen], num, rtol=1e-9, atol=1e-12)


def test_a_denominator_below_its_rounding_is_not_usable():
    num, den = torch.ones(4, 1), torch.tensor([1.0, 1e-6, -1.0, math.nan])
    part = Partial(num, den, torch.zeros(4), torch.full((4,), 1e-4))
    assert part.usable.tolist() == [True, False, False, False]
