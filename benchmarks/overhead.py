"""What a plan that is exact in every head costs over PyTorch's attention: `python
benchmarks/overhead.py`; with `--registered`, what the attention registered in transformers costs
over its own, for short calls with a model plan.

Calls of both take turns in random order; medians are compared.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import supportbasis as sb
from supportbasis.plans import LayerPlan, ModelPlan

HEADS, LENGTHS, DIMS = (8, 1), (128, 256, 512, 1024, 2048, 4096), (8, 16, 64)
SECONDS = 2.0  # of calls, for each line


def extra(heads: int, n: int, d: int, *, causal: bool, grouped: bool) -> tuple[float, float]:
    """Seconds of PyTorch's call, and what ours takes longer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads // 2 if grouped and side else heads, n, d) for side in range(3)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    how = {"is_causal": causal, "enable_gqa": grouped}
    plan = sb.plan(q, k, v, **how, method=sb.Exact())
    return compared(
        lambda: F.scaled_dot_product_attention(q, k, v, **how),
        lambda: sb.attention(q, k, v, **how, plan=plan),
    )


def registered(n: int) -> tuple[float, float]:
    """Seconds of the attention of a tiny Llama, and what ours takes longer: prefill of n tokens."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    modules = [LlamaAttention(config, 0), LlamaAttention(copy.deepcopy(config), 0)]
    q, k = torch.randn(1, 8, 2048, 64), torch.randn(1, 2, 2048, 64)
    plan = sb.plan(q, k, k, is_causal=True, enable_gqa=True, method=sb.Polynomial(2))
    layer = LayerPlan("0", plan, (0.0,) * 8, 4096)
    sb.integrations.transformers.register("overhead", plan=ModelPlan((layer,), "kl", 1.0, 0, 0.0))
    modules[0].config._attn_implementation = "sdpa"
    modules[1].config._attn_implementation = "overhead"
    x, angle = torch.randn(1, n, 512), torch.zeros(1, n, 64)
    return compared(*(partial(module, x, (angle, angle), None) for module in modules))


def compared(*calls: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of the first call, and what the second takes longer."""
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
    if "--registered" in sys.argv:
        for n in (1, 16, 128, 512):
            with torch.no_grad():
                baseline, more = registered(n)
            print(f"registered, n={n}: {1e3 * baseline:.3f} ms, ours {1e6 * more:+.0f} µs")
        return
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
