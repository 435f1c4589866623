"""The commands and their options."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..errors import InputError, SupportBasisError
from .bench import FULL, QUICK, run_bench
from .chapters import write_index
from .demo import run_demo
from .devices import chosen_device
from .distribution import BUILT_IN, PRESETS, Access, Wish, check_installed, run_distribution
from .downstream import BENCHMARKS, chosen_tasks, run_benchmarks, run_downstream, stories_folder
from .downstream import FULL as WHOLE_DOWNSTREAM
from .downstream import QUICK as QUICK_DOWNSTREAM
from .downstream import Wish as BenchmarkWish
from .efficiency import FULL as WHOLE_EFFICIENCY
from .efficiency import QUICK as QUICK_EFFICIENCY
from .efficiency import run_efficiency
from .frontier import FULL as WHOLE_FRONTIER
from .frontier import QUICK as QUICK_FRONTIER
from .frontier import Models, frontier_extent, parse_heads, parse_lengths, run_frontier
from .frontier import Wish as FrontierWish
from .gpu import run_gpu_bench
from .polynomial_attention import FULL as WHOLE_STUDY
from .polynomial_attention import QUICK as QUICK_STUDY
from .polynomial_attention import run_study
from .selftest import run_selftest
from .settings import GENERATED, Setting, load_qkv

DEFAULT_N = 16384
QUICK_ITEMS = 10  # of each benchmark, for a model of the user's
NO_SPACE = (
    "no space left on the disk of --out; free some, or give another folder, and repeat the command "
    "(finished parts are kept)"
)

app = typer.Typer(
    help="Sub-quadratic softmax attention with a stated error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
benchmarks = typer.Typer(invoke_without_command=True)
app.add_typer(benchmarks, name="bench")
reproduce = typer.Typer(help="Studies of the paper's claims, each with a report.")
app.add_typer(reproduce, name="reproduce", no_args_is_help=True)


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
def selftest(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, or cpu (Triton's interpreter). [default: cuda if there is one]"),
    ] = None,
) -> None:
    """Compare the kernels of exact heads, polynomials and thresholds with float64, in words."""
    with _friendly("selftest"):
        passed = run_selftest(device, _console())
    if not passed:
        raise typer.Exit(1)


@benchmarks.callback()
def bench(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="At most 8192 tokens.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Only the benchmarks whose name starts with this.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: the kernels against every backend of PyTorch.")
    ] = "cpu",
    redraw: Annotated[
        bool, typer.Option("--redraw", help="With cuda: only report what --out holds already.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the report. [default: supportbasis-out/bench, or bench-cuda]"),
    ] = None,
) -> None:
    """Time the methods against PyTorch's exact attention, each with its error."""
    with _friendly("bench"):
        if context.invoked_subcommand is not None:
            _refuse_options(context)
        elif device == "cuda":
            folder = _writable(out or Path("supportbasis-out/bench-cuda"))
            run_gpu_bench(only, folder, _console(), quick=quick, redraw=redraw)
        elif device != "cpu":
            raise InputError(f"--device: got {device!r}, expected cpu or cuda")
        elif redraw:
            raise InputError("--redraw is for --device cuda; leave it out")
        else:
            folder = _writable(out or Path("supportbasis-out/bench"))
            run_bench(QUICK if quick else FULL, only, folder, _console())


@benchmarks.command()
def frontier(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="One model and nothing else: a causal language model of transformers, or an "
            "encoder of points.",
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of such models, a folder each. [default: $SUPPORTBASIS_MODELS]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What language models read. [default: the standard library's modules]",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Tokens, at most a language model's context."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT|LAYER.HEAD,...",
            help="How many heads of each model, or which. [default: 6 of a language model, 12 of a "
            "model of the package, all of an encoder]",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Short inputs, few settings.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs, samples and rows.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/frontier"
    ),
) -> None:
    """Error against cost and time of our methods and published ones, on trained heads."""
    with _friendly("bench frontier"):
        if model is not None and models is not None:
            raise InputError(
                "--model is one model, --models a folder of them; expected one of the two"
            )
        asked = parse_lengths(lengths)
        extent = QUICK_FRONTIER if quick else WHOLE_FRONTIER
        extent = frontier_extent(extent, asked, parse_heads(heads))
        wish = FrontierWish(extent, text, chosen_device(device), seed)
        found = Models.find(models) if model is None else Models.only(model, asked)
        run_frontier(wish, found, _writable(out), _console())


