"""Frames side by side, and distance against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figures import COLOURS, GREY, Line, Panel, draw, new_figure
from .findings import PLAN, average, chosen, kinds, label, speed
from .measure import EXACT, Sampled
from .quality import pixels, psnr
from .rows import VideoRow

SHOWN, CLIPS = 4, 2  # frames of a clip; clips
GAP = 0.12  # after a clip, of a frame's width


def draw_frames(found: Sequence[Sampled], path: Path) -> None:
    """A line for each plan, and for each baseline at the middle change; frames of clips across."""
    changes = [one.change for one in found if one.method == PLAN]
    middle = changes[len(changes) // 2] if changes else None
    exact = found[0]
    found = [one for one in found if one.method in (EXACT, PLAN) or one.change == middle]
    frames, count = exact.clips.shape[2], min(CLIPS, len(exact.clips))
    at = [round(i * (frames - 1) / max(1, SHOWN - 1)) for i in range(min(SHOWN, frames))]
    widths = ([1.0] * len(at) + [GAP]) * count
    figure = new_figure(1.15 * sum(widths) + 1.8, 1.2 * len(found) + 0.2)
    axes = figure.subplots(
        len(found), len(widths), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for line, one in zip(axes, found, strict=True):
        places = line.reshape(count, -1)
        for clip, row in enumerate(places):
            row[-1].axis("off")  # the gap after a clip
            shown = pixels(one.clips[clip : clip + 1])[0, at]
            for place, frame, number in zip(row, shown, at, strict=False):
                place.imshow(frame.permute(1, 2, 0).numpy(), interpolation="nearest")
                place.set(xticks=[], yticks=[])
                place.spines[:].set_visible(False)
                if one is exact:
                    which = f"clip {clip + 1}, " if place is row[0] else ""
                    place.set_title(f"{which}frame {number + 1}", fontsize=8)
        name = label(one.method, one.change).replace(", ", "\n")
        if one is not exact:
            name += f"\n{float(psnr(one.clips, exact.clips).mean()):.1f} dB"
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
        return Panel(title, lines, "time of attention, share of exact", "", log)

    draw(path, [[panel("PSNR, dB", "psnr", ""), panel("distance of features", "distance", "y")]],
         (9.0, 3.8))  # fmt: skip
