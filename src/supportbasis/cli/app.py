"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import InputError
from ..plans import ModelPlan
from . import model_commands
from .bench import FULL, QUICK, run_bench
from .demo import run_demo
from .loading import Access, LoadedModel, chosen_device, chosen_dtype, load_model
from .selftest import run_selftest
from .settings import GENERATED, Setting, load_qkv
from .terminal import console, friendly, writable

DEFAULT_N = 16384
GROUP = "supportbasis.commands"
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    help="Sub-quadratic softmax attention with a stated error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
benchmarks = typer.Typer(invoke_without_command=True)
app.add_typer(benchmarks, name="bench")


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
    with friendly("demo"):
        settings = _demo_settings(n, qkv, seed, causal)
        run_demo(settings, writable(out), seed, console())


@app.command()
def selftest(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, or cpu (Triton's interpreter). [default: cuda if there is one]"),
    ] = None,
) -> None:
    """Compare the kernels of exact heads, polynomials and thresholds with float64, in words."""
    with friendly("selftest"):
        passed = run_selftest(device, console())
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
    with friendly("bench"):
        if context.invoked_subcommand is not None:
            _refuse_options(context)
        elif device == "cuda":
            run_gpu_bench = study("bench-cuda")
            folder = writable(out or Path("supportbasis-out/bench-cuda"))
            run_gpu_bench(only, folder, console(), quick=quick, redraw=redraw)
        elif device != "cpu":
            raise InputError(f"--device: got {device!r}, expected cpu or cuda")
        elif redraw:
            raise InputError("--redraw is for --device cuda; leave it out")
        else:
            folder = writable(out or Path("supportbasis-out/bench"))
            run_bench(QUICK if quick else FULL, only, folder, console())


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


# ---- models ----------------------------------------------------------------------------------

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a model of transformers, or its name.")
]
Text = Annotated[Path, typer.Option(metavar="FILE", help="Text that the model reads.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a batch. [default: 32768 on a GPU, 8192 on a CPU]"),
]
Device = Annotated[str | None, typer.Option(help="[default: cuda if there is one]")]
Dtype = Annotated[
    str | None, typer.Option(help="[default: float32 on a CPU, elsewhere that of the file]")
]
Download = Annotated[bool, typer.Option("--download", help="Fetch the model if need be.")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Seed = Annotated[int, typer.Option(min=0)]


def _loaded(
    model: str, device: str | None, dtype: str | None, download: bool, remote_code: bool
) -> LoadedModel:
    access = Access(download, remote_code)
    return load_model(model, access, chosen_device(device), chosen_dtype(dtype))


@app.command("plan")
def plan_model(
    model: ModelName,
    text: Text,
    kl: Annotated[
        float | None, typer.Option(help="Nats per token that the prediction may move, on average.")
    ] = None,
    change: Annotated[
        float | None,
        typer.Option(help="Models without logits: allowed relative squared change of the output."),
    ] = None,
    tokens: Tokens = None,
    batches: Annotated[int, typer.Option(min=1, help="The last third is held back.")] = 3,
    minimise: Annotated[str, typer.Option(help="cost, or time on this device.")] = "cost",
    device: Device = None,
    dtype: Dtype = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.json", help="The plan; its report is in a folder beside it."),
    ] = Path("supportbasis-out/plan.json"),
) -> None:
    """Plan the attention of every head of a model within a change of its prediction."""
    with friendly("plan"):
        if out.suffix != ".json":
            raise InputError(f"--out: got {out}, expected a file that ends in .json")
        writable(out.parent)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, batches)
        wish = {"kl": kl, "change": change, "minimise": minimise, "seed": seed}
        model_commands.run_plan(loaded, ids, wish, out, console())


@app.command("profile")
def profile_model(
    model: ModelName,
    text: Text,
    tolerance: Annotated[float, typer.Option(help="Of the output of a head.")] = 0.05,
    tokens: Tokens = None,
    device: Device = None,
    dtype: Dtype = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/profile"
    ),
) -> None:
    """Entries, scores and entropy of every head of a model, and what each would get."""
    with friendly("profile"):
        folder = writable(out)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, 1)
        model_commands.run_profile(loaded, ids, tolerance, folder, console())


@app.command("eval")
def evaluate_model(
    model: ModelName,
    plan: Annotated[Path, typer.Option(metavar="FILE.json", help="A plan of this model.")],
    text: Text,
    tokens: Tokens = None,
    batches: Annotated[int, typer.Option(min=1)] = 1,
    copies: Annotated[int, typer.Option(min=0, help="Rounds of the copy test.")] = 4,
    device: Device = None,
    dtype: Dtype = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/eval"
    ),
) -> None:
    """Loss and predictions of a language model with a plan, paired with exact attention."""
    with friendly("eval"):
        folder, made = writable(out), ModelPlan.load(plan)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, batches)
        model_commands.run_eval(loaded, made, ids, copies, seed, folder, console())


# ---- commands of the studies, a package of their own -----------------------------------------


def study(name: str) -> Any:
    """What the studies register under ``name``; loaded only where it is asked for."""
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    raise InputError(
        "this command comes with the studies: pip install supportbasis-studies "
        "(in a checkout: pip install ./studies)"
    )


@app.command(add_help_option=False, context_settings=PASSED_ON)
def reproduce(context: typer.Context) -> None:
    """Studies of the paper's claims, each with a report."""
    _pass_on("reproduce", context)


@benchmarks.command(add_help_option=False, context_settings=PASSED_ON)
def frontier(context: typer.Context) -> None:
    """Error against cost and time of our methods and published ones, on trained heads."""
    _pass_on("bench frontier", context)


def _pass_on(command: str, context: typer.Context) -> None:
    with friendly(command):
        commands = study(command.replace(" ", "-"))
    commands(args=context.args, prog_name=f"supportbasis {command}")
