"""What the distributions say, beside what the paper says: tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..numbers import percent
from ..study import Check, Grid, table
from .rows import Layer, SideRow
from .texts import REPEATED

MOMENTS: dict[str, Callable[[SideRow], str]] = {
    "std": lambda row: f"{row.std:.3g}",
    "max|x|": lambda row: f"{row.largest:.3g}",
    "proxy σ²": lambda row: f"{row.proxy:.3g}",
    "÷ Gaussian's": lambda row: f"{row.gaussian_ratio:.2g}",
}


def texts_of(layers: Sequence[Layer]) -> list[str]:
    return list(dict.fromkeys(layer.text for layer in layers))


def shown(layers: Sequence[Layer], text: str) -> list[Layer]:
    return [layer for layer in layers if layer.text == text]


def count(value: float) -> str:
    """A number of entries, however large or small."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def exponent(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "none"


def layer_table(layers: Sequence[Layer], text: str) -> Grid:
    """Queries and keys of every layer; red where more than half of the pairs are in A^(L)."""
    rows = [layer.sides[name] for layer in shown(layers, text) for name in ("query", "key")]
    title = f"{text}: n={rows[0].n}, √ln n = {rows[0].threshold:.3g}"
    columns: dict[str, Callable[[SideRow], str]] = {
        "entries of": lambda row: f"layer {row.layer}, {row.side}",
        **MOMENTS,
        "large entries": lambda row: f"{row.large_entries:,}",
        "share": lambda row: percent(100 * row.large_share),
        "a matrix": lambda row: count(row.large_entries / row.matrices),
        "bound": lambda row: count(row.bound),
        "α": lambda row: exponent(row.alpha),
        "large rows": lambda row: percent(100 * row.row_share),
        "pairs in A⁽ᴸ⁾": lambda row: percent(100 * row.pair_share),
    }
    return table(title, rows, columns, lost=lambda row: row.pair_share > 0.5)


def value_table(layers: Sequence[Layer], text: str) -> Grid:
    """Values, of which the method asks nothing but the paper draws them."""
    columns: dict[str, Callable[[SideRow], str]] = {
        "values": lambda row: f"layer {row.layer}",
        **MOMENTS,
        "share above √ln n": lambda row: percent(100 * row.large_share),
    }
    rows = [layer.sides["value"] for layer in shown(layers, text)]
    return table(f"{text}: values", rows, columns)


def summary_table(layers: Sequence[Layer], text: str) -> Grid:
    """A few columns of each layer, for the terminal."""

    def both(cell: Callable[[SideRow], str]) -> Callable[[Layer], str]:
        return lambda layer: " / ".join(cell(layer.sides[name]) for name in ("query", "key"))

    columns: dict[str, Callable[[Layer], str]] = {
        "Q / K": lambda layer: f"layer {layer.number}",
        "std": both(lambda row: f"{row.std:.2g}"),
        "proxy σ²": both(lambda row: f"{row.proxy:.2g}"),
        "large entries": both(lambda row: percent(100 * row.large_share)),
        "α": both(lambda row: exponent(row.alpha)),
        "large rows": both(lambda row: percent(100 * row.row_share)),
        "pairs": lambda layer: percent(100 * layer.sides["query"].pair_share),
    }
    return table(text, shown(layers, text), columns)


FEW_ENTRIES = 0.01  # share of entries above sqrt(ln n) that counts as few
FEW_PAIRS = 0.1  # share of pairs in A^(L) that counts as sparse
LIGHT = 2.0  # times the proxy of a Gaussian: up to here a tail counts as light
EARLY = 3  # layers in which the paper finds repeated tokens dispersed


def _entries(layers: Sequence[Layer]) -> list[SideRow]:
    return [layer.sides[name] for layer in layers for name in ("query", "key")]


def checks(layers: Sequence[Layer]) -> list[Check]:
    """The paper's statements on its figures, text by text."""
    made = []
    for text in texts_of(layers):
        rows = _entries(shown(layers, text))
        made += [_few(text, rows), _light(text, rows), _sparse(text, rows)]
    repeated = shown(layers, REPEATED)
    if len(repeated) > EARLY:
        made.append(_settles(repeated))
    return made


def _where(row: SideRow) -> str:
    return f"{row.side}, layer {row.layer}"


def _few(text: str, rows: Sequence[SideRow]) -> Check:
    worst = max(rows, key=lambda row: row.large_share)
    said = f"at most {percent(100 * worst.large_share)} ({_where(worst)})"
    statement = f"{text}: few entries (≤ {100 * FEW_ENTRIES:g} %) exceed √ln n in every layer"
    return Check(statement, said, worst.large_share <= FEW_ENTRIES)


def _light(text: str, rows: Sequence[SideRow]) -> Check:
    worst = max(rows, key=lambda row: row.gaussian_ratio)
    said = f"at most {worst.gaussian_ratio:.2g} × a Gaussian's ({_where(worst)})"
    statement = f"{text}: tails are sub-Gaussian-like (proxy ≤ {LIGHT:g} × that of a Gaussian)"
    return Check(statement, said, worst.gaussian_ratio <= LIGHT)


def _sparse(text: str, rows: Sequence[SideRow]) -> Check:
    worst = max(rows, key=lambda row: row.pair_share)
    said = f"at most {percent(100 * worst.pair_share)} (layer {worst.layer})"
    statement = f"{text}: so A⁽ᴸ⁾ is sparse (≤ {100 * FEW_PAIRS:g} % of the pairs at T = √ln n)"
    return Check(statement, said, worst.pair_share <= FEW_PAIRS)


def _settles(layers: Sequence[Layer]) -> Check:
    spread = [max(layer.sides[name].std for name in ("query", "key")) for layer in layers]
    early, late = (sum(part) / len(part) for part in (spread[:EARLY], spread[EARLY:]))
    said = f"standard deviation {early:.2g} in layers 0 to {EARLY - 1}, {late:.2g} after them"
    statement = f"{REPEATED}: dispersed in the first layers, concentrated later"
    return Check(statement, said, late < early)


def _span(shares: Sequence[float]) -> str:
    """From the smallest to the largest."""
    low, high = (percent(100 * share) for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def text_findings(layers: Sequence[Layer], text: str) -> list[str]:
    """How many layers have few large entries, and what that makes of rows and pairs."""
    mine = shown(layers, text)
    rows = _entries(mine)
    pairs = [layer.sides["query"].pair_share for layer in mine]
    alphas = [row.alpha for row in rows]
    shares = [row.large_share for row in rows]
    said = (
        f"{text}: {_span(shares)} of the entries of Q and K exceed √ln n = "
        f"{rows[0].threshold:.3g} (α from {exponent(min(alphas))} to {exponent(max(alphas))}), "
        f"{_span([row.row_share for row in rows])} of the rows hold one, and {_span(pairs)} of the "
        "pairs are in A⁽ᴸ⁾."
    )
    hidden = [
        str(layer.number)
        for layer in mine
        if layer.sides["query"].pair_share > 0.5
        and all(layer.sides[name].gaussian_ratio <= LIGHT for name in ("query", "key"))
    ]
    if not hidden:
        return [said]
    return [
        said,
        f"{text}: light tails and yet more than half of all pairs in A⁽ᴸ⁾, layer "
        f"{', '.join(hidden)}: a row of d entries is large as soon as one of them is.",
    ]
