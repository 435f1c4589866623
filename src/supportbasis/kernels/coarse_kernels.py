# mypy: ignore-errors
"""Kernels of `coarse`: the way back through `selection_kernels.tilt`."""

from __future__ import annotations

from .language import jit, tl
from .selection_kernels import rows_at


@jit
def bent(query, gap, variance, most):
    """As in `tilt`: the score along the gap, the shift before it is limited, what limits it."""
    along = tl.sum(query * gap, 1)
    shift = query * variance + along[:, None] * gap
    bend = tl.sum(shift * query, 1)
    return along, shift, bend, most / tl.maximum(bend, most)


@jit
def pulled(query, gap, along, shift, bend, part, to_key, to_weight, linked, stepped, most):
    """Gradients of the bend, the shift and the score along the gap. ``linked`` and ``stepped`` are
    the gradient of the value times what the value is moved by, within halves and between them."""
    toward = to_key - (to_weight / 2)[:, None] * query
    slope = tl.sum(toward * shift, 1) + linked + along * stepped
    slope = tl.where(bend > most, -slope * part / bend, 0.0)
    toward = toward * part[:, None] + slope[:, None] * query
    return slope, toward, tl.sum(toward * gap, 1) + part * stepped


@jit
def add_slots(
    node, first, last, mean, gap, step, variance, covariance, slots, cells,
    d_key, d_value, d_weight, out_key, out_value, out_mass, out_gap, out_step, out_variance,
    out_covariance, d, dv, known, most,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The slots from ``first`` to ``last`` of a node."""
    near, dims, cols, leads = tl.arange(0, BN), tl.arange(0, D), tl.arange(0, E), tl.arange(0, L)
    inner, outer, led = dims < d, cols < dv, leads < known
    at_dims, at_cols = node * d + dims, node * dv + cols
    between = tl.load(gap + at_dims, mask=inner, other=0.0)[None, :]
    within = tl.load(variance + at_dims, mask=inner, other=0.0)[None, :]
    jump = tl.load(step + at_cols, mask=outer, other=0.0)
    at_link = (node * known + leads)[:, None] * dv + cols[None, :]
    both = led[:, None] & outer[None, :]
    link = tl.load(covariance + at_link, mask=both, other=0.0).to(tl.float32)
    sum_key = tl.load(out_key + at_dims, mask=inner, other=0.0)
    sum_gap = tl.load(out_gap + at_dims, mask=inner, other=0.0)
    sum_variance = tl.load(out_variance + at_dims, mask=inner, other=0.0)
    sum_value = tl.load(out_value + at_cols, mask=outer, other=0.0)
    sum_step = tl.load(out_step + at_cols, mask=outer, other=0.0)
    sum_link = tl.load(out_covariance + at_link, mask=both, other=0.0)
    sum_mass = tl.load(out_mass + node)
    for at in range(first, last, BN):
        here = at + near < last
        slot = tl.load(slots + at + near, mask=here, other=0).to(tl.int64)
        cell = tl.load(cells + slot, mask=here, other=0).to(tl.int64)
        query = rows_at(mean, cell, here, d, BN, D)
        lead = tl.load(
            mean + cell[:, None] * d + leads[None, :], mask=here[:, None] & led[None, :], other=0.0
        )
        to_key = rows_at(d_key, slot, here, d, BN, D)
        to_value = rows_at(d_value, slot, here, dv, BN, E)
        to_weight = tl.load(d_weight + slot, mask=here, other=0.0)
        along, shift, bend, part = bent(query, between, within, most)
        linked = tl.sum(lead * tl.dot(to_value, tl.trans(link), input_precision=PRECISION), 1)
        stepped = tl.sum(to_value * jump[None, :], 1)
        _, toward, to_along = pulled(
            query, between, along, shift, bend, part, to_key, to_weight, linked, stepped, most
        )
        sum_key += tl.sum(to_key, 0)
        sum_value += tl.sum(to_value, 0)
        sum_mass += tl.sum(to_weight, 0)
        sum_variance += tl.sum(toward * query, 0)
        sum_gap += tl.sum(toward * along[:, None] + to_along[:, None] * query, 0)
        sum_step += tl.sum(to_value * (along * part)[:, None], 0)
        lead = tl.trans(lead * part[:, None])
        sum_link = tl.dot(lead, to_value, sum_link, input_precision=PRECISION)
    tl.store(out_key + at_dims, sum_key, mask=inner)
    tl.store(out_gap + at_dims, sum_gap, mask=inner)
    tl.store(out_variance + at_dims, sum_variance, mask=inner)
    tl.store(out_value + at_cols, sum_value, mask=outer)
    tl.store(out_step + at_cols, sum_step, mask=outer)
    tl.store(out_covariance + at_link, sum_link, mask=both)
    tl.store(out_mass + node, sum_mass)


@jit
def to_nodes(
    mean, gap, step, variance, covariance, slots, cells, bounds, d_key, d_value, d_weight,
    out_key, out_value, out_mass, out_gap, out_step, out_variance, out_covariance,
    d, dv, known, most,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to one node what its coarse keys give, in the order of their slots."""
    node = tl.program_id(0).to(tl.int64)
    first, last = tl.load(bounds + node), tl.load(bounds + node + 1)
    if first < last:
        add_slots(
            node, first, last, mean, gap, step, variance, covariance, slots, cells,
            d_key, d_value, d_weight, out_key, out_value, out_mass, out_gap, out_step,
            out_variance, out_covariance, d, dv, known, most, D, E, L, BN, PRECISION,
        )  # fmt: skip


@jit
def to_means(
    mean, gap, step, variance, covariance, item, first, count, base,
    d_key, d_value, d_weight, out, d, dv, known, most,
    D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One cell: its mean query, through all of its coarse keys."""
    cell = tl.program_id(0).to(tl.int64)
    dims, near = tl.arange(0, D), tl.arange(0, BN)
    centre = tl.load(mean + cell * d + dims, mask=dims < d, other=0.0)
    begin, nodes = tl.load(first + cell), tl.load(count + cell)
    place = tl.load(base + cell).to(tl.int64) * BN
    total = tl.zeros((D,), dtype=tl.float32)
    for at in range(0, nodes, BN):
        here = at + near < nodes
        node = tl.load(item + begin + at + near, mask=here, other=0).to(tl.int64)
        query = tl.where(here[:, None], centre[None, :], 0.0)
        between = rows_at(gap, node, here, d, BN, D)
        within = rows_at(variance, node, here, d, BN, D)
        slot = place + at + near
        to_key = rows_at(d_key, slot, here, d, BN, D)
        to_value = rows_at(d_value, slot, here, dv, BN, E)
        to_weight = tl.load(d_weight + slot, mask=here, other=0.0)
        along, shift, bend, part = bent(query, between, within, most)
        linked = to_weight * 0.0
        for r in range(known):
            row = rows_at(covariance, node * known + r, here, dv, BN, E).to(tl.float32)
            moved = tl.sum(row * to_value, 1)
            linked += tl.load(mean + cell * d + r) * moved
            total += tl.where(dims == r, tl.sum(part * moved, 0), 0.0)
        stepped = tl.sum(to_value * rows_at(step, node, here, dv, BN, E), 1)
        slope, toward, to_along = pulled(
            query, between, along, shift, bend, part, to_key, to_weight, linked, stepped, most
        )
        slope -= to_weight * part / 2
        change = slope[:, None] * shift + toward * within + to_along[:, None] * between
        total += tl.sum(change, 0)
    tl.store(out + cell * d + dims, total, mask=dims < d)
