"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from .. import __version__
from ..errors import InputError
from .model_commands import evaluate_model, plan_model, profile_model
from .selftest import selftest
from .terminal import friendly

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Sub-quadratic softmax attention with a stated error."""
    if version:
        typer.echo(f"supportbasis {__version__}")
        raise typer.Exit


app.command("selftest")(selftest)
app.command("plan")(plan_model)
app.command("profile")(profile_model)
app.command("eval")(evaluate_model)

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
