"""PyTorch's fused attention kernels for CUDA, with the log-sum-exp that SDPA does not return.

cuDNN's and flash attention's operators return the lse of every row and take any lse for the
backward pass. Both round weights to the input dtype and sum in float32, which `sdpa.sdpa_noise`
bounds. Gradients of queries may be added up in another sequence at every call, as in SDPA itself,
unless PyTorch is set to deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.problem import Problem

DTYPES = (torch.bfloat16, torch.float16)
LONG = 2**17  # rows of all heads from which on cuDNN comes first: it prepares every shape anew

Three = tuple[Tensor, Tensor, Tensor]  # gradients of query, key and value


class Kernel(NamedTuple):
    """Attention and its gradients: tokens [batch, heads, tokens, d], lse [batch, heads, n]."""

    name: str
    can_use: Callable[[Any], bool]  # of `torch.backends.cuda.SDPAParams`
    attend: Callable[..., tuple[Tensor, Tensor]]
    differentiate: Callable[..., Three]


def attention(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Output and lse, contiguous; None where no kernel takes the call."""
    made = _first("attend", problem)
    return None if made is None else (made[0].contiguous(), made[1].contiguous())


def gradients(problem: Problem, output: Tensor, lse: Tensor, grad: Tensor) -> Three | None:
    """Gradients in the dtype of the tokens; None where no kernel takes the call."""
    return _first("differentiate", problem, output, lse, grad.to(problem.query.dtype))


def kernels_for(problem: Problem) -> list[Kernel]:
    """What PyTorch would run this call with, the fastest first."""
    if not (problem.query.is_cuda and is_plain(problem)):
        return []
    tokens = (problem.query, problem.key, problem.value)
    call = torch.backends.cuda.SDPAParams(*tokens, None, 0.0, problem.is_causal, problem.group > 1)
    found = [kernel for kernel in (CUDNN, FLASH) if kernel.can_use(call)]
    has_wgmma = torch.cuda.get_device_capability(problem.query.device)[0] >= 9
    return found if has_wgmma and problem.batch * problem.heads * problem.n >= LONG else found[::-1]


def is_plain(problem: Problem) -> bool:
    """Whether this is attention as the kernels define it. Flash attention takes the largest score
    of a row before it scales, and hides later keys from the last row on instead of the first."""
    return (
        problem.query.dtype in DTYPES
        and problem.key_log_weight is None
        and problem.query.shape[-1] == problem.value.shape[-1]
        and problem.scale > 0
        and (problem.n == problem.m or not problem.is_causal)
    )


_refused: set[Hashable] = set()  # calls that a kernel raised an error for, in spite of `can_use`


def _first(what: str, problem: Problem, *given: Tensor) -> Any:
    """The result of the first kernel that does not raise for calls of this kind, or None."""
    query, shapes = problem.query, (problem.query.shape, problem.key.shape)
    for kernel in kernels_for(problem):
        kind = (kernel.name, what, query.device, query.dtype, *shapes, problem.is_causal)
        if kind in _refused:
            continue
        try:
            return getattr(kernel, what)(problem, *(x.contiguous() for x in given))
        except _FAULTS:
            raise
        except (RuntimeError, TypeError):  # of the operator: the device ran nothing
            _refused.add(kind)
    return None


# what is wrong with the device or its memory, not with the call
_FAULTS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def _cudnn(problem: Problem) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        problem.query, problem.key, problem.value, None, True,
        is_causal=problem.is_causal, scale=problem.scale,
    )  # fmt: skip
    return output, lse.view(output.shape[:3])


def _cudnn_gradients(problem: Problem, output: Tensor, lse: Tensor, grad: Tensor) -> Three:
    seed = lse.new_empty((), dtype=torch.int64)  # of dropout, which there is none of
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, problem.query, problem.key, problem.value, output, lse.unsqueeze(-1), seed, seed,
        None, None, None, problem.n, problem.m, 0.0, problem.is_causal, scale=problem.scale,
    )  # fmt: skip


def _flash(problem: Problem) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
        problem.query, problem.key, problem.value,
        is_causal=problem.is_causal, scale=problem.scale,
    )  # fmt: skip
    return output, lse


def _flash_gradients(problem: Problem, output: Tensor, lse: Tensor, grad: Tensor) -> Three:
    seed, unused = (lse.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad, problem.query, problem.key, problem.value, output, lse, None, None,
        problem.n, problem.m, 0.0, problem.is_causal, seed, unused, scale=problem.scale,
    )  # fmt: skip


CUDNN = Kernel("cudnn", torch.backends.cuda.can_use_cudnn_attention, _cudnn, _cudnn_gradients)
FLASH = Kernel("flash", torch.backends.cuda.can_use_flash_attention, _flash, _flash_gradients)
