"""Frames side by side, and distance against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figures import COLOURS, GREY, Line, Panel, draw, new_figure
from .findings import PLAN, average, chosen, kinds, label, speed
from .measure import EXACT, Sampled
from .quality import pixels
from .rows import VideoRow

SHOWN, CLIPS = 4, 2  # frames of a clip; clips


def draw_frames(found: Sequence[Sampled], path: Path) -> None:
    """A line for each plan, and for each baseline at the middle change; frames of clips across."""
    changes = [one.change for one in found if one.method == PLAN]
    middle = changes[len(changes) // 2] if changes else None
    found = [one for one in found if one.method in (EXACT, PLAN) or one.change == middle]
    frames, count = found[0].clips.shape[2], min(CLIPS, len(found[0].clips))
    at = [round(i * (frames - 1) / max(1, SHOWN - 1)) for i in range(min(SHOWN, frames))]
    figure = new_figure(1.15 * len(at) * count + 1.8, 1.2 * len(found))
    axes = figure.subplots(len(found), len(at) * count, squeeze=False)
    for line, one in zip(axes, found, strict=True):
        shown = pixels(one.clips[:count])[:, at].flatten(0, 1)
        for place, frame in zip(line, shown, strict=True):
            place.imshow(frame.permute(1, 2, 0).numpy(), interpolation="nearest")
            place.set(xticks=[], yticks=[])
            place.spines[:].set_visible(False)
        name = label(one.method, one.change).replace(", ", "\n")
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    figure.savefig(path, dpi=80)


def draw_quality(rows: Sequence[VideoRow], path: Path) -> None:
    """PSNR and distance of features against the share of exact attention's time."""
    methods = [m for m in dict.fromkeys(method for method, _ in kinds(rows)) if m != EXACT]
    changes = [change for method, change in kinds(rows) if method == PLAN]

    def panel(title: str, name: str, log: str) -> Panel:
        lines = []
        for number, method in enumerate(methods):
            colour = COLOURS[number % len(COLOURS)] if method == PLAN else (*COLOURS, GREY)[number]
            share, values, spans = [], [], []
            for change in changes:
                mine = chosen(rows, method, change)
                if not mine:
                    continue
                share.append(1 / speed(chosen(rows, PLAN, change)[0]))
                each = [float(getattr(row, name)) for row in mine]
                values.append(average(mine, lambda row: float(getattr(row, name))))
                spans.append((min(each), max(each)))
            lines.append(Line(method, share, values, "-o", colour, spans))
        return Panel(title, lines, "time of attention, share of exact", title, log)

    draw(path, [[panel("PSNR, dB", "psnr", ""), panel("distance of features", "distance", "y")]],
         (9.0, 3.8))  # fmt: skip
