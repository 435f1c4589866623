"""Heads to measure on: queries, keys and values of one attention head, and generated ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

DIM = 64
CLUSTERS = 64
SPREAD, LOOSE = 0.1, 0.3  # of tokens around their centre, in units of the centres' spread
SINKS, SINK_SCORE = 4, 10.0
SAMPLED = 1024  # queries and keys from which the spread of scores is estimated

SYNTHETIC = "synthetic"


@dataclass(frozen=True, eq=False)
class Capture:
    """One head: query [n, d], key [m, d], value [m, dv], all float32, scale 1/√d."""

    model: str
    layer: int
    head: str  # its number in a trained model, its name among the generated ones
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False

    @property
    def n(self) -> int:
        return self.query.shape[0]

    @property
    def m(self) -> int:
        return self.key.shape[0]

    @property
    def d(self) -> int:
        return self.query.shape[1]

    @property
    def dv(self) -> int:
        return self.value.shape[1]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.d)

    @property
    def name(self) -> str:
        if self.model == SYNTHETIC:
            return self.head
        return f"{self.layer}.{self.head}"

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `sb.attention` takes them: [1, 1, tokens, dim]."""
        query, key, value = (x[None, None] for x in (self.query, self.key, self.value))
        return query, key, value

    @cached_property
    def sigma(self) -> float:
        """The standard deviation of its scores, from evenly spaced tokens."""
        query, key = (x[:: max(1, len(x) // SAMPLED)].double() for x in (self.query, self.key))
        score = query @ key.T * self.scale
        if self.is_causal and len(query) == len(key):
            score = score[torch.ones_like(score).tril().bool()]
        return float(score.std())


@dataclass(frozen=True, eq=False)
class Source:
    """Heads of one model at one length, made when they are asked for."""

    model: str
    n: int
    count: int
    make: Callable[[], Iterator[Capture]]

    def __str__(self) -> str:
        return f"{self.model}, n={self.n}"


def spread(count: int, limit: int | None) -> list[int]:
    """At most ``limit`` numbers below ``count``, evenly spaced.

    >>> spread(24, 3)
    [0, 8, 16]
    """
    kept = count if limit is None else min(limit, count)
    return [i * count // kept for i in range(kept)]


Maker = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _to_sigma(query: Tensor, key: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Both sides scaled alike, so that scores have this standard deviation."""
    factor = math.sqrt(sigma / Capture("", 0, "", query, key, key).sigma)
    return query * factor, key * factor


def diffuse(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores of standard deviation 0.5 that live in 16 directions."""
    rank = 16
    basis = torch.linalg.qr(_normal(DIM, rank, generator=generator))[0]
    query, key = (_normal(n, rank, generator=generator) @ basis.T for _ in range(2))
    return _to_sigma(query, key, 0.5)


def clusters(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores of standard deviation 4; queries and keys in 64 clusters each."""
    query = _clustered(n, _centres(generator), SPREAD, generator)
    return _to_sigma(query, _clustered(n, _centres(generator), SPREAD, generator), 4.0)


def loose_clusters(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same with clusters so wide that within them scores still vary by more than one."""
    query = _clustered(n, _centres(generator), LOOSE, generator)
    return _to_sigma(query, _clustered(n, _centres(generator), LOOSE, generator), 4.0)


def own_cluster(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Wide clusters that are common: every query looks for the keys of its own."""
    centres = _centres(generator)
    query = _clustered(n, centres, LOOSE, generator)
    return _to_sigma(query, _clustered(n, centres, LOOSE, generator), 4.0)


def _centres(generator: torch.Generator) -> Tensor:
    return _normal(CLUSTERS, DIM, generator=generator)


def _clustered(n: int, centres: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    member = torch.randint(CLUSTERS, (n,), generator=generator)
    return centres[member] + spread * _normal(n, DIM, generator=generator)


def isotropic(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores of standard deviation 1 in all directions alike: the hard case."""
    query, key = (_normal(n, DIM, generator=generator) for _ in range(2))
    return _to_sigma(query, key, 1.0)


def sinks(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The diffuse head with four keys at the start that every query scores about 10."""
    query, key = diffuse(n, generator)
    direction = _normal(DIM, generator=generator)
    direction /= direction.norm()
    query = query + direction
    key[:SINKS] = direction * SINK_SCORE * math.sqrt(DIM)
    return query, key


MAKERS: dict[str, Maker] = {
    "diffuse": diffuse,
    "clusters": clusters,
    "loose clusters": loose_clusters,
    "own cluster": own_cluster,
    "isotropic": isotropic,
    "sinks": sinks,
}


def synthetic(n: int, seed: int, names: tuple[str, ...] | None = None) -> Iterator[Capture]:
    """The generated heads, d=64, with values from N(0, 1).

    >>> [head.name for head in synthetic(128, 0)]
    ['diffuse', 'clusters', 'loose clusters', 'own cluster', 'isotropic', 'sinks']
    """
    for name, make in MAKERS.items():
        if names is not None and name not in names:
            continue
        generator = torch.Generator().manual_seed(seed)
        query, key = make(n, generator)
        value = _normal(n, DIM, generator=generator)
        yield Capture(SYNTHETIC, 0, name, query, key, value)
