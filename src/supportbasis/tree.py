"""Trees of tokens: batched median splits along principal axes, and what each node holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

ITERATIONS = 6  # of the power method; the axis need not be exact
AXIS_TOKENS = 128  # of a node, evenly spaced, from which its axis is estimated
FEW = 16  # coordinates of which a covariance is small
EXPLAINED = 0.99  # of the variance of the scores: directions beyond are not looked at


def leading(spectrum: Tensor) -> int:
    """Number of leading coordinates that carry nearly all the variance of the scores."""
    share = spectrum.square().cumsum(0)
    if not len(share) or float(share[-1]) <= 0:
        return min(1, len(share))
    return int((share < EXPLAINED * share[-1]).sum()) + 1


def leaf_layout(tokens: int, leaf: int) -> tuple[int, int]:
    """Depth of the tree, and tokens a leaf: at most ``leaf``, all leaves alike."""
    depth = max(0, math.ceil(math.log2(max(1, tokens) / leaf)))
    return depth, math.ceil(max(1, tokens) / 2**depth)


class Split(NamedTuple):
    """One level of all trees: a node sends what projects beyond its threshold to the right."""

    axis: Tensor  # [nodes, dim, 1]
    threshold: Tensor  # [nodes]


@torch.no_grad()
def order(x: Tensor, depth: int) -> tuple[Tensor, list[Split]]:
    """Positions of the tokens ``x`` [segments, tokens, dim] in the order of the tree's leaves.

    Each level splits every node at the median of its projections on its principal axis; the
    number of tokens is a multiple of 2^depth. One gather, one product and one sort a level; on a
    CUDA device kernels do the same where Triton is installed, so whoever sums over blocks, and
    goes back through them, finds the same ones.
    """
    if _has_kernels(x):
        from .kernels import ordering

        return ordering.order(x, depth)
    segments, tokens, dim = x.shape
    position = torch.arange(tokens, device=x.device).expand(segments, tokens)
    flat = x.reshape(segments * tokens, dim)
    offset = torch.arange(segments, device=x.device).unsqueeze(1) * tokens
    splits = []
    for level in range(depth):
        nodes = (position + offset).reshape(segments << level, tokens >> level)
        part = flat[nodes]
        axis = _axis(part[:, :: max(1, part.shape[1] // AXIS_TOKENS)])
        along = (part @ axis).squeeze(2)
        along, index = along.sort(dim=1, stable=True)
        half = along.shape[1] // 2
        splits.append(Split(axis, (along[:, half - 1] + along[:, half]) / 2))
        position = position.reshape(nodes.shape).gather(1, index).reshape(segments, tokens)
    return position, splits


@torch.no_grad()
def positions(x: Tensor, depth: int) -> Tensor:
    """The positions of `order` alone."""
    if _has_kernels(x):
        from .kernels import ordering

        return ordering.order(x, depth, splits=False)[0]
    return order(x, depth)[0]


def _has_kernels(x: Tensor) -> bool:
    fits = x.is_cuda and x.dtype == torch.float32 and x.shape[2] <= 256
    return fits and _has_triton()


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.no_grad()
def assign(x: Tensor, splits: Sequence[Split]) -> Tensor:
    """The leaf that each of other tokens ``x`` [segments, tokens, dim] falls into."""
    segments, tokens, _ = x.shape
    leaf = torch.zeros(segments, tokens, dtype=torch.long, device=x.device)
    first = torch.arange(segments, device=x.device).unsqueeze(1)
    for level, split in enumerate(splits):
        node = (first << level) + leaf
        along = (x * split.axis.squeeze(2)[node]).sum(2)
        leaf = 2 * leaf + (along > split.threshold[node]).long()
    return leaf


@lru_cache(maxsize=64)
def _signs(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    bits = torch.randint(2, (dim,), generator=torch.Generator().manual_seed(0))
    return (2 * bits - 1).to(device, dtype)


def signs(like: Tensor) -> Tensor:
    """Fixed signs: a start of the power method that is orthogonal to no axis one would think of."""
    return _signs(like.shape[2], like.dtype, like.device)


def _axis(part: Tensor) -> Tensor:
    """Approximate principal axes of tokens [nodes, tokens, dim]: [nodes, dim, 1].

    Powers of the covariance where it is small, or of both its factors in turn.
    """
    tiny = torch.finfo(part.dtype).tiny
    part = part - part.mean(1, keepdim=True)
    diagonal = part.square().sum(1)
    part = part / diagonal.sum(1).clamp(min=tiny).sqrt().view(-1, 1, 1)
    covariance = part.transpose(1, 2) @ part if part.shape[2] <= FEW else None
    axis = diagonal.sqrt() * signs(part) + tiny
    for _ in range(ITERATIONS):  # products and sums: for many small matrices faster than bmm
        if covariance is not None:
            axis = (covariance * axis.unsqueeze(1)).sum(2)
        else:
            along = (part * axis.unsqueeze(1)).sum(2)
            axis = (part * along.unsqueeze(2)).sum(1)
        axis = axis / axis.norm(dim=1, keepdim=True).clamp(min=tiny)
    return axis.unsqueeze(2)


def split_work(axes: int) -> int:
    """Multiply-adds of one level of a tree, for each token."""
    return axes * ((axes if axes <= FEW else 2 * ITERATIONS) + 3)
