"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import InputError
from ..plans import ModelPlan
from . import model_commands
from .loading import Access, LoadedModel, chosen_device, chosen_dtype, load_model
from .selftest import run_selftest
from .terminal import console, friendly, writable

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Sub-quadratic softmax attention with a stated error."""
    if version:
        typer.echo(f"supportbasis {__version__}")
        raise typer.Exit


@app.command()
def selftest(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, or cpu (Triton's interpreter). \\[default: cuda if there is one]"),
    ] = None,
) -> None:
    """Compare the kernels of exact heads, polynomials and lists with float64, in words."""
    with friendly("selftest"):
        passed = run_selftest(device, console())
    if not passed:
        raise typer.Exit(1)


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a model of transformers, or its name.")
]
Text = Annotated[Path, typer.Option(metavar="FILE", help="Text that the model reads.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a batch. \\[default: 32768 on a GPU, 8192 on a CPU]"),
]
Device = Annotated[str | None, typer.Option(help="\\[default: cuda if there is one]")]
Dtype = Annotated[
    str | None, typer.Option(help="\\[default: float32 on a CPU, elsewhere that of the file]")
]
Download = Annotated[bool, typer.Option("--download", help="Fetch the model if need be.")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Seed = Annotated[int, typer.Option(min=0)]
Folder = Annotated[Path, typer.Option(help="Folder of the report.")]


def _loaded(model: str, device: str | None, dtype: str | None, *allowed: bool) -> LoadedModel:
    return load_model(model, Access(*allowed), chosen_device(device), chosen_dtype(dtype))


@app.command("plan")
def plan_model(
    model: ModelName, text: Text,
    kl: Annotated[
        float | None, typer.Option(help="Nats per token that the prediction may move, on average.")
    ] = None,
    change: Annotated[
        float | None,
        typer.Option(help="Models without logits: allowed relative squared change of the output."),
    ] = None,
    tokens: Tokens = None,
    batches: Annotated[
        int, typer.Option(min=2, help="Every third, or the second of two, is held back.")
    ] = 3,
    minimise: Annotated[str, typer.Option(help="cost, or time on this device.")] = "cost",
    device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, seed: Seed = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.json", help="The plan; its report is in a folder beside it."),
    ] = Path("supportbasis-out/plan.json"),
) -> None:  # fmt: skip
    """Plan the attention of every head of a model within a change of its prediction."""
    with friendly("plan"):
        if out.suffix != ".json":
            raise InputError(f"--out: got {out}, expected a file that ends in .json")
        writable(out.parent)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, batches)
        wish = {"kl": kl, "change": change, "minimise": minimise, "seed": seed}
        model_commands.run_plan(loaded, ids, wish, out)


@app.command("profile")
def profile_model(
    model: ModelName, text: Text,
    tolerance: Annotated[float, typer.Option(help="Of the output of a head.")] = 0.05,
    tokens: Tokens = None, device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, out: Folder = Path("supportbasis-out/profile"),
) -> None:  # fmt: skip
    """Entries, scores and entropy of every head of a model, and what each would get."""
    with friendly("profile"):
        folder = writable(out)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, 1)
        model_commands.run_profile(loaded, ids, tolerance, folder)


@app.command("eval")
def evaluate_model(
    model: ModelName,
    plan: Annotated[Path, typer.Option(metavar="FILE.json", help="A plan of this model.")],
    text: Text, tokens: Tokens = None, batches: Annotated[int, typer.Option(min=1)] = 1,
    copies: Annotated[int, typer.Option(min=0, help="Rounds of the copy test.")] = 4,
    device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, seed: Seed = 0,
    out: Folder = Path("supportbasis-out/eval"),
) -> None:  # fmt: skip
    """Loss and predictions of a language model with a plan, paired with exact attention."""
    with friendly("eval"):
        folder, made = writable(out), ModelPlan.load(plan)
        loaded = _loaded(model, device, dtype, download, trust_remote_code)
        ids = model_commands.batch_tokens(loaded, text, tokens, batches)
        model_commands.run_eval(loaded, made, ids, copies, seed, folder)


STUDIES = {
    "demo": "Compare the methods with PyTorch's exact attention, on generated inputs or on yours.",
    "bench": "Time the methods against PyTorch's exact attention, each with its error.",
    "reproduce": "Studies of the paper's claims, each with a report.",
}


def run_study(context: typer.Context) -> None:
    """Pass the user's words on to the command that the studies register under this name."""
    name = context.command.name or ""
    with friendly(name):
        found = list(entry_points(group="supportbasis.commands", name=name))
        if not found:
            raise InputError(
                "this command comes with the studies: pip install supportbasis-studies "
                "(in a checkout: pip install ./studies)"
            )
        command = found[0].load()
    command(args=context.args, prog_name=f"supportbasis {name}")


passed_on = {"ignore_unknown_options": True, "allow_extra_args": True}
for study, purpose in STUDIES.items():
    app.command(study, help=purpose, add_help_option=False, context_settings=passed_on)(run_study)
