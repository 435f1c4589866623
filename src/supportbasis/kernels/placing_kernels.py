# mypy: ignore-errors
"""The kernels of `placing`."""

from __future__ import annotations

from .language import jit, tl


@jit
def take(
    table, rows, out, places, width, largest,
    BOUNDED: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Some places, whole rows."""
    place, cols = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, W)
    row = tl.load(rows + place, mask=place < places, other=-1).to(tl.int64)
    known = (cols < width)[None, :]
    x = tl.load(
        table + row[:, None] * width + cols[None, :], mask=(row >= 0)[:, None] & known, other=0.0
    )
    if BOUNDED:
        x = tl.minimum(tl.maximum(x, -largest), largest)
    target = out + place[:, None] * width + cols[None, :]
    tl.store(target, x.to(out.dtype.element_ty), mask=(place < places)[:, None] & known)


@jit
def measure(
    table, rows, mean, variance, size, width, S: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """One block, some columns at a time."""
    block = tl.program_id(0).to(tl.int64)
    near = tl.arange(0, S)
    here = near < size
    row = tl.load(rows + block * size + near, mask=here, other=0).to(tl.int64)
    for at in range(0, width, W):
        cols = at + tl.arange(0, W)
        inside = here[:, None] & (cols < width)[None, :]
        x = tl.load(table + row[:, None] * width + cols[None, :], mask=inside, other=0.0)
        middle = tl.sum(x, 0) / size
        apart = tl.where(inside, x - middle[None, :], 0.0)
        target = block * width + cols
        tl.store(mean + target, middle, mask=cols < width)
        tl.store(variance + target, tl.sum(apart * apart, 0) / size, mask=cols < width)


@jit
def add_rows(total, rows, more, places, size, width, W: tl.constexpr, BM: tl.constexpr):
    """Some places, each with a row of its own."""
    place, cols = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, W)
    row = tl.load(rows + place, mask=place < places, other=-1).to(tl.int64)
    inside = (row >= 0)[:, None] & (cols < width)[None, :]
    at = total + row[:, None] * width + cols[None, :]
    extra = tl.load(more + (place // size)[:, None] * width + cols[None, :], mask=inside, other=0.0)
    tl.store(at, tl.load(at, mask=inside, other=0.0) + extra.to(tl.float32), mask=inside)


@jit
def add_means(
    output, lse, rows, more, size, shift, places, width, W: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Some places: weights of both sums from their logarithms, and the mean of the means."""
    place, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, W)
    row = tl.load(rows + place, mask=place < places, other=-1).to(tl.int64)
    here = row >= 0
    old = tl.load(lse + row, mask=here, other=float("-inf"))
    new = tl.load(size + place, mask=here, other=float("-inf"))
    new += tl.load(shift + row, mask=here, other=0.0)
    top = tl.maximum(old, new)
    unit = tl.where(top == float("-inf"), 0.0, top)
    mine, theirs = tl.exp(old - unit), tl.exp(new - unit)
    total = tl.where(top == float("-inf"), 1.0, mine + theirs)
    inside = here[:, None] & (cols < width)[None, :]
    at = output + row[:, None] * width + cols[None, :]
    value = tl.load(at, mask=inside, other=0.0) * (mine / total)[:, None]
    extra = tl.load(
        more + place.to(tl.int64)[:, None] * width + cols[None, :], mask=inside, other=0.0
    )
    value += extra.to(tl.float32) * (theirs / total)[:, None]
    tl.store(at, value, mask=inside)
    tl.store(lse + row, unit + tl.log(total), mask=here & (top > float("-inf")))
