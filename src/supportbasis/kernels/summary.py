"""The nodes of trees on a device: what `supportbasis.forest.build` makes of ordered keys.

One launch for the leaves and one for each level above. Leaves are copied in the dtypes in which
they are attended to. On the way back `to_tokens` is the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..forest import DIRECTIONS, Forest
from ..problem import Head
from . import summary_kernels as kernels
from .language import power_of_two


def summarised(
    head: Head, position: Tensor, segments: int, depth: int, dtype: torch.dtype, largest: float
) -> Forest:
    """Trees of ``depth`` levels over ``segments`` segments, whose leaves hold the keys at
    ``position`` [leaves, size], -1 for none. ``head`` is in its frame; keys are copied in
    ``dtype`` with no entry beyond ``largest``. Covariances, most of what a coarse key reads, are
    rounded to 16 bits where the values have as many."""
    leaves, size = position.shape
    (d, dv), new = (head.dim, head.value_dim), head.key.new_empty
    known = min(DIRECTIONS, d)
    rough = torch.float32 if head.value.dtype == torch.float32 else torch.bfloat16
    counts = [segments << level for level in range(depth + 1)]
    starts = [segments * ((1 << level) - 1) for level in range(depth + 1)]
    total = starts[-1] + counts[-1]
    assert counts[-1] == leaves
    fields = {
        "key": new(total, d), "value": new(total, dv), "log_mass": new(total),
        "gap": new(total, d), "step": new(total, dv), "variance": new(total, d),
        "stride": new(total), "scatter": new(total), "others": new(total),
        "covariance": new(total, known, dv, dtype=rough), "linked": new(total, known),
    }  # fmt: skip
    written, widths = tuple(fields.values()), (power_of_two(d, 1), power_of_two(dv, 1))
    tables = (
        torch.empty(leaves, size, d, dtype=dtype, device=position.device),
        torch.empty(leaves, size, dv, dtype=head.value.dtype, device=position.device),
        new(leaves, size),
    )
    sums = _sums(new, leaves, d, dv, known)
    kernels.leaves[(leaves,)](
        head.key, head.value, head.key_log_weight, position, *tables, *sums, *written,
        starts[-1], size, d, dv, known, largest, *widths, power_of_two(size, 2),
        num_warps=1 if max(widths) <= 64 else 2,
    )  # fmt: skip
    for start, count in zip(reversed(starts[:-1]), reversed(counts[:-1]), strict=True):
        above = _sums(new, count, d, dv, known)
        kernels.parents[(count,)](
            *sums, *above, *written, start, d, dv, known, *widths, num_warps=1
        )
        sums = above
    node = torch.arange(total, device=position.device)
    child = torch.where(node < starts[-1], 2 * node + segments, -1)
    leaf = torch.where(node < starts[-1], -1, node - starts[-1])
    leaf_key, leaf_value, leaf_weight = tables
    return Forest(
        **fields, child=child, leaf=leaf, roots=node[:segments],
        leaf_key=leaf_key, leaf_value=leaf_value, leaf_weight=leaf_weight,
    )  # fmt: skip


def halves(head: Head, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean keys, mean values and log masses of halves of leaves [halves, size]."""
    (count, size), (d, dv), new = position.shape, (head.dim, head.value_dim), head.key.new_empty
    made = new(count, d), new(count, dv), new(count)
    widths = (power_of_two(d, 1), power_of_two(dv, 1))
    kernels.halves[(count,)](
        head.key, head.value, head.key_log_weight, position, *made,
        size, d, dv, *widths, power_of_two(size, 2), num_warps=1 if max(widths) <= 64 else 2,
    )  # fmt: skip
    return made


def to_tokens(
    head: Head,
    position: Tensor,
    log_mass: Tensor,
    sums: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and log-weights at ``position`` [halves, size]: from those of their
    halves, of key, its square, value, product and log mass (`device.nodes_backward`), and those of
    the tables of leaves. Tokens that are nowhere have none."""
    (count, size), (d, dv) = position.shape, (head.dim, head.value_dim)
    new = head.key.new_zeros
    made = new(head.m, d), new(head.m, dv), new(head.m)
    widths = (power_of_two(d, 1), power_of_two(dv, 1))
    kernels.to_tokens[(count,)](
        head.key, head.value, head.key_log_weight, position, log_mass, *sums,
        *(x.contiguous() for x in leaves), *made, size, d, dv, sums[3].shape[1],
        *widths, power_of_two(size, 2), num_warps=1 if max(widths) <= 64 else 2,
    )  # fmt: skip
    return made


def _sums(
    new: Callable[..., Tensor], nodes: int, d: int, dv: int, known: int
) -> tuple[Tensor, ...]:
    """Room for sums over nodes: top, mass, square, key, its square, value, its square, product."""
    return (
        new(nodes), new(nodes), new(nodes), new(nodes, d), new(nodes, d), new(nodes, dv),
        new(nodes), new(nodes, known, dv),
    )  # fmt: skip
