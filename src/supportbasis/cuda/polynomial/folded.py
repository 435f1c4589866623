# mypy: ignore-errors
"""Degree-2 sums with the triangle of products x_i x_j folded into full rows.

Row p of the packing, p < d/2, holds x[p] x[j] for j >= p and x[d-1-p] x[d-1-j] for j < p: d/2 rows
of d columns cover every pair. A row is the tile of tokens (or the reversed tile) times one
broadcast entry, so features are formed in registers and fed to the tensor cores from there. Squares
have a block of their own (block P; the diagonal entries of the rows get weight zero), the linear
features another (P + 1).
"""

from __future__ import annotations

from ..runtime.language import jit, store_tile, tile_of, tl


@jit
def fold(x, y, a, b, mask, PACKED: tl.constexpr):
    """Products x a where ``mask`` is -1, y b where it is 0; two bfloat16 at a time if PACKED.

    Every argument comes from a load, not from `tl.arange` or a scalar: only then does the compiler
    form the product in the registers the tensor cores read, without a way through shared memory.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            lop3.b32 s, $5, $1, $2, 0xCA;
            lop3.b32 t, $5, $3, $4, 0xCA;
            mul.rn.bf16x2 $0, s, t;
            }""",
            "=r,r,r,r,r,r", [x, y, a, b, mask], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(mask != 0, x * a, y * b)


@jit
def entry(words, p, padded, near, PACKED: tl.constexpr):
    """Entry p of some tokens: from the words of `prepare` if PACKED, or from tokens transposed."""
    value = tl.load(words + p * padded + near)
    if PACKED:
        value = value.to(tl.int16)
    return value[:, None]


