"""Tokens sorted so that neighbours are similar: repeated median splits along principal axes.

A window of tokens is cut in half at the median along its principal axis, then each half along its
own, until nodes have the size of a leaf. Axes are searched in the 8 leading principal coordinates
of the window, which is cheap and nearly as good. A sequence longer than a window is first sorted by
the nearest of a few cluster centres, which are means of the leaves of a sorted sample. Sorting is a
constant of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

AXES = 8  # leading principal coordinates in which nodes are split
AXIS_STEPS, NODE_STEPS = 3, 4  # power iterations: of all axes of a window at once, of a node's
DEPENDENT = 2.0**-20  # relative length of what others leave of an axis that is none
SORTED = 2048  # tokens that are sorted as one window, at most, where windows are ours to choose
CENTRES = 256  # at most


def window_length(count: int, leaf: int) -> int:
    """Slots of a window that sorts ``count`` tokens: leaf * 2^k, at most `SORTED`."""
    leaves = max(1, -(-min(count, SORTED) // leaf))
    return leaf << (leaves - 1).bit_length()


def window_permutation(x: Tensor, leaf: int, padded: Tensor | None = None) -> Tensor:
    """Permutations [windows, W] that sort the tokens of windows [windows, W, d] into leaves; those
    that are ``padded`` [windows, W] stay behind the others."""
    windows, width = x.shape[:2]
    permutation = torch.arange(width, device=x.device).expand(windows, width)
    part, size = leading_coordinates(x, padded), width
    while size > leaf:
        part, permutation = part.reshape(-1, size, part.shape[-1]), permutation.reshape(-1, size)
        padded = None if padded is None else padded.reshape(-1, size)
        away = _centred(part, padded)
        along = (away @ _principal_axis(away.mT @ away)).squeeze(2)
        along = along if padded is None else along.masked_fill(padded, math.inf)
        at = along.argsort(dim=1, stable=True)
        permutation, size = permutation.gather(1, at), size // 2
        padded = None if padded is None else padded.gather(1, at)
        part = part.gather(1, at.unsqueeze(2).expand_as(part))
    return permutation.reshape(windows, width)


def head_permutation(x: Tensor, leaf: int, hidden: Tensor | None = None, window: int = 0) -> Tensor:
    """All tokens [n, d] that are not ``hidden`` sorted into leaves, [slots], -1 for slots that are
    left over: within windows of so many positions, or anywhere."""
    n, width = len(x), window or window_length(len(x), leaf)
    hidden = x.new_zeros(n, dtype=torch.bool) if hidden is None else hidden
    group = hidden.to(torch.int16)
    if n > width and not window:  # of the nearest centre
        sample = sampled_leaves(x[None], hidden[None], window_permutation)[0]
        group = nearest(x, sample.mean(1)).masked_fill(hidden, len(sample)).to(torch.int16)
    slots = pad(group.argsort(stable=True), (0, -n % width), value=-1).view(-1, width)
    padded = torch.arange(slots.numel(), device=x.device).view_as(slots) >= (~hidden).sum()
    tokens = x[slots.clamp(min=0)]
    at = window_permutation(tokens, leaf, padded if bool(padded.any()) else None)
    return slots.masked_fill(padded, -1).gather(1, at).flatten()


def sampled_leaves(
    x: Tensor, hidden: Tensor | None, permutation: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Leaves whose means are the centres, one or two for each window: a sample, at even strides, of
    the tokens [heads, n, d] that are not ``hidden`` [heads, n], [heads, centres, tokens, d]."""
    heads, n, d = x.shape
    centres = min(CENTRES, 1 << (-(-n // SORTED) - 1).bit_length())
    size = min(SORTED, max(512, 32 * centres))
    shown = n if hidden is None else (~hidden).sum(1, keepdim=True)
    token = torch.arange(size, device=x.device).expand(heads, size) * shown // size
    if hidden is not None:  # the first of all tokens when hidden ones are moved behind the others
        token = hidden.to(torch.uint8).argsort(stable=True).gather(1, token)
    sample = x.gather(1, token.unsqueeze(2).expand(-1, -1, d))
    at = permutation(sample, size // centres).long()
    return sample.gather(1, at.unsqueeze(2).expand(-1, -1, d)).view(heads, centres, -1, d)


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """The nearest of some centres [..., centres, d] to each token [..., n, d], first of equals."""
    middle = centres.mean(-2, keepdim=True)
    away = centres - middle
    score = (x - middle) @ away.mT - away.square().sum(-1).unsqueeze(-2) / 2
    return score.argmax(-1)


def leading_coordinates(x: Tensor, padded: Tensor | None) -> Tensor:
    """Tokens of windows in their leading principal coordinates, [windows, W, axes], by power
    iterations from the columns of the largest variances."""
    away = _centred(x.float() if x.dtype != torch.float64 else x, padded)
    covariance = away.mT @ away
    largest = covariance.diagonal(dim1=1, dim2=2).topk(min(AXES, x.shape[2])).indices
    axes = _orthonormal(covariance.gather(2, largest.unsqueeze(1).expand(-1, x.shape[2], -1)))
    for _ in range(AXIS_STEPS - 1):
        axes = _orthonormal(covariance @ axes)
    return away @ axes


def _orthonormal(axes: Tensor) -> Tensor:
    """Axes [windows, d, axes] made orthonormal, one after the other; zero where the ones before
    leave nothing of one."""
    least = DEPENDENT * axes.norm(dim=1)
    made: list[Tensor] = []
    while axes.shape[2]:
        axis, axes = axes[..., :1], axes[..., 1:]
        length = axis.norm(dim=1, keepdim=True)
        kept = length.squeeze(2) > least[:, len(made), None]
        axis = torch.where(kept.unsqueeze(2), axis / length, 0.0)
        axes = axes - axis @ (axis.mT @ axes)
        made.append(axis)
    return torch.cat(made, 2)


def _centred(x: Tensor, padded: Tensor | None) -> Tensor:
    """Tokens less the mean of the real ones of their node; zeros for the others. Divided by the
    largest, so that squares neither overflow nor vanish."""
    if padded is None:
        away = x - x.mean(1, keepdim=True)
    else:
        real = (~padded).unsqueeze(2).to(x.dtype)
        mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        away = (x - mean) * real
    unit = away.abs().amax((1, 2), keepdim=True)
    return away / torch.where(unit > 0, unit, 1.0)


def _principal_axis(covariance: Tensor) -> Tensor:
    """Approximate first eigenvectors [..., d, 1], from the column of the largest variance."""
    start = covariance.diagonal(dim1=1, dim2=2).argmax(1)
    axis = covariance[torch.arange(len(covariance), device=start.device), start].unsqueeze(2)
    tiny = torch.finfo(axis.dtype).tiny
    axis = normalize(axis, dim=1, eps=tiny)
    for _ in range(NODE_STEPS):
        axis = normalize(covariance @ axis, dim=1, eps=tiny)
    return axis
