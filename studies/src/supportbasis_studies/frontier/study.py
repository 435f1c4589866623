"""``supportbasis bench frontier``: measure, write, print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console

from supportbasis.cli.report import write_csv

from ..study import Machine, Section, Steps, Tick, publish
from . import findings, pictures, shipped
from .heads import SYNTHETIC, Capture, Source
from .measure import ROWS, Row, measure_heads
from .sources import Extent, Models, sources
from .summary import Group, groups

TITLE = "supportbasis bench frontier"
LEAD = (
    "Error against cost and against time of our methods and of published approximations, written "
    f"from their papers. The error is the relative Frobenius error of a head's output on {ROWS} "
    "sampled query rows against float64 attention. The cost counts multiply-adds relative to exact "
    "attention, everything included: pooling, hashing, sorting, selection. A baseline chooses its "
    "sizes so that its cost is within the budget. Times are of ours, whole heads with the plan "
    "given, best of several calls in turns with SDPA (on a GPU its fastest backend, and the "
    "measured heads of a layer in one call). Baselines are not timed: pictures of time show them, "
    "dotted, where their cost would be at SDPA's rate. Scale 1/√d; float32, on a GPU bfloat16."
)
CAPTION = (
    "Medians over heads; bands from the 10th to the 90th percentile of the errors of ours. Errors "
    f"below {pictures.FLOOR:g} are drawn there. “Top blocks, oracle” is no method: each row keeps "
    "the blocks of keys that hold most of its exact weight, and drops the rest."
)


@dataclass(frozen=True)
class Wish:
    """What the user asks for beside the models."""

    extent: Extent
    text: Path | None
    device: torch.device
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


def run_frontier(wish: Wish, models: Models, out: Path, console: Console) -> None:
    """Measure every source, write the table after each layer, then the report, and print last."""
    machine = Machine.here(str(wish.device))
    problem = shipped.missing() if wish.extent.shipped and not models.alone else None
    notes = [*models.notes, problem] if problem else models.notes
    for note in notes:
        console.print(note)
    rows: list[Row] = []
    found = sources(models, wish.extent, wish.seed, wish.text, wish.device)
    with Steps(console, len(found)) as steps:
        for source in found:
            with steps.step(str(source)) as tick:
                for more in _measure(source, wish, tick):
                    rows += more
                    write_csv(out / "frontier.csv", machine, map(asdict, rows))
    publish(out, TITLE, " ".join([LEAD, *notes]), _sections(rows, out), machine, console)


def _measure(source: Source, wish: Wish, tick: Tick) -> Iterator[list[Row]]:
    """Head by head; on a GPU layer by layer, the heads of one in a call."""
    extent, done = wish.extent, 0
    for heads in _calls(source, wish.device):
        moved = [head.to(wish.device, wish.dtype) for head in heads]
        share = _share(tick, done, len(heads), source.count)
        yield measure_heads(moved, extent.budgets, extent.tolerances, wish.seed, share)
        done += len(heads)


def _share(tick: Tick, done: int, heads: int, count: int) -> Tick:
    """The tick of the next ``heads`` of ``count``."""
    return lambda share: tick((done + share * heads) / count)


def _calls(source: Source, device: torch.device) -> Iterator[list[Capture]]:
    if device.type == "cpu" or source.model == SYNTHETIC:
        yield from ([head] for head in source.make())
        return
    for _, heads in groupby(source.make(), key=lambda head: head.layer):
        yield list(heads)


# ---- sections --------------------------------------------------------------------------------


def _sections(rows: Sequence[Row], out: Path) -> list[Section]:
    found = groups(rows)
    models = dict.fromkeys(group.model for group in found)
    return [_section(model, [g for g in found if g.model == model], out) for model in models]


def _section(model: str, made: Sequence[Group], out: Path) -> Section:
    """One model at all lengths; generated heads have little in common and get a panel each."""
    panels = list(made)
    if model == SYNTHETIC:
        panels = [group.only(head) for group in made for head in group.heads]
    name = model.replace(" ", "-")
    figures = []
    for x in (pictures.time, pictures.cost):
        path = out / f"{name}-{x.__name__}.png"
        pictures.draw_groups(panels, x, path)
        figures.append((path, f"{model}: error against {x.__name__}. {CAPTION}"))
    said = [findings.paragraph(group) for group in made]
    shown = [findings.our_table(group) for group in made]
    if len(made) > 1:
        shown.append(findings.growth_table(made))
    grids = [*shown, *(findings.equal_cost_table(group) for group in made)]
    about = _about(model, made[0].rows[0])
    return Section(model, about, said, grids, figures, printed=shown)


def _about(model: str, row: Row) -> str:
    if model == SYNTHETIC:
        return (
            "Generated heads, d=64, values from N(0, 1). Diffuse: scores of standard deviation 0.5 "
            "in 16 directions. Clusters: standard deviation 4, queries and keys in 64 clusters "
            "each, whose tokens spread by a tenth of what the centres do; loose clusters: by three "
            "tenths; own cluster: the same loose clusters for both. Isotropic: standard deviation "
            "1 in all 64 directions, the hard case. Sinks: the diffuse head with four keys that "
            "every query scores high."
        )
    return (
        f"{'Causal heads' if row.causal else 'Heads'} of a trained model, d={row.d}, {row.dtype}."
    )
