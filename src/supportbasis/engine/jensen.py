"""A lower bound on every row's true sum of weights, at the price of a few means.

Weights are convex functions of the score (exp, even powers), so by Jensen's inequality
``sum_j w_j f(z_ij) >= W f(<q_i, kbar> scale)`` with W the sum of the key weights and kbar the
weighted mean key; for causal rows, those of the keys so far. A sketched sum that falls far below
it has provably lost its row.

Sums of fitted polynomials have no noise and need not fall far: one that is half of the bound is
wrong. Scores that spread make a bound by one mean loose, so keys are split by the signs of their
leading coordinates, and the bounds of the groups are added up; not those of causal heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..components.exact_sum import take, take_index
from ..plans import FittedHead, HeadPlan, PowerHead
from ..polynomials.balancing import framed
from ..problem.problem import Head

BLOCK = 4096  # tokens in float64 at a time
LOST = 1 / 64  # of the bound: a sketched sum below that is lost
WRONG = 1 / 2  # the same of a fitted polynomial
SIGNS = 4  # coordinates that split keys into groups
PRODUCTS = 128  # at most, that one sum over keys is made of


def least_lse(plan: HeadPlan, head: Head, rows: Tensor | None) -> Tensor:
    """Log of what the sums of the given rows (None: all) must at least be, or they are lost."""
    if not isinstance(plan, FittedHead):
        return lower_lse(plan, head, rows) + math.log(LOST)
    by_groups = not head.is_causal and head.m > 0
    bound = _grouped_lse(plan, head, rows) if by_groups else lower_lse(plan, head, rows)
    return bound + math.log(WRONG)


def _grouped_lse(plan: FittedHead, head: Head, rows: Tensor | None) -> Tensor:
    """The bound by groups of keys, in the frame of the plan."""
    inside = framed(head, plan.frame)
    assert inside.key_log_weight is not None
    query = inside.query if rows is None else inside.query[rows]
    least = grouped_lse(query[None], inside.key[None], inside.key_log_weight[None])
    return (least[0] + plan.frame.row_shift(head, rows)).double()


def grouped_lse(query: Tensor, key: Tensor, log_weight: Tensor) -> Tensor:
    """Log of the bound [heads, n] for queries [heads, n, d] in the frame of the keys [heads, m, d],
    of which those with the same signs in their leading coordinates are a group. A group that has
    next to no weight counts as nothing."""
    signs = min(SIGNS, key.shape[2])
    bits = 2 ** torch.arange(signs, device=key.device)
    label = ((key[..., :signs] > 0) * bits).sum(-1).unsqueeze(1)
    top = log_weight.amax(1, keepdim=True)
    top = torch.where(top > -math.inf, top, 0.0)
    weight = (log_weight - top).exp().unsqueeze(1)
    member = (label == torch.arange(2**signs, device=key.device).unsqueeze(1)) * weight
    mass = member.sum(2, keepdim=True)
    # one product so long and thin would keep few units of a GPU busy
    parts = math.gcd(key.shape[1], PRODUCTS)
    split = member.unflatten(2, (parts, -1)).transpose(1, 2)
    total = (split @ key.unflatten(1, (parts, -1))).sum(1)
    mean = total / torch.where(mass > 0, mass, 1.0)
    score = torch.baddbmm(mass.log() + top.unsqueeze(2), mean, query.mT)  # [heads, groups, n]
    best = score.amax(1, keepdim=True)
    best = torch.where(best > -math.inf, best, 0.0)
    least = (score - best).exp_().sum(1).log_() + best.squeeze(1)
    return torch.where(least.isnan(), math.inf, least)  # scores that overflow: nothing is known


def lower_lse(plan: HeadPlan, head: Head, rows: Tensor | None) -> Tensor:
    """Log of the lower bound for the given rows (None: all); -inf where it says nothing."""
    count = head.n if rows is None else len(rows)
    least = head.query.new_full((count,), -math.inf, dtype=torch.float64)
    means = _Means(head)
    if not head.is_causal:
        means.add(0, head.m)
    for start in range(0, count, BLOCK):
        stop = min(count, start + BLOCK)
        query = take(head.query, rows, start, stop).double()
        log_mass, mean = means.at(take_index(rows, start, stop, query))
        score = (query * mean).sum(-1) * head.scale
        if isinstance(plan, PowerHead):
            score = plan.kernel.log(score)
        least[start:stop] = log_mass + score
    return least


class _Means:
    """Running ln W and kbar in float64, over blocks of keys."""

    def __init__(self, head: Head):
        self.head, self.seen = head, 0
        self.mass = head.key.new_zeros((), dtype=torch.float64)
        self.total = head.key.new_zeros(head.dim, dtype=torch.float64)
        self.top, weight = 0.0, head.key_log_weight
        if weight is not None and weight.numel():
            largest = float(weight.detach().max())
            self.top = largest if math.isfinite(largest) else 0.0

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those that each of these rows may see; rows come in ascending order."""
        head = self.head
        if not head.is_causal:
            return self._finish(self.mass, self.total)
        first, last = (min(int(rows[i]) + 1, head.m) for i in (0, -1))
        if len(rows) > 1 and last - first > BLOCK:  # rows that lie apart
            halves = [self.at(half) for half in rows.tensor_split(2)]
            log_mass, mean = (torch.cat(pair) for pair in zip(*halves, strict=True))
            return log_mass, mean
        self.add(self.seen, first)
        weight, weighted = self._block(first, last)
        mass = torch.cat([self.mass.view(1), self.mass + weight.cumsum(0)])
        total = torch.cat([self.total.view(1, -1), self.total + weighted.cumsum(0)])
        at = (rows + 1).clamp(max=head.m) - first
        return self._finish(mass[at], total[at])

    def add(self, start: int, stop: int) -> None:
        for begin in range(start, stop, BLOCK):
            weight, weighted = self._block(begin, min(stop, begin + BLOCK))
            self.mass = self.mass + weight.sum()
            self.total = self.total + weighted.sum(0)
        self.seen = stop

    def _block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        key = self.head.key[start:stop].double()
        weight = key.new_ones(len(key))
        if self.head.key_log_weight is not None:
            weight = (self.head.key_log_weight[start:stop].double() - self.top).exp()
        return weight, key * weight.unsqueeze(1)

    def _finish(self, mass: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        mean = total / torch.where(mass > 0, mass, 1.0).unsqueeze(-1)
        return mass.log() + self.top, mean
