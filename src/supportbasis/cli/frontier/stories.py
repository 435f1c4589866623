"""The heads of stories260K, a small causal Llama, as it reads a story of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ..capture import observed
from .heads import Capture, Source, spread

MODEL = "stories260K"
LAYERS, HEADS = 5, 8
TOKENS = 512  # its context
START = "Once upon a time"

Recorded = list[tuple[Tensor, Tensor, Tensor]]


def missing(folder: Path) -> str | None:
    """Why its heads cannot be measured; None: they can."""
    if not folder.is_dir():
        return f"--models: no folder {MODEL} in it; its heads are left out."
    if find_spec("transformers") is None:
        return f'The heads of {MODEL} are left out: they need pip install "supportbasis[hf]".'
    return None


def source(folder: Path, limit: int | None) -> Source:
    """Some of its heads, evenly spread."""
    chosen = spread(LAYERS * HEADS, limit)

    def make() -> Iterator[Capture]:
        layers = _record(folder)
        for number in chosen:
            layer, head = divmod(number, HEADS)
            query, key, value = (x[head].float().contiguous() for x in layers[layer])
            yield Capture(MODEL, layer, str(head), query, key, value, is_causal=True)

    return Source(MODEL, TOKENS, len(chosen), make)


@torch.no_grad()
def _record(folder: Path) -> Recorded:
    """Queries and keys after rotation, and values, of each layer: [heads, tokens, dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    recorded: Recorded = []

    def observe(_: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        recorded.append((query[0], key[0], value[0]))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(START, return_tensors="pt").input_ids
    length = TOKENS - tokens.shape[1]
    story = model.generate(
        tokens, do_sample=False, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
    )
    with observed(model, observe):
        model(story, use_cache=False)
    return recorded
