"""The heads of the two models that come with the package, as they read generated text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ..downstream.documents import KIND, row
from ..downstream.models import FOLDER, load_model
from ..models import attending, exact, is_causal
from .heads import Capture, Choice, Source, chosen_heads

LAYERS, HEADS = 6, 4
SHOWN = 12  # heads of a model, unless the user says so
NAMES = {"causal": "shipped causal", "diffusion": "shipped diffusion"}


def missing(folder: Path = FOLDER) -> str | None:
    """Why the heads cannot be measured; None: they can."""
    if find_spec("transformers") is None:
        return 'The heads of the shipped models are left out: pip install "supportbasis[hf]".'
    if not all((folder / kind / "model.safetensors").is_file() for kind in NAMES):
        return f"The heads of the shipped models are left out: there are no weights in {folder}."
    return None


def sources(choice: Choice, seed: int, tokens: int) -> list[Source]:
    """Some heads of both models."""
    chosen = chosen_heads("a shipped model", LAYERS, HEADS, SHOWN if choice is None else choice)

    def source(kind: str) -> Source:
        return Source(
            NAMES[kind], tokens, len(chosen), lambda: captures(kind, tokens, seed, chosen)
        )

    return [source(kind) for kind in NAMES]


@torch.no_grad()
def captures(kind: str, tokens: int, seed: int, chosen: list[tuple[int, int]]) -> Iterator[Capture]:
    recorded: list[tuple[Tensor, Tensor, Tensor]] = []
    model = load_model(FOLDER / kind)
    text = [token % KIND for token in row(Random(f"frontier {seed}"), tokens)]

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        recorded.append((query, key, value))
        return exact(query, key, value, scale, causal)

    with attending(model, attend):
        model(torch.tensor([text]), use_cache=False)
    for layer, head in chosen:
        query, key, value = (x[0, head].contiguous() for x in recorded[layer])
        yield Capture(NAMES[kind], layer, str(head), query, key, value, is_causal(model))
