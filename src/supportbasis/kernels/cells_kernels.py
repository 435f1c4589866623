# mypy: ignore-errors
"""The kernel of `cells`."""

from __future__ import annotations

from .language import jit, tl
from .ordering_kernels import ranks


@jit
def entries(query, place, here, at, d, W: tl.constexpr):
    """Some columns of the queries at some places."""
    column = at + tl.arange(0, W)
    inside = here[:, None] & (column < d)[None, :]
    return tl.load(query + place[:, None] * d + column[None, :], mask=inside, other=0.0)


@jit
def gather(
    query, rows, head, spectrum, scratch,
    out_rows, out_query, out_mean, out_variance, out_wide, out_alone, size, d, largest,
    S: tl.constexpr, W: tl.constexpr, BN: tl.constexpr,
    FAR: tl.constexpr, UNUSUAL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One block, some columns at a time: first how far its queries are from their mean, then what
    is left of it."""
    block = tl.program_id(0).to(tl.int64)
    near, cols = tl.arange(0, S), tl.arange(0, W)
    here = near < size
    row = tl.load(rows + block * size + near, mask=here, other=-1)
    count = tl.maximum(tl.sum((row >= 0).to(tl.int32), 0), 1)
    place = tl.load(rows + block * size + near % count, mask=here, other=0)
    place = tl.maximum(place, 0).to(tl.int64)
    spectrum += tl.load(head + block) * d
    distance = tl.zeros((S,), dtype=tl.float32)
    for at in range(0, d, W):
        x = entries(query, place, here, at, d, W)
        mean = tl.sum(x, 0) / size
        x = x - mean[None, :]
        weight = tl.load(spectrum + at + cols, mask=at + cols < d, other=0.0)
        distance += tl.sum(x * x * weight[None, :], 1)
    distance = tl.where(here, distance, 0.0)
    far = near < 0
    wide = near < 0
    if SPLITS:
        wide = distance * 0.0 + tl.sum(distance, 0) > FAR * size
    if tl.max(distance, 0) > FAR:
        # the middle one of all distances, read back so that all threads see the same numbers
        scratch += block * size
        tl.store(scratch + near, distance, mask=here)
        tl.debug_barrier()
        distance = tl.load(scratch + near, mask=here, other=0.0)
        rank = ranks(scratch, distance, near, size, S, BN)
        middle = tl.sum(tl.where(here & (rank == (size - 1) // 2), distance, 0.0), 0)
        far = (distance > FAR) & (distance > UNUSUAL * middle)
    for at in range(0, d, W):
        x = entries(query, place, here, at, d, W)
        inside = here[:, None] & (at + cols < d)[None, :]
        mean = tl.sum(x, 0) / size
        x = tl.where(far[:, None] & inside, mean[None, :], x)
        mean = tl.sum(x, 0) / size
        apart = tl.where(inside, x - mean[None, :], 0.0)
        target = block * d + at + cols
        tl.store(out_mean + target, mean, mask=at + cols < d)
        tl.store(out_variance + target, tl.sum(apart * apart, 0) / size, mask=at + cols < d)
        x = tl.minimum(tl.maximum(x, -largest), largest)
        target = out_query + (block * size + near[:, None]) * d + at + cols[None, :]
        tl.store(target, x.to(out_query.dtype.element_ty), mask=inside)
    slot = block * size + near
    tl.store(out_rows + slot, tl.where(far | wide, -1, row), mask=here)
    tl.store(out_alone + slot, tl.where(far & (wide == 0), row, -1), mask=here)
    tl.store(out_wide + block + near, wide, mask=near < 1)
