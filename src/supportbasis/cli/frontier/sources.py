"""Where heads come from: trained models in a folder, and generated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import InputError
from ..folders import VARIABLE, models_from_environment
from . import encoder, shipped, stories
from .heads import MAKERS, SYNTHETIC, Capture, Source, spread, synthetic


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

    tsp50: encoder.Encoder | None
    stories: Path | None
    notes: tuple[str, ...]

    @staticmethod
    def find(folder: Path | None) -> Models:
        """The models in the folder, or in that of the environment variable."""
        named = folder or models_from_environment()
        if named is None:
            note = (
                f"No trained models: neither --models nor {VARIABLE} names a folder with tsp50/ "
                "and stories260K/. Only generated heads are measured."
            )
            return Models(None, None, (note,))
        if not named.is_dir():
            raise InputError(f"--models: there is no folder {named}")
        loaded, path, notes = None, named / stories.MODEL, []
        if (named / encoder.MODEL).is_dir():
            loaded = encoder.Encoder.load(named / encoder.MODEL)
        else:
            notes.append(f"--models: no folder {encoder.MODEL} in it; its heads are left out.")
        problem = stories.missing(path)
        if problem:
            notes.append(problem)
        return Models(loaded, None if problem else path, tuple(notes))

    def tsp_source(self, n: int, seed: int, chosen: Sequence[int]) -> Source:
        """The chosen heads of tsp50 with n points."""
        assert self.tsp50 is not None
        model, wanted = self.tsp50, frozenset(chosen)

        def make() -> Iterator[Capture]:
            return model.captures(encoder.random_points(n, seed), wanted)

        return Source(encoder.MODEL, n, len(wanted), make)


def sources(models: Models, extent: Extent, seed: int) -> list[Source]:
    """Everything whose errors are measured, shortest first."""
    made = [synthetic_source(n, seed, extent.heads) for n in extent.synthetic]
    if models.stories is not None:
        made.append(stories.source(models.stories, extent.heads))
    if shipped.missing() is None:
        made += [found for n in extent.shipped for found in shipped.sources(extent.heads, seed, n)]
    if models.tsp50 is not None:
        chosen = spread(encoder.LAYERS * encoder.HEADS, extent.heads)
        made += [models.tsp_source(n, seed, chosen) for n in extent.lengths]
    return made


def synthetic_source(n: int, seed: int, heads: int | None) -> Source:
    names = tuple(MAKERS)[:heads]
    return Source(SYNTHETIC, n, len(names), lambda: synthetic(n, seed, names))
