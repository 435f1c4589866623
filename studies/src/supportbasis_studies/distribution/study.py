"""``supportbasis reproduce distribution``: run the model where rows are missing, write, print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from supportbasis import InputError
from supportbasis.cli.loading import Access, chosen_device, chosen_dtype, one_line
from supportbasis.cli.report import write_page

from ..figures import save
from ..files import folder_digest
from ..models import without_cache
from ..study import Machine, Records, Section, Steps, Tick, in_short, publish
from . import capture, findings, pictures
from .models import BUILT_IN, PRESETS, RANDOM, Loaded, load
from .rows import (
    BinRow,
    Layer,
    Origin,
    SideRow,
    before,
    before_unit,
    bin_rows,
    layers_of,
    side_rows,
)
from .stream import LayerStream
from .texts import Shown, inputs_for

TITLE = "supportbasis reproduce distribution"
LEAD = (
    "The entries of queries, keys and values in every layer of a model: the paper's figures of "
    "appendix L. They are shown as attention sees them, after rotary embeddings and before the "
    "scale, and of models with rotary embeddings also before those, as the projections give them: "
    "that is where the authors' scripts look. Entries are "
    "sub-Gaussian with variance proxy σ² when Pr(|x| ≥ t) ≤ 2·exp(−t²/σ²) for all t; σ² is the "
    "smallest that covers all entries of a layer, and 2·E[x²] for a Gaussian. A large entry "
    "exceeds T = √ln n, n being the tokens of a window; a matrix is one head of one window, of "
    "n × d entries, and n^α of them are large. The bound is Lemma D.2's, 2nd·exp(−T²/σ²). A row "
    "is large when one of its d entries is, and a pair is in A⁽ᴸ⁾ when its query row or its key "
    "row is: that is what would be computed exactly."
)

UNKNOWN = (
    "The projections of this model have names or a layout that the study does not know, so entries "
    "are shown only as attention sees them: after rotary embeddings, if it has any."
)


@dataclass(frozen=True)
class Wish:
    """What the user wants to see."""

    model: str | None = None
    text: Path | None = None
    window: int | None = None
    access: Access = field(default_factory=Access)
    windows: int | None = None  # at most
    device: str = "cpu"
    dtype: str | None = None  # None: float32 on a CPU, elsewhere that of the file

    @property
    def name(self) -> str:
        """Of the model, in the rows."""
        if self.model is None:
            return BUILT_IN
        folder = Path(self.model)
        if folder.is_dir():
            return folder.resolve().name
        return PRESETS.get(self.model.lower(), self.model)

    def unit(self, shown: Shown) -> str:
        """The model (of a folder, its files), what it is shown, its dtype if one is asked for."""
        parts = [self.name, shown.name, shown.digest]
        if self.model is not None and Path(self.model).is_dir():
            parts.append(folder_digest(self.model))
        return ", ".join([*parts, self.dtype] if self.dtype else parts)


def run_distribution(wish: Wish, out: Path, console: Console, *, redraw: bool = False) -> None:
    """Fill in the rows that the folder lacks; then the overview and a page for each layer."""
    machine = Machine.here()
    sides = Records(out / "layers.csv", SideRow, machine)
    bins = Records(out / "histograms.csv", BinRow, machine)
    if redraw:
        latest = {row.text: row.unit for row in sides.rows if row.model == wish.name}
        units = [unit for unit in latest.values() if bins.has(unit)]
        if not units:
            raise InputError(
                f"--redraw: {sides.path} holds no rows of {wish.name}; run the same command "
                "without --redraw"
            )
    else:
        units = _measured(wish, sides, bins, console)
    layers = layers_of(sides.of(units), bins.of(units))
    _publish(layers, out, machine, console)


# ---- running the model -----------------------------------------------------------------------


def _measured(
    wish: Wish, sides: Records[SideRow], bins: Records[BinRow], console: Console
) -> list[str]:
    device, dtype = chosen_device(wish.device), chosen_dtype(wish.dtype)
    loaded = load(wish.model, wish.access, device, dtype)
    if loaded.is_random:
        console.print(RANDOM, style="yellow")
    inputs = inputs_for(loaded, wish.text, wish.window, wish.windows)
    units: list[str] = []
    with Steps(console, len(inputs)) as steps:
        for shown in inputs:
            unit = wish.unit(shown)
            console.print(shown.said)
            with steps.step(f"{wish.name}, {shown.name}") as tick:
                if sides.has(unit) and bins.has(unit):
                    console.print(f"{shown.name}: found in {sides.path.name} and kept.")
                else:
                    seen, projected = _run(loaded, shown, device, tick)
                    count = len(shown.windows)
                    origin = Origin(unit, wish.name, loaded.is_random, shown.name, count)
                    if projected:
                        _add(before(origin), projected, sides, bins)
                    elif projected is None:
                        console.print(UNKNOWN, style="yellow")
                    _add(origin, seen, sides, bins)
            units += [unit] + [before_unit(unit)] * sides.has(before_unit(unit))
    return units


def _add(
    origin: Origin,
    streams: Sequence[LayerStream],
    sides: Records[SideRow],
    bins: Records[BinRow],
) -> None:
    bins.add(bin_rows(origin.unit, streams))
    sides.add(side_rows(origin, streams))


@torch.no_grad()
def _run(
    loaded: Loaded, shown: Shown, device: torch.device, tick: Tick
) -> tuple[list[LayerStream], list[LayerStream] | None]:
    """Every window through the model: its layers as attention sees them, and as the projections
    give them where that differs; None where projections of some layer are not known."""
    seen: list[LayerStream] = []
    projected: list[LayerStream] = []
    is_rotated = False

    def show(layer: capture.Layer) -> None:
        nonlocal is_rotated
        is_rotated = is_rotated or layer.is_rotated
        _stream(seen, layer.number, layer.seen)
        if layer.projected is not None:
            _stream(projected, layer.number, layer.projected)

    options = without_cache(loaded.model)
    for done, window in enumerate(shown.windows):
        given = {loaded.model.main_input_name: window.unsqueeze(0).to(device)}
        if shown.is_picture:
            given = {name: x.to(loaded.model.dtype) for name, x in given.items()}
        with one_line(loaded.name), capture.captured(loaded.model, show):
            loaded.model(**given, **options)
        tick((done + 1) / len(shown.windows))
    if len(projected) < len(seen):
        return seen, None
    return seen, projected if is_rotated else []


def _stream(streams: list[LayerStream], number: int, tokens: capture.Tokens) -> None:
    tokens = tuple(x.cpu() for x in tokens)  # type: ignore[assignment]
    if number == len(streams):
        streams.append(LayerStream(tokens[0].shape[-2]))
    streams[number].add(*tokens)


# ---- the report ------------------------------------------------------------------------------


def _publish(layers: Sequence[Layer], out: Path, machine: Machine, console: Console) -> None:
    first = layers[0].sides["query"]
    title = "The paper's statements on its figures, on this model"
    said = [RANDOM] * first.random_weights + [f"Model: {first.model}."]
    sections = [
        in_short(title, findings.checks(layers), *said),
        *(_text_section(layers, text, out) for text in findings.texts_of(layers)),
        _layers_section(layers, out),
        Section("One page for each layer", links=_layer_pages(layers, out)),
    ]
    publish(out, f"{TITLE}: {first.model}", LEAD, sections, machine, console)


def _text_section(layers: Sequence[Layer], text: str, out: Path) -> Section:
    picture = out / f"overview-{_slug(text)}.png"
    pictures.draw_overview(layers, text, picture)
    row = findings.shown(layers, text)[0].sides["query"]
    told = f"{row.windows} window{'s' if row.windows > 1 else ''} of n={row.n} tokens."
    caption = f"Entries of all layers, {text}; red: ±√ln n."
    grids = [findings.layer_table(layers, text), findings.value_table(layers, text)]
    shown = [findings.summary_table(layers, text)]
    said = findings.text_findings(layers, text)
    title = text[0].upper() + text[1:]
    return Section(title, told, said, grids, [(picture, caption)], printed=shown)


def _layers_section(layers: Sequence[Layer], out: Path) -> Section:
    lines, bounds = out / "layers.png", out / "bounds.png"
    pictures.draw_layers(layers, lines)
    pictures.draw_bounds(layers, bounds)
    shown = [
        (lines, "Spread, tail, large entries, large rows and pairs of every layer."),
        (bounds, "Large entries of a matrix beside the bound of the fitted proxy."),
    ]
    text = (
        "Few large entries do not make few large rows: a row has d entries, and one is enough. "
        "The bound uses the proxy fitted to the same entries, so that it always holds."
    )
    return Section("Layer by layer", text, figures=shown)


def _layer_pages(layers: Sequence[Layer], out: Path) -> dict[str, str]:
    """A page for each layer with the histograms and tails of all texts: addresses and names."""
    folder = out / "layers"
    folder.mkdir(exist_ok=True)
    lead = (
        "Left: entries, red lines at ±√ln n. Right: entries above a threshold, a matrix, and the "
        "fitted sub-Gaussian envelope."
    )
    back = Section("Back", links={"../report.html": "all layers"})
    pages = {}
    for number in dict.fromkeys(layer.number for layer in layers):
        mine = [layer for layer in layers if layer.number == number]
        title = f"{mine[0].sides['query'].model}: layer {number}"
        page = folder / f"layer-{number:02d}.html"
        write_page(page, title, lead, [*(_layer_section(layer, folder) for layer in mine), back])
        pages[f"layers/{page.name}"] = f"layer {number}"
    return pages


def _layer_section(layer: Layer, folder: Path) -> Section:
    figures = []
    for name, what, profile in (
        ("qk", "queries and keys", layer.profile()),
        ("v", "values", layer.value_profile()),
    ):
        path = folder / f"layer-{layer.number:02d}-{_slug(layer.text)}-{name}.png"
        save(profile.plot(), path)
        figures.append((path, f"Layer {layer.number}, {layer.text}: {what}."))
    text = f"{layer.profile()}\n\n{layer.value_profile()}"
    return Section(layer.text, figures=figures, verbatim=text)


def _slug(text: str) -> str:
    """A name for files.

    >>> _slug("h repeated")
    'h-repeated'
    """
    kept = "".join(letter if letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")
