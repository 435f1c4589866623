"""How attention behaves inside PyTorch: operators, graphs, transforms, autocast, checkpoints."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import supportbasis as sb
from cases import in_turn, qkv
from supportbasis.accuracy.sampling import exact_rows
from supportbasis.components import streaming
from supportbasis.problem.validation import attention_problem

METHODS = [
    sb.Exact(),
    sb.Polynomial(2),
    sb.SingleThreshold(0.4, 2),
    sb.MultiThreshold(2.0, 1),
    sb.PowerAttention(2, sketch_size=8),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Graphs of one test must not count against those of the next."""
    yield
    torch.compiler.reset()


def tensors(requires_grad=True, **shape):
    shape = {"n": 12, "d": 4, "scale": 0.3} | shape
    return [x.requires_grad_(requires_grad) for x in qkv(1, 2, **shape)]


def grads(output, inputs):
    return torch.autograd.grad(output.square().sum(), inputs)


def assert_equal(given, expected):
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("method", "causal", "bias"), in_turn(METHODS, [False, True], [False, True]), ids=str
)
def test_operators_pass_opcheck(method, causal, bias):
    q, k, v = tensors(dv=3)
    weight = torch.zeros(1, 2, 12, dtype=torch.float64, requires_grad=True) if bias else None
    plan = sb.plan(q, k, v, is_causal=causal, method=method)
    settings = (plan.handle, "auto", 0.5, causal)
    ops = torch.ops.supportbasis
    torch.library.opcheck(ops.attention, (q, k, v, weight, None, *settings))
    plain = [None if x is None else x.detach() for x in (q, k, v, weight)]
    output, lse, fallback, _ = ops.attention(*plain, None, *settings)
    torch.library.opcheck(
        ops.attention_backward,
        (output.cos(), lse.cos(), output, lse, fallback, bias, *plain, None, *settings),
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_graph_holds_a_call_with_a_plan(method):
    q, k, v = tensors()
    plan = sb.plan(q, k, v, is_causal=True, method=method)

    def step(q, k, v):
        return sb.attention(q * 1.2, k, v, is_causal=True, plan=plan).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(q, k, v)
    assert_equal([compiled(q, k, v)], [expected])
    assert_equal(grads(compiled(q, k, v), (q, k, v)), grads(expected, (q, k, v)))
    with torch.no_grad():
        assert_equal([compiled(q, k, v)], [expected])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_is_kept_serves_every_way_back(method):
    """A graph keeps no sums over keys, so its gradients are formed from scratch."""
    inputs = tensors(n=40)
    plan = sb.plan(*inputs, method=method)
    settings = (plan.handle, "auto", 0.5, False)
    scratch = grads(torch.ops.supportbasis.attention(*inputs, None, None, *settings)[0], inputs)
    loss = sb.attention(*inputs, plan=plan).square().sum()
    for _ in range(2):
        assert_equal(torch.autograd.grad(loss, inputs, retain_graph=True), scratch)


def test_sums_over_keys_are_formed_once(monkeypatch):
    formed = []
    original = streaming.sum_keys
    monkeypatch.setattr(streaming, "sum_keys", lambda *x: formed.append(x) or original(*x))
    for n, expected in ((40, 1), (8, 2)):  # 15 features: of 8 keys they would hold more than these
        formed.clear()
        inputs = [x[:, :1] for x in tensors(n=n)]
        grads(sb.attention(*inputs, method=sb.Polynomial(2)), inputs)
        assert len(formed) == expected


def test_a_graph_holds_key_biases_and_grouped_heads():
    q, k, v = qkv(1, 4, n=12, d=4, key_heads=2, scale=0.3)
    bias = torch.randn(1, 1, 1, 12, generator=torch.Generator(), dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    for method in (sb.Polynomial(2), sb.Exact()):
        plan = sb.plan(q, k, v, attn_mask=bias, enable_gqa=True, method=method)

        def step(q, k, v, bias, plan=plan):
            return sb.attention(q, k, v, attn_mask=bias, enable_gqa=True, plan=plan)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        expected = step(*inputs)
        assert_equal([compiled(*inputs)], [expected])
        assert_equal(grads(compiled(*inputs), inputs), grads(expected, inputs))


@pytest.mark.slow
def test_inductor_compiles_forward_and_backward():
    q, k, v = tensors()
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(0.4, 2))
    step = lambda q, k, v: sb.attention(q * 1.2, k, v, plan=plan).sin()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True)
    assert_equal(grads(compiled(q, k, v), (q, k, v)), grads(step(q, k, v), (q, k, v)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.parametrize("method", [None, sb.Polynomial(2)], ids=str)
def test_without_a_plan_the_graph_breaks_once(method):
    q, k, v = tensors()

    def step(q, k, v):
        return sb.attention(q * 1.5, k, v, method=method).sin()

    import torch._dynamo as dynamo

    assert dynamo.explain(step)(q, k, v).graph_break_count == 1
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        assert_equal(grads(compiled(q, k, v), (q, k, v)), grads(step(q, k, v), (q, k, v)))


def test_a_graph_keeps_its_plan():
    q, k, v = tensors()
    plan = sb.plan(q, k, v, method=sb.Polynomial(2))
    expected = grads(sb.attention(q, k, v, plan=plan), (q, k, v))
    call = torch.compile(
        lambda q, k, v, plan: sb.attention(q, k, v, plan=plan), fullgraph=True, backend="aot_eager"
    )
    output = call(q, k, v, plan)
    del plan
    gc.collect()
    assert_equal(grads(output, (q, k, v)), expected)


def test_autograd_keeps_the_plan_until_the_backward_pass():
    q, k, v = tensors()
    output = sb.attention(q, k, v, method=sb.Polynomial(2))
    gc.collect()
    assert grads(output, (q, k, v))[0].isfinite().all()


def test_a_copied_plan_is_a_plan():
    q, k, v = tensors()
    plan = sb.plan(q, k, v, method=sb.Polynomial(2))
    other = copy.deepcopy(plan)
    assert other.handle != plan.handle
    expected = sb.attention(q, k, v, plan=plan)
    del plan
    gc.collect()
    assert_equal([sb.attention(q, k, v, plan=other)], [expected])


def test_a_plan_that_is_gone_is_named():
    with pytest.raises(sb.SupportBasisError, match="plan 12345678 is gone"):
        sb.Plan.known("plan 12345678")


def test_operators_refuse_inputs_that_a_plan_does_not_fit():
    q, k, v = tensors()
    plan = sb.plan(q, k, v, method=sb.SingleThreshold(0.4, 2))
    with pytest.raises(sb.InputError, match="heads, dim"):
        sb.attention(q[:, :1], k[:, :1], v[:, :1], plan=plan)
    with pytest.raises(sb.InputError, match="is_causal=False"):
        sb.attention(q, k, v, is_causal=True, plan=plan)
    with pytest.raises(sb.InputError, match=r"scale=0\.5, but the call has scale=2"):
        sb.attention(q, k, v, scale=2.0, plan=plan)
    with pytest.raises(sb.InputError, match="non-finite"):
        sb.attention(q / 0, k, v, plan=plan)


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.SingleThreshold(0.4), sb.Exact()], ids=str)
def test_functional_gradients(method, with_plan):
    q, k, v = tensors(requires_grad=False)
    plan = sb.plan(q, k, v, method=method) if with_plan else None

    def loss(q, k, v):
        return sb.attention(q, k, v, method=method, plan=plan).square().sum()

    given = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    assert_equal(given, torch.autograd.grad(loss(*inputs), inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA has no batching rule
@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.SingleThreshold(0.4), sb.Exact()], ids=str)
def test_vmap_calls_the_plan_for_each_slice(method):
    q, k, v = tensors(requires_grad=False)
    plan = sb.plan(q, k, v, method=method)
    several = torch.stack([q, 0.5 * q, -q], 1)

    def call(q):
        return sb.attention(q, k, v, plan=plan)

    expected = torch.stack([call(x) for x in several.unbind(1)], 2)
    assert_equal([torch.func.vmap(call, in_dims=1, out_dims=2)(several)], [expected])
    assert torch.func.vmap(call)(q.new_zeros(0, *q.shape)).shape == (0, *q.shape)
    empty = torch.func.vmap(lambda q, k, v: sb.attention(q, k, v, plan=plan))(
        *(x[None, :0].repeat(2, 1, 1, 1, 1) for x in (q, k, v))
    )
    assert empty.shape == (2, 0, *v.shape[1:])
    slopes = torch.func.vmap(torch.func.grad(lambda q: call(q).square().sum()), in_dims=1)(several)
    each = [x.clone().requires_grad_() for x in several.unbind(1)]
    assert_equal(slopes, [grads(call(x), x)[0] for x in each])


