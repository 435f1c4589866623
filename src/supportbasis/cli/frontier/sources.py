"""Where heads come from: trained models in a folder, and generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import InputError
from ..folders import VARIABLE, models_from_environment
from . import language, shipped
from .encoder import HEADS, LAYERS, Encoder
from .heads import MAKERS, SYNTHETIC, Source, spread, synthetic


@dataclass(frozen=True)
class Extent:
    """How long the inputs are and what is measured on them."""

    lengths: tuple[int, ...]  # of the trained model's inputs
    synthetic: tuple[int, ...]  # of the generated heads
    budgets: tuple[float, ...]
    keys: tuple[int, ...]  # further budgets of our method, in keys a query
    heads: int | None = None  # of each model, at most
    work: tuple[int, int] = (32, 4100)  # least and most keys a query that a budget may stand for
    timed: tuple[int, ...] = (16384, 65536, 131072)
    timed_synthetic: tuple[int, ...] = (65536,)
    growth: tuple[int, ...] = (16384, 65536, 262144)
    growth_heads: int = 6
    shipped: tuple[int, ...] = ()  # lengths of texts for the models that come with the package

    def budgets_at(self, n: int) -> list[float]:
        """Budgets of all methods at a length: neither next to nothing nor endless work."""
        least, most = self.work
        kept = [budget for budget in self.budgets if least <= budget * n <= most]
        return kept or [min(self.budgets)]

    def our_budgets_at(self, n: int) -> list[float]:
        """The same, and further ones for keys a query."""
        further = (count / n for count in self.keys if count <= n / 2)
        return sorted({*self.budgets_at(n), *further})


KEYS = (128, 192, 256, 384, 512, 1024)
BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5)
FULL = Extent((1024, 4096, 16384, 65536), (16384,), BUDGETS, KEYS, shipped=(4096,))
QUICK = Extent(
    (1024, 4096),
    (4096,),
    (0.05, 0.15),
    (256,),
    timed=(8192, 16384),
    timed_synthetic=(8192,),
    growth=(8192, 16384, 32768),
    growth_heads=2,
)


def frontier_extent(extent: Extent, lengths: Sequence[int] | None, heads: int | None) -> Extent:
    """The extent with the user's lengths, for all inputs, and number of heads."""
    if not lengths:
        return replace(extent, heads=heads)
    chosen = tuple(sorted(set(lengths)))
    return replace(
        extent, lengths=chosen, synthetic=chosen, timed=chosen, timed_synthetic=chosen,
        growth=chosen, heads=heads, shipped=chosen if extent.shipped else (),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Models:
    """What was found, and what the user should know about it."""

    encoders: tuple[Encoder, ...]
    languages: tuple[Path, ...]
    notes: tuple[str, ...]

    @staticmethod
    def find(folder: Path | None) -> Models:
        """The models in the folder, or in that of the environment variable: encoders, and causal
        language models where transformers is there to run them."""
        named = folder or models_from_environment()
        if named is None:
            note = (
                f"No trained models: neither --models nor {VARIABLE} names a folder with folders "
                "such as tsp50 and stories260K. Only generated heads are measured."
            )
            return Models((), (), (note,))
        if not named.is_dir():
            said = VARIABLE if folder is None else "--models"
            raise InputError(f"{said}: there is no folder {named}")
        encoders: list[Encoder] = []
        languages: list[Path] = []
        notes: list[str] = []
        for path in sorted(named.iterdir()):
            if not path.is_dir() or path.name.startswith("."):
                continue
            try:
                if (path / language.CONFIG).is_file():
                    language.check(path)
                    languages.append(path)
                else:
                    encoders.append(Encoder.load(path))
            except InputError as error:
                notes.append(f"--models: {path.name} is left out: {error}.")
        if not encoders and not languages:
            notes.append(f"--models: there is no model in {named}.")
        return Models(tuple(encoders), tuple(languages), tuple(notes))


def encoder_source(model: Encoder, n: int, seed: int, chosen: Sequence[int]) -> Source:
    """The chosen heads of an encoder with n points."""
    wanted = frozenset(chosen)
    return Source(model.name, n, len(wanted), lambda: model.captures(model.points(n, seed), wanted))


def sources(models: Models, extent: Extent, seed: int) -> list[Source]:
    """Everything whose errors are measured, shortest first."""
    made = [synthetic_source(n, seed, extent.heads) for n in extent.synthetic]
    made += [language.source(folder, extent.heads) for folder in models.languages]
    if shipped.missing() is None:
        made += [found for n in extent.shipped for found in shipped.sources(extent.heads, seed, n)]
    chosen = spread(LAYERS * HEADS, extent.heads)
    for n in extent.lengths:
        made += [encoder_source(model, n, seed, chosen) for model in models.encoders]
    return made


def synthetic_source(n: int, seed: int, heads: int | None) -> Source:
    names = tuple(MAKERS)[:heads]
    return Source(SYNTHETIC, n, len(names), lambda: synthetic(n, seed, names))
