"""Which rows are compared, what they say about all rows, and needles that must not escape them."""

import math

import pytest
import torch

import supportbasis as sb
from cases import dense_attention
from supportbasis.accuracy.sampling import QUANTILE, RowSample, Sketch, draw_rows, probabilities
from supportbasis.problem.validation import attention_problem


def head_of(q, k, v, mask=None, causal=False):
    return attention_problem(q, k, v, mask, 0.0, causal, None, False).head(0, 0)


def needles(n=4096, d=16, rows=64, keys=4, size=1.0, score=9.0, seed=0):
    """Small scores, but for ``rows`` queries of ``size`` times the usual norm that score
    ``score`` with a few keys, which other queries do not see."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n, d, generator=generator).unbind(0)
    q, k = 0.4 * q, 0.4 * k
    direction = torch.randn(d, generator=generator)
    direction /= direction.norm()
    q -= (q @ direction)[:, None] * direction
    at = torch.randperm(n, generator=generator)
    length = size * float(q.norm(dim=1).median())
    q[at[:rows]] = length * direction
    k[at[-keys:]] = score * math.sqrt(d) / length * direction
    return at[:rows], [x[None, None] for x in (q, k, v)]


def test_probabilities_add_up_and_go_by_the_measures():
    generator = torch.Generator().manual_seed(0)
    even = torch.ones(1000, dtype=torch.float64)
    measure = torch.rand(1000, generator=generator, dtype=torch.float64)
    measure[:3] = torch.tensor([math.inf, 1e300, 1e5], dtype=torch.float64)
    chance = probabilities(even, (measure, torch.zeros_like(even)), 100)
    assert float(chance.sum()) == pytest.approx(100)
    assert bool((chance[:3] == 1).all())
    assert float(chance.max()) <= 1
    assert float(chance.min()) >= 0.4 * 100 / 1000
    rest = chance[3:] - chance[3:].min()
    slope = rest / (measure[3:] - measure[3:].min()).clamp(min=1e-9)
    assert float(slope[measure[3:] > 0.5].std() / slope[measure[3:] > 0.5].mean()) < 1e-2


def test_rows_are_drawn_as_often_as_they_should_be():
    even = torch.ones(50, dtype=torch.float64)
    chance = probabilities(even, (torch.arange(50.0).square(),), 12)
    trials, count = 4000, torch.zeros(50)
    for seed in range(trials):
        rows = draw_rows(chance, 12, seed)
        assert len(rows) == 12
        assert bool((rows.diff() > 0).all())
        count[rows] += 1
    away = (count / trials - chance).abs() / (chance * (1 - chance) / trials).sqrt().clamp(min=1e-9)
    assert float(away.max()) < 4.5
    assert bool((count[chance == 1] == trials).all())


def test_totals_have_no_bias():
    """Whatever the measures are."""
    generator = torch.Generator().manual_seed(0)
    x, measure = torch.rand(2, 600, generator=generator, dtype=torch.float64).pow(4).unbind(0)
    head = head_of(*torch.randn(3, 1, 1, 600, 4, generator=generator).unbind(0))
    found = []
    for seed in range(800):
        sample = RowSample.draw(head, 60, seed, (measure,))
        assert len(sample.rows) == 60
        found.append(sample.total(x[sample.rows]))
    mean, spread = sum(found) / 800, float(torch.tensor(found).std()) / math.sqrt(800)
    assert abs(mean - float(x.sum())) < 4 * spread
    assert spread < 0.02 * float(x.sum())


def test_the_limit_is_that_of_a_plain_sample_and_one_missed_row():
    generator = torch.Generator().manual_seed(0)
    squared, size = torch.rand(2, 100, generator=generator, dtype=torch.float64).unbind(0)
    sample = RowSample(torch.arange(100), torch.full((100,), 7.0, dtype=torch.float64))
    measured, limit = sample.frobenius_limit(squared, size)
    ratio = float(squared.sum() / size.sum())
    assert measured == pytest.approx(math.sqrt(ratio))
    residual = float((squared - ratio * size).square().mean().sqrt())
    standard = residual * math.sqrt((1 - 1 / 7) / 100) / float(size.mean())
    missed = 6 * float(squared.max()) / (7 * float(size.sum()))
    expected = ratio * math.exp(QUANTILE * standard / ratio) + missed
    assert limit == pytest.approx(math.sqrt(expected))
    everyone = RowSample(torch.arange(100), torch.ones(100, dtype=torch.float64))
    everyone = everyone.frobenius_limit(squared, size)
    assert everyone == (pytest.approx(measured), pytest.approx(measured))


@pytest.mark.parametrize("causal", [False, True])
def test_weights_and_sums_are_estimated(causal):
    """Keys that few rows attend to are found; padded ones, and those ahead, count for nothing."""
    _, (q, k, v) = needles(n=2048)
    mask = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    mask[..., ::5] = False
    head = head_of(q, k, v, mask, causal)
    sketch = Sketch.of(head, 0)
    assert Sketch.of(head, 0) is sketch
    score = (q[0, 0] @ k[0, 0].T / math.sqrt(16)).masked_fill(~mask[0, 0], -math.inf)
    if causal:
        score = score.masked_fill(torch.ones_like(score).triu(1).bool(), -math.inf)
    late = torch.arange(2048) > (300 if causal else -1)
    assert float((sketch.lse - score.logsumexp(1))[late].abs().quantile(0.9)) < 0.3
    own = (score.softmax(1).square() @ (v[0, 0] - v[0, 0].mean(0)).square().sum(1)).nan_to_num(0.0)
    largest = own[late].topk(20).indices
    top = sketch.measures[2][late].topk(64).indices
    assert len(set(largest.tolist()) & set(top.tolist())) >= 18
    ratio = (sketch.measures[2] / own)[late]
    assert 0.5 < float(ratio.median()) < 2
    no_keys = head_of(q, k, v, torch.zeros_like(mask), causal)
    assert len(RowSample.draw(no_keys, 32, 0).rows) == 32


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("count", [8, 64])
def test_needle_rows_are_drawn(count, size):
    for seed in range(3):
        rows, tensors = needles(rows=count, size=size, seed=seed)
        sample = RowSample.draw(head_of(*tensors), 128, 0)
        drawn = torch.isin(rows, sample.rows)
        assert int(drawn.sum()) >= min(count, 24) / 2
        assert float(sample.weight[torch.isin(sample.rows, rows)].max()) < 10


def test_keys_that_only_pilot_rows_tell_are_found():
    """Needle keys of the usual norm and value; rows that look for them are long."""
    for seed in range(3):
        rows, tensors = needles(size=10.0, score=7.0, seed=seed)
        own = Sketch.of(head_of(*tensors), 0).measures[2]
        others = torch.ones(4096, dtype=torch.bool)
        others[rows] = False
        assert float(own[rows].min()) > 20 * float(own[others].max())


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_auto_keeps_its_tolerance_where_few_rows_look_for_few_keys(seed, size):
    """64 rows of 4096 make most of the output: a sample of forty found none, and 0.2 was true
    where 0.02 was measured."""
    _, tensors = needles(size=size, seed=seed, score=6.0)
    plan = sb.plan(*tensors, method=sb.Auto(0.05))
    result = sb.attention(*tensors, plan=plan, return_result=True)
    exact = dense_attention(*tensors)[0]
    error = float((result.output.double() - exact).norm() / exact.norm())
    assert error <= 1.25 * 0.05
    assert error <= float(result.certificate.limit)


def test_the_certificate_finds_the_needles():
    """A polynomial that knows nothing of them; their rows are where the error is."""
    for count in (8, 64):
        _, tensors = needles(rows=count, score=6.0)
        result = sb.attention(*tensors, method=sb.Polynomial(1), return_result=True)
        exact = dense_attention(*tensors)[0]
        error = float((result.output.double() - exact).norm() / exact.norm())
        assert error > 0.3
        assert float(result.certificate.measured) == pytest.approx(error, rel=0.1)
        assert float(result.certificate.limit) >= error
