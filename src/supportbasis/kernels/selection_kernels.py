# mypy: ignore-errors
"""Kernels of `selection`: what a block believes, which nodes it opens, its coarse keys, its list.

One program is one block: it walks down its tree level by level, with the nodes that are still to be
judged in memory of its own. So no block waits for another, and the host for none.
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
def select(
    mean, spread, price, view_mass, view_key, view_output, view_size,
    key, value, log_mass, gap, variance, stride, linked, scatter, others, child, leaf,
    start, first, count, waiting, coarse, exact, coarse_count, exact_count,
    d, dv, known, leaf_added, limit,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, BN: tl.constexpr,
    EXPONENT: tl.constexpr, DRIFT: tl.constexpr,
):  # fmt: skip
    """The nodes that each block sees coarsely and the leaves that it sees exactly.

    ``waiting`` [blocks, 2, limit] holds the nodes of this level and of the next one. A list holds
    ``limit`` entries at most: what would be opened beyond stays coarse.
    """
    block = tl.program_id(0).to(tl.int64)
    dims, cols, links = tl.arange(0, D), tl.arange(0, E), tl.arange(0, L)
    step = tl.arange(0, BN)
    query = tl.load(mean + block * d + dims, mask=dims < d, other=0.0)
    wide = tl.load(spread + block * d + dims, mask=dims < d, other=0.0)
    led = tl.load(mean + block * d + links, mask=links < known, other=0.0)
    wide_led = tl.load(spread + block * d + links, mask=links < known, other=0.0)
    seen_key = tl.load(view_key + block * d + dims, mask=dims < d, other=0.0)
    seen_output = tl.load(view_output + block * dv + cols, mask=cols < dv, other=0.0)
    seen_mass, seen_size = tl.load(view_mass + block), tl.load(view_size + block)
    cost = tl.load(price + block)
    begin, nodes = tl.load(first + block), tl.load(count + block)
    waiting += block * 2 * limit
    coarse += block * limit
    exact += block * limit
    for at in range(0, nodes, BN):
        here = at + step < nodes
        node = tl.load(start + begin + at + step, mask=here, other=0)
        tl.store(waiting + at + step, node, mask=here)
    tl.debug_barrier()
    settled = seen_mass * 0.0 + float("-inf")
    side = nodes * 0
    kept, listed = nodes * 0, nodes * 0
    while nodes > 0:
        now = waiting + side * limit
        later = waiting + (1 - side) * limit
        total = settled
        for at in range(0, nodes, BN):
            here = at + step < nodes
            node = tl.load(now + at + step, mask=here, other=0)
            mass = least_masses(query, key, log_mass, node, here, d, BN, D)
            top = tl.max(mass, 0)
            unit = tl.where(top == float("-inf"), 0.0, top)
            total = log_added(total, tl.log(tl.sum(tl.exp(mass - unit), 0)) + unit)
        total = tl.maximum(total, seen_mass)
        room = limit - kept - listed - nodes
        opened_so_far = nodes * 0
        for at in range(0, nodes, BN):
            here = at + step < nodes
            node = tl.load(now + at + step, mask=here, other=0)
            rows = rows_at(key, node, here, d, BN, D)
            weight = tl.load(log_mass + node, mask=here, other=float("-inf"))
            least = tl.sum(rows * query[None, :], 1) + weight
            away = rows - seen_key[None, :]
            drift = tl.minimum(tl.sum(away * away * wide[None, :], 1), DRIFT)
            rows = rows_at(gap, node, here, d, BN, D)
            across = tl.sum(rows * query[None, :], 1)
            across = across * across
            between = tl.sum(rows * rows * wide[None, :], 1)
            rows = rows_at(variance, node, here, d, BN, D)
            inner = tl.sum(rows * (query * query)[None, :], 1) + across
            outer = tl.sum(rows * wide[None, :], 1) + between
            more = tl.load(others + node, mask=here, other=0.0)
            likely = least + tl.minimum(inner / 2, tl.sqrt(inner * more))
            rows = rows_at(value, node, here, dv, BN, E) - seen_output[None, :]
            apart = tl.sum(rows * rows, 1)
            link = rows_at(linked, node, here, known, BN, L)
            jump = tl.load(stride + node, mask=here, other=0.0)
            both = tl.minimum(inner + outer, EXPONENT)
            # exp(x) - 1 by its series where x is small
            series = both * (1 + both * (0.5 + both * (1 / 6 + both / 24)))
            grown = tl.where(both < 0.02, series, tl.exp(both) - 1)
            error = grown * tl.load(scatter + node, mask=here, other=0.0)
            error += tl.sum(link * wide_led[None, :], 1) + between * jump
            bent = tl.sum(link * (led * led)[None, :], 1) + across * jump
            error += tl.minimum(both * both / 4, 1.0) * bent
            off = tl.minimum(both * tl.sqrt(both) / 6 + outer, 2.0)
            error += off * off * apart
            share = tl.exp(2 * tl.minimum(likely + drift - total, 0.0))
            error = share * error / seen_size
            below = tl.load(child + node, mask=here, other=-1)
            added = tl.where(below < 0, leaf_added, 1.0)
            opens = here & (error > cost * added)
            inside = opens & (below >= 0)
            place = tl.cumsum(inside.to(tl.int32), 0)
            inside = inside & (opened_so_far + place <= room)
            at_child = later + 2 * (opened_so_far + place - 1)
            tl.store(at_child, below, mask=inside)
            tl.store(at_child + 1, below + 1, mask=inside)
            opened_so_far += tl.sum(inside.to(tl.int32), 0)
            whole = opens & (below < 0)
            place = tl.cumsum(whole.to(tl.int32), 0)
            which = tl.load(leaf + node, mask=whole, other=0)
            tl.store(exact + listed + place - 1, which, mask=whole)
            listed += tl.sum(whole.to(tl.int32), 0)
            stays = here & (inside == 0) & (whole == 0)
            place = tl.cumsum(stays.to(tl.int32), 0)
            tl.store(coarse + kept + place - 1, node, mask=stays)
            kept += tl.sum(stays.to(tl.int32), 0)
            least = tl.where(here & (inside == 0), least, float("-inf"))
            top = tl.max(least, 0)
            unit = tl.where(top == float("-inf"), 0.0, top)
            settled = log_added(settled, tl.log(tl.sum(tl.exp(least - unit), 0)) + unit)
        nodes = 2 * opened_so_far
        side = 1 - side
        tl.debug_barrier()
    tl.store(coarse_count + block, kept)
    tl.store(exact_count + block, listed)


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
