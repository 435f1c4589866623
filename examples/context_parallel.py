"""Attention over a sequence that is sliced among processes, against one process:

    torchrun --nproc-per-node 4 examples/context_parallel.py

Each rank holds a slice of the tokens (zig-zag, so that causal work is even). For each method it
prints the largest difference to `sb.attention` on the whole sequence, forward and backward, what a
rank sent to others, and the time of a forward pass beside that of one process. On GPUs the group
is NCCL's, and each rank takes one of them; on CPUs it is Gloo's, with one thread for each rank.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import supportbasis as sb

METHODS = {
    "state: one polynomial": (sb.Polynomial(2), None),
    "state: one threshold": (sb.SingleThreshold(0.6), None),
    "heads: exact": (sb.Exact(), "heads"),
    "ring: exact": (sb.Exact(), "ring"),
}


class Row(NamedTuple):
    """One method: errors relative to the largest entry, bytes by rank, seconds."""

    method: str
    output: float
    gradient: float
    forward_bytes: int
    backward_bytes: int
    seconds: float
    alone: float


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--not-causal", action="store_true")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("run it as: torchrun --nproc-per-node 4 examples/context_parallel.py")
    device = start()
    tensors = [x.to(device) for x in made(options.heads, options.tokens, options.dim)]
    rows = [compared(name, tensors, not options.not_causal) for name in METHODS]
    if dist.get_rank() == 0:
        show(options, rows)
    dist.destroy_process_group()
    return rows


def start() -> torch.device:
    """Join the group that torchrun describes."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def made(heads: int, tokens: int, dim: int) -> list[Tensor]:
    """Query, key and value; some tokens are large."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, heads, tokens, dim, generator=generator).unbind(0)
    for x in (query, key):
        x *= 0.1
        x[:, :, :: max(1, tokens // 16)] *= 4
    return [query, key, value]


def compared(name: str, tensors: list[Tensor], causal: bool) -> Row:
    method, exchange = METHODS[name]
    layout = {"layout": "zigzag"}
    own = [sb.distributed.split_tokens(x, **layout).clone() for x in tensors]
    plan = sb.distributed.plan(*own, is_causal=causal, method=method, **layout)
    own = [x.requires_grad_() for x in own]
    whole = [x.clone().requires_grad_() for x in tensors]
    expected = sb.attention(*whole, is_causal=causal, plan=plan)
    expected.backward(torch.ones_like(expected))

    def call(*given: Tensor) -> Tensor:
        return sb.distributed.attention(
            *given, is_causal=causal, plan=plan, exchange=exchange, **layout
        )

    with sb.distributed.traffic() as forward:
        output = call(*own)
    with sb.distributed.traffic() as backward:
        output.backward(torch.ones_like(output))

    def difference(x: Tensor, y: Tensor) -> float:
        whole = sb.distributed.gather_tokens(x, **layout)
        return float((whole - y).detach().abs().max() / y.detach().abs().max())

    errors = [difference(x.grad, y.grad) for x, y in zip(own, whole, strict=True)]
    with torch.no_grad():
        seconds = timed(lambda: call(*own))
        if dist.get_rank() == 0:
            alone = timed(lambda: sb.attention(*whole, is_causal=causal, plan=plan))
        else:
            alone = 0.0
        dist.barrier()
    sent = (forward.bytes, backward.bytes)
    return Row(name, difference(output, expected), max(errors), *sent, seconds, alone)


def timed(run: Callable[[], Tensor], repeats: int = 3) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = run()
        if result.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def show(options: argparse.Namespace, rows: list[Row]) -> None:
    shape = f"{options.tokens} tokens, {options.heads} heads of dim {options.dim}"
    kind = "not causal" if options.not_causal else "causal"
    print(f"{dist.get_world_size()} ranks, {shape}, {kind}")
    print(f"{'':24}{'error':>9}{'of grad.':>10}{'kB sent':>10}{'backward':>10}{'s':>9}{'alone':>8}")
    for row in rows:
        sizes = f"{row.forward_bytes / 1e3:10.0f}{row.backward_bytes / 1e3:10.0f}"
        errors = f"{row.output:9.1e}{row.gradient:10.1e}"
        print(f"{row.method:24}{errors}{sizes}{row.seconds:9.3f}{row.alone:8.3f}")


if __name__ == "__main__":
    main()
