"""A bar on the terminal, and the ticks that move it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Tick = Callable[[float], None]  # called with the used share of the time budget


def part(tick: Tick, done: int, count: int) -> Tick:
    """The tick of one of ``count`` equal parts, ``done`` of which are over."""
    return lambda share: tick((done + share) / count)


class Steps(Progress):
    """A bar of ``count`` steps; each step moves it by the share of its own time that is over."""

    def __init__(self, console: Console, count: int):
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._bar = self.add_task("starting", total=max(1, count))
        self._done = 0

    @contextmanager
    def step(self, description: str) -> Iterator[Tick]:
        """Name a step; the tick it gives takes the share of the step that is over."""
        self.update(self._bar, description=description)
        yield lambda share: self.update(self._bar, completed=self._done + share)
        self._done += 1
        self.update(self._bar, completed=self._done)
