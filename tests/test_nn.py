"""Modules: the same answers as PyTorch's own, methods that can be exchanged, gradients."""

import pytest
import torch
from torch import nn

import supportbasis as sb
from supportbasis.nn import rotated


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _own_randomness():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_of_multihead_attention_give_its_answers(bias, masked):
    theirs = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=torch.float64)
    ours = sb.nn.SupportBasisAttention.from_multihead(theirs, method=sb.Exact())
    copied = ours.query_projection.weight, ours.key_projection.weight, ours.value_projection.weight
    assert torch.equal(torch.cat(copied), theirs.in_proj_weight)  # all 53 bits
    x, context = tokens(2, 7, 12), tokens(2, 9, 12, seed=1)
    keep = torch.ones(2, 9, dtype=torch.bool)
    if masked:
        keep[1, 5:] = False
    expected, _ = theirs(x, context, context, key_padding_mask=~keep)
    torch.testing.assert_close(ours(x, context, key_mask=keep if masked else None), expected)


def test_multihead_attention_that_has_no_counterpart_is_refused():
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6}):
        with pytest.raises(sb.InputError, match="module has"):
            sb.nn.SupportBasisAttention.from_multihead(nn.MultiheadAttention(12, 3, **options))


def test_a_causal_module_does_not_look_ahead():
    module = sb.nn.SupportBasisEncoder(
        2, 16, 4, num_key_heads=2, rope=True, is_causal=True, method=sb.Polynomial(2)
    ).double()
    x = tokens(1, 10, 16)
    changed = x.clone()
    changed[:, 6:] = 0
    module.method = sb.Exact()
    torch.testing.assert_close(module(x)[:, :6], module(changed)[:, :6])


def test_the_method_of_a_trained_module_can_be_changed():
    module = sb.nn.SupportBasisEncoder(2, 16, 4, tolerance=1e-3).double()
    assert module.method == (sb.Auto(1e-3), sb.Auto(1e-3))
    state = {name: x.clone() for name, x in module.state_dict().items()}
    x = tokens(2, 20, 16)
    module.method = sb.Exact()
    module.requires_grad_(False)
    exact = module(x)
    for method in (sb.Polynomial(3), sb.SingleThreshold(0.5, 2), sb.MultiThreshold(2.0, 2)):
        module.method = method
        assert module.method == (method, method)
        assert float((module(x) - exact).norm()) < 0.02 * float(exact.norm())
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())


@pytest.mark.parametrize(
    "method", [sb.Exact(), sb.SingleThreshold(0.5, 2), sb.Polynomial(3)], ids=str
)
def test_gradients_of_all_parameters(method):
    module = sb.nn.SupportBasisEncoder(2, 8, 2, rope=True, is_causal=True, method=method).double()
    x = tokens(1, 12, 8)
    module(x).square().sum().backward()
    given = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module.method = sb.Exact()
    module(x).square().sum().backward()
    expected = [p.grad for p in module.parameters()]
    wrong = sum(float((a - b).square().sum()) for a, b in zip(given, expected, strict=True))
    assert wrong <= 0.05**2 * sum(float(b.square().sum()) for b in expected)


def test_rotary_scores_depend_on_distances_only():
    x, y = tokens(1, 8), tokens(1, 8, seed=1)
    q, k = rotated(x.expand(9, 8)), rotated(y.expand(9, 8))
    score = q @ k.T
    for offset in range(-8, 9):
        diagonal = score.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embed_dim": 10, "num_heads": 3}, "num_heads is 3"),
        ({"embed_dim": 10, "num_heads": "2"}, "num_heads must be an integer >= 1"),
        ({"embed_dim": 10, "num_heads": 2, "dropout": 1.5}, "dropout must be"),
        ({"embed_dim": 12, "num_heads": 4, "num_key_heads": 3}, "num_key_heads is 3"),
        ({"embed_dim": 9, "num_heads": 3, "rope": True}, "even head dim"),
        ({"embed_dim": 8, "num_heads": 2, "method": "auto"}, "method must be"),
        ({"embed_dim": 8, "num_heads": 2, "method": sb.Exact(), "tolerance": 0.1}, "give one"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(sb.InputError, match=words):
        sb.nn.SupportBasisAttention(**options)


@pytest.mark.parametrize("layers", [-1, 1.5])
def test_a_number_of_layers_is_a_count(layers):
    with pytest.raises(sb.InputError, match="num_layers must be an integer >= 0"):
        sb.nn.SupportBasisEncoder(layers, 16, 2)


def test_a_module_keeps_its_plan(monkeypatch):
    """Calls with a plan do not plan, whatever their batch and length; another method drops it."""
    module = sb.nn.SupportBasisAttention(16, 2, method=sb.Polynomial(2)).double()
    x = tokens(2, 50, 16)
    before = module(x)
    plan = module.plan(x)
    assert module.kept_plan is plan and len(plan.heads) == 2
    monkeypatch.setattr(sb.Polynomial, "plan_head", None)  # planning would fail
    torch.testing.assert_close(module(x), before)
    assert module(0.9 * tokens(3, 40, 16, seed=1)).shape == (3, 40, 16)
    module.method = sb.Exact()
    assert module.kept_plan is None


def test_an_encoder_plans_every_layer_on_what_reaches_it():
    model = sb.nn.SupportBasisEncoder(3, 16, 2, method=sb.Polynomial(2), is_causal=True).double()
    x = tokens(2, 50, 16)
    expected = model(x)
    plans = model.plan(x)
    assert [layer.attention.kept_plan for layer in model.layers] == list(plans)
    assert len({plan.heads[0].bound for plan in plans}) == 3  # each from its own inputs
    torch.testing.assert_close(model(x), expected)


def test_a_plan_is_made_as_the_calls_will_run(monkeypatch):
    """Where gradients are recorded, methods know it: causal lists are then measured as strict."""
    module, recorded = sb.nn.SupportBasisAttention(16, 2, method=sb.Polynomial(2)), []
    plan_head = sb.Polynomial.plan_head

    def spy(self, head):
        recorded.append(head.requires_grad)
        return plan_head(self, head)

    monkeypatch.setattr(sb.Polynomial, "plan_head", spy)
    module.plan(tokens(1, 20, 16).float())
    with torch.no_grad():
        module.plan(tokens(1, 20, 16).float())
    assert recorded == [True, True, False, False]
