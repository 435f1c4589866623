# mypy: ignore-errors
"""Kernels of `summary`: what leaves hold, and nodes from their halves.

Sums are in units of exp(top). Both kernels end in `write_node`, which makes the fields of a node
from the sums over it and those over its two halves.
"""

from __future__ import annotations

from .language import jit, tl


@jit
def entry(x, cols, r):
    """Entry r of a vector."""
    return tl.sum(tl.where(cols == r, x, 0.0), 0)


@jit
def root_of_shares(first, second):
    """Root of the product of the shares of two masses."""
    total = tl.maximum(first + second, 1.1754944e-38)
    return tl.sqrt(tl.maximum((first / total) * (second / total), 1.1754944e-38))


@jit
def write_node(
    node, top, mass, square, key, key_square, value, value_square, gap, step,
    out_key, out_value, out_mass, out_gap, out_step, out_variance, out_stride, out_scatter,
    out_others, d, dv, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """All fields but those of the covariance; returns mean key and mean value."""
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    safe = tl.maximum(mass, 1.1754944e-38)
    mean, mean_value = key / safe, value / safe
    variance = tl.maximum(key_square / safe - mean * mean - gap * gap, 0.0)
    spread = tl.maximum(value_square / safe - tl.sum(mean_value * mean_value, 0), 0.0)
    each = square / tl.maximum(safe * safe, 1.1754944e-38)
    others = 1 / tl.minimum(tl.maximum(each, 1.1754944e-38), 1.0) - 1
    tl.store(out_key + node * d + dims, mean, mask=dims < d)
    tl.store(out_gap + node * d + dims, gap, mask=dims < d)
    tl.store(out_variance + node * d + dims, variance, mask=dims < d)
    tl.store(out_value + node * dv + cols, mean_value, mask=cols < dv)
    tl.store(out_step + node * dv + cols, step, mask=cols < dv)
    tl.store(out_mass + node, tl.where(mass > 0, tl.log(safe) + top, float("-inf")))
    tl.store(out_stride + node, tl.sum(step * step, 0))
    tl.store(out_scatter + node, spread * each)
    tl.store(out_others + node, tl.minimum(others, 1e12))
    return mean, mean_value


@jit
def leaves(
    key, value, log_weight, position, leaf_key, leaf_value, leaf_weight,
    s_top, s_mass, s_square, s_key, s_key_square, s_value, s_value_square, s_product,
    out_key, out_value, out_mass, out_gap, out_step, out_variance, out_stride, out_scatter,
    out_others, out_covariance, out_linked, start, size, d, dv, known, largest,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One leaf: its tokens copied into its place, its sums, and the node that it is."""
    leaf = tl.program_id(0).to(tl.int64)
    near, dims, cols = tl.arange(0, S), tl.arange(0, D), tl.arange(0, E)
    place = tl.load(position + leaf * size + near, mask=near < size, other=-1)
    here = place >= 0
    place = tl.where(here, place, 0).to(tl.int64)
    inside = here[:, None] & (dims < d)[None, :]
    k = tl.load(key + place[:, None] * d + dims[None, :], mask=inside, other=0.0)
    inside = here[:, None] & (cols < dv)[None, :]
    v = tl.load(value + place[:, None] * dv + cols[None, :], mask=inside, other=0.0)
    w = tl.load(log_weight + place, mask=here, other=float("-inf"))
    slot = leaf * size + near
    target = leaf_key + slot[:, None] * d + dims[None, :]
    short = tl.minimum(tl.maximum(k, -largest), largest).to(leaf_key.dtype.element_ty)
    tl.store(target, short, mask=(near < size)[:, None] & (dims < d)[None, :])
    target = leaf_value + slot[:, None] * dv + cols[None, :]
    tl.store(target, v, mask=(near < size)[:, None] & (cols < dv)[None, :])
    tl.store(leaf_weight + slot, w, mask=near < size)
    v = v.to(tl.float32)
    top = tl.max(w, 0)
    unit = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(w - unit)
    first = tl.where(near * 2 < size, w, 0.0)
    second = w - first
    mass_1, mass_2 = tl.sum(first, 0), tl.sum(second, 0)
    key_1, value_1 = tl.sum(k * first[:, None], 0), tl.sum(v * first[:, None], 0)
    key_2, value_2 = tl.sum(k * second[:, None], 0), tl.sum(v * second[:, None], 0)
    root = root_of_shares(mass_1, mass_2)
    safe_1, safe_2 = tl.maximum(mass_1, 1.1754944e-38), tl.maximum(mass_2, 1.1754944e-38)
    gap, step = (
        (key_1 / safe_1 - key_2 / safe_2) * root,
        (value_1 / safe_1 - value_2 / safe_2) * root,
    )
    mass, square = mass_1 + mass_2, tl.sum(w * w, 0)
    sum_key, sum_value = key_1 + key_2, value_1 + value_2
    key_square = tl.sum(k * k * w[:, None], 0)
    value_square = tl.sum(tl.sum(v * v, 1) * w, 0)
    mean, mean_value = write_node(
        start + leaf, top, mass, square, sum_key, key_square, sum_value, value_square, gap, step,
        out_key, out_value, out_mass, out_gap, out_step, out_variance, out_stride, out_scatter,
        out_others, d, dv, D, E,
    )  # fmt: skip
    for r in range(known):
        line = tl.sum(tl.where((dims == r)[None, :], k, 0.0), 1) * w
        product = tl.sum(v * line[:, None], 0)
        tl.store(s_product + (leaf * known + r) * dv + cols, product, mask=cols < dv)
        shared = product / tl.maximum(mass, 1.1754944e-38)
        shared -= entry(mean, dims, r) * mean_value + entry(gap, dims, r) * step
        row = (start + leaf) * known + r
        tl.store(out_covariance + row * dv + cols, shared, mask=cols < dv)
        tl.store(out_linked + row, tl.sum(shared * shared, 0))
    tl.store(s_top + leaf, top)
    tl.store(s_mass + leaf, mass)
    tl.store(s_square + leaf, square)
    tl.store(s_value_square + leaf, value_square)
    tl.store(s_key + leaf * d + dims, sum_key, mask=dims < d)
    tl.store(s_key_square + leaf * d + dims, key_square, mask=dims < d)
    tl.store(s_value + leaf * dv + cols, sum_value, mask=cols < dv)


@jit
def parents(
    c_top, c_mass, c_square, c_key, c_key_square, c_value, c_value_square, c_product,
    s_top, s_mass, s_square, s_key, s_key_square, s_value, s_value_square, s_product,
    out_key, out_value, out_mass, out_gap, out_step, out_variance, out_stride, out_scatter,
    out_others, out_covariance, out_linked, start, d, dv, known,
    D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One node from its two children."""
    node = tl.program_id(0).to(tl.int64)
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    left, right = 2 * node, 2 * node + 1
    top_1, top_2 = tl.load(c_top + left), tl.load(c_top + right)
    top = tl.maximum(top_1, top_2)
    unit = tl.where(top == float("-inf"), 0.0, top)
    share_1, share_2 = tl.exp(top_1 - unit), tl.exp(top_2 - unit)
    mass_1, mass_2 = tl.load(c_mass + left), tl.load(c_mass + right)
    key_1 = tl.load(c_key + left * d + dims, mask=dims < d, other=0.0)
    key_2 = tl.load(c_key + right * d + dims, mask=dims < d, other=0.0)
    value_1 = tl.load(c_value + left * dv + cols, mask=cols < dv, other=0.0)
    value_2 = tl.load(c_value + right * dv + cols, mask=cols < dv, other=0.0)
    safe_1, safe_2 = tl.maximum(mass_1, 1.1754944e-38), tl.maximum(mass_2, 1.1754944e-38)
    root = root_of_shares(mass_1 * share_1, mass_2 * share_2)
    gap, step = (
        (key_1 / safe_1 - key_2 / safe_2) * root,
        (value_1 / safe_1 - value_2 / safe_2) * root,
    )
    mass = mass_1 * share_1 + mass_2 * share_2
    square = tl.load(c_square + left) * share_1 * share_1
    square += tl.load(c_square + right) * share_2 * share_2
    sum_key, sum_value = key_1 * share_1 + key_2 * share_2, value_1 * share_1 + value_2 * share_2
    key_square = tl.load(c_key_square + left * d + dims, mask=dims < d, other=0.0) * share_1
    key_square += tl.load(c_key_square + right * d + dims, mask=dims < d, other=0.0) * share_2
    value_square = tl.load(c_value_square + left) * share_1
    value_square += tl.load(c_value_square + right) * share_2
    mean, mean_value = write_node(
        start + node, top, mass, square, sum_key, key_square, sum_value, value_square, gap, step,
        out_key, out_value, out_mass, out_gap, out_step, out_variance, out_stride, out_scatter,
        out_others, d, dv, D, E,
    )  # fmt: skip
    for r in range(known):
        at = (left * known + r) * dv + cols
        product = tl.load(c_product + at, mask=cols < dv, other=0.0) * share_1
        at = (right * known + r) * dv + cols
        product += tl.load(c_product + at, mask=cols < dv, other=0.0) * share_2
        tl.store(s_product + (node * known + r) * dv + cols, product, mask=cols < dv)
        shared = product / tl.maximum(mass, 1.1754944e-38)
        shared -= entry(mean, dims, r) * mean_value + entry(gap, dims, r) * step
        row = (start + node) * known + r
        tl.store(out_covariance + row * dv + cols, shared, mask=cols < dv)
        tl.store(out_linked + row, tl.sum(shared * shared, 0))
    tl.store(s_top + node, top)
    tl.store(s_mass + node, mass)
    tl.store(s_square + node, square)
    tl.store(s_value_square + node, value_square)
    tl.store(s_key + node * d + dims, sum_key, mask=dims < d)
    tl.store(s_key_square + node * d + dims, key_square, mask=dims < d)
    tl.store(s_value + node * dv + cols, sum_value, mask=cols < dv)


@jit
def half_tokens(
    key, value, log_weight, position, half, size, d, dv,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Where the tokens of half a leaf are, which are there, and what they are."""
    near, dims, cols = tl.arange(0, S), tl.arange(0, D), tl.arange(0, E)
    place = tl.load(position + half * size + near, mask=near < size, other=-1)
    here = place >= 0
    place = tl.where(here, place, 0).to(tl.int64)
    inside = here[:, None] & (dims < d)[None, :]
    k = tl.load(key + place[:, None] * d + dims[None, :], mask=inside, other=0.0)
    inside = here[:, None] & (cols < dv)[None, :]
    v = tl.load(value + place[:, None] * dv + cols[None, :], mask=inside, other=0.0)
    w = tl.load(log_weight + place, mask=here, other=float("-inf"))
    return place, here, k, v.to(tl.float32), w


@jit
def halves(
    key, value, log_weight, position, out_key, out_value, out_mass, size, d, dv,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Mean key, mean value and log mass of half a leaf."""
    half = tl.program_id(0).to(tl.int64)
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    _, _, k, v, w = half_tokens(key, value, log_weight, position, half, size, d, dv, D, E, S)
    top = tl.max(w, 0)
    unit = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(w - unit)
    mass = tl.sum(w, 0)
    safe = tl.maximum(mass, 1.1754944e-38)
    tl.store(out_key + half * d + dims, tl.sum(k * w[:, None], 0) / safe, mask=dims < d)
    tl.store(out_value + half * dv + cols, tl.sum(v * w[:, None], 0) / safe, mask=cols < dv)
    tl.store(out_mass + half, tl.where(mass > 0, tl.log(safe) + unit, float("-inf")))


@jit
def to_tokens(
    key, value, log_weight, position, mass, d_key, d_square, d_value, d_product, d_rest,
    leaf_key, leaf_value, leaf_weight, out_key, out_value, out_weight, size, d, dv, known,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens of half a leaf, from those of its sums and of the leaf's table."""
    half = tl.program_id(0).to(tl.int64)
    near, dims, cols = tl.arange(0, S), tl.arange(0, D), tl.arange(0, E)
    place, here, k, v, w = half_tokens(key, value, log_weight, position, half, size, d, dv, D, E, S)
    total = tl.load(mass + half)
    share = tl.exp(w - tl.where(total == float("-inf"), 0.0, total))
    line = tl.load(d_key + half * d + dims, mask=dims < d, other=0.0)[None, :]
    square = k * tl.load(d_square + half * d + dims, mask=dims < d, other=0.0)[None, :]
    to_weight = tl.load(d_rest + half) + tl.sum(k * (line + square), 1)
    to_key = line + 2 * square
    to_value = v * 0.0 + tl.load(d_value + half * dv + cols, mask=cols < dv, other=0.0)[None, :]
    for r in range(known):
        row = tl.load(d_product + (half * known + r) * dv + cols, mask=cols < dv, other=0.0)
        lead = dims == r
        across = tl.sum(v * row[None, :], 1)
        to_key += tl.where(lead[None, :], across[:, None], 0.0)
        to_value += tl.sum(tl.where(lead[None, :], k, 0.0), 1)[:, None] * row[None, :]
    to_weight += tl.sum(v * to_value, 1)
    slot = half * size + near
    inside = here[:, None] & (dims < d)[None, :]
    exact = tl.load(leaf_key + slot[:, None] * d + dims[None, :], mask=inside, other=0.0)
    target = out_key + place[:, None] * d + dims[None, :]
    tl.store(target, to_key * share[:, None] + exact, mask=inside)
    inside = here[:, None] & (cols < dv)[None, :]
    exact = tl.load(leaf_value + slot[:, None] * dv + cols[None, :], mask=inside, other=0.0)
    target = out_value + place[:, None] * dv + cols[None, :]
    tl.store(target, to_value * share[:, None] + exact, mask=inside)
    exact = tl.load(leaf_weight + slot, mask=here, other=0.0)
    tl.store(out_weight + place, to_weight * share + exact, mask=here)
