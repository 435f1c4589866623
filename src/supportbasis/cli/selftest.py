"""``supportbasis selftest``: outputs and gradients of kernels against those of the component engine
in float64, in words. On a CPU the same kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..api import attention, plan
from ..errors import InputError
from ..methods import BlockSupport, Exact, Method, Polynomial, SingleThreshold
from .terminal import console, friendly

UNITS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-9}
OUTPUT, GRADIENT = 2.0, 8.0  # errors that are allowed, in units of the dtype


@dataclass(frozen=True)
class Case:
    """A method on random tokens, a few of them large."""

    name: str
    method: Method
    dtype: torch.dtype
    causal: bool = False
    bias: bool = False
    d: int = 64
    dv: int = 64
    key_heads: int = 2

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        flags = ", causal" * self.causal + ", key biases" * self.bias
        flags += ", grouped heads" * (self.key_heads == 1)
        return f"{self.name}, {kind}, d={self.d}, values of {self.dv}{flags}"


SINGLE, DEGREE2, DEGREE1 = SingleThreshold(1.2, 2), Polynomial(2, 1.0), SingleThreshold(1.2, 1)
LISTS = BlockSupport(0.9, block_size=32)  # strict where it is causal, since gradients are taken
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
ON_DEVICE = [  # what takes longest to compile first
    Case("lists", LISTS, BRAIN, key_heads=1),
    Case("lists", LISTS, BRAIN, causal=True),
    Case("lists, not strict", replace(LISTS, strict=False), HALF, causal=True, bias=True),
    Case("single threshold, degree 2", SINGLE, BRAIN),
    Case("single threshold, degree 2", SINGLE, BRAIN, causal=True, bias=True, key_heads=1),
    Case("single threshold, degree 2", SINGLE, HALF, causal=True, d=24, dv=40),
    Case("single threshold, degree 1", DEGREE1, BRAIN, causal=True),
    Case("polynomial, degree 2", DEGREE2, BRAIN, causal=True, d=128, dv=128),
    Case("polynomial, degree 2", DEGREE2, FULL, causal=True),
    Case("exact", Exact(), BRAIN, causal=True, bias=True),
]
IN_INTERPRETER = [
    Case("single threshold, degree 2", SINGLE, FULL, bias=True, d=16, dv=18),
    Case("single threshold, degree 2", SINGLE, HALF, causal=True, d=16, dv=16, key_heads=1),
    Case("polynomial, degree 1", Polynomial(1, 0.9), FULL, causal=True, d=17, dv=16),
    Case("exact", Exact(), FULL, causal=True, bias=True, d=16, dv=16),
    Case("lists", LISTS, HALF, d=16, dv=16, key_heads=1),
    Case("lists", LISTS, FULL, causal=True, bias=True, d=16, dv=18),
]


@friendly("selftest")
def selftest(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, or cpu (Triton's interpreter). \\[default: cuda if there is one]"),
    ] = None,
) -> None:
    """Compare the kernels of exact heads, polynomials and lists with float64, in words."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _prepare(device)
    to, start, passed = console(), time.perf_counter(), []
    for is_right, line in _verdicts(ON_DEVICE if device == "cuda" else IN_INTERPRETER, device):
        passed.append(is_right)
        to.print(line)
    count, wrong, seconds = len(passed), passed.count(False), time.perf_counter() - start
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, by interpretation"
    right = f"PASS: all {count} cases are right on {where} ({seconds:.0f} s)."
    to.print(f"FAIL: {wrong} of {count} cases are wrong on {where}." if wrong else right)
    if wrong:
        raise typer.Exit(1)


def _prepare(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device: got {device!r}, expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device here")
    if device == "cpu":  # read when kernels are decorated
        loaded = "supportbasis.cuda.runtime.language" in sys.modules
        if loaded and os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError("--device cpu: kernels are compiled in this process already")
        os.environ["TRITON_INTERPRET"] = "1"


def _verdicts(cases: Sequence[Case], device: str) -> Iterator[tuple[bool, str]]:
    """On a GPU nearly all of the time is compilation, which processes share."""
    if device == "cpu":
        yield from (check(case, device) for case in cases)
        return
    workers = min(len(cases), os.cpu_count() or 2)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(check, cases, [device] * len(cases))


def check(case: Case, device: str) -> tuple[bool, str]:
    """Whether a case is right, and a line with its errors or with what went wrong."""
    try:
        output, *gradients = _compared(case, device)
    except RuntimeError as error:  # a kernel that does not compile or does not run
        first = (str(error).strip() or "no message").splitlines()[0]
        return False, f"FAIL  {case}: {type(error).__name__}: {first}"
    unit = UNITS[case.dtype]
    errors = (("output", output, OUTPUT * unit), ("gradients", max(gradients), GRADIENT * unit))
    is_right = all(error <= limit for _, error, limit in errors)
    said = ", ".join(f"{name} {error:.1e} (at most {limit:.1e})" for name, error, limit in errors)
    return is_right, f"{'pass' if is_right else 'FAIL'}  {case}: {said}"


def _compared(case: Case, device: str) -> list[float]:
    """Relative errors of output and gradients against the component engine in float64."""
    tensors = _tensors(case, device)
    settings: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": True}
    on_cpu: Any = [x.cpu() for x in tensors]  # on a GPU short lists are not worth it
    settings["plan"] = plan(*on_cpu, **settings, method=case.method)
    has_lists = isinstance(case.method, BlockSupport)
    assert all((head.kind == "lists") == has_lists for head in settings["plan"].heads)
    shape = (1, 2, tensors[0].shape[2], case.dv)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)

    def run(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        dtypes = (*[dtype] * 3, torch.promote_types(dtype, torch.float32))
        each = zip(tensors, dtypes, strict=False)
        tracked: Any = [x.to(its_dtype).detach().requires_grad_() for x, its_dtype in each]
        output = attention(*tracked, **settings, implementation=implementation)
        return [output.detach(), *torch.autograd.grad(output, tracked, grad.to(dtype))]

    pairs = zip(run("triton", case.dtype), run("eager", torch.float64), strict=True)
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]


def _tensors(case: Case, device: str) -> list[Tensor]:
    """Query, key, value and, if the case has one, a bias of the keys. Scores of standard deviation
    0.25 and some tokens four times as large; for lists, queries and keys on a surface of three
    dimensions and values that follow the keys."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    d, on_cpu = case.d, device == "cpu"
    if isinstance(case.method, BlockSupport):
        m = (512 if on_cpu else 2048) * (1 + case.causal)  # windows have 512 positions
        slope, phase = 2 * normal(2, 3, d), 6 * normal(2, 1, d)
        q, k = torch.cos(normal(2, 2, m, 3).sigmoid() @ slope + phase) * (2 * d**-0.25)
        k = k[: case.key_heads]
        v = torch.tanh(k @ normal(d, case.dv) / d**0.5)
    else:
        n, m = (60, 50) if on_cpu else (700, 1500)
        q, k = d**-0.25 * normal(2, n, d), d**-0.25 * normal(case.key_heads, m, d)
        v = normal(case.key_heads, m, case.dv)
        q[:, 3::17] *= 4
        k[:, 5::19] *= 4
    bias = [normal(1, 2, 1, m).to(device)] if case.bias else []
    return [x[None].to(device, case.dtype) for x in (q, k, v)] + bias
