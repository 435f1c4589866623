# mypy: ignore-errors
"""Kernels of `lists`: cell means, leaves and their tilts, lists, and attention over them.

Heads are those of the queries; ``group`` of them share keys. Cells of a span are counted from
``first``. Logarithms are to base 2 inside, as the hardware has them, and natural in memory.
Tensors that may be missing are None: log-weights, cells of tiles (those of the same number), the
own window.
"""

from __future__ import annotations

from ..exact.rectangle_kernels import bias_of, store_quotients
from ..runtime.language import jit, store_tile, tl


@jit
def load_rows(x, at, here, width: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a contiguous matrix, [rows, WIDE]; zero where there is none."""
    dims = tl.arange(0, WIDE)
    source = x + at[:, None] * width + dims[None, :]
    if width == WIDE:
        return tl.load(source, mask=here[:, None], other=0.0)
    else:
        return tl.load(source, mask=here[:, None] & (dims < width)[None, :], other=0.0)


@jit
def store_rows(x, tile, at, here, width: tl.constexpr, WIDE: tl.constexpr):
    store_tile(x, tile, at, here, tl.arange(0, WIDE), width)


@jit
def listed_keys(index, start, many, L: tl.constexpr, BN: tl.constexpr):
    """BN keys from ``start`` on of the ``many`` listed leaves: first slot, slots from it, which
    exist. A program that takes a part of one leaf at a time has one 64-bit number for all."""
    near = tl.arange(0, BN)
    if BN <= L:
        leaf = tl.load(index + start // L).to(tl.int64)
        return leaf * L + start % L, near, tl.full((BN,), 1, tl.int1)
    else:
        here = start + near < many * L
        leaf = tl.load(index + (start + near) // L, mask=here, other=0).to(tl.int64)
        return tl.zeros((), tl.int64), leaf * L + (start + near) % L, here


@jit
def leaf_bias(lt, at, here):
    """Log-weights of tilted keys to base 2; -inf where there is none."""
    return tl.load(lt + at, mask=here, other=float("-inf")) * 1.4426950408889634


@jit
def cell_means(
    query, members, mean, variance,
    n, d: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Mean m of a cell's members, and mean |q - m|^2 / d; zeros where it has none."""
    bh = tl.program_id(1).to(tl.int64)
    cell = bh * tl.num_programs(0) + tl.program_id(0)
    row = tl.load(members + cell * B + tl.arange(0, B)).to(tl.int64)
    live = row >= 0
    token = load_rows(query + bh * n * d, row, live, d, D).to(tl.float32)
    count = tl.maximum(tl.sum(live.to(tl.float32), 0), 1.0)
    middle = tl.sum(token, 0) / count
    dims = tl.arange(0, D)
    centred = tl.where(live[:, None], token - middle[None, :], 0.0)
    tl.store(mean + cell * d + dims, middle, mask=dims < d)
    tl.store(variance + cell, tl.sum(tl.sum(centred * centred, 1), 0) / (count * d))


@jit
def curvature(variance, spread, scale):
    """1 + s / 2, by which a tilted key weighs more than the mean query gives it."""
    return 1.0 + variance * (0.5 * scale * scale * spread)


@jit
def tilt(
    mean, ks, vs, bs, variance, spread, visible, kt, vt, lt,
    all_cells, first, cells, keys, leaves, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BC: tl.constexpr, PER: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tilted keys of PER leaves for BC cells: one key, value and log-weight for each pair."""
    start, bh = tl.program_id(0) * BC, tl.program_id(2).to(tl.int64)
    near, key_at = tl.arange(0, BC), tl.arange(0, L)
    here, one = start + near < cells, tl.full((L,), 1, tl.int1)
    shown = tl.load(visible + first + start + near, mask=here, other=0)
    whole = bh * all_cells + first + start
    middle = load_rows(mean + whole * d, near, here, d, D).to(ks.dtype.element_ty)
    apart = tl.load(variance + whole + near, mask=here, other=0.0)
    spread += bh // group * (keys // L)
    ks += bh // group * keys * d
    vs += bh // group * keys * dv
    offset = (bh * cells + start) * leaves  # of the program; in it 32 bits are enough
    kt += offset * d
    vt += offset * dv
    lt += offset
    near = near * leaves
    low = tl.program_id(1) * PER
    high = tl.minimum(low + PER, leaves)
    reach = tl.max(shown, 0)
    for leaf in range(low, tl.minimum(high, reach)):
        slot = tl.cast(leaf, tl.int64) * L
        key = load_rows(ks + slot * d, key_at, one, d, D)
        score = tl.dot(middle, tl.trans(key), input_precision=PRECISION)
        bias = bias_of(bs, bh * keys + slot, key_at, one)
        score = score * (scale * 1.4426950408889634) + bias[None, :]
        score = tl.where((leaf < shown)[:, None], score, float("-inf"))
        top = tl.max(score, 1)
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(score - base[:, None])
        size = base + tl.log2(tl.sum(weight, 1))
        # Divided by the sum of the weights as rounded: then kt is a mean.
        rounded = weight.to(key.dtype)
        mass = tl.sum(rounded.to(tl.float32), 1)
        share = tl.where(mass > 0.0, 1.0 / mass, 0.0)
        tilted = tl.dot(rounded, key, input_precision=PRECISION) * share[:, None]
        tilted = tilted.to(kt.dtype.element_ty)
        store_rows(kt, tilted, near + leaf, here, d, D)
        link = tl.sum(middle.to(tl.float32) * tilted.to(tl.float32), 1) * scale
        size += tl.log2(curvature(apart, tl.load(spread + leaf), scale))
        tl.store(lt + near + leaf, size * 0.6931471805599453 - link, mask=here)
        value = load_rows(vs + slot * dv, key_at, one, dv, E)
        value = tl.dot(rounded, value, input_precision=PRECISION) * share[:, None]
        store_rows(vt, value, near + leaf, here, dv, E)
    leaf = low + tl.arange(0, PER)
    beyond = here[:, None] & (leaf >= reach)[None, :] & (leaf < high)[None, :]
    target = near[:, None] + leaf[None, :]
    tl.store(lt + target, tl.full((BC, PER), float("-inf"), tl.float32), mask=beyond)


@jit
def gather_leaves(
    key, value, slots, ks, vs, spread,
    tokens, d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Keys and values of a leaf side by side, zeros where there is none, and the keys' variance."""
    bh = tl.program_id(1).to(tl.int64)
    leaf = bh * tl.num_programs(0) + tl.program_id(0)
    near = tl.arange(0, L)
    token = tl.load(slots + leaf * L + near).to(tl.int64)
    live = token >= 0
    found = load_rows(key + bh * tokens * d, token, live, d, D)
    store_rows(ks + leaf * L * d, found, near, near < L, d, D)
    part = load_rows(value + bh * tokens * dv, token, live, dv, E)
    store_rows(vs + leaf * L * dv, part, near, near < L, dv, E)
    wide = found.to(tl.float32)
    count = tl.maximum(tl.sum(live.to(tl.float32), 0), 1.0)
    centred = tl.where(live[:, None], wide - (tl.sum(wide, 0) / count)[None, :], 0.0)
    tl.store(spread + leaf, tl.sum(tl.sum(centred * centred, 1), 0) / count)


@jit
def _scores(
    token, kt, lt, at, end, scale, d: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr
):
    """Scores of rows with tilted keys to base 2; -inf where there is no leaf."""
    key = load_rows(kt, at, at < end, d, D)
    score = tl.dot(token, tl.trans(key), input_precision=PRECISION)
    return score * (scale * 1.4426950408889634) + leaf_bias(lt, at, at < end)[None, :]


@jit
def select(
    query, members, kt, lt, spread, variance, visible, price, index, count,
    n, all_cells, first, cells, leaves, scale, all_leaves, group,
    d: tl.constexpr, D: tl.constexpr, B: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Leaves of a cell whose importance exceeds the price, ascending; their tilted keys get no
    weight. Every STRIDE-th member is scored, BM at most; first for its log-sum-exp."""
    bh = tl.program_id(1).to(tl.int64)
    cell = tl.num_programs(0) - 1 - tl.program_id(0)  # cells that see the most come first
    offset, whole = bh * cells + cell, bh * all_cells + first + cell
    near = tl.arange(0, BM)
    scored = near < B // STRIDE
    row = tl.load(members + whole * B + near * STRIDE, mask=scored, other=-1).to(tl.int64)
    token = load_rows(query + bh * n * d, row, row >= 0, d, D)
    kt += offset * leaves * d
    lt += offset * leaves
    end = tl.load(visible + first + cell)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, end, BN):
        score = _scores(token, kt, lt, start + tl.arange(0, BN), end, scale, d, D, PRECISION)
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        mass = mass * tl.exp2(top - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
        top = new_top
    live = (row >= 0) & (mass > 0.0)
    size = tl.where(live, top + tl.log2(mass), float("inf"))
    factor = scale * scale * tl.load(variance + whole)
    factor = factor / tl.maximum(tl.sum(live.to(tl.float32), 0), 1.0)
    limit = tl.load(price + bh)
    spread += bh // group * all_leaves
    index += offset * leaves
    total = tl.zeros((), dtype=tl.int32)
    for start in range(0, end, BN):
        at = start + tl.arange(0, BN)
        share = tl.exp2(_scores(token, kt, lt, at, end, scale, d, D, PRECISION) - size[:, None])
        width = tl.load(spread + at, mask=at < end, other=0.0)
        above = (tl.sum(share * share, 0) * width * factor > limit) & (at < end)
        slot = total + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(index + slot, at, mask=above)
        tl.store(lt + at, tl.full((BN,), float("-inf"), tl.float32), mask=above)
        total += tl.sum(above.to(tl.int32), 0)
    tl.store(count + offset, total)


@jit
def _add_keys(
    query, key, value, bias, top, mass, total, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """One step of the online softmax."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    score = score * (scale * 1.4426950408889634) + bias[None, :]
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weight, 1)
    total = total * shrink[:, None]
    total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION)
    return new_top, mass, total


@jit
def tile_rows(rows, cell_of, bh, tiles, tile, near, first, T: tl.constexpr):
    """Rows of a tile, which exist, and the cell whose tables they use; -1: none has a row."""
    row = tl.load(rows + (bh * tiles + tile) * T + near).to(tl.int64)
    cell = tile
    if cell_of is not None:
        cell = tl.load(cell_of + bh * tiles + tile)
    return row, row >= 0, tl.where(tl.max(row, 0) >= 0, cell - first, -1)


@jit
def attend(
    query, kt, vt, lt, ks, vs, bs, index, count, visible, rows, cell_of, own_out, own_lse, out, lse,
    n, first, cells, keys, leaves, first_tile, tiles, group, scale,
    d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows of a tile: own window, tilted keys of closed leaves, keys of open ones."""
    bh = tl.program_id(1).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # cells that see the most come first
    near = block % (T // BM) * BM + tl.arange(0, BM)
    tile = first_tile + block // (T // BM)
    row, live, cell = tile_rows(rows, cell_of, bh, tiles, tile, near, first, T)
    token = load_rows(query + bh * n * d, row, live, d, D)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, E), dtype=tl.float32)
    if own_lse is not None:
        top = tl.load(own_lse + bh * n + row, mask=live, other=float("-inf")) * 1.4426950408889634
        mass = tl.where(top == float("-inf"), 0.0, 1.0)
        total = load_rows(own_out + bh * n * dv, row, live, dv, E).to(tl.float32)
        total = tl.where((mass > 0.0)[:, None], total, 0.0)
    end = tl.load(visible + first + cell, mask=cell >= 0, other=0)
    offset = bh * cells + cell
    many = tl.load(count + offset, mask=cell >= 0, other=0)
    kt += offset * leaves * d
    vt += offset * leaves * dv
    lt += offset * leaves
    for start in range(0, end, BN):
        at = start + tl.arange(0, BN)
        here = at < end
        top, mass, total = _add_keys(
            token, load_rows(kt, at, here, d, D), load_rows(vt, at, here, dv, E),
            leaf_bias(lt, at, here), top, mass, total, scale, PRECISION,
        )  # fmt: skip
    ks += bh // group * keys * d
    vs += bh // group * keys * dv
    index += offset * leaves
    for start in range(0, many * L, BN):
        slot, key, here = listed_keys(index, start, many, L, BN)
        top, mass, total = _add_keys(
            token, load_rows(ks + slot * d, key, here, d, D),
            load_rows(vs + slot * dv, key, here, dv, E),
            bias_of(bs, bh * keys + slot, key, here), top, mass, total, scale, PRECISION,
        )  # fmt: skip
    cols = tl.arange(0, E)
    store_quotients(out + bh * n * dv, lse + bh * n, total, top, mass, row, live, cols, dv)
