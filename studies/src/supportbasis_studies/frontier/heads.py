"""Heads to measure on: queries, keys and values of one attention head, and generated ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from supportbasis import InputError

DIM = 64
CLUSTERS = 64
SPREAD, LOOSE = 0.1, 0.3  # of tokens around their centre, in units of the centres' spread
SINKS, SINK_SCORE = 4, 10.0
SAMPLED = 1024  # queries and keys from which the spread of scores is estimated

SYNTHETIC = "synthetic"


@dataclass(frozen=True, eq=False)
class Capture:
    """One head: query [n, d], key [m, d], value [m, dv], scale 1/√d."""

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

    def to(self, *options: torch.device | torch.dtype) -> Capture:
        """On a device, or in a dtype."""
        query, key, value = self.query, self.key, self.value
        for option in options:
            query, key, value = (x.to(option) for x in (query, key, value))
        return replace(self, query=query, key=key, value=value)

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


def stacked(heads: Sequence[Capture]) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of one layer as `sb.attention` takes them: [1, heads, tokens, dim]."""
    query, key, value = (
        torch.stack([getattr(head, side) for head in heads]).unsqueeze(0)
        for side in ("query", "key", "value")
    )
    return query, key, value


Choice = int | tuple[tuple[int, int], ...] | None  # how many heads, or which; None: all


def parse_heads(text: str | None) -> Choice:
    """The heads that a user asks for: a number of them, or layer.head, several with commas.

    >>> parse_heads("6"), parse_heads("0.1, 3.0")
    (6, ((0, 1), (3, 0)))
    """
    if text is None:
        return None
    try:
        if "." not in text:
            count = int(text)
            if count < 1:
                raise ValueError
            return count
        named = [part.split(".") for part in text.split(",")]
        pairs = sorted({(int(layer), int(head)) for layer, head in named})
        if min(min(pair) for pair in pairs) < 0:
            raise ValueError
    except ValueError:
        raise InputError(
            f"--heads: got {text!r}, expected a number of heads such as 6, or heads by layer and "
            "number such as 0.0,3.1"
        ) from None
    return tuple(pairs)


def chosen_heads(model: str, layers: int, heads: int, choice: Choice) -> list[tuple[int, int]]:
    """Layer and number of each chosen head; a number of them is spread over layers and heads.

    >>> chosen_heads("tsp50", 3, 8, 3)
    [(0, 0), (1, 1), (2, 2)]
    """
    if isinstance(choice, tuple):
        for layer, head in choice:
            if layer >= layers or head >= heads:
                raise InputError(
                    f"--heads: {model} has no head {layer}.{head}; expected layers from 0 to "
                    f"{layers - 1} and heads from 0 to {heads - 1}"
                )
        return list(choice)
    count = layers * heads
    kept = count if choice is None else min(choice, count)
    pairs = (divmod(i * count // kept, heads) for i in range(kept))
    return sorted((layer, (head + layer) % heads) for layer, head in pairs)


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
