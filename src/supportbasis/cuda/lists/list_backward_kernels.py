# mypy: ignore-errors
"""Kernels of `list_backward`: gradients of rows, tilted keys, keys of leaves and cell means.

Heads, cells and logarithms are counted as in `list_kernels`, and None is a tensor that is missing.
Rows lie gathered by tile, those of a cell one after the other. Every sum has one program and a
fixed sequence: results repeat to the bit.
"""

from __future__ import annotations

from ..exact.rectangle_kernels import bias_of
from ..runtime.language import jit, tl
from .list_kernels import curvature, leaf_bias, listed_keys, load_rows, store_rows, tile_rows


@jit
def add_rows(x, tile, at, here, width: tl.constexpr, WIDE: tl.constexpr):
    """Add to rows of a contiguous float32 matrix."""
    store_rows(x, load_rows(x, at, here, width, WIDE) + tile, at, here, width, WIDE)


@jit
def load_slopes(lse, slope, at, here):
    """Log-sum-exp to base 2 (inf: no weight) and slope of rows."""
    size = tl.load(lse + at, mask=here, other=float("inf"))
    return size, tl.load(slope + at, mask=here, other=0.0)


@jit
def gather_rows(
    query, grad, slope, lse, rows, cell_of, to_query, to_grad, to_slope, to_lse, to_cell,
    n, first, first_tile, tiles,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Rows of a tile, their lse to base 2 (inf: no weight); the tile's cell, -1: it has no row."""
    tile, bh, near = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, T)
    row, live, cell = tile_rows(rows, cell_of, bh, tiles, first_tile + tile, near, first, T)
    one, offset = tl.full((T,), 1, tl.int1), bh * tl.num_programs(0) + tile
    tl.store(to_cell + offset, cell)
    offset *= T
    token = load_rows(query + bh * n * d, row, live, d, D)
    store_rows(to_query + offset * d, token, near, one, d, D)
    change = load_rows(grad + bh * n * dv, row, live, dv, E)
    store_rows(to_grad + offset * dv, change, near, one, dv, E)
    tl.store(to_slope + offset + near, tl.load(slope + bh * n + row, mask=live, other=0.0))
    size = tl.load(lse + bh * n + row, mask=live, other=float("-inf"))
    size = tl.where(size == float("-inf"), float("inf"), size * 1.4426950408889634)
    tl.store(to_lse + offset + near, size)


