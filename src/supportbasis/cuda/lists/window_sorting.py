"""Tokens sorted into leaves of similar ones, on a device, as `lists.sorting` does.

One kernel reduces each window to its leading principal coordinates, another makes all its splits.
Inside a leaf, and between equal projections, tokens keep the sequence in which they came. No call
synchronises with the host, and shapes depend on shapes alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...lists import sorting
from ...lists.sorting import AXES, AXIS_STEPS, NODE_STEPS
from ..runtime.language import cdiv, interpreted, power_of_two, tl
from . import window_sorting_kernels as kernels

WIDEST = 4096  # tokens of a window: one program holds their coordinates
HELD = 8  # tokens of a window that one thread holds; 16 registers for each
IN_REGISTERS = 128  # entries of a token, for a covariance that one program can hold


def window_permutation(
    x: Tensor, window: int, leaf: int, sequence: Tensor | None = None,
    others: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Tokens ``x`` [heads, tokens, d] sorted inside windows of consecutive slots.

    Returns the token of each sorted slot, [heads, windows * window] int32, -1 for padding, which is
    last in its window. Slot j holds token j, or ``sequence[head, j]`` (int32 [heads, tokens]; -1:
    none, after the tokens of its window). Heads from the first of ``others`` on have leaves of the
    second.
    """
    first, other = others or (len(x), leaf)
    (heads, count, d), windows = x.shape, cdiv(x.shape[1], window)
    if 0 in (heads, windows):
        return torch.empty(heads, 0, dtype=torch.int32, device=x.device)
    if d > IN_REGISTERS:
        points = _wide_points(x, sequence, window)
    else:
        points = x.new_empty((heads, windows, window, AXES), dtype=torch.float32)
        width = power_of_two(d)
        tile = (128 if width <= 64 else 64) // (2 if x.dtype == torch.float32 else 1)
        kernels.axes[(windows, heads)](
            x, sequence, points, count, *x.stride()[:2], d, window, width, min(window, tile),
            min(AXES, d), AXIS_STEPS, *_operands(x.dtype),
            num_warps=4 if width <= 64 else 8, num_stages=2,
        )  # fmt: skip
    permutation = torch.empty(heads, windows * window, dtype=torch.int32, device=x.device)
    keys = torch.empty_like(permutation, dtype=torch.uint32)
    levels = [(window // size).bit_length() - 1 for size in (leaf, other)]
    kernels.split[(windows, heads)](
        points, sequence, keys, permutation, count, first, *levels,
        window, max(levels), NODE_STEPS + 1,
        num_warps=max(1, window // (32 * HELD)), maxnreg=16 * HELD,
    )  # fmt: skip
    return permutation


def head_permutation(
    x: Tensor, leaf: int, hidden: Tensor | None = None, window: int = 0,
    others: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """All tokens ``x`` [heads, tokens, d] of a head sorted, [heads, slots] int32, -1 for padding.

    With a ``window``, inside windows of so many slots. Else up to SORTED tokens are one window, the
    smallest leaf * 2^k that holds them; more are gathered around centres first, and the sequence of
    the centres is cut into windows of SORTED. ``hidden`` [heads, tokens]: tokens that are left out,
    without a window; their slots are padding, at the end. ``others`` as in `window_permutation`,
    with a window or more than SORTED tokens.
    """
    width, sequence = window or sorting.window_length(x.shape[1], leaf), None
    if x.shape[1] > width and not window:
        sequence = _by_centre(x, hidden)
    elif hidden is not None:  # the tokens that are not hidden, then -1
        flags, token = hidden.to(torch.uint8).sort(dim=1, stable=True)
        sequence = token.int().masked_fill_(flags != 0, -1)
    return window_permutation(x, width, leaf, sequence, others)


def _operands(dtype: torch.dtype) -> tuple[Any, Any, str | None]:
    """Dtypes of tokens in sums of products and in projections, and the precision of float32. What
    is summed was shifted, which 16 bits of float16 may not hold."""
    if dtype == torch.float32 or interpreted():
        return tl.float32, tl.float32, "tf32x3"
    return tl.bfloat16, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, None


def _wide_points(x: Tensor, sequence: Tensor | None, window: int) -> Tensor:
    """Coordinates by PyTorch, for tokens whose covariance no program can hold."""
    heads, count, d = x.shape
    token = torch.arange(count, device=x.device).expand(heads, -1) if sequence is None else sequence
    token = pad(token, (0, -count % window), value=-1).long()
    tokens = x.gather(1, token.clamp(min=0).unsqueeze(2).expand(-1, -1, d))
    padded = token.view(-1, window) < 0
    return sorting.leading_coordinates(tokens.view(-1, window, d), padded).contiguous()


def _by_centre(x: Tensor, hidden: Tensor | None) -> Tensor:
    """A permutation of the tokens of each head by nearest centre, [heads, tokens] int32; hidden
    tokens are -1, at the end. With the mean s of the centres, and c about it in the dtype of x,
    <x, c> - <s, c> - |c|^2 / 2 is largest at the nearest centre s + c."""
    heads, count, d = x.shape
    mean = sorting.sampled_leaves(x, hidden, head_permutation).float().mean(2)
    shift = mean.mean(1, keepdim=True)
    centre = (mean - shift).to(x.dtype)
    known = centre.float()
    offset = -(known * (shift + known / 2)).sum(2)
    many, width = mean.shape[1], power_of_two(d)
    padded = power_of_two(many)
    centre = pad(centre, (0, 0, 0, padded - many))
    offset = pad(offset, (0, padded - many), value=-math.inf)
    dtype = torch.int16 if heads * (many + 1) < 2**15 else torch.int32
    key = torch.empty(heads, count, dtype=dtype, device=x.device)
    _, operand, precision = _operands(x.dtype)
    kernels.nearest[(cdiv(count, 128), heads)](
        x, centre, offset, None if hidden is None else hidden.contiguous().view(torch.uint8), key,
        count, *x.stride()[:2], d, many + 1, width, padded, 128, min(padded, 64),
        operand, precision, num_warps=4 if width <= 64 else 8, num_stages=2,
    )  # fmt: skip
    key, index = key.flatten().sort(stable=True)
    first = torch.arange(heads, dtype=torch.int32, device=x.device).unsqueeze(1)
    token = index.int().view(heads, count) - first * count
    if hidden is None:
        return token
    return token.masked_fill_(key.view(heads, count) == first * (many + 1) + many, -1)
