"""The heads of a causal language model in the form of transformers, as it reads a text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from supportbasis import InputError

from ..models import observed
from .heads import Capture, Choice, Source, chosen_heads

CONFIG = "config.json"  # a folder that holds one is such a model
NEEDED = ("transformers", "safetensors")
CHARACTERS = 6  # of a token, about: how much text the tokenizer is given at first
FILES = {"local_files_only": True, "trust_remote_code": False}


Recorded = dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]  # by layer and head


class _Enough(Exception):
    """The last layer that was asked for has been seen."""


@dataclass(frozen=True)
class Language:
    """A model by its folder, and its sizes."""

    folder: Path
    layers: int
    heads: int
    context: int  # most tokens
    dim: int  # of a head

    @staticmethod
    def of(folder: Path) -> Language:
        """Read the configuration."""
        if any(find_spec(name) is None for name in NEEDED):
            raise InputError(
                'it needs transformers and safetensors: pip install "supportbasis[hf]"'
            )
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        names = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        try:
            config = AutoConfig.from_pretrained(folder, **FILES)
            sizes = [int(getattr(config, name)) for name in names]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{CONFIG} cannot be used ({error})") from None
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(f"{CONFIG} is of {config.model_type}, no causal language model")
        dim = getattr(config, "head_dim", None) or config.hidden_size // sizes[1]
        layers, heads, context = sizes
        return Language(folder, layers, heads, context, int(dim))

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def within(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths that its context holds, or the context where it holds none of them."""
        return tuple(n for n in lengths if n <= self.context) or (self.context,)

    def source(self, n: int, choice: Choice, text: Path | None, device: torch.device) -> Source:
        """Chosen heads on the first n tokens of a text."""
        chosen = chosen_heads(self.name, self.layers, self.heads, choice)
        return Source(self.name, n, len(chosen), lambda: self.captures(n, chosen, text, device))

    def captures(
        self, n: int, chosen: list[tuple[int, int]], text: Path | None, device: torch.device
    ) -> Iterator[Capture]:
        """Queries and keys after rotation, and values; layers beyond the last are not computed."""
        tokens = self._tokens(text, n).to(device)
        try:
            recorded = self._record(tokens, chosen)
        except (OSError, ValueError) as error:
            raise InputError(f"--model: {self.name} cannot be run ({error})") from None
        for pair in chosen:
            if pair not in recorded:
                raise InputError(
                    f"--model: layer {pair[0]} of {self.name} attends neither through "
                    "transformers' interface nor by PyTorch's attention; it cannot be seen"
                )
            yield Capture(self.name, pair[0], str(pair[1]), *recorded.pop(pair), is_causal=True)

    @torch.no_grad()
    def _record(self, tokens: Tensor, chosen: list[tuple[int, int]]) -> Recorded:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        recorded: Recorded = {}
        last = max(layer for layer, _ in chosen)

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
            shared = query.shape[1] // key.shape[1]
            for number in (head for at, head in chosen if at == layer):
                sides = (query[0, number], key[0, number // shared], value[0, number // shared])
                q, k, v = (x.float().contiguous() for x in sides)
                recorded[layer, number] = q, k, v
            if layer == last:
                raise _Enough

        dtype = torch.float32 if tokens.device.type == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, **FILES)
        model.to(tokens.device).eval()
        with suppress(_Enough), observed(model, observe):
            model.base_model(tokens.unsqueeze(0), use_cache=False)
        return recorded

    def _tokens(self, path: Path | None, n: int) -> Tensor:
        """The first n of a file, or of the standard library."""
        from transformers import AutoTokenizer

        text = standard_library() if path is None else read_text(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **FILES)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"--model: {self.name} has no usable tokenizer ({error})") from None
        length = CHARACTERS * n
        found: list[int] = []
        while len(found) <= n:  # the last may be half a word
            found = tokenizer(text[:length], verbose=False).input_ids
            if length >= len(text):
                break
            length *= 2
        if not found:
            raise InputError(f"--model: the tokenizer of {self.name} knows no words")
        if len(found) < n:
            said = "the standard library" if path is None else path
            raise InputError(f"--text: {said} has {len(found)} tokens of {self.name}, expected {n}")
        return torch.tensor(found[:n])


def standard_library() -> str:
    """Python's own modules, each headed by its name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    return "".join(f"# file: {path.name}\n{read_text(path)}" for path in files)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise InputError(f"--text: {path} cannot be read ({error.strerror})") from None
