"""What the commands share: the console, the folder of results, errors as sentences."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import typer
from rich.console import Console

from ..errors import InputError, SupportBasisError

NO_SPACE = (
    "no space left on the disk of --out; free some, or give another folder, and repeat the command "
    "(finished parts are kept)"
)


@contextmanager
def friendly(command: str) -> Iterator[None]:
    """Errors that the user can mend end the program with a sentence and status 2."""
    try:
        yield
    except (SupportBasisError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and not isinstance(error, SupportBasisError):
            raise
        typer.echo(f"supportbasis {command}: {NO_SPACE if is_full else error}", err=True)
        raise typer.Exit(2) from None


def writable(out: Path) -> Path:
    """The folder, made if need be; one that cannot be written is refused before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise InputError(f"--out: cannot write to {out} ({error.strerror})") from None
    return out


def console() -> Console:
    """The terminal, or lines wide enough for a table when the output goes to a file."""
    width = None if Console().is_terminal else 120
    return Console(width=width, markup=False, highlight=False)
