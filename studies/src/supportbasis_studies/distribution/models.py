"""Models to look into: a folder, a name on the hub, one of the paper's, or the built-in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from supportbasis.cli.loading import Access, check_installed, load_model

PRESETS = {
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "opt": "facebook/opt-1.3b",
    "llada": "GSAI-ML/LLaDA-8B-Base",
    "llada-instruct": "GSAI-ML/LLaDA-8B-Instruct",
    "phi-2": "microsoft/phi-2",
    "vit": "google/vit-base-patch16-224-in21k",
}
BUILT_IN = "built-in"
LAYERS = 4  # of the built-in model
RANDOM = (
    "The weights of the built-in model are random: it shows that everything works offline, and "
    "says nothing about trained models."
)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that computes attention, and how text becomes its input."""

    name: str
    model: Any
    encode: Callable[[str], Tensor] | None  # tokens of a text; None: the model sees pictures
    context: int | None  # most tokens it can take; None: no limit known
    picture: tuple[int, int] | None = None  # channels and pixels on a side
    is_random: bool = False


def load(
    name: str | None,
    access: Access,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model of this name; without one, the built-in. Without a ``dtype``, float32 on a CPU,
    elsewhere that of its file."""
    check_installed()
    device = torch.device(device)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if name is None or name == BUILT_IN:
        made = _built_in()
        made.model.to(device, dtype or torch.float32)
        return made
    return _from_files(PRESETS.get(name.lower(), name), access, device, dtype)


def _built_in() -> Loaded:
    """In the manner of Llama, head dim 64, random weights, tokens are bytes."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaModel(config).eval()

    def encode(text: str) -> Tensor:
        return torch.tensor(list(text.encode()))

    return Loaded(BUILT_IN, model, encode, 4096, is_random=True)


def _from_files(
    name: str, access: Access, device: torch.device, dtype: torch.dtype | None
) -> Loaded:
    found = load_model(name, access, device, dtype)
    if found.tokenizer is None:
        config = found.model.config
        return Loaded(found.name, found.model, None, None, (config.num_channels, config.image_size))

    def encode(text: str) -> Tensor:
        ids: Tensor = found.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return ids

    return Loaded(found.name, found.model, encode, found.context)
