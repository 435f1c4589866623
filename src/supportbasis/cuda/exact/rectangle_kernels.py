# mypy: ignore-errors
"""Kernels of `rectangle`: online softmax of some rows over some keys, and its two gradients.

Logarithms are to base 2 inside, as the hardware has them. Tensors that may be missing are None: all
rows or keys instead of listed ones, no log-weights, no sums to begin with, no splits.
"""

from __future__ import annotations

from ..runtime.language import jit, store_tile, tile_of, tl


@jit
def tokens_at(index, count, bh, at, most, total):
    """Tokens in some slots of a set, and which of these slots are filled."""
    if index is not None:
        here = at < tl.load(count + bh)
        token = tl.load(index + bh * most + at, mask=here, other=0).to(tl.int64)
    else:
        here = at < total
        token = at.to(tl.int64)
    return token, here


@jit
def end_of_keys(rows, row_count, keys, key_count, bh, row, live, m, BM, CAUSAL: tl.constexpr):
    """Where the keys end that a block of BM rows attends to."""
    end = m
    if keys is not None:
        end = tl.load(key_count + bh)
    elif CAUSAL:
        end = tl.minimum(m, tl.max(tl.where(live, row, -1), 0).to(tl.int32) + 1)
    if rows is not None:  # a block without rows has nothing to do
        end = tl.where(tl.program_id(0) * BM < tl.load(row_count + bh), end, 0)
    return end


@jit
def bias_of(log_weight, start, token, here):
    """Log-weights of keys, counted from ``start``, to base 2; -inf where there is none."""
    bias = tl.where(here, 0.0, float("-inf"))
    if log_weight is not None:
        bias = tl.load(log_weight + start + token, mask=here, other=float("-inf"))
        bias *= 1.4426950408889634
    return bias


@jit
def attend(
    q, k, v, log_weight, rows, row_count, keys, key_count,
    num, den, unit, out, lse, masses,
    heads, group, n, m, d, dv, most_rows, most_keys, span, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows over a split of the keys.

    The sums begin with ``num`` and ``den``, in units of exp(unit). With ``masses``, numerators,
    tops and masses of this split are written, one slot a row; else output and lse, at the rows' own
    positions.
    """
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = bh // heads, bh % heads
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    row, live = tokens_at(rows, row_count, bh, slot, most_rows, n)
    query = tile_of(q + b * q_b + h * q_h, row, live, dims, q_n, d)
    k += b * k_b + h // group * k_h
    v += b * v_b + h // group * v_h
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, E), dtype=tl.float32)
    if num is not None:
        mass = tl.load(den + bh * n + row, mask=live, other=0.0)
        total = tile_of(num, bh * n + row, live, cols, dv, dv)
        top = tl.where(mass != 0.0, tl.load(unit + bh) * 1.4426950408889634, float("-inf"))
    end = end_of_keys(rows, row_count, keys, key_count, bh, row, live, m, BM, CAUSAL)
    for start in range(split * span, tl.minimum((split + 1) * span, end), BN):
        key, here = tokens_at(keys, key_count, bh, start + tl.arange(0, BN), most_keys, m)
        key_tile = tile_of(k, key, here, dims, k_n, d)
        score = tl.dot(query, tl.trans(key_tile), input_precision=PRECISION)
        score = score * scale + bias_of(log_weight, b * w_b + h * w_h, key, here)[None, :]
        if CAUSAL:
            score = tl.where(key[None, :] <= row[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weight, 1)
        value = tile_of(v, key, here, cols, v_n, dv)
        total = total * shrink[:, None]
        total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION)
        top = new_top
    if masses is not None:
        target = (split.to(tl.int64) * tl.num_programs(2) + bh) * most_rows + slot
        store_tile(out, total, target, live, cols, dv)
        tl.store(lse + target, top, mask=live)
        tl.store(masses + target, mass, mask=live)
    else:
        store_quotients(out, lse, total, top, mass, bh * n + row, live, cols, dv)


@jit
def store_quotients(out, lse, total, top, mass, at, live, cols, dv):
    """The one division, and the logarithm of the denominator."""
    real = mass > 0.0
    total = tl.where(real[:, None], total / mass[:, None], 0.0)
    size = tl.where(real, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
    store_tile(out, total, at, live, cols, dv)
    tl.store(lse + at, size, mask=live)


@jit
def join_splits(
    parts, tops, masses, rows, row_count, out, lse,
    n, dv, most_rows, splits,
    E: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Join the splits of every row, at the row's own position."""
    bh, cols = tl.program_id(1).to(tl.int64), tl.arange(0, E)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    row, live = tokens_at(rows, row_count, bh, slot, most_rows, n)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, E), dtype=tl.float32)
    for split in range(splits):
        at = (tl.cast(split, tl.int64) * tl.num_programs(1) + bh) * most_rows + slot
        more = tl.load(tops + at, mask=live, other=float("-inf"))
        new_top = tl.maximum(top, more)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        mine, theirs = tl.exp2(top - base), tl.exp2(more - base)
        mass = mass * mine + theirs * tl.load(masses + at, mask=live, other=0.0)
        part = tile_of(parts, at, live, cols, dv, dv)
        total = total * mine[:, None] + part * theirs[:, None]
        top = new_top
    store_quotients(out, lse, total, top, mass, bh * n + row, live, cols, dv)


