"""Frames: coordinates in which scores are easier, without changing any of them.

With centres a of the queries and c of the keys and maps A, B with A B^T = I,

    scale <q, k> = <x, y> + scale <q, c> + scale <a, k - c>,
    x = sqrt(scale) (q - a) A,    y = sqrt(scale) (k - c) B:

softmax does not see the second term, which is one number for each row, and the third is a
log-weight of each key. So any frame is valid for any data. A good one makes <x, y> small and its
coordinates independent: `balanced` centres both sides and gives them equal, diagonal covariances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..components.cotangent import Gradients
from ..problem.caching import WeakCache
from ..problem.problem import Head

LARGEST_LEAN = 1.0  # standard deviation of the log-weights that centring queries gives the keys
FRAME_TOKENS = 1024  # of each side, at most, that the covariances are taken from
FLOOR = 1e-3  # of the largest variance: directions below are not stretched any further


@dataclass(frozen=True, eq=False)
class Frame:
    """Centres [d] and maps [d, d] in float64, and the variance that each coordinate had."""

    query_centre: Tensor
    key_centre: Tensor
    query_map: Tensor
    key_map: Tensor
    spectrum: Tensor  # [d], descending: of x and of y

    @cached_property
    def is_plain(self) -> bool:
        """Whether tokens stay as they are, up to the root of the scale."""
        centres = bool(self.query_centre.any()) or bool(self.key_centre.any())
        identity = torch.eye(len(self.spectrum), dtype=torch.float64)
        maps = (x.cpu() for x in (self.query_map, self.key_map))
        return not centres and all(torch.equal(x, identity) for x in maps)

    @cached_property
    def spread(self) -> float:
        """The standard deviation of <x, y>."""
        return float(self.spectrum.square().sum().sqrt())

    def apply(self, head: Head) -> Head:
        """The same head in this frame: scale 1, and key log-weights that hold the third term."""
        root, like = math.sqrt(head.scale), head.query.new_empty((), dtype=head.dtype)
        if self.is_plain:
            weight = head.key_log_weight
            return replace(
                head,
                query=head.query.to(like) * root,
                key=head.key.to(like) * root,
                key_log_weight=like.new_zeros(head.m) if weight is None else weight.to(like),
                scale=1.0,
            )
        query = (head.query.to(like) - self.query_centre.to(like)) @ self.query_map.to(like)
        key = head.key.to(like) - self.key_centre.to(like)
        shift = (key @ self.query_centre.to(like)) * head.scale
        if head.key_log_weight is not None:
            shift = shift + head.key_log_weight.to(like)
        return replace(
            head,
            query=query.mul_(root),
            key=(key @ self.key_map.to(like)).mul_(root),
            key_log_weight=shift,
            scale=1.0,
        )

    def pull_back(self, inside: Gradients, total: Gradients, scale: float) -> None:
        """Add gradients of a head in this frame to those of the head itself, all but the values';
        those of its rows' log-factors are those of `row_shift`."""
        root, like = math.sqrt(scale), inside.query
        assert inside.query_log_weight is not None and inside.key_log_weight is not None
        if total.key_log_weight is not None:
            total.key_log_weight += inside.key_log_weight
        if self.is_plain:
            total.query.add_(inside.query, alpha=root)
            total.key.add_(inside.key, alpha=root)
            return
        total.query.addmm_(inside.query, self.query_map.to(like).T, alpha=root)
        total.query.addr_(inside.query_log_weight, self.key_centre.to(like), alpha=scale)
        total.key.addmm_(inside.key, self.key_map.to(like).T, alpha=root)
        total.key.addr_(inside.key_log_weight, self.query_centre.to(like), alpha=scale)

    def row_shift(self, head: Head, rows: Tensor | None) -> Tensor:
        """The second term: what the log-sums of the rows lack in this frame."""
        query = (head.query if rows is None else head.query[rows]).to(head.dtype)
        return (query @ self.key_centre.to(query)) * head.scale


