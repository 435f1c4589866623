"""From gradients of nodes and leaves to those of the keys, values and log-weights below them.

What a node says of its keys are weighted means m of k, v, k^2 and k v^T and its log mass. A token
t with the share p in a node adds to its gradient p times what the node's own are for these, and

    d loss / d ln w_t = p (g_mass + <g, m_t - m>) = p (h + <g, m_t>),    h = g_mass - <g, m>.

The share in a node is the share in the half of it times that half's own: so g and h of a node,
times the share of a half, are added to those of the half, level by level from the roots to the
halves of leaves; then every token looks at its half alone. Gap and step are differences of what
the halves say, times the root of the product of their shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..forest import Forest, Nodes
from ..kernels import summary
from ..problem import Head


class Flow(NamedTuple):
    """Of nodes and, behind them, of halves of leaves."""

    key: Tensor  # [nodes, d]
    square: Tensor  # [nodes, d]
    value: Tensor  # [nodes, dv]
    product: Tensor  # [nodes, directions, dv]
    rest: Tensor  # [nodes]: h


def token_gradients(
    forest: Forest, head: Head, position: Tensor, nodes: Nodes, leaves: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the keys, values and log-weights of ``head``, whose places in leaves are
    ``position`` [leaves, size], from those of nodes and of the tables of leaves."""
    held = position.reshape(len(position) * 2, -1)
    halves = summary.halves(head, held)
    return summary.to_tokens(head, held, halves[2], _down(forest, nodes, halves), leaves)


def _finite(log_mass: Tensor) -> Tensor:
    return torch.where(log_mass > -math.inf, log_mass, 0.0)


def _down(forest: Forest, grads: Nodes, halves: tuple[Tensor, Tensor, Tensor]) -> Flow:
    """The flow of the halves of leaves, with means and log masses ``halves``."""
    roots, count = len(forest.roots), len(forest.key)
    key, value, log_mass = (
        torch.cat([mine, below])
        for mine, below in zip((forest.key, forest.value, forest.log_mass), halves, strict=True)
    )
    share = (log_mass[roots:].view(-1, 2) - _finite(forest.log_mass).unsqueeze(1)).exp()
    own, gap, step = _own(forest, grads)
    extra = _between(forest, gap, step, share)
    flow = []
    for mine, more in zip(own, extra, strict=True):
        total = mine.new_zeros(len(log_mass), *mine.shape[1:])
        total[:count] = mine
        if more is not None:
            total[roots:] += more.flatten(0, 1)
        flow.append(total)
    made = Flow(*flow)
    made.rest.sub_((made.key * key).sum(1)).sub_((made.value * value).sum(1))
    first, size = 0, roots
    while first < count:
        last = first + size
        for total in made:
            below = total[last : last + 2 * size].unflatten(0, (-1, 2))
            part = share[first:last].view(-1, 2, *(1 for _ in total.shape[1:]))
            below.addcmul_(part, total[first:last].unsqueeze(1))
        first, size = last, 2 * size
    return Flow(*(total[count:] for total in made))


def _own(forest: Forest, grads: Nodes) -> tuple[Flow, Tensor, Tensor]:
    """What each node adds, with `Flow.rest` still without the means of key and value; and the
    gradients of gap and step."""
    known = forest.covariance.shape[1]
    square = grads.variance * (forest.variance > 0)
    product = grads.covariance
    lead, lead_gap = forest.key[:, :known].unsqueeze(2), forest.gap[:, :known].unsqueeze(2)
    by_value = (product * forest.value.unsqueeze(1)).sum(2)
    by_step = (product * forest.step.unsqueeze(1)).sum(2)
    key = grads.key - 2 * forest.key * square
    key[:, :known] -= by_value
    gap = grads.gap - 2 * forest.gap * square
    gap[:, :known] -= by_step
    value, step = grads.value - (product * lead).sum(1), grads.step - (product * lead_gap).sum(1)
    mean_square = forest.variance + forest.key.square() + forest.gap.square()
    rest = grads.log_mass - (square * mean_square).sum(1)
    rest -= (product * forest.covariance).sum((1, 2))
    rest -= (lead.squeeze(2) * by_value + lead_gap.squeeze(2) * by_step).sum(1)
    return Flow(key, square, value, product, rest), gap, step


def _between(forest: Forest, gap: Tensor, step: Tensor, share: Tensor) -> tuple[Tensor | None, ...]:
    """What the gradients of gap and step add to the two halves of each node, as in `Flow`."""
    root = share.prod(1, keepdim=True).sqrt()
    key, value = gap * root, step * root
    level = ((gap * forest.gap).sum(1) + (step * forest.step).sum(1)) / 2
    rest = level * (share[:, 1] - share[:, 0])
    key, value, rest = (torch.stack([x, -x], 1) for x in (key, value, rest))
    return key, None, value, None, rest
