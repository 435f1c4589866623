"""Models and texts that commands read: folders, or names on the hub. Needs transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, SupportBasisError

CONTEXT = ("max_position_embeddings", "max_sequence_length")  # in a configuration
CHARACTERS = 8  # for each token that is wanted: how much of a text the tokenizer is given first


@dataclass(frozen=True)
class Access:
    """What the user allows while a model is loaded."""

    download: bool = False
    remote_code: bool = False


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model of transformers in evaluation, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any  # None: the model takes pictures
    context: int | None  # most tokens it can take; None: no limit known

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def tokens(self, path: Path, count: int) -> Tensor:
        """The first ``count`` tokens of a text, or all that there are, [tokens]."""
        if self.tokenizer is None:
            raise InputError(f"--text: {self.name} takes pictures, not text")
        try:
            text = path.read_text(encoding="utf-8", errors="ignore")
        except OSError as error:
            raise InputError(f"--text: {path} cannot be read ({error.strerror})") from None
        first = CHARACTERS * count
        ids = self.tokenizer(text[:first], verbose=False).input_ids
        if len(ids) <= count and first < len(text):  # of as many the last may be half a word
            ids = self.tokenizer(text, verbose=False).input_ids
        if not ids:
            raise InputError(f"--text: {path} has no tokens of {self.name}")
        return torch.tensor(ids[:count], device=self.device)


def load_model(
    name: str, access: Access, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """A model with logits where it has any: causal, masked, or with code of its own. Without a
    ``dtype``, float32 on a CPU, elsewhere that of its file."""
    check_installed()
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_folder(name)
    device = torch.device(device)
    options = {"local_files_only": not access.download, "trust_remote_code": access.remote_code}
    chosen = dtype or (torch.float32 if device.type == "cpu" else "auto")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(name, **options)
        brought = getattr(config, "auto_map", None) or {}
        kind: Any = transformers.AutoModel
        for better in (transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM):
            if better.__name__ in brought or type(config) in better._model_mapping:
                kind = better
        if kind.__name__ in brought and access.remote_code:
            mend(name, brought[kind.__name__], config, access.download)
        model = kind.from_pretrained(name, config=config, dtype=chosen, **options)
        model.to(device).eval()
        is_visual = model.main_input_name == "pixel_values"
        tokenizer = (
            None if is_visual else transformers.AutoTokenizer.from_pretrained(name, **options)
        )
    except Exception as error:  # code of others fails in ways of its own
        raise InputError(why(name, access, error)) from None
    label = Path(name).resolve().name if Path(name).is_dir() else name
    limits = (getattr(config, key, None) for key in CONTEXT)
    return LoadedModel(label, model, tokenizer, next((n for n in limits if n is not None), None))


def check_installed() -> None:
    """Raise an `InputError` with the line to install where transformers is missing."""
    if find_spec("transformers") is None:
        raise InputError('reading a model needs transformers: pip install "supportbasis[hf]"')


def check_folder(name: str) -> None:
    """A name that can only be a folder must be one."""
    folder = Path(name)
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise InputError(f"model: there is no folder {name}")


def why(name: str, access: Access, error: Exception) -> str:
    """One line: what is missing and the way out."""
    if "trust_remote_code" in str(error):
        return f"model: {name} brings its own code; read it, then add --trust-remote-code"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if Path(name).is_dir():
        return f"model: {name} cannot be read as a model of transformers ({first})"
    if not access.download:
        return (
            f"model: {name} is neither a folder nor among the models on this machine; add "
            "--download to fetch it"
        )
    return (
        f"model: {name} could not be fetched ({first}); check the name and the network, or give "
        "the folder of a model that you have"
    )


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Whatever goes wrong inside, in code that comes with a model too, is said in one line."""
    try:
        yield
    except (SupportBasisError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        said = ": ".join([type(error).__name__, *first])
        raise InputError(f"model: {name} failed as it ran ({said})") from error


def chosen_device(name: str | None) -> torch.device:
    """A device that PyTorch sees and that knows float64; None: a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError):
        raise InputError(
            f"--device: PyTorch sees no device {name!r} here; expected cpu, or one that it sees "
            "and that knows float64, for example cuda or cuda:1"
        ) from None
    return device


def chosen_dtype(name: str | None) -> torch.dtype | None:
    """A floating-point type of PyTorch by its name."""
    names = ("float32", "float16", "bfloat16", "float64")
    if name is not None and name not in names:
        raise InputError(f"--dtype: got {name!r}, expected one of {', '.join(names)}")
    return None if name is None else getattr(torch, name)


def mend(name: str, reference: str, config: Any, download: bool) -> None:
    """Add what transformers 5 expects of a model's own code and older code lacks (LLaDA's): a map
    of tied weights, arguments of ``tie_weights``, ``use_cache``."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module as get_class

    brought: Any = get_class(reference, name, local_files_only=not download)
    if not hasattr(brought, "all_tied_weights_keys"):
        brought.all_tied_weights_keys = {}  # an instance whose code calls post_init has its own
    tie_weights = brought.tie_weights
    if "missing_keys" not in inspect.signature(tie_weights).parameters:

        @wraps(tie_weights)
        def tie(model: Any, missing_keys: Any = None, recompute_mapping: bool = True) -> None:
            tie_weights(model)

        brought.tie_weights = tie
    if not hasattr(config, "use_cache"):
        config.use_cache = False
