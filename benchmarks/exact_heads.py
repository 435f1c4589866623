"""Exact heads on one GPU beside PyTorch's attention: `python benchmarks/exact_heads.py`.

Each row has the time of the fastest backend of SDPA and its ratio to ours: 1.00 is as fast.
"forward, lse" is the evaluator of exact heads, as in a plan with other heads or with
`return_result` (without the certificate); "operators" is forward and backward through it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import supportbasis as sb
from supportbasis.cuda.exact import exact_heads as exact
from supportbasis.cuda.exact import fused
from supportbasis.problem.validation import attention_problem
from supportbasis_studies.gpu.measure import milliseconds

HEADS = 8
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def timed(call: Callable[[], object]) -> float:
    call()
    call()
    return milliseconds(call, 400.0)


def fastest(call: Callable[[], object]) -> tuple[float, str]:
    """Milliseconds of the fastest backend that takes a call, and its name."""
    found = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            try:
                found.append((timed(call), backend.name.removesuffix("_ATTENTION").lower()))
            except RuntimeError:  # a backend that refuses is no baseline
                continue
    return min(found)


def rows(n: int, d: int, causal: bool, key_heads: int) -> None:
    shape = (1, HEADS, n, d)
    q, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, key_heads, n, d, device="cuda").bfloat16() for _ in range(2))
    call = {"is_causal": causal, "enable_gqa": key_heads != HEADS}
    plan = sb.plan(q, k, v, **call, method=sb.Exact())
    problem = attention_problem(q, k, v, None, 0.0, causal, None, key_heads != HEADS)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def both(attention: Callable[..., Tensor], **more: object) -> object:
        return torch.autograd.grad(attention(*leaves, **call, **more), leaves, grad)

    def operators(*tokens: Tensor, **more: object) -> Tensor:
        return sb.attention(*tokens, **more, plan=plan, implementation="triton")

    sdpa = F.scaled_dot_product_attention
    kernels = "/".join(kernel.name for kernel in fused.kernels_for(problem)) or "rectangle"
    forward, name = fastest(lambda: sdpa(q, k, v, **call))
    backward, other = fastest(lambda: both(sdpa))
    cases = (
        ("forward", forward, name, lambda: sb.attention(q, k, v, **call, plan=plan)),
        ("forward, lse", forward, name, lambda: exact.forward(problem, plan)),
        ("forward+backward", backward, other, lambda: both(sb.attention, plan=plan)),
        ("the same, operators", backward, other, lambda: both(operators)),
    )
    for what, theirs, backend, ours in cases:
        mine = timed(ours)
        print(
            f"n={n} d={d} key heads={key_heads} {'causal' if causal else 'full':6} {what:20} "
            f"SDPA ({backend}) {theirs:8.3f} ms, ours {mine:8.3f} ms, {theirs / mine:.2f}x "
            f"[{kernels}]",
            flush=True,
        )


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/exact_heads.py needs a CUDA device")
    for n, causal, d in itertools.product((16384, 32768, 131072), (True, False), (64, 128)):
        rows(n, d, causal, HEADS)
    for causal in (True, False):
        rows(32768, 64, causal, HEADS // 4)


if __name__ == "__main__":
    main()
