# mypy: ignore-errors
"""Kernels of `ordering`: principal axes of nodes, ranks along them, and whole splits."""

from __future__ import annotations

from .language import jit, tl


@jit
def tokens_at(x, place, here, width, A: tl.constexpr):
    """Rows of ``x`` at some places, [places, A]."""
    cols = tl.arange(0, A)
    at = x + place.to(tl.int64)[:, None] * width + cols[None, :]
    return tl.load(at, mask=here[:, None] & (cols < width)[None, :], other=0.0)


@jit
def principal_axis(part, here, count, start, A: tl.constexpr, ITERATIONS: tl.constexpr):
    """Approximate principal axis [A] of tokens [S, A]; ``start`` are the signs it begins with."""
    middle = tl.sum(part, 0) / count
    part = tl.where(here[:, None], part - middle[None, :], 0.0)
    diagonal = tl.sum(part * part, 0)
    part = part / tl.sqrt(tl.maximum(tl.sum(diagonal, 0), 1.1754944e-38))
    axis = tl.sqrt(diagonal) * start + 1.1754944e-38
    for _ in range(ITERATIONS):
        along = tl.sum(part * axis[None, :], 1)
        axis = tl.sum(part * along[:, None], 0)
        axis = axis / tl.maximum(tl.sqrt(tl.sum(axis * axis, 0)), 1.1754944e-38)
    return axis


@jit
def ranks(numbers, mine, near, size, S: tl.constexpr, BN: tl.constexpr):
    """How many of ``size`` numbers come before each of ``mine``, which were read from the same
    memory at ``near``; of equal ones the first. BN at a time: fewer steps than a sort, and far
    less to compile."""
    rank = tl.zeros((S,), dtype=tl.int32)
    for at in range(0, size, BN):
        other = at + tl.arange(0, BN)
        theirs = tl.load(numbers + other, mask=other < size, other=0)
        before = theirs[None, :] < mine[:, None]
        tie = (theirs[None, :] == mine[:, None]) & (other[None, :] < near[:, None])
        rank += tl.sum(((before | tie) & (other < size)[None, :]).to(tl.int32), 1)
    return rank


@jit
def axes(
    x, position, sign, axis, middle, unit, size, segment, tokens, sampled, width,
    A: tl.constexpr, S: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """The axis of each node, from ``sampled`` of its tokens, evenly spaced; the middle of their
    projections, and the distance from it that they stay well within."""
    node = tl.program_id(0).to(tl.int64)
    near, cols = tl.arange(0, S), tl.arange(0, A)
    here = near < sampled
    at = node * size + near.to(tl.int64) * size // sampled
    place = tl.load(position + at, mask=here, other=0)
    part = tokens_at(x, node * size // segment * tokens + place, here, width, A)
    start = tl.load(sign + cols, mask=cols < width, other=0.0)
    found = principal_axis(part, here, sampled, start, A, ITERATIONS)
    tl.store(axis + node * width + cols, found, mask=cols < width)
    along = tl.sum(part * found[None, :], 1)
    low = tl.min(tl.where(here, along, float("inf")), 0)
    high = tl.max(tl.where(here, along, float("-inf")), 0)
    tl.store(middle + node, (low + high) / 2)
    tl.store(unit + node, tl.maximum(high - low, 1.1754944e-38))


@jit
def project(
    x, position, axis, middle, unit, ranked, size, segment, tokens, width, steps,
    A: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Tokens of each node along its axis, in whole steps: below 2 * ``steps`` of them from one end
    of the node to the other, after those of the nodes before it."""
    node, cols = tl.program_id(1).to(tl.int64), tl.arange(0, A)
    near = tl.program_id(0) * S + tl.arange(0, S)
    here = near < size
    place = tl.load(position + node * size + near, mask=here, other=0)
    part = tokens_at(x, node * size // segment * tokens + place, here, width, A)
    line = tl.load(axis + node * width + cols, mask=cols < width, other=0.0)
    along = tl.sum(part * line[None, :], 1)
    along = (along - tl.load(middle + node)) / tl.load(unit + node)
    along = tl.minimum(tl.maximum(along, -1.0), 1.0)
    along = tl.where(along == along, along, 0.0)  # a token that is not finite goes anywhere
    step = (along * (steps - 1)).to(tl.int32) + steps
    tl.store(ranked + node * size + near, (node * 2 * steps + step).to(tl.int32), mask=here)


@jit
def split(
    x, position, sign, axes, along, ordered, size, segment, tokens, width,
    A: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """A whole node at once: its tokens in the order of their projections on its axis.

    The place of a token is the number of tokens before it. Projections are compared as integers
    read back from memory: so all threads see the same numbers, and places are a permutation
    whatever the tokens are.
    """
    node = tl.program_id(0).to(tl.int64)
    near, cols = tl.arange(0, S), tl.arange(0, A)
    here = near < size
    place = tl.load(position + node * size + near, mask=here, other=0)
    part = tokens_at(x, node * size // segment * tokens + place, here, width, A)
    start = tl.load(sign + cols, mask=cols < width, other=0.0)
    axis = principal_axis(part, here, size, start, A, ITERATIONS)
    tl.store(axes + node * width + cols, axis, mask=cols < width)
    bits = tl.sum(part * axis[None, :], 1).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the numbers
    along += node * size
    tl.store(along + near, bits, mask=here)
    tl.debug_barrier()
    mine = tl.load(along + near, mask=here, other=0)
    rank = ranks(along, mine, near, size, S, BN)
    tl.store(ordered + node * size + rank, place, mask=here)