Quick = Annotated[bool, typer.Option("--quick", help="Short inputs: about a minute.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the model if need be.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Redraw = Annotated[
    bool, typer.Option("--redraw", help="Only draw and report what --out holds already.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of inputs and sampled rows.")]


@reproduce.command()
def efficiency(
    quick: Quick = False,
    redraw: Redraw = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/efficiency"
    ),
) -> None:
    """Time and error against the threshold, as in the paper's figure, and on harder inputs."""
    with _friendly("reproduce efficiency"):
        extent = QUICK_EFFICIENCY if quick else WHOLE_EFFICIENCY
        run_efficiency(extent, _writable(out), seed, _console(), redraw=redraw)


@reproduce.command()
def distribution(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A folder, a name on the hub, or one of the paper's: "
            f"{', '.join(PRESETS)}. [default: {BUILT_IN}]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own text. [default: a story, and h repeated]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens the model sees at once. [default: 2048, or its limit]"),
    ] = None,
    download: Download = False,
    trust_remote_code: TrustRemoteCode = False,
    quick: Annotated[bool, typer.Option("--quick", help="One window of each text.")] = False,
    redraw: Redraw = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/distribution"
    ),
) -> None:
    """Entries of Q, K and V in every layer of a model, beside the bounds of the paper."""
    with _friendly("reproduce distribution"):
        access = Access(download, trust_remote_code)
        wish = Wish(model, text, window, access, 1 if quick else None)
        run_distribution(wish, _writable(out), _console(), redraw=redraw)


@reproduce.command()
def downstream(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A model of your own, on the benchmarks of --tasks. [default: two small models "
            "that come with the package, on generated tasks]",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help=f"For --model, lm-eval's names. [default: {','.join(BENCHMARKS)}]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="For --model: items of each task, at most.")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with stories260K/. [default: $SUPPORTBASIS_MODELS]"
        ),
    ] = None,
    download: Download = False,
    trust_remote_code: TrustRemoteCode = False,
    device: Annotated[
        str, typer.Option(help="Where the models run: cpu, cuda, or another of PyTorch's.")
    ] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="Few items: about two minutes; confirms nothing.")
    ] = False,
    redraw: Redraw = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/downstream"
    ),
) -> None:
    """Answers with approximate attention in every layer of a model, as in the paper's table."""
    with _friendly("reproduce downstream"):
        if model is None:
            if tasks is not None or limit is not None:
                raise InputError("--tasks and --limit are for a model of your own: add --model")
            extents = QUICK_DOWNSTREAM if quick else WHOLE_DOWNSTREAM
            found = stories_folder(models)
            run_downstream(extents, _writable(out), found, _console(), device=device, redraw=redraw)
        else:
            access = Access(download, trust_remote_code)
            items = limit or (QUICK_ITEMS if quick else None)
            wish = BenchmarkWish(model, chosen_tasks(tasks), items, access)
            run_benchmarks(wish, _writable(out), _console(), device=device, redraw=redraw)


@reproduce.command("all")
def everything(
    quick: Quick = False,
    redraw: Redraw = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the reports.")] = Path("supportbasis-out"),
) -> None:
    """Every part of the paper's experiments, one after the other, each in a folder of its own."""
    with _friendly("reproduce all"):
        check_installed()
        _writable(out)
    efficiency(quick, redraw, seed, out / "efficiency")
    distribution(quick=quick, redraw=redraw, out=out / "distribution")
    downstream(quick=quick, redraw=redraw, out=out / "downstream")
    with _friendly("reproduce all"):
        parts = {
            "efficiency": "time and error",
            "distribution": "entries of Q, K and V",
            "downstream": "answers with approximate attention",
        }
        write_index(out, "supportbasis reproduce all", parts)


@reproduce.command("polynomial-attention")
def polynomial_attention(
    quick: Annotated[bool, typer.Option("--quick", help="Short inputs and few seeds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and sketches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/polynomial-attention"
    ),
) -> None:
    """Softmax against one polynomial, one power and several, sketched or not."""
    with _friendly("reproduce polynomial-attention"):
        extent = QUICK_STUDY if quick else WHOLE_STUDY
        run_study(extent, _writable(out), seed, _console())


def _refuse_options(context: typer.Context) -> None:
    """Options before the name of a sub-command would be ignored."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            command = context.invoked_subcommand
            raise InputError(f"--{name} must come after {command}: bench {command} --{name} ...")


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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        typer.echo(f"supportbasis {command}: {NO_SPACE}", err=True)
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
