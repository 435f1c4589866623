# mypy: ignore-errors
"""Kernels of `window_sorting`: principal coordinates of windows, median splits, nearest centres.

A sequence of tokens, or a mask of hidden ones, is None where there is none.
"""

from __future__ import annotations

from ..runtime.language import jit, tile_of, tl


@jit
def tokens_of(sequence, head, slot, count):
    """The token in each slot of a head, -1 for none."""
    if sequence is not None:
        return tl.load(sequence + head * count + slot, mask=slot < count, other=-1)
    else:
        return tl.where(slot < count, slot, -1)


@jit
def rows_at(x, token, x_t, d, D: tl.constexpr):
    """Rows of ``x`` [tokens, D] as they are stored; zeros where there is no token."""
    return tile_of(x, token.to(tl.int64), token >= 0, tl.arange(0, D), x_t, d)


@jit
def orthonormal(V, R: tl.constexpr):
    """The first R columns of V [D, 16] made orthonormal, one after the other; zero where the ones
    before leave nothing of one."""
    columns = tl.arange(0, 16)
    sizes = tl.sum(V * V, 0)
    for k in range(R):
        chosen = columns == k
        v = tl.sum(tl.where(chosen[None, :], V, 0.0), 1)
        size, whole = tl.sum(v * v, 0), tl.sum(tl.where(chosen, sizes, 0.0), 0)
        v = tl.where(size > 9.094947e-13 * whole, v / tl.sqrt(size), 0.0)  # 2^-20, squared
        along = tl.where(columns > k, tl.sum(V * v[:, None], 0), 0.0)
        V = tl.where(chosen[None, :], v[:, None], V - v[:, None] * along[None, :])
    return V


@jit
def principal_axes(C, D: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr):
    """R leading axes [D, 16] of a covariance [D, D], by power iterations of all at once; the first
    of STEPS products makes the columns of the R largest variances."""
    dims, columns = tl.arange(0, D), tl.arange(0, 16)
    variance = tl.sum(tl.where(dims[:, None] == dims[None, :], C, 0.0), 0)
    V = tl.zeros((D, 16), dtype=tl.float32)
    for k in range(R):
        _, largest = tl.max(variance, 0, return_indices=True)
        V = tl.where((dims == largest)[:, None] & (columns == k)[None, :], 1.0, V)
        variance = tl.where(dims == largest, -1.0, variance)
    for _ in range(STEPS):
        V = orthonormal(tl.dot(C, V, input_precision="tf32x3"), R)
    return V