@jit
def _add_row(
    total, value, xt, x, y, mask, p, token, padded, d, PACKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Add row p of the packing for a tile of tokens, transposed [rows, tokens], times values."""
    a = tl.load(xt + p * padded + token)[None, :]
    b = tl.load(xt + (d - 1 - p) * padded + token)[None, :]
    f = fold(x, y, a, b, mask[:, None], PACKED)
    return tl.dot(f, value, total, input_precision=PRECISION)


@jit
def square_state(
    xt, v, masks, part,
    heads, n, span, padded, pairs, blocks, d, dv, groups, tiles,
    v_b, v_h, v_n,
    D: tl.constexpr, DB: tl.constexpr, EB: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over a split's tokens of features times values; R rows of the packing a program."""
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = (tl.program_id(0) % groups) * R
    tile = tl.program_id(0) // groups
    rows = (tile % tiles) * DB + tl.arange(0, DB)
    cols = (tile // tiles) * EB + tl.arange(0, EB)
    near = tl.arange(0, BN)
    first = split * span
    last = tl.minimum(first + span, n)
    xt += bh * d * padded
    v += (bh // heads) * v_b + (bh % heads) * v_h
    zero = tl.zeros((DB, EB), dtype=tl.float32)
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    forward = xt + rows[:, None] * padded
    backward = xt + (d - 1 - rows)[:, None] * padded
    known = (rows < d)[:, None]
    p1 = tl.minimum(p + 1, pairs - 1)  # rows past the last are computed and not stored
    p2, p3 = tl.minimum(p + 2, pairs - 1), tl.minimum(p + 3, pairs - 1)
    mask0 = tl.load(masks + p * D + rows).to(tl.int16)
    mask1 = tl.load(masks + p1 * D + rows).to(tl.int16)
    mask2 = tl.load(masks + p2 * D + rows).to(tl.int16)
    mask3 = tl.load(masks + p3 * D + rows).to(tl.int16)
    for start in range(first, last, BN):
        token = start + near
        x = tl.load(forward + token[None, :], mask=known, other=0.0)
        y = tl.load(backward + token[None, :], mask=known, other=0.0)
        value = tile_of(v + tl.cast(start, tl.int64) * v_n, near, token < last, cols, v_n, dv)
        value = value.to(OPERAND)
        sum0 = _add_row(sum0, value, xt, x, y, mask0, p, token, padded, d, PACKED, PRECISION)
        if R > 1:
            sum1 = _add_row(sum1, value, xt, x, y, mask1, p1, token, padded, d, PACKED, PRECISION)
        if R > 2:
            sum2 = _add_row(sum2, value, xt, x, y, mask2, p2, token, padded, d, PACKED, PRECISION)
            sum3 = _add_row(sum3, value, xt, x, y, mask3, p3, token, padded, d, PACKED, PRECISION)
    offset = (split.to(tl.int64) * tl.num_programs(2) + bh) * blocks + p
    target = part + offset * d * dv + rows[:, None] * dv + cols[None, :]
    inside = known & (cols < dv)[None, :]
    tl.store(target, sum0, mask=inside & (p < pairs))
    if R > 1:
        tl.store(target + d * dv, sum1, mask=inside & (p + 1 < pairs))
    if R > 2:
        tl.store(target + 2 * d * dv, sum2, mask=inside & (p + 2 < pairs))
        tl.store(target + 3 * d * dv, sum3, mask=inside & (p + 3 < pairs))


@jit
def finish_state(
    part, state, coefficients,
    splits, states, group, pairs, blocks, d, dv,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Sums of the splits, pairs counted twice, rounded to operands, padded with zeros to [D, E].

    SCAN 0: one sum of all splits. SCAN 1: for each split the sum of those before it; -1: of
    those after it. ``group`` heads of the tokens are added up for one head of the state, each
    with its own coefficients if the tokens are QUERIES.
    """
    block, bh = tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, E)
    inside = (rows < d)[:, None] & (cols < dv)[None, :]
    total_heads = tl.num_programs(1).to(tl.int64)
    twice = (rows != block) & ((rows > block) | (2 * block != d - 1))
    factor = tl.where(twice, 2.0, 0.0)
    factor = tl.where(block >= pairs, 1.0, factor)[:, None]
    power = tl.where(block == blocks - 1, 1, 2)
    source = part + tl.cast(block, tl.int64) * d * dv + rows[:, None] * dv + cols[None, :]
    target = state + block * D * E + rows[:, None] * E + cols[None, :]
    total = tl.zeros((ROWS, E), dtype=tl.float32)
    steps = tl.maximum(splits, states) if SCAN != 0 else splits
    for step in range(steps):
        split = tl.cast(steps - 1 - step if SCAN < 0 else step, tl.int64)
        if SCAN != 0:  # noqa: SIM102 - known when compiled
            if split < states:
                offset = (split * total_heads + bh) * (blocks * D * E)
                tl.store(target + offset, (total * factor).to(state.dtype.element_ty))
        if split < splits:
            for member in range(group):
                offset = ((split * total_heads + bh) * group + member) * blocks
                more = tl.load(source + offset * d * dv, mask=inside, other=0.0)
                if QUERIES:
                    more *= tl.load(coefficients + (bh * group + member) * 3 + power)
                total += more
    if SCAN == 0:
        offset = bh * (blocks * D * E)
        tl.store(target + offset, (total * factor).to(state.dtype.element_ty))


@jit
def head_coefficients(coefficients, head, KNOWN: tl.constexpr):
    """The polynomial of a head of the queries; ones where the state has it already."""
    c0, c1, c2 = 1.0, 1.0, 1.0
    if KNOWN:
        c0 = tl.load(coefficients + head * 3)
        c1 = tl.load(coefficients + head * 3 + 1)
        c2 = tl.load(coefficients + head * 3 + 2)
    return c0, c1, c2


@jit
def own_chunk(start, own, chunk, m, BM: tl.constexpr, BN: tl.constexpr, SCAN: tl.constexpr):
    """First token of the other side in the chunk of a block of rows that they attend to, and
    steps."""
    if SCAN > 0:
        low, high = own * chunk, tl.minimum(start + BM, m)
    else:
        low, high = start, tl.minimum((own + 1) * chunk, m)
    return low, (tl.maximum(high - low, 0) + BN - 1) // BN


@jit
def visible_pairs(row, index, here, SCAN: tl.constexpr):
    """Which tokens each row attends to: those not after it, or not before it if SCAN < 0."""
    if SCAN > 0:
        visible = index[None, :] <= row[:, None]
    else:
        visible = index[None, :] >= row[:, None]
    return here[None, :] & visible


@jit
def normaliser(
    x, rows, tokens, vectors, matrix, n, d, dv, x_n, c0, c1, c2,
    D: tl.constexpr, DEGREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Denominator of each row from the moments: c0 s + c1 s' x + c2 x' M x, M in two operands."""
    dims = tl.arange(0, D)
    CB: tl.constexpr = D if D < 64 else 64
    first = tl.load(vectors + dv + dims, mask=dims < d, other=0.0)
    den = c1 * tl.sum(tokens.to(tl.float32) * first[None, :], 1)
    den += c0 * tl.load(vectors + dv + d)
    if DEGREE == 2:
        for start in tl.static_range(0, D, CB):
            cols = start + tl.arange(0, CB)
            offset = matrix + dims[:, None] * D + cols[None, :]
            mapped = tl.dot(tokens, tl.load(offset), input_precision=PRECISION)
            mapped = tl.dot(tokens, tl.load(offset + D * D), mapped, input_precision=PRECISION)
            again = tile_of(x, rows, rows < n, cols, x_n, d)
            den += c2 * tl.sum(mapped * again.to(tl.float32), 1)
    return den


@jit
def read_out(
    x, words, state, vectors, matrix, y, v, w, row_weight, coefficients,
    masks, slope, unit, out, den,
    heads, n, padded, d, dv, pairs, blocks, chunk, ratio, other_heads, m, members,
    x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n,
    D: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DEGREE: tl.constexpr, SCAN: tl.constexpr, QUERIES: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of every row of ``x``: features times state, and with SCAN != 0 the row's own chunk of
    (y, v) by the polynomial itself. One epilogue divides (with a ``unit``, which it adds to the
    logarithms in ``den``) or writes the sums. Without ``den`` no denominators are summed.

    A head of ``x`` reads the state of head // ratio; the tokens of its chunk come from
    ``members`` heads of ``y``. ``words`` are as in `entry`. ``coefficients`` in <x, y> are those
    of each head of the queries: of ``x`` (QUERIES) or of ``y``, whose state has them already.
    """
    block, bh = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * EB + tl.arange(0, EB)
    start = block * BM
    near, dims = tl.arange(0, BM), tl.arange(0, D)
    live = start + near < n
    if row_weight is not None:
        scale = tl.load(row_weight + bh * n + start + near, mask=live, other=0.0)
        live = live & (scale != 0.0)
    x += (bh // heads) * x_b + (bh % heads) * x_h + start * x_n
    if words is not None:
        words += bh * d * padded + start
    tokens = tile_of(x, near, live, dims, x_n, d).to(OPERAND)
    own = start // chunk if SCAN != 0 else start * 0
    offset = own * (tl.num_programs(2) // ratio) + bh // ratio
    state += offset * (blocks * D * E)
    vectors += offset * (dv + d + 1)
    matrix += offset * (2 * D * D)
    tile = dims[:, None] * E + cols[None, :]
    c0, c1, c2 = head_coefficients(coefficients, bh, QUERIES)

    total = tl.zeros((BM, EB), dtype=tl.float32)
    if DEGREE == 2:
        known = live[:, None] & (dims < d)[None, :]
        reverse = x + near[:, None] * x_n + (d - 1 - dims)[None, :]
        reverse = tl.load(reverse, mask=known, other=0.0).to(OPERAND)
        for p in range(pairs):
            mask = tl.load(masks + p * D + dims).to(tl.int16)
            a = entry(words, p, padded, near, PACKED)
            b = entry(words, d - 1 - p, padded, near, PACKED)
            f = fold(tokens, reverse, a, b, mask[None, :], PACKED)
            block_state = tl.load(state + p * (D * E) + tile)
            total = tl.dot(f, block_state, total, input_precision=PRECISION)
        squares = tl.load(state + pairs * (D * E) + tile)
        total = tl.dot(tokens * tokens, squares, total, input_precision=PRECISION)
        if QUERIES:
            total *= c2
    linear = tl.load(state + (blocks - 1) * (D * E) + tile)
    if QUERIES:
        total += c1 * tl.dot(tokens, linear, input_precision=PRECISION)
    else:
        total = tl.dot(tokens, linear, total, input_precision=PRECISION)
    total += c0 * tl.load(vectors + cols, mask=cols < dv, other=0.0)[None, :]
    weight_sum = tl.zeros((BM,), dtype=tl.float32)
    if den is not None:
        weight_sum = normaliser(
            x, near, tokens, vectors, matrix, n - start, d, dv, x_n, c0, c1, c2,
            D, DEGREE, PRECISION,
        )  # fmt: skip

    if SCAN != 0:
        low, steps = own_chunk(start, own, chunk, m, BM, BN, SCAN)
        for step in range(steps * members):
            other = (bh // ratio) * members + step // steps
            ys = y + (other // other_heads) * y_b + (other % other_heads) * y_h
            vs = v + (other // other_heads) * v_b + (other % other_heads) * v_h
            index = low + (step % steps) * BN + tl.arange(0, BN)
            here = index < m
            if w is not None:
                weight = tl.load(w + other * m + index, mask=here, other=0.0)
                here = here & (weight != 0.0)
            ty = tile_of(ys, index, here, dims, y_n, d).to(OPERAND)
            z = tl.dot(tokens, tl.trans(ty), input_precision=PRECISION)
            a0, a1, a2 = c0, c1, c2
            if not QUERIES:
                a0, a1, a2 = head_coefficients(coefficients, other, True)
            z = a0 + z * (a1 + a2 * z)
            if w is not None:
                z = z * weight[None, :]
            z = tl.where(visible_pairs(start + near, index, here, SCAN), z, 0.0)
            tv = tile_of(vs, index, here, cols, v_n, dv).to(OPERAND)
            total = tl.dot(z.to(OPERAND), tv, total, input_precision=PRECISION)
            if slope is not None:  # of queries: they weigh the denominator alone
                z *= tl.load(slope + other * m + index, mask=here, other=0.0)[None, :]
            weight_sum += tl.sum(z, 1)

    if unit is not None:
        total = tl.where((weight_sum > 0.0)[:, None], total / weight_sum[:, None], 0.0)
    if row_weight is not None:
        total *= scale[:, None]
    store_tile(out + (bh * n + start) * dv, total, near, start + near < n, cols, dv)
    if unit is not None:
        weight_sum = tl.where(weight_sum > 0.0, tl.log(weight_sum), float("-inf"))
        weight_sum += tl.load(unit + bh)
    if den is not None:
        tl.store(den + bh * n + start + near, weight_sum, mask=live & (tl.program_id(1) == 0))
