# mypy: ignore-errors
"""The kernels of `lengths`."""

from __future__ import annotations

from .language import jit, tile_of, tl


@jit
def lengths(
    query, key, log_weight, limit, out, heads, group, n, m, span, d,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    BT: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Largest square, sum and number of the lengths of a span of tokens of one head; tokens with
    an entry beyond the limit, or of no weight, do not count."""
    part, head, side = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, own = head // heads, head % heads
    tokens, stride, count = query + batch * q_batch + own * q_head, q_row, n
    if side == 1:
        tokens, stride, count = key + batch * k_batch + own // group * k_head, k_row, m
    bound, entry = tl.load(limit + head), tl.arange(0, BD)
    largest = tl.zeros((BT,), dtype=tl.float32)
    total = tl.zeros((BT,), dtype=tl.float32)
    number = tl.zeros((BT,), dtype=tl.float32)
    for first in range(part * span, tl.minimum(count, (part + 1) * span), BT):
        row = first + tl.arange(0, BT)
        counted = row < count
        x = tile_of(tokens, row.to(tl.int64), counted, entry, stride, d).to(tl.float32)
        counted &= tl.max(tl.abs(x), 1) <= bound
        if WEIGHTED:
            there = (row < count) & (side == 1)
            weight = tl.load(log_weight + head * m + row, mask=there, other=0.0)
            counted &= weight > float("-inf")
        square = tl.where(counted, tl.sum(x * x, 1), 0.0)
        largest = tl.maximum(largest, square)
        total += tl.sqrt(square)
        number += counted.to(tl.float32)
    out += ((side * tl.num_programs(1) + head) * tl.num_programs(0) + part) * 3
    tl.store(out, tl.max(largest, 0))
    tl.store(out + 1, tl.sum(total, 0))
    tl.store(out + 2, tl.sum(number, 0))


@jit
def large(
    tokens, log_weight, limit, out, heads, group, count, d, batch_stride, head_stride, stride,
    BT: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """1 for tokens with an entry beyond the limit that have a weight, else 0."""
    head = tl.program_id(1).to(tl.int64)
    row, entry = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BD)
    tokens += head // heads * batch_stride + head % heads // group * head_stride
    x = tile_of(tokens, row.to(tl.int64), row < count, entry, stride, d).to(tl.float32)
    beyond = tl.max(tl.abs(x), 1) > tl.load(limit + head)
    if WEIGHTED:
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
