"""The commands and their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..errors import InputError, SupportBasisError
from .bench import FULL, QUICK, run_bench
from .demo import run_demo
from .settings import GENERATED, Setting, load_qkv

DEFAULT_N = 16384

app = typer.Typer(
    help="Sub-quadratic softmax attention with a stated error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Sub-quadratic softmax attention with a stated error."""
    if version:
        typer.echo(f"supportbasis {__version__}")
        raise typer.Exit


@app.command()
def demo(
    n: Annotated[int | None, typer.Option(min=2, help=f"Tokens. [default: {DEFAULT_N}]")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/demo"
    ),
    qkv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors",
            help="Your own tensors named q, k, v: [..., heads, tokens, dim] or [tokens, dim].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of generated inputs and sampled rows.")] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
) -> None:
    """Compare the methods with PyTorch's exact attention, on generated inputs or on yours."""
    with _friendly("demo"):
        settings = _demo_settings(n, qkv, seed, causal)
        run_demo(settings, _writable(out), seed, _console())


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="At most 8192 tokens.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Only the benchmarks whose name starts with this.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/bench"
    ),
) -> None:
    """Time the methods against PyTorch's exact attention, each with its error."""
    with _friendly("bench"):
        run_bench(QUICK if quick else FULL, only, _writable(out), _console())


def _demo_settings(n: int | None, qkv: Path | None, seed: int, causal: bool) -> list[Setting]:
    if qkv is None:
        return [make(n or DEFAULT_N, seed, causal) for make in GENERATED]
    if n is not None:
        raise InputError("--n is the length of generated inputs; leave it out with --qkv")
    return [load_qkv(qkv, causal)]


@contextmanager
def _friendly(command: str) -> Iterator[None]:
    """Errors that the user can mend end the program with a sentence and status 2."""
    try:
        yield
    except SupportBasisError as error:
        typer.echo(f"supportbasis {command}: {error}", err=True)
        raise typer.Exit(2) from None


def _writable(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out: cannot write to {out} ({error.strerror})") from None
    return out


def _console() -> Console:
    """The terminal, or lines wide enough for a table when the output goes to a file."""
    width = None if Console().is_terminal else 120
    return Console(width=width, markup=False, highlight=False)
