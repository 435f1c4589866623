"""What the rows say: tables, and statements that hold or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean

import torch

from supportbasis.cli.report import times
from supportbasis.models.planning import upper_limit

from ..numbers import seconds
from ..study import Check, Grid, table
from .baselines import CLUSTERS, SAME_TIME, SLIDING, TILES
from .measure import EXACT
from .rows import HeadRow, VideoRow

PLAN = "plan"
GOOD, FASTER, BETTER = 30.0, 2.0, 2.0  # decibels; times exact attention; decibels


def chosen(rows: Sequence[VideoRow], method: str, change: float | None) -> list[VideoRow]:
    return [row for row in rows if (row.method, row.change) == (method, change)]


def kinds(rows: Sequence[VideoRow]) -> list[tuple[str, float | None]]:
    """Methods and changes, in the order in which they were measured."""
    return list(dict.fromkeys((row.method, row.change) for row in rows))


def label(method: str, change: float | None) -> str:
    if change is None:
        return method
    return f"{method}, {change:g}"


def average(rows: Sequence[VideoRow], of: Callable[[VideoRow], float]) -> float:
    return mean(of(row) for row in rows)


def difference(rows: Sequence[VideoRow], method: str, change: float | None) -> tuple[float, float]:
    """Mean decibels by which the plan is nearer to exact than a baseline at its time, clip by clip,
    and the half width of its 95 % interval."""
    pairs = zip(chosen(rows, PLAN, change), chosen(rows, method, change), strict=True)
    found = torch.tensor([ours.psnr - theirs.psnr for ours, theirs in pairs]).double()
    if len(found) < 2:
        return float(found.mean()), math.nan
    value, upper = upper_limit(found, 0.975)
    return value, upper - value


def speed(row: VideoRow) -> float:
    """Of attention in steps that are not dense, against exact attention."""
    return row.exact_planned_s / row.planned_s if row.planned_s else 1.0


def quality_table(rows: Sequence[VideoRow]) -> Grid:
    def cells(kind: tuple[str, float | None]) -> list[str]:
        mine = chosen(rows, *kind)
        worst, first = min(row.psnr for row in mine), mine[0]
        timed = first.method in (EXACT, PLAN)
        ratios = (
            (speed(first), first.exact_attention_s / first.attention_s,
             first.exact_sampling_s / first.sampling_s)
            if timed else (None, None, None)
        )  # fmt: skip
        paired = "—"
        if not timed:
            value, half = difference(rows, *kind)
            paired = f"{-value:+.1f} ± {half:.1f}"
        note = f"\n! {first.note}" if first.note and first.method == PLAN else ""
        return [
            label(*kind) + note, f"{average(mine, lambda row: row.psnr):.1f}", f"{worst:.1f}",
            paired, f"{average(mine, lambda row: row.ssim):.4f}",
            f"{average(mine, lambda row: row.distance):.2e}", f"{first.cost:.3f}",
            *map(times, ratios), seconds(first.sampling_s if timed else None),
        ]  # fmt: skip

    headings = ["method, change", "PSNR", "worst", "paired", "SSIM", "features", "cost",
                "attention", "all", "sampling", "time"]  # fmt: skip
    return Grid("Clips against those of exact attention", headings, [cells(x) for x in kinds(rows)])


def head_table(rows: Sequence[HeadRow]) -> Grid:
    columns: dict[str, Callable[[HeadRow], str]] = {
        "layer": lambda row: row.layer,
        "method": lambda row: row.method,
        "cost": lambda row: f"{row.cost:.3f}",
        "median error": lambda row: f"{row.median_error:.3g}",
        "largest error": lambda row: f"{row.largest_error:.3g}",
    }
    return table("Heads of the model at the middle of sampling", rows, columns)


def checks(rows: Sequence[VideoRow]) -> list[Check]:
    """Of the fastest plan whose clips are near enough to exact ones."""
    plans = [mine for kind in kinds(rows) if kind[0] == PLAN and (mine := chosen(rows, *kind))]
    good = [mine for mine in plans if average(mine, lambda row: row.psnr) >= GOOD]
    if not good:
        best = max((average(mine, lambda row: row.psnr) for mine in plans), default=0.0)
        return [Check(f"a plan reaches {GOOD:g} dB", f"{best:.1f} dB at best", False)]
    fastest = max(good, key=lambda mine: speed(mine[0]))
    change, psnr = fastest[0].change, average(fastest, lambda row: row.psnr)
    found = [
        Check(
            f"with PSNR ≥ {GOOD:g} dB, attention is {FASTER:g} times as fast as exact",
            f"{times(speed(fastest[0]))} at {psnr:.1f} dB, change {change:g}",
            speed(fastest[0]) >= FASTER,
        )
    ]
    for method in (SAME_TIME, CLUSTERS, TILES, SLIDING):
        if chosen(rows, method, change):
            value, half = difference(rows, method, change)
            statement = f"{BETTER:g} dB nearer to exact than “{method}”"
            found.append(Check(statement, f"{value:+.1f} ± {half:.1f} dB", value >= BETTER))
    return found