EVERY = [*METHODS, sb.MultiThreshold(2.0, 1, sketch_size=8), sb.BlockSupport(0.5), sb.Auto()]
SECOND = {
    "backward": lambda f, x: f(x).backward(),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA has no batching rule
@pytest.mark.parametrize(("method", "second", "with_plan"), in_turn(EVERY, SECOND, [False, True]))
def test_second_derivatives_are_refused_in_one_line(method, second, with_plan):
    q, k, v = tensors(requires_grad=False)
    plan = sb.plan(q, k, v, method=method) if with_plan else None

    def slope(q):
        call = lambda q: sb.attention(q, k, v, method=method, plan=plan).sum()  # noqa: E731
        if second == "backward":
            return torch.autograd.grad(call(q), q, create_graph=True)[0].sum()
        return torch.func.jacrev(call)(q).sum()

    with pytest.raises(sb.SupportBasisError, match=r"no (second|forward-mode) derivatives"):
        SECOND[second](slope, q.requires_grad_(second == "backward"))


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("method", EVERY, ids=str)
def test_second_derivatives_through_a_result_are_refused(method, with_plan):
    q, k, v = tensors()
    plan = sb.plan(q, k, v, method=method) if with_plan else None
    result = sb.attention(q, k, v, method=method, plan=plan, return_result=True)
    slopes = torch.autograd.grad(result.lse.sum() + result.output.sum(), (q, k), create_graph=True)
    with pytest.raises(sb.SupportBasisError, match="no second derivatives"):
        torch.autograd.grad(slopes[1].sum(), v)


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2), sb.SingleThreshold(0.4)], ids=str)
def test_tangents_are_refused(method, with_plan):
    from torch.autograd import forward_ad

    q, k, v = tensors(requires_grad=False)
    plan = sb.plan(q, k, v, method=method) if with_plan else None
    with forward_ad.dual_level():
        expected = sb.attention(q, k, v, method=method)
        assert_equal([sb.attention(q, k, v, method=method, plan=plan)], [expected])
        dual = forward_ad.make_dual(k, k)
        with pytest.raises(sb.SupportBasisError, match="no forward-mode derivatives"):
            sb.attention(q, dual, v, method=method, plan=plan)


