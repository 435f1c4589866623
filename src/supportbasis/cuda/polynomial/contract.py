# mypy: ignore-errors
"""The gradient of a read-out with respect to its tokens.

With T_p [b, e] = 2 sum_j w_j k_p k_b v_e the read-out's gradient in direction u is
``sum_p x_p T_p u``: features x_p u_e of an outer product, which need no folding, times rows of T
that are gathered from the folded state (its diagonal is zero; squares have their own block).
"""

from __future__ import annotations

from ..runtime.language import jit, store_tile, tile_of, tl
from .folded import entry, head_coefficients, own_chunk, visible_pairs


@jit
def times(u, a, PACKED: tl.constexpr):
    """Rows of u times one number each; two bfloat16 at a time if PACKED."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [u, a],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return u * a


@jit
def _rows_of_pair(state, p, to, cols, pairs, d, D: tl.constexpr, E: tl.constexpr):
    """T_p transposed, [E, columns]: the folded state of the pairs of p with ``to``."""
    low, high = tl.minimum(to, p), tl.maximum(to, p)
    folded = low >= pairs
    row = tl.where(folded, d - 1 - low, low)
    col = tl.where(folded, d - 1 - high, high)
    row = tl.where(to < d, row, 0)  # beyond d: the zero at (0, 0)
    col = tl.where(to < d, col, 0)
    return tl.load(state + (row * (D * E) + col * E)[None, :] + cols[:, None])


@jit
def contract(
    x, words, state, vectors, matrix, y, v, w, row_weight, coefficients, u, h, out,
    heads, n, padded, d, dv, pairs, blocks, chunk, ratio, other_heads, m, members,
    x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, u_b, u_h, u_n,
    D: tl.constexpr, E: tl.constexpr, DB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DEGREE: tl.constexpr, SCAN: tl.constexpr, QUERIES: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of every token of ``x``, whose direction is ``u`` and the normaliser's ``h``.

    ``h`` and the ``coefficients`` in <x, y> belong to the rows (x are QUERIES), or to the other
    side, and are in the moments already (x are keys).
    """
    block, bh = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    to = tl.program_id(1) * DB + tl.arange(0, DB)
    start = block * BM
    near, dims, cols = tl.arange(0, BM), tl.arange(0, D), tl.arange(0, E)
    live = start + near < n
    if row_weight is not None:
        scale = tl.load(row_weight + bh * n + start + near, mask=live, other=0.0)
        live = live & (scale != 0.0)
    x += (bh // heads) * x_b + (bh % heads) * x_h + start * x_n
    if words is not None:
        words += bh * d * padded + start
    u += (bh // heads) * u_b + (bh % heads) * u_h + start * u_n
    tokens = tile_of(x, near, live, dims, x_n, d).to(OPERAND)
    direction = tile_of(u, near, live, cols, u_n, dv).to(OPERAND)
    own = start // chunk if SCAN != 0 else start * 0
    offset = own * (tl.num_programs(2) // ratio) + bh // ratio
    state += offset * (blocks * D * E)
    vectors += offset * (dv + d + 1)
    matrix += offset * (2 * D * D)
    _, c1, c2 = head_coefficients(coefficients, bh, QUERIES)
    if QUERIES:
        slope = tl.load(h + bh * n + start + near, mask=live, other=0.0)
    else:
        slope = tl.full((BM,), 1.0, dtype=tl.float32)

    total = tl.zeros((BM, DB), dtype=tl.float32)
    if DEGREE == 2:
        for p in range(d):
            gathered = _rows_of_pair(state, p, to, cols, pairs, d, D, E)
            f = times(direction, entry(words, p, padded, near, PACKED), PACKED)
            total = tl.dot(f, gathered, total, input_precision=PRECISION)
        squares = tl.load(state + pairs * (D * E) + to[None, :] * E + cols[:, None])
        part = tl.dot(direction, squares, input_precision=PRECISION)
        again = tile_of(x, near, live, to, x_n, d)
        total += 2.0 * part * again.to(tl.float32)
        columns = matrix + dims[:, None] * D + to[None, :]
        part = tl.dot(tokens, tl.load(columns), input_precision=PRECISION)
        part = tl.dot(tokens, tl.load(columns + D * D), part, input_precision=PRECISION)
        total = c2 * (total + 2.0 * slope[:, None] * part)
    # [E, DB] tiles of the state, read along e
    linear = tl.load(state + (blocks - 1) * (D * E) + to[None, :] * E + cols[:, None])
    first = tl.load(vectors + dv + to, mask=to < d, other=0.0)
    part = tl.dot(direction, linear, input_precision=PRECISION)
    total += c1 * (part + slope[:, None] * first[None, :])

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
            tv = tile_of(vs, index, here, cols, v_n, dv).to(OPERAND)
            z = tl.dot(tokens, tl.trans(ty), input_precision=PRECISION)
            change = tl.dot(direction, tl.trans(tv), input_precision=PRECISION)
            if QUERIES:
                change = (change + slope[:, None]) * (c1 + 2.0 * c2 * z)
            else:
                _, a1, a2 = head_coefficients(coefficients, other, True)
                change += tl.load(h + other * m + index, mask=here, other=0.0)[None, :]
                change = change * (a1 + 2.0 * a2 * z)
            if w is not None:
                change = change * weight[None, :]
            change = tl.where(visible_pairs(start + near, index, here, SCAN), change, 0.0)
            side = tile_of(ys, index, here, to, y_n, d).to(OPERAND)
            total = tl.dot(change.to(OPERAND), side, total, input_precision=PRECISION)

    if row_weight is not None:
        total *= scale[:, None]
    store_tile(out + (bh * n + start) * d, total, near, start + near < n, to, d)
