# mypy: ignore-errors
"""Kernels of `selection`: what a block believes, which nodes it opens, its coarse keys, its list.

A program walks down the trees of a few neighbouring blocks level by level, with the nodes that are
still to be judged in memory of its own. So no block waits for one far away, and the host for none.
"""

from __future__ import annotations

from .language import jit, tl


@jit
def log_added(a, b):
    """log(exp(a) + exp(b)) of two numbers, also where one or both are -inf."""
    top = tl.maximum(a, b)
    unit = tl.where(top == float("-inf"), 0.0, top)
    return unit + tl.log(tl.exp(a - unit) + tl.exp(b - unit))


@jit
def rows_at(table, row, here, width, BN: tl.constexpr, W: tl.constexpr):
    """Rows [BN, W] of a table with ``width`` columns."""
    cols = tl.arange(0, W)
    at = table + row.to(tl.int64)[:, None] * width + cols[None, :]
    return tl.load(at, mask=here[:, None] & (cols < width)[None, :], other=0.0)


@jit
def least_masses(mean, key, log_mass, node, here, d, BN: tl.constexpr, D: tl.constexpr):
    """Lower bound of the log mass of each node for the mean query; -inf where there is no node."""
    rows = rows_at(key, node, here, d, BN, D)
    weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
    return tl.sum(rows * mean[None, :], 1) + weight