@pytest.mark.parametrize("side", range(4))
@pytest.mark.parametrize("method", EVERY, ids=str)
def test_vmap_without_a_plan_asks_for_one(method, side):
    inputs = [*tensors(requires_grad=False), torch.zeros(12, dtype=torch.float64)]
    name = ("query", "key", "value", "attn_mask")[side]

    def call(x):
        q, k, v, mask = (x if i == side else y for i, y in enumerate(inputs))
        return sb.attention(q, k, v, mask, method=method)

    with pytest.raises(sb.InputError, match=f"{name} is batched by torch.func.vmap.*plan="):
        torch.func.vmap(call)(torch.stack([inputs[side]] * 2))


@pytest.mark.parametrize("with_plan", [False, True])
def test_vmap_of_a_mask_of_pairs_is_refused(with_plan):
    q, k, v = tensors(requires_grad=False)
    plan = sb.plan(q, k, v, method=sb.Polynomial(2)) if with_plan else None
    with pytest.raises(sb.InputError, match=r"attn_mask is batched by torch\.func\.vmap"):
        torch.func.vmap(lambda mask: sb.attention(q, k, v, mask, plan=plan))(torch.zeros(2, 12, 12))


@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2), sb.SingleThreshold(0.4)], ids=str)
def test_autocast_takes_inputs_as_sdpa_does_and_sums_in_float32(method):
    q, k, v = tensors(dtype=torch.float32, n=64)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = sb.attention(*narrow, method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = sb.attention(q, k.bfloat16(), v, method=method)
        wide = sb.attention(*(x.detach().double() for x in (q, k, v)), method=method)
    assert output.dtype == torch.bfloat16 and wide.dtype == torch.float64
    assert_equal([output], [expected])
    given = torch.autograd.grad(output.float().square().sum(), (q, k, v))
    assert all(x.dtype == torch.float32 for x in given)
    assert_equal(given, [x.float() for x in grads(expected.float(), narrow)])


@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2), sb.FittedPolynomial(64)], ids=str)
def test_plans_and_certificates_do_not_feel_autocast(method):
    tokens = [x.bfloat16() for x in tensors(False, dtype=torch.float32, n=300, d=8)]
    plan = sb.plan(*tokens, method=method)
    expected = sb.attention(*tokens, plan=plan, return_result=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = sb.attention(*tokens, plan=plan, return_result=True)
    assert_equal([result.output, result.lse], [expected.output, expected.lse])
    names = ("bound", "measured", "limit")
    assert_equal(*([getattr(x.certificate, name) for name in names] for x in (result, expected)))


def test_exact_rows_do_not_feel_autocast():
    tokens = tensors(False, dtype=torch.float32)
    head = attention_problem(*tokens, None, 0.0, False, None, False).head(0, 0)
    rows = torch.arange(12)
    expected = exact_rows(head, rows, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact_rows(head, rows, dtype=torch.float32), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [None, *METHODS], ids=str)
def test_activation_checkpoints(method, reentrant):
    q, k, v = tensors()
    call = lambda *x: sb.attention(*x, method=method).sin()  # noqa: E731
    expected = grads(call(q, k, v), (q, k, v))
    output = checkpoint(call, q, k, v, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_equal([x.grad for x in (q, k, v)], expected)


def test_nothing_but_graphs_imports_the_compiler():
    code = """
import sys, torch, supportbasis as sb
x = torch.randn(1, 1, 64, 8)
sb.attention(x, x, x, method=sb.Polynomial(2))
sb.attention(x.requires_grad_(), x, x, method=sb.Polynomial(2)).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
