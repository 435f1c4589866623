"""Balancing transforms: affine maps of queries and keys that keep softmax attention unchanged.

With centres a of the queries and c of the keys and maps A, B with A B^T = I,

    scale <q, k> = <x, y> + scale <q, c> + scale <a, k - c>,
    x = sqrt(scale) (q - a) A,    y = sqrt(scale) (k - c) B:

softmax does not depend on the second term, which is constant in each row, and the third is a
log-weight of each key. So any transform is valid for any data. `balancing_transform` makes <x, y>
small and its coordinates independent: x and y are centred, with equal, diagonal covariances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..problem.caching import WeakCache
from ..problem.problem import Head

LARGEST_DEVIATION = 1.0  # of the log-weights that centring the queries gives the keys
TRANSFORM_TOKENS = 1024  # of each side, at most, that the covariances are taken from
FLOOR = 1e-3  # of the largest variance: directions below are not stretched any further


@dataclass(frozen=True, eq=False)
class Transform:
    """Centres a, c [d] and maps A, B [d, d] in float64, and the covariance of x and of y."""

    query_centre: Tensor
    key_centre: Tensor
    query_map: Tensor
    key_map: Tensor
    eigenvalues: Tensor  # [d], descending, of both covariances

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether its entries, and products of two, do not overflow in this dtype."""
        largest = math.sqrt(torch.finfo(dtype).max)
        return all(bool((part.abs() < largest).all()) for part in vars(self).values())

    def apply(self, head: Head) -> Head:
        """The transformed head: queries x, keys y, scale 1, and the third term as log-weights."""
        root, like = math.sqrt(head.scale), head.query.new_empty((), dtype=head.dtype)
        query, key = head.query.to(like), head.key.to(like) - self.key_centre.to(like)
        query = (query - self.query_centre.to(like)) @ self.query_map.to(like)
        weight = (key @ self.query_centre.to(like)) * head.scale + head.log_weights(head.dtype)
        key = key @ self.key_map.to(like) * root
        return replace(head, query=query * root, key=key, key_log_weight=weight, scale=1.0)

    def pull_back(self, side: str, grad: Tensor, of_logs: Tensor, scale: float) -> Tensor:
        """Gradients of queries or keys from those of the transformed ones, and of the logs that
        come with them: `row_shift` for queries, log-weights for keys."""
        linear, centre = self.query_map, self.key_centre
        if side == "key":
            linear, centre = self.key_map, self.query_centre
        grad = grad @ (linear.to(grad).T * math.sqrt(scale))
        return grad.addr_(of_logs, centre.to(grad), alpha=scale)

    def row_shift(self, head: Head, rows: Tensor | None) -> Tensor:
        """The second term, scale <q, c> [rows], which log-sums of the transformed head lack."""
        query = (head.query if rows is None else head.query[rows]).to(head.dtype)
        return (query @ self.key_centre.to(query)) * head.scale


transformed_heads: WeakCache[Head, Transform, Head] = WeakCache()


def transformed(head: Head, transform: Transform) -> Head:
    """The transformed head, computed once for each head and transform."""
    return transformed_heads.get(head, transform, lambda: transform.apply(head))


def prefix_of(head: Head) -> int | None:
    """Length of the prefix of a causal head that determines its transform and whose rows are exact,
    so that no row depends on later tokens; None if the head is not causal."""
    return min(head.n, max(64, head.n // 32)) if head.is_causal else None


def balancing_transform(head: Head) -> Transform:
    """The transform of a head, from evenly spaced tokens; of a causal head, from its prefix.

    With covariances Lq Lq^T and Lk Lk^T and the singular values U S V^T of Lq^T Lk, the maps
    A = Lq^-T U S^1/2 and B = Lk^-T V S^1/2 give both sides the covariance S, and A B^T = I."""
    tokens = prefix_of(head)
    query, key = head.query[:tokens], head.key[:tokens]
    if head.key_log_weight is not None:
        key = key[head.key_log_weight[:tokens] > -math.inf]
    query, key = (x[:: math.ceil(len(x) / TRANSFORM_TOKENS) or 1].double() for x in (query, key))
    query_centre, query_root = _moments(query)
    key_centre, key_root = _moments(key)
    deviation = head.scale * float((query_centre @ key_root).norm())  # of the keys' log-weights
    query_centre = query_centre * min(1.0, LARGEST_DEVIATION / max(deviation, LARGEST_DEVIATION))
    left, eigenvalues, right = torch.linalg.svd(query_root.T @ key_root)
    stretch = eigenvalues.sqrt()
    query_map = torch.linalg.solve(query_root.T, left) * stretch
    key_map = torch.linalg.solve(key_root.T, right.T) * stretch
    # contiguous as in a loaded plan: products round differently for other strides
    maps = (query_map.contiguous(), key_map.contiguous())
    return Transform(query_centre, key_centre, *maps, eigenvalues * head.scale)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and a root L of the covariance, L L^T, with no direction far below the others."""
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    if not x.numel():
        return x.new_zeros(x.shape[1]), identity
    centre = x.mean(0)
    away = x - centre
    largest = float(away.abs().max())
    unit = largest if largest > 1e100 else 1.0  # so that no square overflows
    away = away / unit
    values, vectors = torch.linalg.eigh(away.T @ away / len(x))
    largest = float(values[-1])
    if not largest > 0:
        return centre, identity
    return centre, vectors * values.clamp(min=FLOOR * largest).sqrt() * unit
