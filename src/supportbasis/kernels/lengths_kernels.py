# mypy: ignore-errors
"""The kernel of `lengths`."""

from __future__ import annotations

from .language import jit, tl


@jit
def lengths(
    tokens, log_weight, limit, out, heads, group, count, span, d, batch_stride, head_stride, stride,
    BT: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Largest square, sum and number of the lengths of a span of tokens of one head; tokens with
    an entry beyond the limit, or of no weight, do not count."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens += head // heads * batch_stride + head % heads // group * head_stride
    bound, entry = tl.load(limit + head), tl.arange(0, BD)
    largest = tl.zeros((BT,), dtype=tl.float32)
    total = tl.zeros((BT,), dtype=tl.float32)
    number = tl.zeros((BT,), dtype=tl.float32)
    for first in range(part * span, tl.minimum(count, (part + 1) * span), BT):
        row = first + tl.arange(0, BT)
        counted = row < count
        x = tl.load(
            tokens + row.to(tl.int64)[:, None] * stride + entry[None, :],
            mask=counted[:, None] & (entry < d)[None, :],
            other=0.0,
        ).to(tl.float32)
        counted &= tl.max(tl.abs(x), 1) <= bound
        if WEIGHTED:
            weight = tl.load(log_weight + head * count + row, mask=row < count, other=0.0)
            counted &= weight > float("-inf")
        square = tl.where(counted, tl.sum(x * x, 1), 0.0)
        largest = tl.maximum(largest, square)
        total += tl.sqrt(square)
        number += counted.to(tl.float32)
    out += (head * tl.num_programs(0) + part) * 3
    tl.store(out, tl.max(largest, 0))
    tl.store(out + 1, tl.sum(total, 0))
    tl.store(out + 2, tl.sum(number, 0))
