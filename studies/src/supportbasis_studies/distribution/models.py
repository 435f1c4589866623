"""Models to look into: a folder, a name on the hub, one of the paper's, or the built-in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from supportbasis import InputError

PRESETS = {
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "opt": "facebook/opt-1.3b",
    "llada": "GSAI-ML/LLaDA-8B-Base",
    "phi-2": "microsoft/phi-2",
    "vit": "google/vit-base-patch16-224",
}
BUILT_IN = "built-in"
LAYERS = 4  # of the built-in model
RANDOM = (
    "The weights of the built-in model are random: it shows that everything works offline, and "
    "says nothing about trained models."
)
INSTALL = 'reading a model needs transformers: pip install "supportbasis[hf]"'


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that computes attention, and how text becomes its input."""

    name: str
    model: Any
    encode: Callable[[str], Tensor] | None  # tokens of a text; None: the model sees pictures
    context: int | None  # most tokens it can take; None: no limit known
    picture: tuple[int, int] | None = None  # channels and pixels on a side
    is_random: bool = False


@dataclass(frozen=True)
class Access:
    """What the user allows while a model is loaded."""

    download: bool = False
    remote_code: bool = False


def check_installed() -> None:
    if find_spec("transformers") is None:
        raise InputError(INSTALL)


def check_folder(name: str) -> None:
    """A name that can only be a folder must be one."""
    folder = Path(name)
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise InputError(f"--model: there is no folder {name}")


def load(name: str | None, access: Access) -> Loaded:
    """The model of this name; without one, the built-in."""
    check_installed()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if name is None or name == BUILT_IN:
        return _built_in()
    check_folder(name)
    return _from_files(PRESETS.get(name, name), access)


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


def _from_files(name: str, access: Access) -> Loaded:
    from transformers import AutoConfig, AutoModel

    options = {"local_files_only": not access.download, "trust_remote_code": access.remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        model = AutoModel.from_pretrained(name, dtype="auto", **options).eval()
        is_visual = model.main_input_name == "pixel_values"
        encode = None if is_visual else _tokenizer(name, options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(why(name, access, error)) from None
    label = Path(name).name if Path(name).is_dir() else name
    context = getattr(config, "max_position_embeddings", None)
    if not is_visual:
        return Loaded(label, model, encode, context)
    return Loaded(label, model, None, None, (config.num_channels, config.image_size))


def _tokenizer(name: str, options: dict[str, bool]) -> Callable[[str], Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **options)

    def encode(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt").input_ids[0]

    return encode


def why(name: str, access: Access, error: Exception) -> str:
    """One line: what is missing and the way out."""
    text = str(error)
    if "trust_remote_code" in text:
        return f"--model: {name} brings its own code; read it, then add --trust-remote-code"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if Path(name).is_dir():
        return f"--model: {name} cannot be read as a model of transformers ({first})"
    if not access.download:
        return (
            f"--model: {name} is neither a folder nor among the models on this machine; add "
            "--download to fetch it, or leave --model out for what is built in"
        )
    return (
        f"--model: {name} could not be fetched ({first}); check the name and the network, or give "
        "the folder of a model that you have"
    )
