# mypy: ignore-errors
"""The kernel of `transformed`."""

from __future__ import annotations

from ..runtime.language import jit, store_tile, tile_of, tl


@jit
def transform(
    tokens, matrix, offset, line, level, out, extra, count, d, group,
    BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of some tokens of one head; the first columns come with x b + c."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    here, column = row < count, part * BC + tl.arange(0, BC)
    tokens += (head // group * count + row.to(tl.int64)[:, None]) * d
    matrix += head * d * d
    total = tl.zeros((BT, BC), dtype=tl.float32)
    along = tl.zeros((BT,), dtype=tl.float32)
    for first in range(0, d, BC):
        entry = first + tl.arange(0, BC)
        x = tl.load(tokens + entry[None, :], mask=here[:, None] & (entry < d)[None, :], other=0.0)
        a = tile_of(matrix, entry, entry < d, column, d, d)
        if PRECISION == "bf16x3":  # three parts of the matrix add up to it
            part_of = a.to(tl.bfloat16)
            total = tl.dot(x, part_of, total)
            a -= part_of.to(tl.float32)
            part_of = a.to(tl.bfloat16)
            total = tl.dot(x, part_of, total)
            total = tl.dot(x, (a - part_of.to(tl.float32)).to(tl.bfloat16), total)
        else:
            total = tl.dot(x.to(tl.float32), a, total, input_precision=PRECISION)
        b = tl.load(line + head * d + entry, mask=entry < d, other=0.0)
        along += tl.sum(x.to(tl.float32) * b[None, :], 1)
    total += tl.load(offset + head * d + column, mask=column < d, other=0.0)[None, :]
    slot = head * count + row
    store_tile(out, total, slot, here, column, d)
    if part == 0:
        tl.store(extra + slot, along + tl.load(level + head), mask=here)
