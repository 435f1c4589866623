"""Lists of exact and tilted keys against their float64 reference, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cases import centred_head, in_turn, key_weights
from supportbasis.components.cotangent import Cotangent, Gradients
from supportbasis.lists.list_sum import ListSum, list_attention
from supportbasis.lists.sorting import head_permutation
from supportbasis.lists.tables import ListSettings, tables, tilt
from supportbasis.problem.problem import Head
from supportbasis_studies import reference

MODES, KINDS = ["whole", "causal", "strict"], ["none", "bias", "mask"]
DTYPES = {torch.float64: 1e-10, torch.float32: 3e-5}


def head_of(q, k, v, bias=None, causal=False, scale=None):
    scale = q.shape[1] ** -0.5 if scale is None else scale
    return Head(q, k, v, bias, None, scale, causal, True)


def settings_of(causal, strict=False, price=1e-5, block=16, leaf=8, window=32):
    return ListSettings(price, block, leaf, window if causal else 0, strict)


def both(head, settings):
    """Output and lse of the evaluator and of the reference, on the same sorted tokens."""
    return list_attention(head, settings), reference.list_attention(
        head, settings, tables(head, settings)
    )


CASES = [
    # n, m, d, dv
    (200, 200, 6, 6),
    (131, 131, 5, 3),
    (97, 160, 4, 4),
    (160, 97, 4, 4),
    (64, 64, 1, 2),
    (33, 32, 3, 3),
    (5, 7, 3, 3),
    (1, 1, 2, 2),
]


@pytest.mark.parametrize(("shape", "mode", "kind"), in_turn(CASES, MODES, KINDS), ids=str)
def test_matches_the_reference(shape, mode, kind):
    n, m, d, dv = shape
    for price in (0.0, 1e-4, 1e-2, math.inf):
        q, k, v = centred_head(n, m, d, dv)
        head = head_of(q, k, v, key_weights(kind, m), mode != "whole")
        settings = settings_of(head.is_causal, mode == "strict", price)
        (output, lse), (wanted, wanted_lse) = both(head, settings)
        assert (output - wanted).abs().max() < 1e-10 * v.abs().max()
        seen = wanted_lse > -math.inf
        assert torch.equal(lse > -math.inf, seen)
        assert (lse - wanted_lse)[seen].abs().max() < 1e-9 if bool(seen.any()) else True


@pytest.mark.parametrize("mode", ["whole", "causal", "strict"])
def test_all_leaves_open_is_exact_attention(mode):
    q, k, v = centred_head(150)
    head = head_of(q, k, v, None, mode != "whole")
    output, lse = list_attention(head, settings_of(head.is_causal, mode == "strict", -1.0))
    score = head.scale * q @ k.T
    if head.is_causal:
        score = score.masked_fill(torch.ones_like(score).triu(1).bool(), -math.inf)
    assert (output - score.softmax(1) @ v).abs().max() < 1e-12
    assert (lse - score.logsumexp(1)).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [1e-3, 0.2, 1.0, 30.0])
def test_any_scale(scale):
    q, k, v = centred_head(150, dtype=torch.float32)
    for causal in (False, True):
        head = head_of(q, k, v, None, causal, scale)
        (output, lse), (wanted, wanted_lse) = both(head, settings_of(causal, price=1e-6))
        reach = abs(scale) * float(q.norm(dim=1).max() * k.norm(dim=1).max())
        limit = 64 * 2**-24 * max(1.0, reach)  # scores are rounded relative to their reach
        assert (output - wanted).abs().max() < limit * v.abs().max()
        assert (lse - wanted_lse).abs().max() < limit * max(1.0, reach)


def test_a_tilted_key_is_exact_for_the_mean_and_too_heavy_by_its_curvature_at_most():
    """Jensen: with all leaves closed no row's sum exceeds the true one by more than the largest
    factor 1 + s / 2; and that factor brings the sums nearer to the true ones."""
    q, k, v = centred_head(256)
    head = head_of(q, k, v)
    settings = settings_of(False, price=math.inf)
    _, lse = list_attention(head, settings)
    exact = (head.scale * q @ k.T).logsumexp(1)
    made = tables(head, settings)
    tilts = tilt(made, slice(None), len(made.key), head.scale)
    curvature = (tilts.variance / 2).log1p()
    assert (lse <= exact + curvature.max() + 1e-12).all()
    plain = lse - curvature.amin()  # the sums are less without the factors
    assert (lse - exact).mean().abs() < 0.5 * (plain - exact).mean().abs()
    same = head_of(q[:1].expand(256, -1).contiguous(), k, v)
    output, lse = list_attention(same, settings)
    score = same.scale * same.query @ k.T
    assert (output - score.softmax(1) @ v).abs().max() < 1e-12
    assert (lse - score.logsumexp(1)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("shape", "mode", "kind"),
    in_turn([(130, 130, 5, 5), (97, 150, 4, 3), (150, 97, 4, 4)], MODES, KINDS),
    ids=str,
)
def test_gradients_match_the_autograd_of_the_reference(shape, mode, kind):
    n, m, d, dv = shape
    generator = torch.Generator().manual_seed(5)
    for price in (1e-5, 1e-3, math.inf):
        tensors = list(centred_head(n, m, d, dv))
        bias = key_weights(kind, m)
        tensors += [] if bias is None else [bias]
        leaves = [x.clone().requires_grad_() for x in tensors]
        head = head_of(*leaves[:3], leaves[3] if bias is not None else None, mode != "whole")
        settings = settings_of(head.is_causal, mode == "strict", price)
        output, lse = reference.list_attention(head, settings, tables(head, settings))
        g = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        h = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        seen = lse > -math.inf
        wanted = torch.autograd.grad(
            (output * g).sum() + (lse[seen] * h[seen]).sum(), leaves, allow_unused=True
        )
        plain = head_of(*tensors[:3], bias, mode != "whole")
        total = Gradients(*(torch.zeros_like(x) for x in tensors[:3]), torch.zeros(m).double())
        cotangent = Cotangent.of(output.detach(), lse.detach(), g, h)
        ListSum(settings).add_gradients(total, cotangent, plain, None)
        found = (total.query, total.key, total.value, total.key_log_weight)
        for one, other in zip(found[: len(leaves)], wanted, strict=True):
            other = torch.zeros_like(one) if other is None else other
            assert (one - other).abs().max() < 1e-9


@pytest.mark.parametrize("changed", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_past_does_not_see_the_future(strict, changed):
    """Bits of rows before a change: of keys and values anywhere later; with strict of queries too,
    and without, of queries in later windows."""
    if changed == "query" and not strict:
        at = 96
    else:
        at = 71
    q, k, v = centred_head(200, dtype=torch.float32)
    bias = torch.zeros(200)
    before = list_attention(head_of(q, k, v, bias, True), settings_of(True, strict))
    x = {"query": q, "key": k, "value": v, "bias": bias}[changed]
    x[at:] = torch.randn(x[at:].shape, generator=torch.Generator().manual_seed(9)) * 3
    after = list_attention(head_of(q, k, v, bias, True), settings_of(True, strict))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:at], other[:at])
    assert not torch.equal(before[0][at:], after[0][at:])


def test_every_row_is_in_one_tile():
    for n in (1, 31, 32, 33, 64, 200):
        q, k, v = centred_head(n)
        for mode in ("whole", "causal", "strict"):
            head = head_of(q, k, v, None, mode != "whole")
            settings = settings_of(head.is_causal, mode == "strict")
            made = tables(head, replace(settings))
            rows = made.tiles[made.tiles >= 0]
            assert rows.sort().values.tolist() == list(range(n))
            assert made.slots[made.slots >= 0].sort().values.tolist() == list(range(n))


def test_hidden_tokens_do_not_sort_the_others():
    """Of a head that is longer than a window: centres are those of tokens that are seen."""
    x = centred_head(5000, d=4)[0].float()
    hidden = torch.arange(5000) % 3 == 0
    before = head_permutation(x, 64, hidden)
    x[hidden] = 100.0
    assert torch.equal(before, head_permutation(x, 64, hidden))
    assert before[before >= 0].sort().values.tolist() == (~hidden).nonzero().flatten().tolist()
