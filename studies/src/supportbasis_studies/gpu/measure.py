"""How a case is measured: by events on the device, beside every backend of PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from supportbasis import Plan, attention, plan
from supportbasis.engine.dispatch import groups, label
from supportbasis.problem.validation import attention_problem

from ..comparison.measure import exact_rows, sampled_rows
from ..study import Row
from .cases import Case

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SAMPLED_ROWS = 64  # of each head
SLOW_BACKEND = 32768  # efficient attention is left out of sweeps beyond this length
Call = Callable[[], object]
Times = dict[str, float]
Tokens = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class GpuRow(Row):
    """One case. A backend that did not run has no time."""

    work: str
    method: str
    implementation: str
    heads: int
    n: int
    d: int
    causal: bool
    backward: bool
    graph: bool
    ms: float
    flash_ms: float | None
    cudnn_ms: float | None
    efficient_ms: float | None
    baseline: str  # the fastest of the three
    baseline_ms: float
    ratio: float
    rate: float | None  # of multiply-adds over that of a large matrix product
    matmul_tflops: float
    error: float  # relative, against float64 on sampled rows
    limit: float
    planning_s: float
    first_call_s: float  # compilation included
    triton: str
    note: str

    @property
    def counts(self) -> bool:
        """Whether the error is within its limit: otherwise the speed does not count."""
        return self.error <= self.limit


def milliseconds(call: Call, budget: float = 150.0) -> float:
    """Median time of a call that has run before, over about ``budget`` milliseconds.

    triton.testing.do_bench empties the L2 cache before each call; in a model the layer before has
    just written these inputs, so here the cache stays as calls leave it.
    """
    once = _timed(call, 1)[0]
    repeats = int(min(50, max(3, budget / max(once, 1e-3))))
    return sorted(_timed(call, repeats))[repeats // 2]


def _timed(call: Call, repeats: int) -> list[float]:
    torch.cuda.synchronize()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in pairs:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in pairs]


def replayed(call: Call) -> Call:
    """The same as a captured graph: what it takes without launches from Python."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Bench:
    """Measurements of one run; baselines are timed once."""

    def __init__(self) -> None:
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        torch.matmul(a, b)
        self.matmul = 2 * 8192**3 / (milliseconds(lambda: torch.matmul(a, b)) * 1e-3)
        self._known: dict[object, Times] = {}

    def row(self, case: Case) -> GpuRow:
        tokens = case.inputs(case.heads, case.n, case.d)
        for x in tokens:  # known to planning: causal lists that are differentiated are strict
            x.requires_grad_(case.backward)
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = plan(*tokens, is_causal=case.causal, method=case.method)
        torch.cuda.synchronize()
        planned = time.perf_counter()

        def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = attention(
                query, key, value, is_causal=case.causal,
                plan=made, implementation=case.implementation,
            )  # fmt: skip
            assert isinstance(output, Tensor)
            return output

        step = _step(ours, tokens, case.backward)
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - planned
        output = ours(*tokens).detach()
        with torch.no_grad():
            wrong, size = sampled_squares(*tokens, output, case.causal)
        error = float((wrong.sum() / size.sum()).sqrt())
        ms = milliseconds(replayed(step) if case.graph else step)
        times = self._baselines(case, tokens)
        best = min(times, key=times.__getitem__)
        note = "graph replay" if case.graph else ""
        if case.baseline_n:
            note = f"SDPA extrapolated from n={case.baseline_n}"
        beyond = said_of_heads((wrong / size).sqrt().tolist(), case.limit)
        note = "; ".join(part for part in (note, beyond) if part)
        problem = attention_problem(*tokens, None, 0.0, case.causal, None, False, finite=False)
        return GpuRow(
            unit=case.unit,
            work=case.name,
            method=str(case.method),
            implementation=label(groups(problem, made, case.implementation)),
            heads=case.heads,
            n=case.n,
            d=case.d,
            causal=case.causal,
            backward=case.backward,
            graph=case.graph,
            ms=ms,
            flash_ms=times.get("flash"),
            cudnn_ms=times.get("cudnn"),
            efficient_ms=times.get("efficient"),
            baseline=best,
            baseline_ms=times[best],
            ratio=times[best] / ms,
            rate=None if case.backward else _flops(case, made) / (ms * 1e-3) / self.matmul,
            matmul_tflops=self.matmul / 1e12,
            error=error,
            limit=case.limit,
            planning_s=planned - start,
            first_call_s=first,
            triton=version("triton"),
            note=note,
        )

    def _baselines(self, case: Case, tokens: Tokens) -> Times:
        """The time of each backend that takes these inputs."""
        n = case.baseline_n or case.n
        place = (case.heads, n, case.d, case.causal, case.backward, case.graph)
        if place not in self._known:
            query, key, value = (x[:, :, :n] for x in tokens)
            self._known[place] = _time_sdpa(case, (query, key, value))
        return {name: ms * (case.n / n) ** 2 for name, ms in self._known[place].items()}


def _time_sdpa(case: Case, tokens: Tokens) -> Times:
    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    times = {}
    for name, backend in BACKENDS.items():
        if name == "efficient" and "sweep" in case.name and case.n > SLOW_BACKEND:
            continue
        with sdpa_kernel(backend):
            step = _step(sdpa, tokens, case.backward)
            try:
                step()
            except RuntimeError:  # a backend that does not take these inputs
                continue
            times[name] = milliseconds(replayed(step) if case.graph else step)
    return times


def _step(run: Callable[..., Tensor], tokens: Tokens, backward: bool) -> Call:
    if not backward:
        return lambda: run(*tokens)
    leaves = [x.detach().requires_grad_() for x in tokens]
    grad = torch.randn_like(leaves[2])
    return lambda: torch.autograd.grad(run(*leaves), leaves, grad)


def _flops(case: Case, made: Plan) -> float:
    """Of a call, by the plan's cost: two for each multiply-add."""
    pairs = case.n * (case.n + 1) / 2 if case.causal else float(case.n) ** 2
    return 2 * made.cost * pairs * 2 * case.d * case.heads


def said_of_heads(errors: Sequence[float], limit: float) -> str:
    """Which heads are beyond the limit by themselves, if any.

    >>> said_of_heads([0.01, 0.031, 0.02], 0.03)
    '1 of 3 heads beyond the limit, the worst 0.031'
    """
    beyond = [error for error in errors if not error <= limit]
    if not beyond:
        return ""
    return f"{len(beyond)} of {len(errors)} heads beyond the limit, the worst {max(beyond):.2g}"


def sampled_squares(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Squared error and size of sampled rows of each head, against float64 over all keys."""
    rows = sampled_rows(q.shape[2], SAMPLED_ROWS, 0).to(q.device)
    heads = [
        exact_rows(q[0, head], k[0, head], v[0, head], rows, q.shape[-1] ** -0.5, causal)
        for head in range(q.shape[1])
    ]
    exact = torch.stack(heads)
    wrong = output[0][:, rows].double() - exact
    return wrong.square().sum((1, 2)), exact.square().sum((1, 2))
