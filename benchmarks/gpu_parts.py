"""Where the time of lists on a GPU goes, kernel by kernel: `python benchmarks/gpu_parts.py`.

The cases of `supportbasis bench --device cuda --only lists` and, where SUPPORTBASIS_MODELS names a
folder of encoders, those of their layers; each is planned, run twice, and profiled once.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import supportbasis as sb
from supportbasis_studies.gpu.cases import Case
from supportbasis_studies.gpu.lists import list_cases

SHOWN = 24  # kernels of a work, the longest first


def parts(work: Case) -> None:
    """Print the kernels of one call with a plan."""
    tokens = work.inputs(work.heads, work.n, work.d)
    plan = sb.plan(*tokens, is_causal=work.causal, method=work.method)
    for x in tokens:
        x.requires_grad_(work.backward)

    def call() -> None:
        output = sb.attention(*tokens, is_causal=work.causal, plan=plan)
        if work.backward:
            torch.autograd.grad(output, tokens, output.detach())
        torch.cuda.synchronize()

    for _ in range(3):  # fitted polynomials: run, captured, replayed
        call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
    events = [
        event
        for event in profiled.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / 1e3
    print(f"{work.unit}: {total:.2f} ms, {sum(event.count for event in events)} launches")
    for event in events[:SHOWN]:
        name = event.key[:70]
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms  {event.count:4d}  {name}")


def main() -> None:
    for work in list_cases():
        parts(work)


if __name__ == "__main__":
    main()
