"""``supportbasis reproduce video``: sample clips, compare, write, print."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from supportbasis import InputError, ModelPlan

from ..numbers import seconds
from ..study import Machine, Section, in_short, publish, write_rows
from . import findings, pictures
from .baselines import CLUSTERS, IDEAL, SAME_TIME, SLIDING, TILES
from .denoiser import load
from .measure import BUDGET, Extent, Lab, Sampled, rows_of

FULL = Extent()
QUICK = Extent(
    frames=8, size=32, steps=6, dense=1, parts=1, clips=2, batch=2, changes=(5e-3,)
)  # fmt: skip
KINDS = (SAME_TIME, CLUSTERS, TILES, SLIDING, IDEAL)
SEARCH = 70  # forward passes of a clip, in whose time the settings of a range are compared
CHECK = 9  # the same for one plan of it, made and measured
TITLE = "supportbasis reproduce video"
LEAD = (
    "A small diffusion transformer samples clips of moving textured shapes; every token attends to "
    "all tokens of a clip. The same clips, from the same noise, by exact attention, by plans of "
    "sb.models.plan(change=...), and by sparse attention."
)
TEXT = (
    "Each clip is compared with the one that exact attention gives. “PSNR” is the mean over clips "
    "in decibels (100: the same), “worst” the lowest; “paired” the mean difference of PSNR to the "
    "plan of that change, clip by clip, with the half width of its 95 % interval. “features” is a "
    "distance of the form of LPIPS with fixed random filters. “cost” counts multiply-adds of "
    "attention relative to exact in the planned steps; of baselines, the share of keys. Speeds are "
    "against exact attention by PyTorch's fastest backend: “attention” in the planned steps, “all” "
    "with the dense ones, “sampling” as a whole. Baselines drop the rest: each block of queries "
    "attends to the groups of keys in which its mean query has the most weight (“clusters” as the "
    "library groups them, “tiles” of 4 × 4 × 4 neighbours), or to the nearest tiles (“sliding”). "
    "They attend to as many keys as the cost of the plan allows, head by head; grouping and "
    "selection are free. “Equal time”: clusters, with as many keys as the library's kernels attend "
    "to in the time of the plan if nothing is tilted. “Ideal kernel”: as many as PyTorch's kernel, "
    "without any time for grouping and selection, attends to in that time: a limit, not a method. "
    "The time of baselines is not measured."
)
SHORT = (
    f"What plans should reach is asked of clips of {FULL.tokens} tokens. In shorter ones exact "
    "attention takes so little time that nothing pays."
)
HEADS = f"Relative Frobenius errors of BlockSupport({BUDGET}) on all heads of a layer."


def video_extent(extent: Extent, changes: str | None, clips: int | None) -> Extent:
    """The extent with other changes or clips.

    >>> video_extent(QUICK, "1e-3,0.1", 5).changes
    (0.001, 0.1)
    """
    if clips is not None:
        extent = replace(extent, clips=clips, batch=min(extent.batch, clips))
    if changes is None:
        return extent
    try:
        found = tuple(float(part) for part in changes.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < change < math.inf for change in found):
        raise InputError(f"--changes: expected numbers > 0 such as 1e-3,1e-2, got {changes!r}")
    return replace(extent, changes=found)


def expected(lab: Lab, baselines: bool) -> float:
    """Seconds that the study takes, from the time of one forward pass: each method takes about as
    long as exact attention, plans as long as `SEARCH` and `CHECK` passes."""
    extent = lab.extent
    methods = 1 + len(extent.changes) * (1 + (len(KINDS) if baselines else 0))
    plans = extent.parts * (SEARCH + CHECK * len(extent.changes))
    return lab.pass_seconds() * (extent.clips * extent.steps * methods + extent.steps + plans)


def roughly(value: float) -> str:
    """Seconds in words.

    >>> roughly(80), roughly(9000)
    ('2 minutes', '2.5 hours')
    """
    return f"{math.ceil(value / 60)} minutes" if value < 7200 else f"{value / 3600:.1f} hours"


@contextmanager
def step(console: Console, name: str) -> Iterator[None]:
    """Say what was done, and how long it took: runs are long, and may be cut."""
    start = time.perf_counter()
    yield
    console.print(f"{name}: {seconds(time.perf_counter() - start)}")


def run_video(
    extent: Extent,
    out: Path,
    weights: Path,
    seed: int,
    device: torch.device,
    console: Console,
    *,
    baselines: bool = True,
) -> None:
    """Sample with every method; then tables, pictures and the report."""
    machine = Machine.here(str(device))
    lab = Lab(load(weights), extent, device, seed)
    found: list[Sampled] = []
    plans: dict[float, list[ModelPlan]] = {}
    if device.type == "cpu":
        console.print(
            f"On a CPU this takes about {roughly(expected(lab, baselines))}. --quick, fewer "
            "--clips and --no-baselines take less."
        )
    with step(console, "exact attention"):
        found.append(lab.exact())
    with step(console, "effects of settings on the prediction"):
        searches = lab.searches()
    for change in extent.changes:
        with step(console, f"plans, change {change:g}"):
            plans[change] = [search.plan(change) for search in searches]
        with step(console, f"clips by plans, change {change:g}"):
            found.append(lab.planned(change, plans[change]))
        share = found[-1].planned / max(1e-9, found[0].planned)
        for kind in KINDS if baselines else ():
            with step(console, findings.label(kind, change)):
                found.append(lab.sparse(kind, change, plans[change], min(1.0, share)))
        _write(found, out, machine)
    with step(console, "heads"):
        heads = lab.heads()
    write_rows(out / "heads.csv", machine, heads)
    sections = [*_clips(found, extent, out), _plans(plans)]
    sections.append(Section("Heads", HEADS, grids=[findings.head_table(heads)]))
    publish(out, TITLE, LEAD, sections, machine, console)


def _write(found: list[Sampled], out: Path, machine: Machine) -> None:
    rows = [row for one in found for row in rows_of(one, found[0])]
    write_rows(out / "video.csv", machine, rows)


def _clips(found: list[Sampled], extent: Extent, out: Path) -> list[Section]:
    rows = [row for one in found for row in rows_of(one, found[0])]
    pictures.draw_frames(found, out / "frames.png")
    pictures.draw_quality(rows, out / "quality.png")
    figures = [
        (out / "frames.png", "Frames, a line for each method, with its mean PSNR over all clips."),
        (out / "quality.png", "Distance from exact clips against time; bars span the clips."),
    ]
    said = (
        f"{extent.clips} clips of {extent.tokens} tokens, {extent.steps} steps, the first "
        f"{extent.dense} dense; exact attention: {found[0].note}."
    )
    if extent.tokens < FULL.tokens:  # too short for anything to pay
        short = Section("In short", findings=[said, SHORT])
    else:
        short = in_short("What the plans should reach", findings.checks(rows), said)
    return [short, Section("Clips", TEXT, grids=[findings.quality_table(rows)], figures=figures)]


def _plans(plans: dict[float, list[ModelPlan]]) -> Section:
    text = "One plan for each range of timesteps, from noise to clip."
    parts = [f"change {change:g}\n{plan}" for change, each in plans.items() for plan in each]
    return Section("Plans", text, verbatim="\n\n".join(parts))
