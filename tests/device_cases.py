"""Tokens and instruments for tests of evaluators on a device: in Triton's interpreter, or
on the device where there is one. To be imported before any kernel."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings

import pytest
import torch
from torch import Tensor

import supportbasis as sb
from cases import qkv

HAS_TRITON = importlib.util.find_spec("triton") is not None
CUDA = torch.cuda.is_available()
if not CUDA:  # read when a kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if CUDA else "cpu"

from supportbasis.cuda.runtime import capacity as capacity_module  # noqa: E402


def patch_language_once() -> None:
    """Triton's interpreter replaces the functions of its language at each call of a device
    function, which is a third of its time. Within a kernel, once for each module is enough."""
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def once(fn):
        if fn.__module__ in done:
            return None
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore())  # at the end of the kernel
        done.add(fn.__module__)
        return scope

    interpreter._patch_lang = once


if HAS_TRITON and not CUDA:
    patch_language_once()


def slow_case(*values):
    """Settings of a kernel that only the slow run has."""
    return pytest.param(*values, marks=pytest.mark.slow)


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
on_device = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device"), needs_triton]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
marks = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    *([pytest.mark.gpu] if CUDA else []),  # there, all of them run on it
]


def smooth(heads, n, d=6, seed=0, dtype=torch.float32):
    """Queries and keys on a curved surface, values that follow the keys: trees without clusters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    slope, phase = 2 * normal(heads, 3, d), 6 * torch.rand(heads, 1, d, generator=generator)
    q, k = (
        2 * torch.cos(torch.rand(heads, n, 3, generator=generator) @ slope + phase)
        for _ in range(2)
    )
    v = torch.tanh(k @ normal(heads, d, d))
    return tuple(x.to(DEVICE, dtype)[None] for x in (q, k, v))


def inputs(heads=2, key_heads=None, *, batch=1, weighted=False, dtype=torch.float32, **shape):
    q, k, v = qkv(batch, heads, key_heads=key_heads or heads, dtype=dtype, **shape)
    call = {}
    if weighted:
        generator = torch.Generator().manual_seed(1)
        m = k.shape[2]
        call["log_weight"] = torch.randn(batch, k.shape[1], m, generator=generator)
        call["log_weight"][..., 3] = -math.inf
        call["lengths"] = torch.randint(m // 2, m, (batch,), generator=generator)
    return [x.to(DEVICE) for x in (q, k, v)], {key: x.to(DEVICE) for key, x in call.items()}


def planned(*tokens, **how):
    """A plan made on the CPU: on a GPU small heads are exact, because nothing is gained there."""
    return sb.plan(*(None if x is None else x.cpu() for x in tokens), **how)


def relative(given: Tensor, wanted: Tensor) -> float:
    assert given.isfinite().all()
    given, wanted = given.detach().double(), wanted.detach().double()
    return float((given - wanted).norm() / wanted.norm())


def directions(*results, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator).to(x) for x in results]


def capacities_of(plan):
    return list(capacity_module._capacities._kept.get(plan, {}).values())


def followed(call, tokens):
    """A captured graph of a call that does not synchronise, and its results: as tokens change."""
    for _ in range(3):  # run, captured, replayed
        call()
    without_synchronising(call)
    graph, results = record(call)
    with torch.no_grad():
        for x in tokens:
            x.copy_(x.flip(2))
    graph.replay()
    for mine, theirs in zip(results, call(), strict=True):
        assert relative(mine.detach(), theirs.detach()) < 1e-2
    return graph, results


def without_synchronising(call):
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # the mode that forbids synchronisation warns about itself
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def record(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
