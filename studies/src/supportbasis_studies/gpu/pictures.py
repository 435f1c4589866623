"""Time against length, drawn from rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figures import COLOURS, Line, Panel, draw
from .rows import GpuRow

MODES = {
    (False, False): "forward",
    (False, True): "forward, causal",
    (True, False): "forward and backward",
    (True, True): "forward and backward, causal",
}


def draw_lengths(rows: Sequence[GpuRow], path: Path) -> None:
    """One panel for each width and mode: PyTorch's fastest backend, degree 2 and degree 1."""

    def panel(d: int, backward: bool, causal: bool) -> Panel:
        mine = [r for r in rows if (r.d, r.backward, r.causal) == (d, backward, causal)]
        mine.sort(key=lambda row: row.n)
        best = {row.n: row.baseline_ms for row in mine}
        lines = [Line("SDPA, fastest backend", list(best), list(best.values()), "-D")]
        names = sorted({row.work for row in mine}, reverse=True)
        for colour, name in zip(COLOURS, names, strict=False):
            line = {row.n: row.ms for row in mine if row.work == name}
            label = name.removeprefix("sweep, ")
            lines.append(Line(label, list(line), list(line.values()), colour=colour))
        title = f"d={d}, {MODES[backward, causal]}"
        return Panel(title, lines, "tokens", "milliseconds")

    grid = [[panel(d, *mode) for mode in MODES] for d in sorted({row.d for row in rows})]
    draw(path, grid, (14.0, 3.8 * len(grid)), sharey="row")
