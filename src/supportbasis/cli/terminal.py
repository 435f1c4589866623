"""What the commands share: the console, the folder of results, progress, errors as sentences."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import InputError, SupportBasisError
from .measure import Tick

NO_SPACE = (
    "no space left on the disk of --out; free some, or give another folder, and repeat the command "
    "(finished parts are kept)"
)


@contextmanager
def friendly(command: str) -> Iterator[None]:
    """Errors that the user can mend end the program with a sentence and status 2."""
    try:
        yield
    except SupportBasisError as error:
        typer.echo(f"supportbasis {command}: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        typer.echo(f"supportbasis {command}: {NO_SPACE}", err=True)
        raise typer.Exit(2) from None


def writable(out: Path) -> Path:
    """The folder, made if need be; one that cannot be written is refused before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out: cannot write to {out} ({error.strerror})") from None
    return out


def console() -> Console:
    """The terminal, or lines wide enough for a table when the output goes to a file."""
    width = None if Console().is_terminal else 120
    return Console(width=width, markup=False, highlight=False)


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
