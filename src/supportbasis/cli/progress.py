"""A progress bar over steps whose length is known only as a time budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .measure import Tick


class Steps:
    """A bar of ``count`` steps; each step moves it by the share of its own time that is over."""

    def __init__(self, console: Console, count: int):
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=max(1, count))
        self._done = 0

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, description: str) -> Iterator[Tick]:
        """Name a step; the tick it gives takes the share of the step that is over."""
        self._progress.update(self._task, description=description)
        yield lambda share: self._progress.update(self._task, completed=self._done + share)
        self._done += 1
        self._progress.update(self._task, completed=self._done)
