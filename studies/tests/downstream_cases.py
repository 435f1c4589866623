"""Random models, and the command, of the study of downstream tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from supportbasis_studies import commands
from supportbasis_studies.downstream import models


def random_models() -> dict[str, Any]:
    """Whose attention matters."""
    made = {}
    for kind in models.CONTEXT:
        model = models.new_model(kind, 0, layers=2, width=64).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
        made[kind] = model
    return made


def saved_models(folder: Path) -> Path:
    for kind, model in random_models().items():
        models.save_model(model, folder / kind)
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and output, on one line, of ``supportbasis reproduce downstream``."""
    chosen = [str(argument) for argument in arguments]
    result = CliRunner().invoke(commands.reproduce, ["downstream", *chosen])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())