@jit
def _add_keys(
    query, grad, size, slope, key, value, bias, total, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the gradient of rows from some keys, without the scale."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    score = score * (scale * 1.4426950408889634) + bias[None, :]
    weight = tl.exp2(score - size[:, None])
    change = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    change = (weight * (change - slope[:, None])).to(key.dtype)
    return tl.dot(change, key, total, input_precision=PRECISION)


@jit
def query_gradients(
    query, grad, slope, lse, tile_cell, kt, vt, lt, ks, vs, bs, index, count, visible, rows, total,
    n, first, cells, keys, leaves, first_tile, tiles, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of a tile, over tilted keys of closed leaves and keys of open ones."""
    bh, blocks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)  # cells that see the most come first
    tile = block // (T // BM)
    near, one = tl.arange(0, BM), tl.full((BM,), 1, tl.int1)
    offset = (bh * blocks + block) * BM
    token = load_rows(query + offset * d, near, one, d, D)
    change = load_rows(grad + offset * dv, near, one, dv, E)
    size, level = load_slopes(lse + offset, slope + offset, near, one)
    cell = tl.load(tile_cell + bh * (blocks // (T // BM)) + tile)
    end = tl.load(visible + first + cell, mask=cell >= 0, other=0)
    offset = bh * cells + cell
    many = tl.load(count + offset, mask=cell >= 0, other=0)
    kt += offset * leaves * d
    vt += offset * leaves * dv
    lt += offset * leaves
    sums = tl.zeros((BM, D), dtype=tl.float32)
    for start in range(0, end, BN):
        at = start + tl.arange(0, BN)
        here = at < end
        sums = _add_keys(
            token, change, size, level, load_rows(kt, at, here, d, D),
            load_rows(vt, at, here, dv, E), leaf_bias(lt, at, here), sums, scale, PRECISION,
        )  # fmt: skip
    ks += bh // group * keys * d
    vs += bh // group * keys * dv
    index += offset * leaves
    for start in range(0, many * L, BN):
        slot, key, here = listed_keys(index, start, many, L, BN)
        sums = _add_keys(
            token, change, size, level, load_rows(ks + slot * d, key, here, d, D),
            load_rows(vs + slot * dv, key, here, dv, E),
            bias_of(bs, bh * keys + slot, key, here), sums, scale, PRECISION,
        )  # fmt: skip
    row = tl.load(rows + (bh * tiles + first_tile + tile) * T + block % (T // BM) * BM + near)
    add_rows(total + bh * n * d, sums * scale, row.to(tl.int64), row >= 0, d, D)


@jit
def _add_rows(
    query, grad, size, slope, key, value, bias, to_key, to_value, to_bias, scale,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of keys (without the scale), values and log-weights from some rows."""
    score = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    score = score * (scale * 1.4426950408889634) + bias[:, None]
    weight = tl.exp2(score - size[None, :])
    change = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
    change = (weight * (change - slope[None, :])).to(key.dtype)
    to_bias += tl.sum(change.to(tl.float32), 1)
    to_value = tl.dot(weight.to(key.dtype), grad, to_value, input_precision=PRECISION)
    return tl.dot(change, query, to_key, input_precision=PRECISION), to_value, to_bias


@jit
def tilt_gradients(
    query, grad, slope, lse, mean, kt, vt, lt, variance, spread, visible, run, runs,
    dkt, dvt, lam, shift, level,
    slots, all_cells, first, cells, leaves, all_leaves, group, first_tile, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BN tilted keys of a cell, from all its rows, and what the tilt's own gradient needs:
    lam = logsumexp t to base 2 (inf at open leaves), level = <dkt, kt> + <dvt, vt>,
    shift = dlt - level."""
    cell, bh = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2).to(tl.int64)
    end = tl.load(visible + first + cell)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    here = at < end
    offset = (bh * cells + cell) * leaves
    key = load_rows(kt + offset * d, at, here, d, D)
    value = load_rows(vt + offset * dv, at, here, dv, E)
    bias = leaf_bias(lt + offset, at, here)
    begin, many = cell * T, T
    whole = bh * all_cells + first + cell
    if run is not None:
        begin = (tl.load(run + whole) - first_tile) * T
        many = tl.load(runs + whole) * T
    many = tl.where(tl.program_id(0) * BN < end, many, 0)
    begin = bh * slots + begin
    to_key = tl.zeros((BN, D), dtype=tl.float32)
    to_value = tl.zeros((BN, E), dtype=tl.float32)
    to_bias = tl.zeros((BN,), dtype=tl.float32)
    for start in range(0, many, BM):
        near = start + tl.arange(0, BM)
        live = near < many
        size, tilted = load_slopes(lse + begin, slope + begin, near, live)
        to_key, to_value, to_bias = _add_rows(
            load_rows(query + begin * d, near, live, d, D),
            load_rows(grad + begin * dv, near, live, dv, E),
            size, tilted, key, value, bias, to_key, to_value, to_bias, scale, PRECISION,
        )  # fmt: skip
    dims = tl.arange(0, D)
    middle = tl.load(mean + (bh * cells + cell) * d + dims, mask=dims < d, other=0.0)
    middle = middle.to(tl.float32)
    to_key = ((to_key - to_bias[:, None] * middle[None, :]) * scale).to(key.dtype)
    to_value = to_value.to(key.dtype)
    key = key.to(tl.float32)
    mixed = tl.sum(to_key.to(tl.float32) * key, 1)
    mixed += tl.sum(to_value.to(tl.float32) * value.to(tl.float32), 1)
    top = bias + tl.sum(key * middle[None, :], 1) * (scale * 1.4426950408889634)
    apart = tl.load(spread + bh // group * all_leaves + at, mask=here, other=0.0)
    top -= tl.log2(curvature(tl.load(variance + whole), apart, scale))
    top = tl.where(bias == float("-inf"), float("inf"), top)
    tl.debug_barrier()  # dkt and dvt are kt and vt: no thread is to write before all have read
    store_rows(dkt + offset * d, to_key, at, here, d, D)
    store_rows(dvt + offset * dv, to_value, at, here, dv, E)
    tl.store(lam + offset + at, top, mask=here)
    tl.store(level + offset + at, mixed, mask=here)
    tl.store(shift + offset + at, to_bias - mixed, mask=here)


@jit
def mark(index, count, mask, cells, leaves, BN: tl.constexpr):
    """The list of a cell as a mask."""
    offset = tl.program_id(1).to(tl.int64) * cells + tl.program_id(0)
    many = tl.load(count + offset)
    for start in range(0, many, BN):
        at = start + tl.arange(0, BN)
        leaf = tl.load(index + offset * leaves + at, mask=at < many, other=0)
        tl.store(mask + offset * leaves + leaf, tl.full((BN,), 1, tl.int1), mask=at < many)


@jit
def transpose(
    mask, tile_cell, index, count, cells, leaves, tiles, BT: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """Tiles of the cells that have a leaf open, ascending."""
    bh, leaf = tl.program_id(1).to(tl.int64), tl.program_id(0) * BL + tl.arange(0, BL)
    mask += bh * cells * leaves
    index += bh * leaves * tiles
    total = tl.zeros((BL,), dtype=tl.int32)
    for start in range(0, tiles, BT):
        tile = start + tl.arange(0, BT)
        cell = tl.load(tile_cell + bh * tiles + tile, mask=tile < tiles, other=-1).to(tl.int64)
        here = (cell >= 0)[:, None] & (leaf < leaves)[None, :]
        above = tl.load(mask + cell[:, None] * leaves + leaf[None, :], mask=here, other=0)
        above = above.to(tl.int32)
        slot = total[None, :] + tl.cumsum(above, 0) - 1
        target = index + leaf.to(tl.int64)[None, :] * tiles + slot
        tl.store(target, tl.broadcast_to(tile[:, None], (BT, BL)), mask=above > 0)
        total += tl.sum(above, 0)
    tl.store(count + bh * leaves + leaf, total, mask=leaf < leaves)


@jit
def exact_gradients(
    query, grad, slope, lse, ks, vs, bs, index, count, total_key, total_value, total_weight,
    slots, keys, leaves, tiles, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BL keys of a leaf, from the rows of all tiles that have it open."""
    part, bh = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    leaf = part // (L // BL)
    many = tl.load(count + bh * leaves + leaf)
    index += (bh * leaves + leaf) * tiles
    near, one = tl.arange(0, BL), tl.full((BL,), 1, tl.int1)
    slot, offset = bh // group * keys + part * BL, bh * keys + part * BL
    key = load_rows(ks + slot * d, near, one, d, D)
    value = load_rows(vs + slot * dv, near, one, dv, E)
    bias = bias_of(bs, offset, near, one)
    query += bh * slots * d
    grad += bh * slots * dv
    slope += bh * slots
    lse += bh * slots
    to_key = tl.zeros((BL, D), dtype=tl.float32)
    to_value = tl.zeros((BL, E), dtype=tl.float32)
    to_bias = tl.zeros((BL,), dtype=tl.float32)
    for start in range(0, many * T, BM):
        begin, row, live = listed_keys(index, start, many, T, BM)
        size, level = load_slopes(lse + begin, slope + begin, row, live)
        to_key, to_value, to_bias = _add_rows(
            load_rows(query + begin * d, row, live, d, D),
            load_rows(grad + begin * dv, row, live, dv, E),
            size, level, key, value, bias, to_key, to_value, to_bias, scale, PRECISION,
        )  # fmt: skip
    one = one & (many > 0)
    add_rows(total_key + offset * d, to_key * scale, near, one, d, D)
    add_rows(total_value + offset * dv, to_value, near, one, dv, E)
    to_bias += tl.load(total_weight + offset + near, mask=one, other=0.0)
    tl.store(total_weight + offset + near, to_bias, mask=one)


@jit
def leaf_gradients(
    mean, dkt, dvt, lam, shift, ks, vs, bs, since, total_key, total_value, total_weight,
    cells, keys, leaves, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    L: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BL keys of a leaf, through its tilts, from ``since`` on, the first cell that sees it:
    dt_j = w_j (<dkt, k_j> + <dvt, v_j> + shift), dk_j = w_j dkt + scale dt_j m."""
    part, bh = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    leaf = part // (L // BL)
    near, one = tl.arange(0, BL), tl.full((BL,), 1, tl.int1)
    slot, offset = bh // group * keys + part * BL, bh * keys + part * BL
    key = load_rows(ks + slot * d, near, one, d, D)
    value = load_rows(vs + slot * dv, near, one, dv, E)
    bias = bias_of(bs, offset, near, one)
    to_key = tl.zeros((BL, D), dtype=tl.float32)
    to_value = tl.zeros((BL, E), dtype=tl.float32)
    to_bias = tl.zeros((BL,), dtype=tl.float32)
    begin, cell = tl.load(since + leaf), tl.arange(0, BC)
    for start in range(begin, cells, BC):
        here, at = start + cell < cells, bh * cells + start
        middle = load_rows(mean + at * d, cell, here, d, D)
        at = at * leaves + leaf
        grad_key = load_rows(dkt + at * d, cell * leaves, here, d, D)
        grad_value = load_rows(dvt + at * dv, cell * leaves, here, dv, E)
        size, level = load_slopes(lam + at, shift + at, cell * leaves, here)
        score = tl.dot(key, tl.trans(middle), input_precision=PRECISION)
        score = score * (scale * 1.4426950408889634) + bias[:, None]
        weight = tl.exp2(score - size[None, :])
        change = tl.dot(key, tl.trans(grad_key), input_precision=PRECISION)
        change = tl.dot(value, tl.trans(grad_value), change, input_precision=PRECISION)
        change = weight * (change + level[None, :])
        to_bias += tl.sum(change, 1)
        weight = weight.to(key.dtype)
        to_value = tl.dot(weight, grad_value, to_value, input_precision=PRECISION)
        to_key = tl.dot(weight, grad_key, to_key, input_precision=PRECISION)
        change = (change * scale).to(key.dtype)
        to_key = tl.dot(change, middle, to_key, input_precision=PRECISION)
    one = one & (begin < cells)
    add_rows(total_key + offset * d, to_key, near, one, d, D)
    add_rows(total_value + offset * dv, to_value, near, one, dv, E)
    to_bias += tl.load(total_weight + offset + near, mask=one, other=0.0)
    tl.store(total_weight + offset + near, to_bias, mask=one)


@jit
def mean_gradients(
    mean, dkt, dvt, lam, level, ks, vs, bs, visible, parts,
    first, cells, keys, leaves, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    L: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of BC cells, from a part of the leaves that they see:
    dm = scale sum_l sum_j w_j (<dkt, k_j> + <dvt, v_j> - level) k_j; dlt and its kt cancel."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BC
    split, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    cell, near, one = tl.arange(0, BC), tl.arange(0, BL), tl.full((BL,), 1, tl.int1)
    here, at = start + cell < cells, bh * cells + start
    shown = tl.load(visible + first + start + cell, mask=here, other=0)
    middle = load_rows(mean + at * d, cell, here, d, D)
    ks += bh // group * keys * d
    vs += bh // group * keys * dv
    dkt += at * leaves * d
    dvt += at * leaves * dv
    lam += at * leaves
    level += at * leaves
    total = tl.zeros((BC, D), dtype=tl.float32)
    reach = tl.max(shown, 0)
    per = tl.cdiv(reach, tl.num_programs(1))
    for part in range(split * per * (L // BL), tl.minimum((split + 1) * per, reach) * (L // BL)):
        slot, leaf = tl.cast(part, tl.int64) * BL, part // (L // BL)
        see, at_leaf = leaf < shown, cell * leaves + leaf
        key = load_rows(ks + slot * d, near, one, d, D)
        value = load_rows(vs + slot * dv, near, one, dv, E)
        size, mixed = load_slopes(lam, level, at_leaf, see)
        score = tl.dot(middle, tl.trans(key), input_precision=PRECISION)
        bias = bias_of(bs, bh * keys + slot, near, one)
        score = score * (scale * 1.4426950408889634) + bias[None, :]
        weight = tl.exp2(score - size[:, None])
        grad_key = load_rows(dkt, at_leaf, see, d, D)
        grad_value = load_rows(dvt, at_leaf, see, dv, E)
        change = tl.dot(grad_key, tl.trans(key), input_precision=PRECISION)
        change = tl.dot(grad_value, tl.trans(value), change, input_precision=PRECISION)
        change = (weight * (change - mixed[:, None])).to(key.dtype)
        total = tl.dot(change, key, total, input_precision=PRECISION)
    offset = split.to(tl.int64) * tl.num_programs(2) * cells + at
    store_rows(parts + offset * d, total * scale, cell, here, d, D)


@jit
def add_means(
    parts, variance, query, mean, members, total, n, all_cells, first, splits,
    d: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Every member's share in the gradients of its cell's mean and variance."""
    cell, bh, cells = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    dims = tl.arange(0, D)
    whole = bh * all_cells + first + cell
    row = tl.load(members + whole * B + tl.arange(0, B)).to(tl.int64)
    live = row >= 0
    change = tl.zeros((D,), dtype=tl.float32)
    for split in range(splits):
        at = (tl.cast(split, tl.int64) * tl.num_programs(1) + bh) * cells + cell
        change += tl.load(parts + at * d + dims, mask=dims < d, other=0.0)
    away = load_rows(query + bh * n * d, row, live, d, D).to(tl.float32)
    away -= tl.load(mean + whole * d + dims, mask=dims < d, other=0.0)[None, :]
    change = change[None, :] + away * (tl.load(variance + bh * cells + cell) * 2.0 / d)
    change /= tl.maximum(tl.sum(live.to(tl.float32), 0), 1.0)
    add_rows(total + bh * n * d, change, row, live, d, D)
