"""Rows of the study: a line for each layer and side, and the bins of its histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from supportbasis.analysis import EntryProfile, LargeEntries, SideProfile

from ..study import Row
from .stream import LABEL, LayerStream, SideStream

ALPHA = 0.5
SHARES = (0.5, 0.99, 0.999)


@dataclass(frozen=True)
class SideRow(Row):
    """The entries of one of query, key and value in one layer."""

    model: str
    random_weights: bool
    text: str
    windows: int
    n: int
    layer: int
    side: str
    matrices: int
    d: int
    mean: float
    std: float
    largest: float
    median: float  # of magnitudes, as are the next two
    q99: float
    q999: float
    proxy: float
    threshold: float  # sqrt(ln n)
    large_entries: int
    large_share: float
    alpha: float  # large entries of a matrix are n^alpha
    bound: float  # on their expected number in a matrix
    tail: float
    gaussian_tail: float
    large_rows: int
    row_share: float
    pair_share: float  # of the layer: pairs in A^(L)

    @property
    def gaussian_ratio(self) -> float:
        """Proxy over that of a Gaussian of this second moment: 1 for a Gaussian."""
        square = self.std**2 + self.mean**2
        return self.proxy / (2 * square) if square else 1.0


@dataclass(frozen=True)
class BinRow(Row):
    """One bin of a histogram over [-largest, largest]."""

    layer: int
    side: str
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Origin:
    """What all rows of a unit have in common."""

    unit: str
    model: str
    random_weights: bool
    text: str
    windows: int


BEFORE = "before rotary embedding"


def before_unit(unit: str) -> str:
    """The unit of the same model and text whose entries are those of the projections."""
    return f"{unit}, {BEFORE}"


def before(origin: Origin) -> Origin:
    """The same with entries of the projections."""
    return replace(origin, unit=before_unit(origin.unit), text=f"{origin.text}, {BEFORE}")


def side_rows(origin: Origin, streams: Sequence[LayerStream]) -> list[SideRow]:
    return [
        _side_row(origin, layer, side, stream.pairs)
        for layer, stream in enumerate(streams)
        for side in stream.sides
    ]


def _side_row(origin: Origin, layer: int, side: SideStream, pairs: float) -> SideRow:
    made = side.profile(ALPHA)
    (large,) = made.large
    median, q99, q999 = (side.sketch.quantile(share) for share in SHARES)
    return SideRow(
        **asdict(origin),
        n=made.n,
        layer=layer,
        side=made.name,
        matrices=made.matrices,
        d=made.d,
        mean=made.mean,
        std=made.std,
        largest=made.largest,
        median=median,
        q99=q99,
        q999=q999,
        proxy=made.proxy,
        threshold=large.threshold,
        large_entries=large.entries,
        large_share=large.entries / made.entries,
        alpha=large.alpha,
        bound=large.bound,
        tail=large.tail,
        gaussian_tail=large.gaussian_tail,
        large_rows=large.rows,
        row_share=large.row_share,
        pair_share=pairs,
    )


def bin_rows(unit: str, streams: Sequence[LayerStream]) -> list[BinRow]:
    rows = []
    for layer, stream in enumerate(streams):
        for side in stream.sides:
            counts, largest = side.sketch.histogram(), side.sketch.largest
            edges = [largest * (2 * i / len(counts) - 1) for i in range(len(counts) + 1)]
            rows += [
                BinRow(unit, layer, side.name, low, high, count)
                for low, high, count in zip(edges, edges[1:], counts, strict=False)
            ]
    return rows


@dataclass(frozen=True, eq=False)
class Layer:
    """The rows of one layer shown one text."""

    text: str
    number: int
    sides: dict[str, SideRow]
    bins: dict[str, list[BinRow]]

    def profile(self) -> EntryProfile:
        """Queries and keys, as `EntryProfile.of` would have made it."""
        query, key = self._side("query"), self._side("key")
        row = self.sides["query"]
        return EntryProfile(ALPHA, (LABEL,), (row.threshold,), query, key, (row.pair_share,))

    def value_profile(self) -> EntryProfile:
        row = self.sides["value"]
        side = self._side("value")
        return EntryProfile(ALPHA, (LABEL,), (row.threshold,), side, None, None)

    def _side(self, name: str) -> SideProfile:
        row = self.sides[name]
        large = LargeEntries(
            row.threshold, row.large_entries, row.large_rows, row.row_share, row.alpha, row.bound,
            row.tail, row.gaussian_tail,
        )  # fmt: skip
        counts = tuple(item.count for item in self.bins[name])
        moments = (row.mean, row.std, row.largest, row.proxy)
        return SideProfile(name, row.matrices, row.n, row.d, *moments, (large,), counts)


def layers_of(rows: Sequence[SideRow], bins: Sequence[BinRow]) -> list[Layer]:
    """In the order of the texts, then of the layers."""
    found: dict[tuple[str, int], Layer] = {}
    texts: dict[str, str] = {}
    for row in rows:
        texts[row.unit] = row.text
        layer = found.setdefault((row.unit, row.layer), Layer(row.text, row.layer, {}, {}))
        layer.sides[row.side] = row
    for item in bins:
        if (item.unit, item.layer) in found:
            found[item.unit, item.layer].bins.setdefault(item.side, []).append(item)
    return list(found.values())