@jit
def look(
    mean, key, value, log_mass, scatter, start, first, count,
    view_mass, view_key, view_output, view_size, d, dv,
    D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A softmax of each block over its first nodes."""
    block = tl.program_id(0).to(tl.int64)
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    query = tl.load(mean + block * d + dims, mask=dims < d, other=0.0)
    begin, nodes = tl.load(first + block), tl.load(count + block)
    total = tl.sum(tl.zeros((BN,), dtype=tl.float32), 0) + float("-inf")
    for at in range(0, nodes, BN):
        here = at + tl.arange(0, BN) < nodes
        node = tl.load(start + begin + at + tl.arange(0, BN), mask=here, other=0)
        mass = least_masses(query, key, log_mass, node, here, d, BN, D)
        top = tl.max(mass, 0)
        unit = tl.where(top == float("-inf"), 0.0, top)
        total = log_added(total, tl.log(tl.sum(tl.exp(mass - unit), 0)) + unit)
    unit = tl.where(total == float("-inf"), 0.0, total)
    mean_key = tl.zeros((D,), dtype=tl.float32)
    output = tl.zeros((E,), dtype=tl.float32)
    noise = tl.sum(tl.zeros((BN,), dtype=tl.float32), 0)
    for at in range(0, nodes, BN):
        here = at + tl.arange(0, BN) < nodes
        node = tl.load(start + begin + at + tl.arange(0, BN), mask=here, other=0)
        rows = rows_at(key, node, here, d, BN, D)
        weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
        share = tl.exp(tl.sum(rows * query[None, :], 1) + weight - unit)
        mean_key += tl.sum(rows * share[:, None], 0)
        output += tl.sum(rows_at(value, node, here, dv, BN, E) * share[:, None], 0)
        noise += tl.sum(share * share * tl.load(scatter + node, mask=here, other=0.0), 0)
    tl.store(view_mass + block, total)
    tl.store(view_key + block * d + dims, mean_key, mask=dims < d)
    tl.store(view_output + block * dv + cols, output, mask=cols < dv)
    tl.store(view_size + block, tl.maximum(tl.sum(output * output, 0) + noise, 1.1754944e-38))


@jit
def columns_of(table, member, real, width, G: tl.constexpr, W: tl.constexpr):
    """Rows of a table with ``width`` columns, as columns [W, G]."""
    at = tl.arange(0, W)
    place = table + member[None, :] * width + at[:, None]
    return tl.load(place, mask=real[None, :] & (at < width)[:, None], other=0.0)


@jit
def log_sum(mass):
    """Log-sum-exp of every column."""
    top = tl.max(mass, 0)
    unit = tl.where(top == float("-inf"), 0.0, top)
    return tl.log(tl.sum(tl.exp(mass - unit[None, :]), 0)) + unit


@jit
def select(
    mean, spread, price, view_mass, view_key, view_output, view_size,
    key, value, log_mass, gap, variance, stride, linked, scatter, others, child, leaf,
    start, first, count, waiting, coarse, exact, coarse_count, exact_count,
    blocks, d, dv, known, leaf_added, limit, room,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    EXPONENT: tl.constexpr, DRIFT: tl.constexpr, PRECISION: tl.constexpr, ROUGH: tl.constexpr,
):  # fmt: skip
    """The nodes that each block sees coarsely and the leaves that it sees exactly.

    One program walks for G blocks. ``waiting`` [groups, 2, 2, room] holds the nodes of this level
    and of the next one that any of them wants to judge, and which of them do, a bit for each. A
    block holds ``limit`` nodes at most, all of them ``room``: what would be opened beyond stays
    coarse. All that is needed of a block and a node is a product of something of the block with
    something of the node, so it is found for all pairs at once.
    """
    group = tl.program_id(0).to(tl.int64)
    each, step = tl.arange(0, G), tl.arange(0, BN)
    member = group * G + each
    real = member < blocks
    query = columns_of(mean, member, real, d, G, D)
    wide = columns_of(spread, member, real, d, G, D)
    led = tl.arange(0, L)[:, None] < known
    led_query = tl.load(
        mean + member[None, :] * d + tl.arange(0, L)[:, None], mask=led & real[None, :], other=0.0
    )
    led_wide = tl.load(
        spread + member[None, :] * d + tl.arange(0, L)[:, None], mask=led & real[None, :], other=0.0
    )
    led_query = led_query * led_query
    seen_key = columns_of(view_key, member, real, d, G, D)
    seen_output = columns_of(view_output, member, real, dv, G, E)
    squared = query * query
    toward = wide * seen_key
    from_here = tl.sum(toward * seen_key, 0)
    output_size = tl.sum(seen_output * seen_output, 0)
    seen_mass = tl.load(view_mass + member, mask=real, other=0.0)
    seen_size = tl.load(view_size + member, mask=real, other=1.0)
    cost = tl.load(price + member, mask=real, other=0.0)
    begin = tl.load(first + member, mask=real, other=-1)
    held = tl.load(count + member, mask=real, other=0).to(tl.int32)
    waiting += group * 4 * room
    coarse += member * limit
    exact += member * limit
    nodes = tl.sum(held * 0, 0)
    for i in range(G):  # blocks that start alike start together
        at_first = tl.sum(tl.where(each == i, begin, 0), 0)
        many = tl.sum(tl.where(each == i, held, 0), 0)
        alike = real & (begin == at_first) & (held == many)
        new = tl.sum((alike & (each < i)).to(tl.int32), 0) == 0
        many = tl.where(new, many, 0)
        bits = tl.sum(tl.where(alike, 1 << each, 0), 0)
        for at in range(0, many, BN):
            here = at + step < many
            node = tl.load(start + at_first + at + step, mask=here, other=0)
            tl.store(waiting + nodes + at + step, node.to(tl.int32), mask=here)
            tl.store(waiting + room + nodes + at + step, bits + step * 0, mask=here)
        nodes += many
    tl.debug_barrier()
    settled = seen_mass * 0.0 + float("-inf")
    side = nodes * 0
    kept, listed = held * 0, held * 0
    while nodes > 0:
        now = waiting + side * 2 * room
        later = waiting + (1 - side) * 2 * room
        total = settled
        for at in range(0, nodes, BN):
            here = at + step < nodes
            node = tl.load(now + at + step, mask=here, other=0)
            bits = tl.load(now + room + at + step, mask=here, other=0)
            mine = ((bits[:, None] >> each[None, :]) & 1) > 0
            rows = rows_at(key, node, here, d, BN, D)
            weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
            mass = tl.dot(rows, query, input_precision=PRECISION) + weight[:, None]
            total = log_added(total, log_sum(tl.where(mine, mass, float("-inf"))))
        total = tl.maximum(total, seen_mass)
        pushed = nodes * 0
        for at in range(0, nodes, BN):
            here = at + step < nodes
            node = tl.load(now + at + step, mask=here, other=0)
            bits = tl.load(now + room + at + step, mask=here, other=0)
            mine = ((bits[:, None] >> each[None, :]) & 1) > 0
            rows = rows_at(key, node, here, d, BN, D)
            weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
            least = tl.dot(rows, query, input_precision=PRECISION) + weight[:, None]
            drift = tl.dot(rows * rows, wide, input_precision=ROUGH) + from_here[None, :]
            drift -= 2 * tl.dot(rows, toward, input_precision=ROUGH)
            drift = tl.minimum(tl.maximum(drift, 0.0), DRIFT)
            rows = rows_at(gap, node, here, d, BN, D)
            across = tl.dot(rows, query, input_precision=ROUGH)
            across = across * across
            between = tl.dot(rows * rows, wide, input_precision=ROUGH)
            rows = rows_at(variance, node, here, d, BN, D)
            inner = tl.dot(rows, squared, input_precision=ROUGH) + across
            outer = tl.dot(rows, wide, input_precision=ROUGH) + between
            more = tl.load(others + node, mask=here, other=0.0)
            likely = least + tl.minimum(inner / 2, tl.sqrt(inner * more[:, None]))
            rows = rows_at(value, node, here, dv, BN, E)
            apart = tl.sum(rows * rows, 1)[:, None] + output_size[None, :]
            apart -= 2 * tl.dot(rows, seen_output, input_precision=ROUGH)
            apart = tl.maximum(apart, 0.0)
            link = rows_at(linked, node, here, known, BN, L)
            jump = tl.load(stride + node, mask=here, other=0.0)[:, None]
            both = tl.minimum(inner + outer, EXPONENT)
            # exp(x) - 1 by its series where x is small
            series = both * (1 + both * (0.5 + both * (1 / 6 + both / 24)))
            grown = tl.where(both < 0.02, series, tl.exp(both) - 1)
            error = grown * tl.load(scatter + node, mask=here, other=0.0)[:, None]
            error += tl.dot(link, led_wide, input_precision=ROUGH) + between * jump
            bent = tl.dot(link, led_query, input_precision=ROUGH) + across * jump
            error += tl.minimum(both * both / 4, 1.0) * bent
            off = tl.minimum(both * tl.sqrt(both) / 6 + outer, 2.0)
            error += off * off * apart
            share = tl.exp(2 * tl.minimum(likely + drift - total[None, :], 0.0))
            error = share * error / seen_size[None, :]
            below = tl.load(child + node, mask=here, other=-1)
            inner_node = (below >= 0)[:, None]
            opens = mine & (error > cost[None, :] * tl.where(inner_node, 1.0, leaf_added))
            inside = opens & inner_node
            place = tl.cumsum(inside.to(tl.int32), 0)
            inside = inside & (held[None, :] + place <= limit)
            bits = tl.sum(tl.where(inside, 1 << each[None, :], 0), 1)
            place = pushed + tl.cumsum((bits > 0).to(tl.int32), 0)
            fits = (bits > 0) & (2 * place <= room)
            inside = inside & fits[:, None]
            at_child = later + 2 * (place - 1)
            tl.store(at_child, below.to(tl.int32), mask=fits)
            tl.store(at_child + 1, below.to(tl.int32) + 1, mask=fits)
            tl.store(at_child + room, bits, mask=fits)
            tl.store(at_child + room + 1, bits, mask=fits)
            pushed += tl.sum(fits.to(tl.int32), 0)
            held += tl.sum(inside.to(tl.int32), 0)
            whole = opens & (below < 0)[:, None]
            place = listed[None, :] + tl.cumsum(whole.to(tl.int32), 0)
            which = tl.load(leaf + node, mask=here, other=0)[:, None] + each[None, :] * 0
            tl.store(exact[None, :] + place - 1, which.to(tl.int32), mask=whole)
            listed += tl.sum(whole.to(tl.int32), 0)
            stays = mine & (inside == 0) & (whole == 0)
            place = kept[None, :] + tl.cumsum(stays.to(tl.int32), 0)
            tl.store(coarse[None, :] + place - 1, node[:, None] + each[None, :] * 0, mask=stays)
            kept += tl.sum(stays.to(tl.int32), 0)
            decided = tl.where(mine & (inside == 0), least, float("-inf"))
            settled = log_added(settled, log_sum(decided))
        nodes = 2 * pushed
        side = 1 - side
        tl.debug_barrier()
    tl.store(coarse_count + member, kept, mask=real)
    tl.store(exact_count + member, listed, mask=real)


@jit
def tilt(
    mean, key, value, log_mass, gap, step, variance, covariance,
    item, first, count, base, out_key, out_value, out_weight, d, dv, known, most, largest,
    D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Coarse keys of each cell at its mean query, written in whole granules of BN."""
    cell = tl.program_id(0).to(tl.int64)
    dims, cols, near = tl.arange(0, D), tl.arange(0, E), tl.arange(0, BN)
    query = tl.load(mean + cell * d + dims, mask=dims < d, other=0.0)
    begin, nodes = tl.load(first + cell), tl.load(count + cell)
    place = tl.load(base + cell) * BN
    for at in range(0, nodes, BN):
        here = at + near < nodes
        node = tl.load(item + begin + at + near, mask=here, other=0).to(tl.int64)
        rows = rows_at(gap, node, here, d, BN, D)
        along = tl.sum(rows * query[None, :], 1)
        shift = rows * along[:, None]
        shift += rows_at(variance, node, here, d, BN, D) * query[None, :]
        bend = tl.sum(shift * query[None, :], 1)
        part = most / tl.maximum(bend, most)
        shift = shift * part[:, None]
        moved = rows_at(key, node, here, d, BN, D) + shift
        moved = tl.minimum(tl.maximum(moved, -largest), largest)
        out = rows_at(value, node, here, dv, BN, E)
        out += rows_at(step, node, here, dv, BN, E) * (along * part)[:, None]
        for r in range(known):
            lead = tl.load(mean + cell * d + r)
            out += rows_at(covariance, node * known + r, here, dv, BN, E) * (lead * part)[:, None]
        weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
        weight = weight - tl.sum(shift * query[None, :], 1) / 2
        slot = (place + at + near).to(tl.int64)
        target = out_key + slot[:, None] * d + dims[None, :]
        tl.store(target, moved.to(out_key.dtype.element_ty), mask=(dims < d)[None, :])
        target = out_value + slot[:, None] * dv + cols[None, :]
        tl.store(target, out.to(out_value.dtype.element_ty), mask=(cols < dv)[None, :])
        tl.store(out_weight + slot, weight)


@jit
def fill(
    owner, granules, base, leaf, first, count, offsets, indices, BN: tl.constexpr,
):  # fmt: skip
    """The list of each block: the granules of its cell's coarse keys, then its leaves."""
    block = tl.program_id(0).to(tl.int64)
    cell = tl.load(owner + block)
    step = tl.arange(0, BN)
    target = indices + tl.load(offsets + block)
    coarse, place = tl.load(granules + cell), tl.load(base + cell)
    for at in range(0, coarse, BN):
        tl.store(target + at + step, place + at + step, mask=at + step < coarse)
    begin, nodes = tl.load(first + cell), tl.load(count + cell)
    for at in range(0, nodes, BN):
        here = at + step < nodes
        which = tl.load(leaf + begin + at + step, mask=here, other=0)
        tl.store(target + coarse + at + step, which, mask=here)
