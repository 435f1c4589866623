"""What a plan that is exact in every head costs over PyTorch's attention: `python
benchmarks/overhead.py`.

Calls of both take turns in random order; medians are compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F

import supportbasis as sb

HEADS, LENGTHS, DIMS = (8, 1), (128, 256, 512, 1024, 2048, 4096), (8, 16, 64)
SECONDS = 2.0  # of calls, for each line


def extra(heads: int, n: int, d: int, *, causal: bool, grouped: bool) -> tuple[float, float]:
    """Seconds of PyTorch's call, and what ours takes longer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads // 2 if grouped and side else heads, n, d) for side in range(3)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    how = {"is_causal": causal, "enable_gqa": grouped}
    plan = sb.plan(q, k, v, **how, method=sb.Exact())
    calls: list[Callable[[], object]] = [
        lambda: F.scaled_dot_product_attention(q, k, v, **how),
        lambda: sb.attention(q, k, v, **how, plan=plan),
    ]
    times: dict[int, list[float]] = {0: [], 1: []}
    turns, end = random.Random(0), time.perf_counter() + SECONDS
    for call in calls:
        call()
    while time.perf_counter() < end or len(times[0]) < 5:
        for which in turns.sample((0, 1), 2):
            start = time.perf_counter()
            calls[which]()
            times[which].append(time.perf_counter() - start)
    baseline, ours = (statistics.median(times[which]) for which in (0, 1))
    return baseline, ours - baseline


def main() -> None:
    kinds = ((False, False), (True, False), (True, True))
    for heads, n, d, (causal, grouped) in product(HEADS, LENGTHS, DIMS, kinds):
        if grouped and heads == 1:
            continue
        with torch.no_grad():
            baseline, more = extra(heads, n, d, causal=causal, grouped=grouped)
        many = "one head" if heads == 1 else f"{heads} heads"
        what = f"{many}, n={n}, d={d}{', causal' * causal}{', grouped' * grouped}"
        print(
            f"{what}: SDPA {1e3 * baseline:.3f} ms, ours {1e6 * more:+.0f} µs "
            f"({100 * more / baseline:+.1f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
