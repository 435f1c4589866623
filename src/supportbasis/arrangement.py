"""Segments of tokens that are alike: by a tree, by clusters, or as they come.

A tree cuts at medians, and where tokens lie in clusters it cuts through them: a segment then
straddles two clusters, and its queries want the keys of both. Such segments are seen by their
spread, which is far above the usual one of small segments. These show where the clusters are: the
means of tight ones that are far apart lead groups, every token goes to the nearest leader, and each
group is filled up to whole segments. Tokens that are far from their leader may be led by another
one, found among themselves; those that still are come into segments of their own. So no segment
straddles, at the price of a few empty places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .tree import leaf_layout, positions

ORDERS = ("auto", "tree", "groups", "sequence")
STRADDLING = 1.5  # mean spread of the segments of a tree over the median: above, there are clusters
TIGHT = 2.0  # times the median spread: segments below may lead a group
SMALL = 64  # tokens of the segments that clusters are looked for with, at most
REACH = 4.0  # times the median spread: squared distance within which one leader is enough
LEAST = 1e-6  # of the variance of all tokens: spreads below are as good as none
FAR = 3.0  # times the median spread: squared distance from its leader at which a token is not led
SLACK = 8  # segments may be longer by this part, which spares a group that hardly needs one more
CANDIDATES, MOST_LEADERS = 1024, 256


class Arrangement(NamedTuple):
    """Segments [segments, length] of positions, -1 for none, real ones first."""

    segments: Tensor
    compared: int = 0  # leaders that every token was compared with
    how: str = "tree"  # one of `ORDERS`


@torch.no_grad()
def arranged(
    x: Tensor, size: int, multiple: int, how: str, *, aligned: bool = False
) -> Arrangement:
    """Tokens ``x`` [tokens, dim] in segments.

    Their length is at most ``size``, as even as a tree makes it, rounded up to a multiple of
    ``multiple``. Groups that are ``aligned`` begin and end where halves of halves of all segments
    do, with empty segments between them: so segments can be joined two by two, again and again,
    and no two groups come together before each is whole.
    "auto" is a tree, or groups where segments of the tree straddle clusters, or the sequence where
    its segments are as tight.
    """
    depth, length = leaf_layout(len(x), size)
    length += -length % multiple
    sequence = _filled(torch.arange(len(x), device=x.device), length << depth).view(-1, length)
    if how == "sequence" or not len(x):
        return Arrangement(sequence, how="sequence")
    if how == "tree":
        return Arrangement(_by_tree(x, depth, length))
    finer = leaf_layout(length, SMALL)[0]
    length += -length % (multiple << finer)
    small = _by_tree(x, depth + finer, length >> finer)
    tree = small.view(-1, length).sort(1, descending=True).values
    spread = spreads(x, small)
    usual = max(float(spread.median()), LEAST * float(x.var(0, unbiased=False).sum()))
    best, found = Arrangement(tree), float(spreads(x, tree).mean())
    if how == "groups" or found > STRADDLING * usual:
        longest = length + length // (SLACK * multiple) * multiple
        groups = _by_leaders(x, small, spread, usual, longest, multiple, aligned)
        if groups is not None:
            within = float(spreads(x, groups.segments).mean())
            best = groups if how == "groups" or within < found else best
            found = min(found, within)
    if how == "auto" and float(spreads(x, sequence).mean()) <= found:
        return best._replace(segments=sequence, how="sequence")
    return best


def spreads(x: Tensor, segments: Tensor) -> Tensor:
    """Mean squared distance of the tokens of each segment from their mean."""
    real = (segments >= 0).unsqueeze(2).to(x.dtype)
    tokens = x[segments.clamp(min=0)] * real
    count = real.sum(1).clamp(min=1)
    away = (tokens - tokens.sum(1, keepdim=True) / count.unsqueeze(1)) * real
    return away.square().sum((1, 2)) / count.squeeze(1)


def repeated(segments: Tensor) -> Tensor:
    """The same with the real tokens of a segment repeated in its empty places."""
    count = (segments >= 0).sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(segments.shape[1], device=segments.device) % count
    return segments.gather(1, place).clamp(min=0)


def _filled(positions: Tensor, length: int) -> Tensor:
    return torch.cat([positions, positions.new_full((length - len(positions),), -1)])


def _by_tree(x: Tensor, depth: int, length: int) -> Tensor:
    """Leaves of a tree; where places are left over, tokens are repeated to build it."""
    place = torch.arange(length << depth, device=x.device)
    token = place % len(x)
    at = positions(x[token].unsqueeze(0), depth)[0]
    segments = torch.where(place < len(x), token, -1)[at].view(-1, length)
    return segments.sort(1, descending=True).values


def _by_leaders(
    x: Tensor,
    tree: Tensor,
    spread: Tensor,
    usual: float,
    longest: int,
    multiple: int,
    aligned: bool,
) -> Arrangement | None:
    """Groups around leaders, in the order of the tree, in segments that are no longer than they
    have to be; None where there is nothing to lead."""
    means = _tight_means(x, tree, spread, usual)
    leaders = _leaders(means, REACH * usual)
    if leaders is None:
        return None
    member, away = _nearest(x, leaders)
    compared = len(leaders)
    lost = (away > FAR * usual).nonzero().squeeze(1)
    if len(lost) >= tree.shape[1]:
        again = _by_tree(x[lost], *leaf_layout(len(lost), tree.shape[1]))
        again = torch.where(again >= 0, lost[again], -1)
        more = _tight_means(x, again, spreads(x, again), usual)
        leaders = _leaders(torch.cat([leaders, more]), REACH * usual)
        if leaders is None:
            return None
        member, away = _nearest(x, leaders)
        compared += len(leaders)
    member = torch.where(away > FAR * usual, len(leaders), member)
    token = tree[tree >= 0]  # in the order of the tree
    token = token[member[token].argsort(stable=True)]
    member = member[token]
    count = torch.bincount(member, minlength=len(leaders) + 1)
    segments = (count + longest - 1) // longest
    length = int(((count + segments - 1) // segments.clamp(min=1)).max())
    length += -length % multiple
    rank = torch.arange(len(token), device=x.device) - (count.cumsum(0) - count)[member]
    within, size = segments[member], count[member]
    own = rank * within // size  # segments of a group are equally full
    place = rank - (own * size + within - 1) // within
    first, total = _places(segments, aligned)
    filled = token.new_full((total, length), -1)
    filled[first[member] + own, place] = token
    return Arrangement(filled, compared, "groups")


def _places(segments: Tensor, aligned: bool) -> tuple[Tensor, int]:
    """Where the segments of each group begin, and how many places there are in all."""
    if aligned:
        segments = 2 ** (2 * segments - 1).clamp(min=1).log2().floor().long()  # powers of two
    order = segments.argsort(descending=True, stable=True) if aligned else slice(None)
    first = torch.empty_like(segments)
    first[order] = segments[order].cumsum(0) - segments[order]
    return first, int(segments.sum())


def _tight_means(x: Tensor, segments: Tensor, spread: Tensor, usual: float) -> Tensor:
    """Means of segments that do not straddle, or of as many of them as are enough."""
    tight = (spread <= TIGHT * usual).nonzero().squeeze(1)
    tight = tight[:: max(1, len(tight) // CANDIDATES)]
    return x[repeated(segments[tight])].mean(1)


def _nearest(x: Tensor, leaders: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest leader of every token, and its squared distance."""
    score, member = (x @ leaders.T - leaders.square().sum(1) / 2).max(1)
    return member, x.square().sum(1) - 2 * score


def _leaders(means: Tensor, reach: float) -> Tensor | None:
    """Means of which no two are within reach, taken in order until none is left."""
    distance = torch.cdist(means, means).square()
    free = torch.ones(len(means), dtype=torch.bool, device=means.device)
    chosen: list[int] = []
    while bool(free.any()):
        if len(chosen) == MOST_LEADERS:
            return None
        chosen.append(int(free.nonzero()[0]))
        free &= distance[chosen[-1]] > reach
        free[chosen[-1]] = False
    return means[chosen] if len(chosen) > 1 else None