@jit
def row_slopes(
    grad, out, grad_lse, slope, lse, unit, scaled,
    heads, n, dv, g_b, g_h, g_n,
    E: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """What every score of a row adds: the gradient of lse less <grad, out>. With ``scaled`` it is
    over the row's denominator in units of exp(unit), as is the gradient, which is written there;
    zero where lse is infinite."""
    bh, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BM
    near, cols = tl.arange(0, BM), tl.arange(0, E)
    live = start + near < n
    grad += (bh // heads) * g_b + (bh % heads) * g_h + start * g_n
    direction = tile_of(grad, near, live, cols, g_n, dv).to(tl.float32)
    value = tile_of(out + (bh * n + start) * dv, near, live, cols, dv, dv).to(tl.float32)
    term = -tl.sum(direction * value, 1)
    if grad_lse is not None:
        term += tl.load(grad_lse + bh * n + start + near, mask=live, other=0.0)
    if scaled is not None:
        size = tl.load(lse + bh * n + start + near, mask=live, other=float("-inf"))
        inverse = tl.where(size > float("-inf"), tl.exp(tl.load(unit + bh) - size), 0.0)
        term *= inverse
        direction *= inverse[:, None]
        store_tile(scaled + (bh * n + start) * dv, direction, near, live, cols, dv)
    tl.store(slope + bh * n + start + near, term, mask=live)


@jit
def _row_side(lse, slope, bh, n, row, live):
    """Log-sum-exp to base 2 (inf: no weight) and slope of some rows."""
    size = tl.load(lse + bh * n + row, mask=live, other=float("-inf"))
    size = tl.where(size == float("-inf"), float("inf"), size * 1.4426950408889634)
    return size, tl.load(slope + bh * n + row, mask=live, other=0.0)


@jit
def query_gradient(
    q, k, v, log_weight, rows, row_count, keys, key_count,
    grad, lse, slope, out,
    heads, group, n, m, d, dv, most_rows, most_keys, span, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same walk as `attend`; a split of the keys writes its part to the slots of the rows."""
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = bh // heads, bh % heads
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    row, live = tokens_at(rows, row_count, bh, slot, most_rows, n)
    query = tile_of(q + b * q_b + h * q_h, row, live, dims, q_n, d)
    direction = tile_of(grad + b * g_b + h * g_h, row, live, cols, g_n, dv)
    size, change = _row_side(lse, slope, bh, n, row, live)
    k += b * k_b + h // group * k_h
    v += b * v_b + h // group * v_h
    total = tl.zeros((BM, D), dtype=tl.float32)
    end = end_of_keys(rows, row_count, keys, key_count, bh, row, live, m, BM, CAUSAL)
    for start in range(split * span, tl.minimum((split + 1) * span, end), BN):
        key, here = tokens_at(keys, key_count, bh, start + tl.arange(0, BN), most_keys, m)
        key_tile = tile_of(k, key, here, dims, k_n, d)
        score = tl.dot(query, tl.trans(key_tile), input_precision=PRECISION)
        score = score * (scale * 1.4426950408889634)
        score += bias_of(log_weight, b * w_b + h * w_h, key, here)[None, :] - size[:, None]
        if CAUSAL:
            score = tl.where(key[None, :] <= row[:, None], score, float("-inf"))
        value = tile_of(v, key, here, cols, v_n, dv)
        step = tl.dot(direction, tl.trans(value), input_precision=PRECISION) + change[:, None]
        step = step * tl.exp2(score)
        total = tl.dot(step.to(key_tile.dtype), key_tile, total, input_precision=PRECISION)
    target = (split.to(tl.int64) * tl.num_programs(2) + bh) * most_rows + slot
    store_tile(out, total * scale, target, live, dims, d)


@jit
def key_gradient(
    q, k, v, log_weight, rows, row_count, keys, key_count,
    grad, lse, slope, key_out, value_out, weight_out,
    heads, group, n, m, d, dv, most_rows, most_keys, span, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys over a split of the rows: gradients of keys, values and log-weights."""
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = bh // heads, bh % heads
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    slot = tl.program_id(0) * BN + tl.arange(0, BN)
    key, here = tokens_at(keys, key_count, bh, slot, most_keys, m)
    key_tile = tile_of(k + b * k_b + h // group * k_h, key, here, dims, k_n, d)
    value = tile_of(v + b * v_b + h // group * v_h, key, here, cols, v_n, dv)
    bias = bias_of(log_weight, b * w_b + h * w_h, key, here)
    q += b * q_b + h * q_h
    grad += b * g_b + h * g_h
    to_key = tl.zeros((BN, D), dtype=tl.float32)
    to_value = tl.zeros((BN, E), dtype=tl.float32)
    to_weight = tl.zeros((BN,), dtype=tl.float32)
    begin, end = split * span, n
    if rows is not None:
        end = tl.load(row_count + bh)
    elif CAUSAL:
        first = tl.min(tl.where(here, key, n), 0).to(tl.int32)
        begin = tl.maximum(begin, first // BM * BM)
    end = tl.minimum((split + 1) * span, end)
    if keys is not None:  # a block without keys has nothing to do
        end = tl.where(tl.program_id(0) * BN < tl.load(key_count + bh), end, 0)
    for start in range(begin, end, BM):
        row, live = tokens_at(rows, row_count, bh, start + tl.arange(0, BM), most_rows, n)
        query = tile_of(q, row, live, dims, q_n, d)
        direction = tile_of(grad, row, live, cols, g_n, dv)
        size, change = _row_side(lse, slope, bh, n, row, live)
        score = tl.dot(key_tile, tl.trans(query), input_precision=PRECISION)
        score = score * (scale * 1.4426950408889634) + bias[:, None] - size[None, :]
        if CAUSAL:
            score = tl.where(key[:, None] <= row[None, :], score, float("-inf"))
        weight = tl.exp2(score)
        part = weight.to(direction.dtype)
        to_value = tl.dot(part, direction, to_value, input_precision=PRECISION)
        step = tl.dot(value, tl.trans(direction), input_precision=PRECISION) + change[None, :]
        step = step * weight
        to_weight += tl.sum(step, 1)
        to_key = tl.dot(step.to(query.dtype), query, to_key, input_precision=PRECISION)
    target = (split.to(tl.int64) * tl.num_programs(2) + bh) * most_keys + slot
    store_tile(key_out, to_key * scale, target, here, dims, d)
    store_tile(value_out, to_value, target, here, cols, dv)
    tl.store(weight_out + target, to_weight, mask=here)


@jit
def add_parts(
    parts, index, count, total,
    n, width, most, splits,
    W: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add the splits of every listed token at the token's own position."""
    bh, cols = tl.program_id(1).to(tl.int64), tl.arange(0, W)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    token, here = tokens_at(index, count, bh, slot, most, n)
    value = tile_of(total, bh * n + token, here, cols, width, width)
    for split in range(splits):
        at = (tl.cast(split, tl.int64) * tl.num_programs(1) + bh) * most + slot
        value += tile_of(parts, at, here, cols, width, width)
    store_tile(total, value, bh * n + token, here, cols, width)
