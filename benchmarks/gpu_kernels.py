"""Triton kernels beside PyTorch's attention on one GPU: `python benchmarks/gpu_kernels.py`.

Prints a table and writes tidy rows (`--out rows.csv`). A ratio is the time of the fastest of
PyTorch's backends over ours, from the same run. The error is relative to float64 attention on
sampled rows. "rate" is the work's multiply-adds over time as a share of a large matrix product's.
`--only TEXT` runs the works whose name contains it; `--sweep` times tile shapes instead.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from supportbasis.kernels import blocklist, polynomial
from supportbasis.kernels.tiles import RowTiles, StateTiles, choose_tiles

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PAPER = 0.1  # standard deviation of entries in the paper's setting


def milliseconds(call: Callable[[], object], budget: float = 300.0) -> float:
    """Median time of a call, by events, over about ``budget`` milliseconds."""
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    repeats = int(min(100, max(3, budget / max(start.elapsed_time(end), 1e-3))))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in pairs:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in pairs)[repeats // 2]


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The same call as a captured graph: what it takes without launches from Python."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def matmul_rate() -> float:
    """Floating-point operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (milliseconds(lambda: a @ b) * 1e-3)


def normal(heads: int, n: int, d: int, spread: float, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(scale: float) -> Tensor:
        x = torch.randn(1, heads, n, d, device="cuda", generator=generator)
        return (x * scale).bfloat16()

    return draw(spread), draw(spread), draw(1.0)


def sampled_error(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, *, causal: bool, mask: Tensor | None = None
) -> float:
    """Relative error of sampled rows against float64 attention over all (or the masked) keys."""
    n = q.shape[2]
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:64].sort().values.cuda()
    wrong = size = 0.0
    for head in range(q.shape[1]):
        z = q[0, head, rows].double() @ k[0, head].double().T * q.shape[-1] ** -0.5
        if causal:
            z = z.masked_fill(torch.arange(n, device="cuda") > rows[:, None], -torch.inf)
        if mask is not None:
            z = z.masked_fill(~mask[head, rows // (n // mask.shape[1])], -torch.inf)
        exact = z.softmax(-1) @ v[0, head].double()
        wrong += float((output[0, head, rows].double() - exact).square().sum())
        size += float(exact.square().sum())
    return (wrong / size) ** 0.5


def baseline(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backward: bool = False
) -> tuple[str, float]:
    """The fastest backend and its time."""
    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            call = attend(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                q, k, v, backward,
            )  # fmt: skip
            try:
                times[name] = milliseconds(call, 400.0)
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}")
    best = min(times, key=times.__getitem__)
    print("  sdpa", {name: round(time, 2) for name, time in times.items()}, flush=True)
    return best, times[best]


def attend(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, backward: bool
) -> Callable[[], object]:
    if not backward:
        return lambda: run(q, k, v)
    tokens = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(v)
    return lambda: torch.autograd.grad(run(*tokens), tokens, grad)


@dataclass(frozen=True)
class Work:
    """One line of the table."""

    name: str
    n: int
    d: int
    degree: int = 2
    causal: bool = False
    backward: bool = False
    heads: int = 8
    spread: float = PAPER
    graph: bool = False
    baseline_n: int = 0  # the baseline is timed at this length and scaled by (n / baseline_n)^2

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Least squares under Gaussian scores of variance spread^4 (entries of std. spread)."""
        return (1 - self.spread**4 / 2, 1.0, 0.5)[: self.degree + 1]

    @property
    def flops(self) -> float:
        rows = (self.d // 2 + 2) * self.d if self.degree == 2 else self.d
        return 4.0 * self.heads * self.n * rows * self.d

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backward:
            return polynomial.polynomial_attention(q, k, v, self.coefficients, causal=self.causal)[
                0
            ]
        return polynomial.polynomial_sums(q, k, v, self.coefficients, causal=self.causal)[0]


SIGMA03 = 0.3**0.5
LONG = 131072
WORKS = [
    Work("degree2", LONG, 64),
    Work("degree2", LONG, 64, graph=True),
    Work("degree2-sigma0.3", LONG, 64, spread=SIGMA03),
    Work("degree2", LONG, 128),
    Work("degree2-sigma0.3", LONG, 128, spread=SIGMA03),
    Work("degree1", LONG, 64, degree=1),
    Work("degree1", LONG, 64, degree=1, graph=True),
    Work("degree2-causal", LONG, 64, causal=True),
    Work("degree2-causal-sigma0.3", LONG, 64, causal=True, spread=SIGMA03),
    Work("degree2-causal", LONG, 128, causal=True),
    Work("degree2-causal-backward", 65536, 64, causal=True, backward=True),
    Work("degree2-backward", 65536, 64, backward=True),
    *(Work("crossover", n, 64, heads=16, graph=True) for n in (2048, 4096, 8192, 16384, 32768)),
    Work("degree2-million", 2**20, 64, baseline_n=LONG),
]


def measure(work: Work, rate: float, known: dict[object, tuple[str, float]]) -> dict[str, object]:
    q, k, v = normal(work.heads, work.n, work.d, work.spread)
    call = attend(work.run, q, k, v, work.backward)
    error = sampled_error(q, k, v, work.run(q, k, v).detach(), causal=work.causal)
    ms = milliseconds(replayed(call) if work.graph else call)
    place = (work.baseline_n or work.n, work.d, work.heads, work.causal, work.backward)
    if place not in known:
        base = [x[:, :, : place[0]] for x in (q, k, v)]
        known[place] = baseline(*base, causal=work.causal, backward=work.backward)
    name, base_ms = known[place]
    note = "graph replay" if work.graph else ""
    if work.baseline_n:
        base_ms *= (work.n / work.baseline_n) ** 2
        note = f"baseline extrapolated from n={work.baseline_n}"
    share = work.flops / (ms * 1e-3) / rate if not work.backward else float("nan")
    mode = "forward+backward" if work.backward else "forward"
    return row(work.name, mode, work.n, work.heads, work.d, ms, name, base_ms, share, error, note)


def measure_lists(d: int, share: float, rate: float, known: dict[object, tuple[str, float]],
                  block: int = 128, tiles: blocklist.ListTiles | None = None,
                  weighted: bool = False, backward: bool = False) -> dict[str, object]:  # fmt: skip
    heads, n = 8, LONG
    q, k, v = normal(heads, n, d, 1.0)
    granules, blocks = n // blocklist.GRANULE, n // block
    count = int(share * granules)
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = torch.rand(heads, blocks, granules, device="cuda", generator=generator)
    chosen = chosen.topk(count, -1).indices.sort(-1).values.int()
    offsets = torch.arange(heads * blocks + 1, device="cuda", dtype=torch.int32) * count
    indices = chosen.flatten()
    log_weight = torch.zeros(1, heads, n, device="cuda") if weighted else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocklist.block_list_attention(
            q, k, v, offsets, indices, log_weight=log_weight, block=block, tiles=tiles
        )[0]

    listed = torch.zeros(heads, blocks, granules, dtype=torch.bool, device="cuda")
    listed.scatter_(2, chosen.long(), True)
    mask = listed.repeat_interleave(blocklist.GRANULE, 2)
    error = sampled_error(q, k, v, run(q, k, v), causal=False, mask=mask)
    del mask, listed
    ms = milliseconds(attend(run, q, k, v, backward))
    place = (n, d, heads, False, backward)
    if place not in known:
        known[place] = baseline(q, k, v, causal=False, backward=backward)
    name, base_ms = known[place]
    flops = 4.0 * heads * n * count * blocklist.GRANULE * d
    mode = "forward+backward" if backward else "forward"
    rate_share = flops / (ms * 1e-3) / rate if not backward else float("nan")
    note = f"queries of a list: {block}; error against the same lists"
    work = f"lists-{share:.0%}" + ("-weighted" if weighted else "")
    return row(work, mode, n, heads, d, ms, name, base_ms, rate_share, error, note)


def row(
    work: str, mode: str, n: int, heads: int, d: int, ms: float, baseline: str,
    baseline_ms: float, share: float, error: float, note: str,
) -> dict[str, object]:  # fmt: skip
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "work": work, "mode": mode, "n": n, "heads": heads, "d": d,
        "ms": round(ms, 4), "baseline": baseline, "baseline_ms": round(baseline_ms, 4),
        "ratio": round(baseline_ms / ms, 2), "matmul_share": round(share, 3),
        "error": f"{error:.2e}", "note": note,
    }  # fmt: skip


def commit() -> str:
    marker = Path(__file__).with_name("COMMIT")  # goes with a copy of the files
    if marker.exists():
        return marker.read_text().strip()
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def table(rows: Sequence[dict[str, object]]) -> None:
    print("| work | mode | n | heads | d | ms | best SDPA | its ms | ratio | rate | error | note |")
    print("|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---|")
    for r in rows:
        print(
            f"| {r['work']} | {r['mode']} | {r['n']} | {r['heads']} | {r['d']} | {r['ms']} "
            f"| {r['baseline']} | {r['baseline_ms']} | {r['ratio']} "
            f"| {r['matmul_share']} | {r['error']} | {r['note']} |"
        )


def sweep(text: str) -> None:
    """Time of the degree-2 kernels by tile shape; ``text`` names one of them."""
    for d in (64, 128):
        q, k, v = normal(8, LONG, d, PAPER)
        if "state" in text or not text:
            sweep_state(q, k, v)
        if "read" in text or not text:
            sweep_read(q, k, v)


def sweep_state(q: Tensor, k: Tensor, v: Tensor) -> None:
    d = q.shape[-1]
    for rows, pairs, (tokens, stages), warps in itertools.product(
        {64, d}, (1, 2, 4), ((64, 3), (32, 4), (64, 2)), (4, 8)
    ):
        if 64 <= rows * d * pairs // (warps * 32) <= 128:  # registers of the sums
            shape = StateTiles(rows, d, pairs, tokens, warps, stages)
            tiles = replace(choose_tiles(d, d, False), state=shape)
            setting = polynomial.setting_of(q, v, (1.0, 1.0, 0.5), 0.1, tiles=tiles)
            side = polynomial.prepared(k, v, None, setting, summed=True)
            show(shape, partial(polynomial.sums_over, side, setting))


def sweep_read(q: Tensor, k: Tensor, v: Tensor) -> None:
    d, known = q.shape[-1], choose_tiles(q.shape[-1], q.shape[-1], False)
    setting = polynomial.setting_of(q, v, (1.0, 1.0, 0.5), 0.1)
    keys = polynomial.prepared(k, v, None, setting, summed=True)
    rows = polynomial.prepared(q, v, None, setting, read=True)
    state = polynomial.sums_over(keys, setting)
    for (count, warps), columns, stages in itertools.product(
        ((64, 4), (128, 8), (128, 4), (256, 8)), {64, d}, (2, 3, 4)
    ):
        shape = RowTiles(count, columns, 64, warps, stages)
        tiles = replace(known, read=shape)
        setting = polynomial.setting_of(q, v, (1.0, 1.0, 0.5), 0.1, tiles=tiles)
        show(shape, partial(polynomial.read, rows, state, keys, setting, dtype=torch.bfloat16))


def show(shape: object, call: Callable[[], object]) -> None:
    try:
        print(f"{milliseconds(call, 60.0):8.3f} ms  {shape}", flush=True)
    except Exception as error:  # a shape that does not fit is part of the answer
        print(f"       -     {shape}: {str(error).splitlines()[0][:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--sweep", nargs="?", const="", default=None)
    options = parser.parse_args()
    if options.sweep is not None:
        sweep(options.sweep)
        return
    rate, known = matmul_rate(), {}
    print(f"matrix product: {rate / 1e12:.0f} TFLOP/s")
    rows = [measure(work, rate, known) for work in WORKS if options.only in work.name]
    if options.only in "lists":
        for d, weighted in itertools.product((64, 128), (False, True)):
            rows.append(measure_lists(d, 0.1, rate, known, weighted=weighted))
        rows += [measure_lists(64, 0.1, rate, known, backward=True)]
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    table(rows)


if __name__ == "__main__":
    main()
