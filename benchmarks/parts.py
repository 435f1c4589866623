"""Where the time of SingleThreshold(0.4, degree=2) goes: `python benchmarks/parts.py [n]`.

Best of several runs of each part in the paper's Gaussian setting, float32, d=64, one head.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import supportbasis as sb
from supportbasis.components import ExactSum, evaluate
from supportbasis.components.streaming import lane_count
from supportbasis.polynomials.features import Buffer, FeatureMap, block_rows
from supportbasis.problem.validation import attention_problem


def best(call: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) * s for s in (0.1, 0.1, 1.0))
    method = sb.SingleThreshold(0.4, 2)
    head = attention_problem(q, k, v, None, 0.0, False, None, False).head(0, 0)
    plan = sb.plan(q, k, v, method=method)
    phi, lanes = FeatureMap(64, 2), lane_count("cpu")
    rows = block_rows(phi.count, torch.float32)
    x, value = head.query[: lanes * rows], head.value[: lanes * rows]
    x, value = x.view(lanes, rows, 64), value.view(lanes, rows, 64)
    buffer = Buffer(phi, lanes, rows, x)
    written = buffer.write(x)
    state = torch.zeros(lanes, phi.count - 1, 64)
    blocks = 2 * n / (lanes * rows)  # keys and rows
    product = best(lambda: state.baddbmm_(written, value))
    flops = 2 * lanes * rows * (phi.count - 1) * 64
    exact = 0.0
    for group in plan.heads[0].basis(head):
        for part in (c for c in group.components if isinstance(c, ExactSum)):
            exact += best(lambda part=part, group=group: evaluate([part], head, group.rows))
    parts = {
        "SDPA": best(lambda: F.scaled_dot_product_attention(q, k, v), 3),
        "whole call": best(lambda: sb.attention(q, k, v, method=method)),
        "planning": best(lambda: sb.plan(q, k, v, method=method)),
        f"products ({flops / product / 1e9:.0f} GFLOP/s)": blocks * product,
        "forming features": blocks * best(lambda: buffer.write(x)),
        "exact rectangles": exact,
    }
    for name, seconds in parts.items():
        print(f"{name:28s} {1e3 * seconds:9.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32768)