@jit
def axes(
    x, sequence, points, count, x_h, x_t, d,
    W: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr,
    SUMMED: tl.constexpr, PROJECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Principal coordinates ``points`` [W, 8] of each window, in units of its widest entry.

    Tokens are shifted by the mean of the window's first BT before they are rounded to SUMMED, so
    that a common offset costs no digits.
    """
    window, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    near, dims, columns = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, 16)
    x += head * x_h
    points += (head * tl.num_programs(0) + window) * W * 8
    token = tokens_of(sequence, head, window * W + near, count)
    known = tl.maximum(tl.sum((token >= 0).to(tl.float32), 0), 1.0)
    shift = tl.sum(rows_at(x, token, x_t, d, D).to(tl.float32), 0) / known

    C = tl.zeros((D, D), dtype=tl.float32)
    total, real = tl.zeros((D,), dtype=tl.float32), 0.0
    for start in range(0, W, BT):
        token = tokens_of(sequence, head, window * W + start + near, count)
        here = token >= 0
        y = rows_at(x, token, x_t, d, D).to(tl.float32) - shift[None, :]
        y = tl.where(here[:, None], y, 0.0).to(SUMMED)
        C = tl.dot(tl.trans(y), y, C, input_precision=PRECISION)
        total += tl.sum(y.to(tl.float32), 0)
        real += tl.sum(here.to(tl.float32), 0)
    real = tl.maximum(real, 1.0)
    on_diagonal = dims[:, None] == dims[None, :]
    across = tl.sum(tl.where(on_diagonal, total[None, :], 0.0), 1)
    C = C / real - (across / real)[:, None] * (total / real)[None, :]
    widest = tl.maximum(tl.max(tl.sum(tl.where(on_diagonal, C, 0.0), 0), 0), 1.1754944e-38)
    V = principal_axes(C / widest, D, R, STEPS).to(PROJECTED)

    kept = V.to(tl.float32)
    middle = tl.sum(tl.sum(tl.where(on_diagonal, shift[None, :], 0.0), 1)[:, None] * kept, 0)
    for start in range(0, W, BT):
        token = tokens_of(sequence, head, window * W + start + near, count)
        rows = rows_at(x, token, x_t, d, D).to(PROJECTED)
        p = tl.dot(rows, V, input_precision=PRECISION) - middle[None, :]
        at = points + (start + near)[:, None] * 8 + columns[None, :]
        tl.store(at, p / tl.sqrt(widest), mask=(columns < 8)[None, :])


@jit
def along_principal_axis(p, real, STEPS: tl.constexpr):
    """Points ``p`` [N, S, 8] of N nodes along the principal axis of each, [N, S].

    v <- C v / |C v| without C: the points times their projections on v. The first of STEPS products
    makes the column of C with the largest diagonal entry.
    """
    here = tl.broadcast_to(real[:, :, None], p.shape)
    mean = tl.sum(tl.where(here, p, 0.0), 1) / tl.maximum(tl.sum(here.to(tl.float32), 1), 1.0)
    y = tl.where(here, p - mean[:, None, :], 0.0)
    largest = tl.argmax(tl.sum(y * y, 1), 1)
    v = (tl.arange(0, 8)[None, :] == largest[:, None]).to(tl.float32)
    for _ in range(STEPS):
        along = tl.sum(y * v[:, None, :], 2)
        v = tl.sum(y * along[:, :, None], 1)
        v = v / tl.maximum(tl.sqrt(tl.sum(v * v, 1)), 1.1754944e-38)[:, None]
    return tl.sum(y * v[:, None, :], 2)


@jit
def sortable(along, real):
    """Numbers as unsigned integers of the same sequence; the largest where there is no token."""
    bits = along.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(real, tl.minimum(bits, 0x7FFFFFFE), 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def halves(key, N: tl.constexpr, S: tl.constexpr):
    """Where the entries of N nodes ``key`` [N, S] go, so that the smaller half of each comes first
    and both keep their sequence; of equal ones the first are the smaller.

    The median is found bit by bit: it is at least ``trial`` where fewer than S / 2 are below that.
    """
    median = tl.zeros((N,), dtype=tl.uint32)
    bit = tl.full((N,), 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        trial = median | bit
        below = tl.sum((key < trial[:, None]).to(tl.int32), 1)
        median = tl.where(below < S // 2, trial, median)
        bit = bit >> 1
    less, equal = key < median[:, None], key == median[:, None]
    wanted = S // 2 - tl.sum(less.to(tl.int32), 1)[:, None]  # of the equal ones
    both = tl.cumsum(less.to(tl.int32) + equal.to(tl.int32) * 65536, 1)
    ties = both >> 16
    first = (both & 65535) + tl.minimum(ties, wanted)  # of the smaller half, up to here
    smaller = less | (equal & (ties <= wanted))
    node, near = tl.arange(0, N)[:, None] * S, tl.arange(0, S)[None, :]
    return node + tl.where(smaller, first - 1, S // 2 + near - first)


@jit
def split_nodes(
    points, sequence, keys, permutation, head, first, count,
    N: tl.constexpr, S: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One split of the N nodes of S tokens of the window that begins at slot ``first``.

    Keys go through memory: so all threads compare the same numbers, and what comes out is a
    permutation whatever the points are.
    """
    slot = tl.arange(0, N)[:, None] * S + tl.arange(0, S)[None, :]
    local = slot  # before the first split
    if N > 1:
        local = tl.load(permutation + slot)
    real = tokens_of(sequence, head, first + local, count) >= 0
    p = tl.load(points + local[:, :, None] * 8 + tl.arange(0, 8)[None, None, :])
    tl.store(keys + slot, sortable(along_principal_axis(p, real, STEPS), real))
    tl.debug_barrier()
    target = halves(tl.load(keys + slot), N, S)
    tl.debug_barrier()
    tl.store(permutation + target, local)
    tl.debug_barrier()


@jit
def split(
    points, sequence, keys, permutation, count, others, levels, other_levels,
    W: tl.constexpr, LEVELS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """All splits of a window; ``permutation`` [W] holds slots in between, and tokens at the end.
    Heads from ``others`` on have splits of ``other_levels``; LEVELS are the most."""
    window, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    base = (head * tl.num_programs(0) + window) * W
    points += base * 8
    keys += base
    permutation += base
    first = (window * W).to(tl.int32)
    levels = tl.where(head < others, levels, other_levels)
    for level in tl.static_range(LEVELS):
        if level < levels:
            split_nodes(
                points, sequence, keys, permutation, head, first, count,
                1 << level, W >> level, STEPS,
            )  # fmt: skip
    local = tl.arange(0, W)
    if levels > 0:
        local = tl.load(permutation + local)
    token = tokens_of(sequence, head, first + local, count)
    tl.debug_barrier()
    tl.store(permutation + tl.arange(0, W), token)


@jit
def nearest(
    x, centres, offset, hidden, out, count, x_h, x_t, d, classes,
    D: tl.constexpr, Z: tl.constexpr, BT: tl.constexpr, BZ: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write head * ``classes`` + the nearest of Z centres, the first of equals: the largest
    <x, c> + offset. Hidden tokens are of the last class."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    dims, here = tl.arange(0, D), token < count
    rows = rows_at(x + head * x_h, tl.where(here, token, -1), x_t, d, D).to(OPERAND)
    best, which = tl.full((BT,), float("-inf"), dtype=tl.float32), tl.zeros((BT,), dtype=tl.int32)
    for start in range(0, Z, BZ):
        at = head * Z + start + tl.arange(0, BZ)
        c = tl.load(centres + at[:, None] * d + dims[None, :], mask=(dims < d)[None, :], other=0.0)
        score = tl.dot(rows, tl.trans(c).to(OPERAND), input_precision=PRECISION)
        score += tl.load(offset + at)[None, :]
        top = tl.max(score, 1)
        which = tl.where(top > best, start + tl.argmax(score, 1), which)
        best = tl.maximum(top, best)
    if hidden is not None:
        is_hidden = tl.load(hidden + head * count + token, mask=here, other=0)
        which = tl.where(is_hidden != 0, classes - 1, which)
    key = head * classes + which
    tl.store(out + head * count + token, key.to(out.dtype.element_ty), mask=here)
