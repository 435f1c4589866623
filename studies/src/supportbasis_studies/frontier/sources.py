"""Where heads come from: trained models, and generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from supportbasis import InputError

from ..study import MODELS, models_from_environment
from . import language, shipped
from .encoder import HEADS, LAYERS, Encoder
from .heads import MAKERS, SYNTHETIC, Choice, Source, chosen_heads, synthetic
from .language import Language

SHORTEST = 256
FEW = 6  # heads of a language model, unless the user says so


@dataclass(frozen=True)
class Extent:
    """How long the inputs are and what is measured on them."""

    encoders: tuple[int, ...]  # points
    languages: tuple[int, ...]  # tokens of the text, within the model's context
    synthetic: tuple[int, ...]  # tokens of the generated heads
    shipped: tuple[int, ...]  # tokens of texts for the models that come with the package
    budgets: tuple[float, ...]
    tolerances: tuple[float, ...]
    heads: Choice = None


FULL = Extent(
    (4096, 16384, 65536), (8192, 16384, 32768, 65536), (16384,), (4096,),
    (0.02, 0.05, 0.1, 0.2, 0.4), (0.01, 0.03, 0.1),
)  # fmt: skip
QUICK = Extent((4096,), (8192,), (4096,), (), (0.05, 0.15), (0.03,), 3)


def parse_lengths(text: str | None) -> tuple[int, ...]:
    """The lengths that a user asks for, shortest first; none: those of the study.

    >>> parse_lengths("16384,8192")
    (8192, 16384)
    """
    if text is None:
        return ()
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
        if lengths[0] < SHORTEST:
            raise ValueError
    except ValueError:
        raise InputError(
            f"--lengths: got {text!r}, expected numbers of tokens from {SHORTEST} on, with commas"
        ) from None
    return lengths


def frontier_extent(extent: Extent, lengths: tuple[int, ...], heads: Choice) -> Extent:
    """The extent with the user's lengths, for all inputs, and heads."""
    extent = replace(extent, heads=extent.heads if heads is None else heads)
    if not lengths:
        return extent
    some = lengths if extent.shipped else ()
    return replace(extent, encoders=lengths, languages=lengths, synthetic=lengths, shipped=some)


@dataclass(frozen=True, eq=False)
class Models:
    """What was found, and what the user should know about it."""

    encoders: tuple[Encoder, ...]
    languages: tuple[Language, ...]
    notes: tuple[str, ...] = ()
    alone: bool = False  # nothing else is measured

    @staticmethod
    def find(folder: Path | None) -> Models:
        """The models in the folder, or in that of the environment variable: encoders, and causal
        language models where transformers is there to run them."""
        named = folder or models_from_environment()
        if named is None:
            note = (
                f"No trained models: neither --model, --models nor {MODELS} names a folder. Only "
                "heads that come with the package are measured."
            )
            return Models((), (), (note,))
        if not named.is_dir():
            said = MODELS if folder is None else "--models"
            raise InputError(f"{said}: there is no folder {named}")
        found, notes = [], []
        for path in sorted(named.iterdir()):
            if not path.is_dir() or path.name.startswith("."):
                continue
            try:
                found.append(load(path))
            except InputError as error:
                notes.append(f"--models: {path.name} is left out: {error}.")
        if not found:
            notes.append(f"--models: there is no model in {named}.")
        return Models.of(found, tuple(notes))

    @staticmethod
    def only(folder: Path, lengths: tuple[int, ...]) -> Models:
        """The model in a folder, and that its context holds the lengths the user asks for."""
        if not folder.is_dir():
            raise InputError(f"--model: there is no folder {folder}")
        try:
            model = load(folder)
        except InputError as error:
            raise InputError(f"--model: {folder.name}: {error}") from None
        if isinstance(model, Language) and lengths and lengths[-1] > model.context:
            raise InputError(
                f"--lengths: {lengths[-1]} is more than the context of {model.name}, "
                f"{model.context} tokens"
            )
        return Models.of([model], alone=True)

    @staticmethod
    def of(
        found: Sequence[Encoder | Language], notes: tuple[str, ...] = (), alone: bool = False
    ) -> Models:
        encoders = tuple(model for model in found if isinstance(model, Encoder))
        languages = tuple(model for model in found if isinstance(model, Language))
        return Models(encoders, languages, notes, alone)


def load(folder: Path) -> Encoder | Language:
    """A language model if the folder holds a configuration, else an encoder of points."""
    is_language = (folder / language.CONFIG).is_file()
    return Language.of(folder) if is_language else Encoder.load(folder)


def sources(
    models: Models, extent: Extent, seed: int, text: Path | None, device: torch.device
) -> list[Source]:
    """Everything that is measured, each kind shortest first."""
    if text is not None and not models.languages:
        raise InputError("--text is read by causal language models, and there is none: add --model")
    made = []
    if not models.alone:
        made += [synthetic_source(n, seed, extent.heads) for n in extent.synthetic]
        if shipped.missing() is None:
            few = extent.heads
            made += [found for n in extent.shipped for found in shipped.sources(few, seed, n)]
    for model in models.languages:
        heads = FEW if extent.heads is None else extent.heads
        made += [model.source(n, heads, text, device) for n in model.within(extent.languages)]
    for encoder in models.encoders:
        on_device = encoder.to(device)
        made += [encoder_source(on_device, n, seed, extent.heads) for n in extent.encoders]
    return made


def encoder_source(model: Encoder, n: int, seed: int, choice: Choice) -> Source:
    """Chosen heads of an encoder with n points."""
    pairs = chosen_heads(model.name, LAYERS, HEADS, choice)
    wanted = frozenset(HEADS * layer + head for layer, head in pairs)
    return Source(model.name, n, len(wanted), lambda: model.captures(model.points(n, seed), wanted))


def synthetic_source(n: int, seed: int, choice: Choice) -> Source:
    names = tuple(MAKERS)[: choice if isinstance(choice, int) else None]
    return Source(SYNTHETIC, n, len(names), lambda: synthetic(n, seed, names))
