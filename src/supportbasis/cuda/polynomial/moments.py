# mypy: ignore-errors
"""Small sums over tokens, each cut into splits of ``span`` tokens.

With tokens x_j, values v_j and weights w_j these are ``sum v``, ``sum x v'``, ``sum x^2 v'``
(squares of the entries), and ``sum w``, ``sum w x``, ``sum w x x'``. A weighted sum of values gets
values that are weighted already: `prepare` writes them, and the tokens transposed. Sums are
float32.
"""

from __future__ import annotations

from ..runtime.language import jit, store_tile, tile_of, tl


@jit
def prepare(
    x, v, w, xt, words, vw,
    heads, n, padded, d, dv,
    x_b, x_h, x_n, v_b, v_h, v_n,
    D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Transposed tokens and weighted values for other kernels; zero from n to ``padded`` and where
    w = 0. What is None is not made; without w, no values are.

    ``xt`` are the tokens transposed; ``words`` the same as bfloat16 in words of 32 bits (a column
    of words is copied to shared memory ahead of time, a column of halves is not); ``vw`` the
    values times their weights.
    """
    bh = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * BN
    near = tl.arange(0, BN)
    live = start + near < n
    if w is not None:
        weight = tl.load(w + bh * n + start + near, mask=live, other=0.0)
        live = live & (weight != 0.0)
    dims = tl.arange(0, D)
    source = x + (bh // heads) * x_b + (bh % heads) * x_h + start * x_n
    tile = tile_of(source, near, live, dims, x_n, d)
    target = bh * d * padded + start + dims[:, None] * padded + near[None, :]
    inside = dims[:, None] < d
    if xt is not None:
        tl.store(xt + target, tl.trans(tile).to(xt.dtype.element_ty), mask=inside)
    if words is not None:
        bits = tile.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(words + target, tl.trans(bits), mask=inside)
    if w is not None:
        cols = tl.arange(0, E)
        source = v + (bh // heads) * v_b + (bh % heads) * v_h + start * v_n
        value = tile_of(source, near, live, cols, v_n, dv).to(tl.float32) * weight[:, None]
        store_tile(vw + (bh * n + start) * dv, value, near, start + near < n, cols, dv)


@jit
def value_moments(
    x, v, w, part, flat,
    heads, n, span, blocks, d, dv, flat_size, flat_at,
    x_b, x_h, x_n, x_d, v_b, v_h, v_n,
    DB: tl.constexpr, EB: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    SQUARES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last block of ``part`` gets sum x v', the one before sum x^2 v'; ``flat`` the vectors.

    ``flat`` holds, from ``flat_at``: sum v [dv], sum w x [d], sum w [1].
    """
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row_tile, col_tile = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    rows = row_tile * DB + tl.arange(0, DB)
    cols = col_tile * EB + tl.arange(0, EB)
    near = tl.arange(0, BN)
    first = split * span
    last = tl.minimum(first + span, n)
    x += (bh // heads) * x_b + (bh % heads) * x_h
    v += (bh // heads) * v_b + (bh % heads) * v_h
    linear = tl.zeros((DB, EB), dtype=tl.float32)
    square = tl.zeros((DB, EB), dtype=tl.float32)
    value_sum = tl.zeros((EB,), dtype=tl.float32)
    token_sum = tl.zeros((DB,), dtype=tl.float32)
    weight_sum = tl.zeros((BN,), dtype=tl.float32)
    for start in range(first, last, BN):
        at = tl.cast(start, tl.int64)
        live = start + near < last
        source = x + at * x_n + near[None, :] * x_n + rows[:, None] * x_d
        tokens = tl.load(source, mask=live[None, :] & (rows[:, None] < d), other=0.0).to(OPERAND)
        value = tile_of(v + at * v_n, near, live, cols, v_n, dv).to(OPERAND)
        linear = tl.dot(tokens, value, linear, input_precision=PRECISION)
        if SQUARES:
            square = tl.dot(tokens * tokens, value, square, input_precision=PRECISION)
        value_sum += tl.sum(value.to(tl.float32), 0)
        if w is not None:
            weight = tl.load(w + bh * n + at + near, mask=live, other=0.0)
        else:
            weight = live.to(tl.float32)
        token_sum += tl.sum(tokens.to(tl.float32) * weight[None, :], 1)
        weight_sum += weight
    inside = (rows[:, None] < d) & (cols[None, :] < dv)
    offset = split.to(tl.int64) * tl.num_programs(2) + bh
    part += (offset * blocks + blocks - 1) * d * dv + rows[:, None] * dv + cols[None, :]
    tl.store(part, linear, mask=inside)
    if SQUARES:
        tl.store(part - d * dv, square, mask=inside)
    flat += offset * flat_size + flat_at
    tl.store(flat + cols, value_sum, mask=(cols < dv) & (row_tile == 0))
    tl.store(flat + dv + rows, token_sum, mask=(rows < d) & (col_tile == 0))
    if (row_tile == 0) & (col_tile == 0):
        tl.store(flat + dv + d, tl.sum(weight_sum, 0))


@jit
def weight_moments(
    xt, w, flat,
    n, span, padded, d, flat_size,
    DB: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum w x x' [d, d] into the front of ``flat``. Weighted tokens are two operands, rounded
    and rest, so that the normaliser does not feel the rounding."""
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) % TILES) * DB + tl.arange(0, DB)
    cols = (tl.program_id(0) // TILES) * DB + tl.arange(0, DB)
    near = tl.arange(0, BN)
    first = split * span
    last = tl.minimum(first + span, n)
    xt += bh * d * padded
    xt_rows, xt_cols = xt + rows[:, None] * padded, xt + cols[None, :] * padded
    total = tl.zeros((DB, DB), dtype=tl.float32)
    for start in range(first, last, BN):
        token = start + near
        left = tl.load(xt_rows + token[None, :], mask=rows[:, None] < d, other=0.0)
        right = tl.load(xt_cols + token[:, None], mask=cols[None, :] < d, other=0.0)
        if w is not None:
            weight = tl.load(w + bh * n + token, mask=token < n, other=0.0)
            weighted = left.to(tl.float32) * weight[None, :]
            left = weighted.to(right.dtype)
            rest = (weighted - left.to(tl.float32)).to(right.dtype)
            total = tl.dot(rest, right, total, input_precision=PRECISION)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    flat += (split.to(tl.int64) * tl.num_programs(2) + bh) * flat_size
    inside = (rows[:, None] < d) & (cols[None, :] < d)
    tl.store(flat + rows[:, None] * d + cols[None, :], total, mask=inside)


@jit
def finish_moments(
    flat, vectors, matrix, coefficients,
    splits, states, group, d, dv, flat_size, flat_at,
    D: tl.constexpr, LENGTH: tl.constexpr, SCAN: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Sums of the splits: all of them (SCAN 0), those before (1) or those after (-1) each split,
    with the coefficients of their heads if they are QUERIES. ``matrix`` is written as rounded
    and rest."""
    row, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total_heads = tl.num_programs(1).to(tl.int64)
    at = tl.arange(0, LENGTH)
    if row < D:
        inside = (at < d) & (row < d)
        source = flat + row * d + at
        power = tl.where(inside, 2, 0)
    else:
        inside = at < dv + d + 1
        source = flat + flat_at + at
        power = tl.where((at >= dv) & (at < dv + d), 1, 0)
    steps = tl.maximum(splits, states) if SCAN != 0 else splits
    total = tl.zeros((LENGTH,), dtype=tl.float32)
    for step in range(steps):
        split = tl.cast(steps - 1 - step if SCAN < 0 else step, tl.int64)
        if SCAN != 0:  # noqa: SIM102 - known when compiled
            if split < states:
                _store_moments(vectors, matrix, split * total_heads + bh, row, total, at, d, dv, D)
        if split < splits:
            for member in range(group):
                head = bh * group + member
                offset = (split * total_heads * group + head) * flat_size
                more = tl.load(source + offset, mask=inside, other=0.0)
                if QUERIES:
                    more *= tl.load(coefficients + head * 3 + power)
                total += more
    if SCAN == 0:
        _store_moments(vectors, matrix, bh, row, total, at, d, dv, D)


@jit
def _store_moments(vectors, matrix, offset, row, value, at, d, dv, D: tl.constexpr):
    if row < D:
        rounded = value.to(matrix.dtype.element_ty)
        rest = (value - rounded.to(tl.float32)).to(matrix.dtype.element_ty)
        target = matrix + offset * (2 * D * D) + row * D + at
        tl.store(target, rounded, mask=at < D)
        tl.store(target + D * D, rest, mask=at < D)
    else:
        length = dv + d + 1
        tl.store(vectors + offset * length + at, value, mask=at < length)
