# mypy: ignore-errors
"""The kernels of `split`."""

from __future__ import annotations

from ..runtime.language import jit, tile_of, tl


@jit
def large(
    tokens, log_weight, limit, out, heads, group, count, d, batch_stride, head_stride, stride,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """1 for tokens with an entry beyond the limit that have a weight, else 0."""
    head = tl.program_id(1).to(tl.int64)
    row, entry = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BD)
    tokens += head // heads * batch_stride + head % heads // group * head_stride
    x = tile_of(tokens, row.to(tl.int64), row < count, entry, stride, d).to(tl.float32)
    beyond = tl.max(tl.abs(x), 1) > tl.load(limit + head)
    if log_weight is not None:
        weight = tl.load(log_weight + head * count + row, mask=row < count, other=0.0)
        beyond &= weight > float("-inf")
    tl.store(out + head * count + row, beyond.to(tl.uint8), mask=row < count)


@jit
def listed(flags, index, count, n, most, BT: tl.constexpr):
    """The first flagged tokens of one head, ascending, and how many there are."""
    head = tl.program_id(0).to(tl.int64)
    flags, index = flags + head * n, index + head * most
    total = 0
    for first in range(0, n, BT):
        row = first + tl.arange(0, BT)
        flag = tl.load(flags + row, mask=row < n, other=0).to(tl.int32)
        slot = total + tl.cumsum(flag, 0) - 1
        tl.store(index + slot, row, mask=(flag > 0) & (slot < most))
        total += tl.sum(flag, 0)
    tl.store(count + head, total)