_inside: WeakCache[Head, Frame, Head] = WeakCache()
_own: WeakCache[Head, str, Frame] = WeakCache()


def plain_frame(head: Head) -> Frame:
    """The frame that leaves tokens as they are, made once."""
    zeros = torch.zeros(head.dim, dtype=torch.float64, device=head.query.device)
    identity = torch.eye(head.dim, dtype=torch.float64, device=head.query.device)
    return _own.get(head, "plain", lambda: Frame(zeros, zeros, identity, identity, zeros))


def framed(head: Head, frame: Frame) -> Head:
    """A head in a frame, computed once."""
    return _inside.get(head, frame, lambda: frame.apply(head))


def release(head: Head) -> None:
    """Drop what `framed` keeps for a head that lives on."""
    _inside.drop(head)


def prefix_of(head: Head) -> int | None:
    """Tokens at the start of a causal head whose rows are exact, and which alone make its frame:
    so nothing depends on what comes later. None where every row sees every key."""
    return min(head.n, max(64, head.n // 32)) if head.is_causal else None


def own_frame(head: Head) -> Frame:
    """The balanced frame of a head, made once; of a causal head from its prefix. Tokens that only
    numbers beyond the dtype of the sums could balance stay as they are."""

    def make() -> Frame:
        frame, largest = balanced(head, prefix_of(head)), torch.finfo(head.dtype).max
        parts = (frame.query_centre, frame.key_centre, frame.query_map, frame.key_map)
        fits = all(bool((x.abs() < math.sqrt(largest)).all()) for x in parts)
        return frame if fits else plain_frame(head)

    return _own.get(head, "balanced", make)


def balanced(head: Head, tokens: int | None = None) -> Frame:
    """The frame of a head, from its first ``tokens`` tokens (None: all of them), or from as many
    of these as are enough, evenly spaced.

    With covariances Lq Lq^T and Lk Lk^T and the singular values U S V^T of Lq^T Lk, the maps
    A = Lq^-T U S^1/2 and B = Lk^-T V S^1/2 give both sides the covariance S, and A B^T = I.
    """
    query, key = head.query[:tokens], head.key[:tokens]
    if head.key_log_weight is not None:
        key = key[head.key_log_weight[:tokens] > -math.inf]
    query, key = (x[:: math.ceil(len(x) / FRAME_TOKENS) or 1].double() for x in (query, key))
    query_centre, query_root = _moments(query)
    key_centre, key_root = _moments(key)
    lean = head.scale * float((query_centre @ key_root).norm())  # of the key weights it makes
    query_centre = query_centre * min(1.0, LARGEST_LEAN / max(lean, LARGEST_LEAN))
    left, spectrum, right = torch.linalg.svd(query_root.T @ key_root)
    stretch = spectrum.sqrt()
    query_map = torch.linalg.solve(query_root.T, left) * stretch
    key_map = torch.linalg.solve(key_root.T, right.T) * stretch
    # in the order of a loaded plan: a product rounds otherwise in another one
    maps = (query_map.contiguous(), key_map.contiguous())
    return Frame(query_centre, key_centre, *maps, spectrum * head.scale)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and a root L of the covariance, L L^T, with no direction far below the others."""
    dim = x.shape[1]
    identity = torch.eye(dim, dtype=x.dtype, device=x.device)
    if not len(x):
        return x.new_zeros(dim), identity
    centre = x.mean(0)
    away = x - centre
    largest = float(away.abs().max()) if dim else 0.0
    unit = largest if largest > 1e100 else 1.0  # so that no square overflows
    away = away / unit
    values, vectors = torch.linalg.eigh(away.T @ away / len(x))
    largest = float(values[-1]) if dim else 0.0
    if not largest > 0:
        return centre, identity
    return centre, vectors * values.clamp(min=FLOOR * largest).sqrt() * unit
