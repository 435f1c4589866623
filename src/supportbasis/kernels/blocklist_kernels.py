# mypy: ignore-errors
"""Kernels of `blocklist`: online softmax over listed granules, and its two gradients.

Logarithms are to base 2 inside, as the hardware has them.
"""

from __future__ import annotations

from .language import jit, tl


@jit
def listed_keys(indices, at, last, m, GRANULE: tl.constexpr, BN: tl.constexpr):
    """The next BN keys of a list and which of them exist."""
    step = tl.arange(0, BN)
    place = at + step // GRANULE
    granule = tl.load(indices + place, mask=place < last, other=0).to(tl.int64)
    key = granule * GRANULE + step % GRANULE
    return key, (place < last) & (key < m)


@jit
def granule_weights(
    log_weight, row, known, m,
    GRANULE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Log-weights of granules, a row of 16 each; -inf past a list and past the keys."""
    if WIDE:
        row = row.to(tl.int64)
    slot = row[:, None] * GRANULE + tl.arange(0, GRANULE)[None, :]
    inside = known[:, None]
    if not EVEN:
        inside = inside & (slot < m)
    return tl.load(log_weight + slot, mask=inside, other=float("-inf"))


@jit
def forward(
    q, k, v, log_weight, columns, offsets, indices, out, lse,
    heads, key_heads, n, m, d, dv, blocks, scale, least,
    q_b, q_h, q_n, k_b, k_h, k_n: tl.constexpr, v_b, v_h, v_n: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    GRANULE: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries over its list. EVEN: no key, entry or column is past an end.

    Log-weights come to base 2 as a row of 16 for each granule, or (COLUMNS) as 16 more entries of
    each key, three of which add up to its log-weight over the scale and are part of the product.
    """
    block, bh = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    kh = h // (heads // key_heads)
    near, dims, cols = tl.arange(0, BQ), tl.arange(0, D), tl.arange(0, E)
    start = block * BQ
    live = start + near < n
    q += b * q_b + h * q_h + start * q_n
    k += b * k_b + kh * k_h
    v += b * v_b + kh * v_h
    log_weight += (b * key_heads + kh) * m
    columns += (b * key_heads + kh) * (m + GRANULE) * 16
    more = tl.arange(0, 16)
    ones = tl.where((more < 3)[None, :] & (near >= 0)[:, None], 1.0, 0.0).to(q.dtype.element_ty)
    query = tl.load(
        q + near[:, None] * q_n + dims[None, :], mask=live[:, None] & (dims < d)[None, :], other=0.0
    )
    first = tl.load(offsets + bh * blocks + block)
    last = tl.load(offsets + bh * blocks + block + 1)
    top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BQ,), dtype=tl.float32)
    total = tl.zeros((BQ, E), dtype=tl.float32)
    step = tl.arange(0, BN)
    place = first + step // GRANULE
    granule = tl.load(indices + place, mask=place < last, other=0)
    if WEIGHTED and not COLUMNS:
        each = first + tl.arange(0, BN // GRANULE)
        row = tl.load(indices + each, mask=each < last, other=0)
        weights = granule_weights(log_weight, row, each < last, m, GRANULE, EVEN, WIDE)
        row = tl.load(indices + each + BN // GRANULE, mask=each + BN // GRANULE < last, other=0)
    for at in range(first, last, BN // GRANULE):
        place = at + step // GRANULE
        key = granule * GRANULE + step % GRANULE
        if WIDE:
            key = key.to(tl.int64)
        # the next granules, and their log-weights, are asked for now: waiting for them costs most
        granule = tl.load(
            indices + place + BN // GRANULE, mask=place + BN // GRANULE < last, other=0
        )
        if WEIGHTED and not COLUMNS:
            these = weights
            each = at + BN // GRANULE + tl.arange(0, BN // GRANULE)
            weights = granule_weights(log_weight, row, each < last, m, GRANULE, EVEN, WIDE)
            row = tl.load(indices + each + BN // GRANULE, mask=each + BN // GRANULE < last, other=0)
        at_k = k + key[:, None] * k_n + dims[None, :]
        at_v = v + key[:, None] * v_n + cols[None, :]
        if EVEN:  # places past the list have granule 0 and weight 0
            key_row = tl.load(at_k)
        else:
            key_row = tl.load(at_k, mask=(key < m)[:, None] & (dims < d)[None, :], other=0.0)
        here = place < last
        if not EVEN:
            here = here & (key < m)
        score = tl.dot(query, tl.trans(key_row), input_precision=PRECISION)
        if COLUMNS:  # places past the list have the granule past the keys, without weight
            slot = tl.where(here, key, m + step % GRANULE)
            row = tl.load(columns + slot[:, None] * 16 + more[None, :])
            score = tl.dot(ones, tl.trans(row), score, input_precision=PRECISION)
            score = score * scale
        else:
            if WEIGHTED:
                bias = tl.reshape(these, (BN,))
            else:
                bias = tl.where(here, 0.0, float("-inf"))
            score = score * scale + bias[None, :]
        new_top = tl.maximum(top, tl.max(score, 1))
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - unit[:, None])
        shrink = tl.exp2(top - unit)
        mass = mass * shrink + tl.sum(weight, 1)
        if EVEN:
            value = tl.load(at_v)
        else:
            value = tl.load(at_v, mask=(key < m)[:, None] & (cols < dv)[None, :], other=0.0)
        total = total * shrink[:, None]
        total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION)
        top = new_top
    seen = (mass > 0.0) & (top > least)
    total = tl.where(seen[:, None], total / mass[:, None], 0.0)
    log_mass = tl.where(seen, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
    inside = live[:, None] & (cols < dv)[None, :]
    target = out + bh * n * dv + start * dv + near[:, None] * dv + cols[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + bh * n + start + near, log_mass, mask=live)


@jit
def row_terms(
    grad, out, grad_lse, delta,
    heads, n, dv, g_b, g_h, g_n,
    E: tl.constexpr, BM: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """What every score of a row subtracts: delta = <grad, out> - grad of lse."""
    bh, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BM
    near, cols = tl.arange(0, BM), tl.arange(0, E)
    live = start + near < n
    inside = live[:, None] & (cols < dv)[None, :]
    grad += (bh // heads) * g_b + (bh % heads) * g_h + start * g_n
    slope = tl.load(grad + near[:, None] * g_n + cols[None, :], mask=inside, other=0.0)
    at = bh * n * dv + start * dv + near[:, None] * dv + cols[None, :]
    value = tl.load(out + at, mask=inside, other=0.0)
    term = tl.sum(slope.to(tl.float32) * value.to(tl.float32), 1)
    if LSE:
        term -= tl.load(grad_lse + bh * n + start + near, mask=live, other=0.0)
    tl.store(delta + bh * n + start + near, term, mask=live)


@jit
def query_gradient(
    q, k, v, log_weight, offsets, indices, grad, lse, delta, grad_q,
    heads, key_heads, n, m, d, dv, blocks, scale, slope,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    GRANULE: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same walk as `forward`; ``slope`` scales the scores, ``scale`` their base-2 form.

    Operands of products that carry gradients have the dtype of the values.
    """
    block, bh = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    kh = h // (heads // key_heads)
    near, dims, cols = tl.arange(0, BQ), tl.arange(0, D), tl.arange(0, E)
    start = block * BQ
    live = start + near < n
    q += b * q_b + h * q_h + start * q_n
    grad += b * g_b + h * g_h + start * g_n
    k += b * k_b + kh * k_h
    v += b * v_b + kh * v_h
    log_weight += (b * key_heads + kh) * m
    query = tl.load(
        q + near[:, None] * q_n + dims[None, :], mask=live[:, None] & (dims < d)[None, :], other=0.0
    )
    change = tl.load(
        grad + near[:, None] * g_n + cols[None, :],
        mask=live[:, None] & (cols < dv)[None, :], other=0.0,
    ).to(v.dtype.element_ty)  # fmt: skip
    level = tl.load(lse + bh * n + start + near, mask=live, other=0.0)
    level = tl.where(level == float("-inf"), 0.0, level) * 1.4426950408889634
    term = tl.load(delta + bh * n + start + near, mask=live, other=0.0)
    first = tl.load(offsets + bh * blocks + block)
    last = tl.load(offsets + bh * blocks + block + 1)
    total = tl.zeros((BQ, D), dtype=tl.float32)
    for at in range(first, last, BN // GRANULE):
        key, here = listed_keys(indices, at, last, m, GRANULE, BN)
        known = (dims < d)[None, :]
        key_row = tl.load(
            k + key[:, None] * k_n + dims[None, :], mask=here[:, None] & known, other=0.0
        )
        value_t = tl.load(
            v + key[None, :] * v_n + cols[:, None],
            mask=here[None, :] & (cols < dv)[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(query, tl.trans(key_row), input_precision=PRECISION) * scale
        if WEIGHTED:
            bias = tl.load(log_weight + key, mask=here, other=float("-inf"))
            score += bias[None, :] * 1.4426950408889634
        else:
            score = tl.where(here[None, :], score, float("-inf"))
        weight = tl.exp2(score - level[:, None])
        steep = tl.dot(change, value_t, input_precision=PRECISION) - term[:, None]
        steep = (weight * steep).to(change.dtype)
        key_row = key_row.to(change.dtype)
        total = tl.dot(steep, key_row, total, input_precision=PRECISION)
    target = grad_q + bh * n * d + start * d + near[:, None] * d + dims[None, :]
    inside = live[:, None] & (dims < d)[None, :]
    tl.store(target, (total * slope).to(grad_q.dtype.element_ty), mask=inside)


@jit
def key_gradient(
    q, k, v, log_weight, offsets, rows, grad, lse, delta, grad_k, grad_v, grad_weight,
    heads, key_heads, n, m, d, dv, blocks, scale, slope,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr,
    GRANULE: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One granule over the blocks of queries that list it (``rows`` = head * blocks + block)."""
    granule, bkh = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, kh = bkh // key_heads, bkh % key_heads
    dims, cols = tl.arange(0, D), tl.arange(0, E)
    key = granule * GRANULE + tl.arange(0, GRANULE)
    here = key < m
    key_row = tl.load(
        k + b * k_b + kh * k_h + key[:, None] * k_n + dims[None, :],
        mask=here[:, None] & (dims < d)[None, :], other=0.0,
    )  # fmt: skip
    value = tl.load(
        v + b * v_b + kh * v_h + key[:, None] * v_n + cols[None, :],
        mask=here[:, None] & (cols < dv)[None, :], other=0.0,
    )  # fmt: skip
    bias = tl.zeros((GRANULE,), dtype=tl.float32)
    if WEIGHTED:
        bias = tl.load(log_weight + bkh * m + key, mask=here, other=float("-inf"))
        bias = bias * 1.4426950408889634
    entry = bkh * tl.num_programs(0) + granule
    first, last = tl.load(offsets + entry), tl.load(offsets + entry + 1)
    total_k = tl.zeros((GRANULE, D), dtype=tl.float32)
    total_v = tl.zeros((GRANULE, E), dtype=tl.float32)
    total_w = tl.zeros((GRANULE,), dtype=tl.float32)
    for at in range(first, last):
        row = tl.load(rows + at).to(tl.int64)
        bh, start = row // blocks, (row % blocks) * BQ
        near = start + tl.arange(0, BQ)
        live = near < n
        query = tl.load(
            q + b * q_b + (bh % heads) * q_h + near[:, None] * q_n + dims[None, :],
            mask=live[:, None] & (dims < d)[None, :], other=0.0,
        )  # fmt: skip
        change = tl.load(
            grad + b * g_b + (bh % heads) * g_h + near[:, None] * g_n + cols[None, :],
            mask=live[:, None] & (cols < dv)[None, :], other=0.0,
        ).to(v.dtype.element_ty)  # fmt: skip
        level = tl.load(lse + bh * n + near, mask=live, other=float("inf"))
        level = tl.where(level == float("-inf"), 0.0, level) * 1.4426950408889634
        term = tl.load(delta + bh * n + near, mask=live, other=0.0)
        score = tl.dot(key_row, tl.trans(query), input_precision=PRECISION) * scale
        weight = tl.exp2(score + bias[:, None] - level[None, :])
        total_v = tl.dot(weight.to(change.dtype), change, total_v, input_precision=PRECISION)
        steep = tl.dot(value, tl.trans(change), input_precision=PRECISION) - term[None, :]
        steep = weight * steep
        total_w += tl.sum(steep, 1)
        query = query.to(change.dtype)
        total_k = tl.dot(steep.to(change.dtype), query, total_k, input_precision=PRECISION)
    at_k = grad_k + bkh * m * d + key[:, None] * d + dims[None, :]
    known = here[:, None] & (dims < d)[None, :]
    tl.store(at_k, (total_k * slope).to(grad_k.dtype.element_ty), mask=known)
    at_v = grad_v + bkh * m * dv + key[:, None] * dv + cols[None, :]
    known = here[:, None] & (cols < dv)[None, :]
    tl.store(at_v, total_v.to(grad_v.dtype.element_ty), mask=known)
    if WEIGHTED:
        tl.store(grad_weight + bkh * m + key, total_w, mask=here)
