"""``supportbasis demo`` and ``supportbasis bench`` with its frontier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supportbasis import InputError
from supportbasis.cli.terminal import console, friendly, writable

from .comparison import FULL as WHOLE_BENCH
from .comparison import GENERATED, Setting, load_qkv, run_bench, run_demo
from .comparison import QUICK as QUICK_BENCH
from .frontier import FULL as WHOLE_FRONTIER
from .frontier import QUICK as QUICK_FRONTIER
from .frontier import Models, frontier_extent, parse_heads, parse_lengths, run_frontier
from .frontier import Wish as FrontierWish
from .gpu import run_gpu_bench
from .study import chosen_device

DEFAULT_N = 16384

demo = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False
)


@demo.command()
def compare_methods(
    n: Annotated[int | None, typer.Option(min=2, help=f"Tokens. \\[default: {DEFAULT_N}]")] = None,
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
    with friendly("demo"):
        settings = _demo_settings(n, qkv, seed, causal)
        run_demo(settings, writable(out), seed, console())


@bench.callback()
def time_methods(
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
        typer.Option(
            help="Folder of the report. \\[default: supportbasis-out/bench, or bench-cuda]"
        ),
    ] = None,
) -> None:
    """Time the methods against PyTorch's exact attention, each with its error."""
    with friendly("bench"):
        if context.invoked_subcommand is not None:
            _refuse_options(context)
        elif device == "cuda":
            folder = writable(out or Path("supportbasis-out/bench-cuda"))
            run_gpu_bench(only, folder, console(), quick=quick, redraw=redraw)
        elif device != "cpu":
            raise InputError(f"--device: got {device!r}, expected cpu or cuda")
        elif redraw:
            raise InputError("--redraw is for --device cuda; leave it out")
        else:
            folder = writable(out or Path("supportbasis-out/bench"))
            run_bench(QUICK_BENCH if quick else WHOLE_BENCH, only, folder, console())


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


@bench.command()
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
            help="Folder of such models, a folder each. \\[default: $SUPPORTBASIS_MODELS]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What language models read. \\[default: the standard library's modules]",
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
            help="How many heads of each model, or which. \\[default: 6 of a language model, 12 of "
            "a model of the package, all of an encoder]",
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
    with friendly("bench frontier"):
        if model is not None and models is not None:
            raise InputError(
                "--model is one model, --models a folder of them; expected one of the two"
            )
        asked = parse_lengths(lengths)
        extent = QUICK_FRONTIER if quick else WHOLE_FRONTIER
        extent = frontier_extent(extent, asked, parse_heads(heads))
        wish = FrontierWish(extent, text, chosen_device(device), seed)
        found = Models.find(models) if model is None else Models.only(model, asked)
        run_frontier(wish, found, writable(out), console())
