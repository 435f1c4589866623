"""The heads of attention encoders trained on points of a plane, such as tsp50 on tours.

They have no positional encoding: they take any number of points of the unit square, or cube.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from supportbasis import InputError, attention
from supportbasis.methods import Auto

from .heads import Capture

MODEL = "tsp50"  # the one whose form others have
FILE = "model.safetensors"
INPUT = "init_embed"
LAYERS, HEADS = 3, 8
NORMALISING, EPSILON = ("running_mean", "running_var", "weight", "bias"), 1e-5
LONGEST_EXACT = 131072  # beyond, layers are passed with an error of 0.1 % instead of exactly
PASSING = Auto(1e-3)


@dataclass(frozen=True, eq=False)
class Encoder:
    """The weights by their names in the file, and the name of its folder."""

    name: str
    weights: dict[str, Tensor]

    @staticmethod
    def load(folder: Path) -> Encoder:
        """Read the file of a folder."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / FILE
        if not path.is_file():
            raise InputError(f"it has no file {FILE}")
        try:
            weights = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{FILE} cannot be read ({error})") from None
        for name in _names():
            if name not in weights:
                raise InputError(f"{FILE} has no tensor {name}, which {MODEL} has")
        for name in (f"{_layer(i)}0.module.W_query" for i in range(LAYERS)):
            if len(weights[name]) != HEADS:
                shape = tuple(weights[name].shape)
                raise InputError(f"{name} is {shape}, expected {HEADS} heads")
        return Encoder(folder.name, weights)

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.weights[f"{_layer(0)}0.module.W_query"].shape[2]

    def to(self, device: torch.device) -> Encoder:
        return Encoder(self.name, {name: x.to(device) for name, x in self.weights.items()})

    def points(self, n: int, seed: int) -> Tensor:
        """Uniform in the unit square; of an encoder that is told more, in the unit cube."""
        dim = self.weights[f"{INPUT}.weight"].shape[1]
        drawn = torch.rand(n, dim, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.weights[f"{INPUT}.weight"].device)

    @torch.no_grad()
    def captures(self, points: Tensor, chosen: frozenset[int]) -> Iterator[Capture]:
        """Heads of ``chosen`` numbers (8 · layer + head) as they see points [n, dim].

        A layer is computed only when a head beyond it is asked for.
        """
        hidden = F.linear(points, *self._linear(INPUT))
        for layer in range(LAYERS):
            query, key, value = (self._project(layer, x, hidden) for x in ("query", "key", "val"))
            for head in range(HEADS):
                if HEADS * layer + head in chosen:
                    parts = (query[head], key[head], value[head])
                    yield Capture(self.name, layer, str(head), *parts)
            if max(chosen, default=0) >= HEADS * (layer + 1):
                hidden = self._after(layer, hidden, query, key, value)

    def _linear(self, name: str) -> tuple[Tensor, Tensor]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def _project(self, layer: int, side: str, hidden: Tensor) -> Tensor:
        """[heads, n, 16]"""
        return hidden @ self.weights[f"{_layer(layer)}0.module.W_{side}"]

    def _after(
        self, layer: int, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """The output of a layer: attention and two linear maps, each added and normalised."""
        out = self.weights[f"{_layer(layer)}0.module.W_out"]
        mixed = hidden.clone()
        for head in range(HEADS):
            tensors = (x[head][None, None] for x in (query, key, value))
            mixed += _attend(*tensors)[0, 0] @ out[head]
        mixed = self._normalise(f"{_layer(layer)}1.normalizer", mixed)
        first, second = (self._linear(f"{_layer(layer)}2.module.{i}") for i in (0, 2))
        wide = F.linear(F.relu_(F.linear(mixed, *first)), *second)
        return self._normalise(f"{_layer(layer)}3.normalizer", mixed + wide)

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        mean, variance, weight, bias = (self.weights[f"{name}.{part}"] for part in NORMALISING)
        return F.batch_norm(x, mean, variance, weight, bias, eps=EPSILON)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if query.shape[-2] <= LONGEST_EXACT:
        return F.scaled_dot_product_attention(query, key, value)
    output = attention(query, key, value, method=PASSING)
    assert isinstance(output, Tensor)
    return output


def _names() -> list[str]:
    """Of all tensors that are used."""
    parts = [f"0.module.W_{side}" for side in ("query", "key", "val", "out")]
    parts += [f"2.module.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    parts += [f"{i}.normalizer.{kind}" for i in (1, 3) for kind in NORMALISING]
    layers = [f"{_layer(index)}{part}" for index in range(LAYERS) for part in parts]
    return [f"{INPUT}.weight", f"{INPUT}.bias", *layers]


def _layer(index: int) -> str:
    return f"embedder.layers.{index}."
