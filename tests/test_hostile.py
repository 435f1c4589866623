"""Arguments that are not what they should be: one clear line each, or they work."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import supportbasis as sb
from cases import dense_attention, qkv

TOKENS = qkv(1, 2, n=16, d=4, dtype=torch.float32)
ODD = {
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x[0, 0].to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "complex64": lambda x: x.to(torch.complex64),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors|.*[Ss]parse")
@pytest.mark.parametrize("method", [None, sb.Exact(), sb.Polynomial(1)], ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_tensors_without_plain_entries_are_refused(kind, method):
    q, k, v = TOKENS
    odd = ODD[kind](k)
    plan = None if method is None else sb.plan(q, k, v, method=method)
    for tensors, name in (((odd, odd, odd), "query"), ((q, odd, odd), "key"), ((q, k, odd), "val")):
        with pytest.raises(sb.InputError, match=rf"^{name}.*{kind.split('_')[0]}"):
            sb.attention(*tensors, plan=plan)
    with pytest.raises(sb.InputError, match="attn_mask"):
        sb.attention(q, k, v, attn_mask=odd, plan=plan)
    with pytest.raises(sb.InputError, match="query"):
        sb.plan(odd, odd)
    with pytest.raises(sb.InputError, match="points"):
        sb.gaussian_kde(odd, odd, 1.0)


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), np.int64(1), 1])
@pytest.mark.parametrize("with_plan", [False, True])
def test_scales_may_be_any_real_number(scale, with_plan):
    plan = sb.plan(*TOKENS, method=sb.Exact()) if with_plan else None
    expected, _ = dense_attention(*TOKENS, scale=float(scale))
    given = sb.attention(*TOKENS, scale=scale, plan=plan).double()
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 1j), ("scale", "1"), ("scale", True), ("scale", np.float32("inf")),
        ("enable_gqa", "no"), ("enable_gqa", 1), ("is_causal", 1), ("is_causal", np.bool_(True)),
        ("dropout_p", "a"), ("dropout_p", float("nan")), ("dropout_p", 1.0),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_named(name, value, with_plan):
    plan = sb.plan(*TOKENS, method=sb.Exact()) if with_plan else None
    with pytest.raises(sb.InputError, match=f"^{name} must be"):
        sb.attention(*TOKENS, plan=plan, **{name: value})


INTERRUPTED = """
import sys, importlib.abc
class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "supportbasis.{0}":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
try:
    import supportbasis
except KeyboardInterrupt as error:
    print(error, error.__cause__)
import torch, supportbasis as sb
x = torch.ones(1, 1, 3, 2, requires_grad=True)
sb.attention(x, x, x, method=sb.Polynomial(1)).sum().backward()
"""


@pytest.mark.parametrize("module", ["engine.autograd", "nn"])
def test_an_interrupted_import_says_so_and_can_be_repeated(module):
    code = INTERRUPTED.replace("{0}", module)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "supportbasis was interrupted while it was imported None"
    assert not run.stderr
