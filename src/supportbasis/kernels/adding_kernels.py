# mypy: ignore-errors
"""The kernel of `adding`."""

from __future__ import annotations

from .language import jit, tl


@jit
def add(
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
