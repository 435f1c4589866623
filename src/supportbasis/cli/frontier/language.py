"""The heads of a causal language model in the form of transformers, as it tells a story."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError
from ..capture import observed
from .heads import Capture, Source, spread

CONFIG = "config.json"  # a folder that holds one is such a model
LONGEST = 512  # tokens, and no more than the model's context
START = "Once upon a time"

Recorded = list[tuple[Tensor, Tensor, Tensor]]


def check(folder: Path) -> None:
    """Raise where the heads of a model cannot be measured."""
    if find_spec("transformers") is None:
        raise InputError('it needs pip install "supportbasis[hf]"')
    _sizes(folder)


def source(folder: Path, limit: int | None) -> Source:
    """Some heads of the model in a folder, evenly spread."""
    layers, heads, tokens = _sizes(folder)
    chosen = spread(layers * heads, limit)

    def make() -> Iterator[Capture]:
        try:
            recorded = _record(folder, tokens)
        except (OSError, ValueError) as error:
            raise InputError(f"--models: {folder.name} cannot be run ({error})") from None
        if len(recorded) != layers:
            said = f"{len(recorded)} of {layers} layers of {folder.name} have such attention"
            raise InputError(f"--models: {said}")
        for number in chosen:
            layer, head = divmod(number, heads)
            query, key, value = (x[head].float().contiguous() for x in recorded[layer])
            yield Capture(folder.name, layer, str(head), query, key, value, is_causal=True)

    return Source(folder.name, tokens, len(chosen), make)


def _sizes(folder: Path) -> tuple[int, int, int]:
    """Layers, heads and tokens, from the configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    names = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        layers, heads, context = (int(getattr(config, name)) for name in names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{CONFIG} cannot be used ({error})") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{CONFIG} is of {config.model_type}, no causal language model")
    return layers, heads, min(context, LONGEST)


@torch.no_grad()
def _record(folder: Path, tokens: int) -> Recorded:
    """Queries and keys after rotation, and values, of each layer: [heads, tokens, dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    recorded: Recorded = []

    def observe(_: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        recorded.append((query[0], key[0], value[0]))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    start = AutoTokenizer.from_pretrained(folder, local_files_only=True)(
        START, return_tensors="pt"
    ).input_ids
    length = tokens - start.shape[1]
    story = model.generate(
        start, do_sample=False, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
    )
    with observed(model, observe):
        model(story, use_cache=False)
    return recorded
