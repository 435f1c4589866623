"""Benchmark cases of lists: heads on a curved surface, and those of trained models at hand.

Independent Gaussian tokens have no short lists, whatever the method; heads as models have them do,
because their tokens lie close to something of few dimensions.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from supportbasis.methods import Auto, BlockSupport

from ..frontier import Models
from ..frontier.encoder import HEADS, LAYERS, Encoder
from ..frontier.heads import stacked
from ..frontier.language import Language
from ..study import models_from_environment
from .cases import LONG, MILLION, Case, Inputs

DIMENSIONS, SPREAD = 3, 2.0  # of the surface; of the scores
TOLERANCE, CAUSAL = 0.03, 0.05  # of encoders; of causal language models
TEXTS = (32768, 65536)  # tokens of causal language models
VIDEO = (32760, 115456)  # tokens of a clip
COLUMNS = 10  # of a table
FAIR, LARGE = 2e-2, 5e-2  # errors; from the second on a plan by budget is warned about


def curved(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as cosines of points of a cube, values as functions of the keys; scores have
    variance `SPREAD`."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda", generator=generator)

    slope, phase = 2 * normal(heads, DIMENSIONS, d), 2 * math.pi * uniform(heads, 1, d)
    query, key = (torch.cos(uniform(heads, n, DIMENSIONS) @ slope + phase) for _ in range(2))
    score = query[:, :512] @ key[:, :1024].transpose(1, 2) / math.sqrt(d)
    factor = (SPREAD / score.std()).sqrt()
    query, key = query * factor, key * factor
    value = torch.tanh(key @ normal(heads, d, d) / math.sqrt(d))
    query, key, value = (x.bfloat16().unsqueeze(0) for x in (query, key, value))
    return query, key, value


def table_rows(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of random weights over rows of a random table: 10 columns, a layer of neurons, a norm
    and three linear maps with PyTorch's initial weights, as a table model has them."""
    torch.manual_seed(0)
    width = heads * d
    first, *maps = (torch.nn.Linear(size, width).cuda() for size in (COLUMNS, width, width, width))
    with torch.no_grad():
        x = torch.randn(n, COLUMNS, device="cuda")
        x = torch.nn.functional.layer_norm(torch.nn.functional.gelu(first(x)), (width,))
        query, key, value = (
            each(x).bfloat16().view(n, heads, d).transpose(0, 1).contiguous().unsqueeze(0)
            for each in maps
        )
    return query, key, value


def host_cases() -> list[Case]:
    """Shapes of video denoisers (Wan 480p, HunyuanVideo 720p) and of table models."""
    return [
        *(
            Case("video, budget 0.1, curved", BlockSupport(0.1), curved, n, 128, heads=24,
                 limit=LARGE)
            for n in VIDEO
        ),
        Case("table rows, random weights", Auto(TOLERANCE), table_rows, LONG, 64, limit=TOLERANCE),
    ]  # fmt: skip


def list_cases() -> list[Case]:
    """Lists by budget, and heads of the models in the folder that the environment names."""
    few, more = BlockSupport(0.05), BlockSupport(0.1)  # own windows and tilts are counted, too
    name = "lists, budget {}, curved"
    return [
        Case(name.format(0.05), few, curved, LONG, 64, limit=FAIR),
        Case(name.format(0.05), few, curved, LONG, 64, backward=True, limit=FAIR),
        Case(name.format(0.05), few, curved, LONG, 64, causal=True, limit=LARGE),
        Case(name.format(0.05), few, curved, LONG, 128, causal=True, limit=LARGE),
        Case(name.format(0.05), few, curved, LONG, 64, causal=True, backward=True, limit=LARGE),
        Case(name.format(0.1), more, curved, LONG, 64, causal=True, backward=True, limit=LARGE),
        # about as many keys in open leaves as at 131072 tokens, or more
        Case(
            name.format(0.014),
            BlockSupport(0.014),
            curved,
            MILLION,
            64,
            limit=FAIR,
            baseline_n=LONG,
        ),
        Case(
            name.format(0.018),
            BlockSupport(0.018),
            curved,
            MILLION,
            64,
            causal=True,
            limit=2 * LARGE,
            baseline_n=LONG,
        ),
        *_trained(),
    ]


def _trained() -> list[Case]:
    if models_from_environment() is None:
        return []
    found = Models.find(None)
    for note in found.notes:
        warnings.warn(f"supportbasis: {note}", UserWarning, stacklevel=3)
    method = BlockSupport(tolerance=CAUSAL)
    text = [
        Case(
            f"lists, {model.name}",
            method,
            _heads_of(model),
            n,
            model.dim,
            causal=True,
            limit=CAUSAL,
        )
        for model in found.languages
        for n in model.within(TEXTS)
    ]
    return text + [
        Case(f"Auto, {model.name} layer {layer}", Auto(TOLERANCE), _layer_of(model, layer), LONG,
             model.dim, heads=HEADS, limit=TOLERANCE)
        for model in found.encoders
        for layer in range(LAYERS)
    ]  # fmt: skip


def _layer_of(model: Encoder, layer: int) -> Inputs:
    def make(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
        there = Encoder(model.name, {name: x.cuda() for name, x in model.weights.items()})
        chosen = frozenset(range(HEADS * layer, HEADS * layer + heads))
        found = list(there.captures(model.points(n, 0).cuda(), chosen))
        sides = (
            [getattr(capture, name) for capture in found] for name in ("query", "key", "value")
        )
        query, key, value = (torch.stack(side).bfloat16().unsqueeze(0) for side in sides)
        return query, key, value

    return make


def _heads_of(model: Language) -> Inputs:
    """Heads spread evenly over the layers of a language model."""

    def make(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
        total = model.layers * model.heads
        numbers = [total * (2 * i + 1) // (2 * heads) for i in range(heads)]
        chosen = [divmod(number, model.heads) for number in numbers]
        found = list(model.captures(n, chosen, None, torch.device("cuda")))
        query, key, value = stacked(found)
        return query.bfloat16(), key.bfloat16(), value.bfloat16()

    return make
