"""The folder of trained models that some studies can use."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "SUPPORTBASIS_MODELS"


def models_from_environment() -> Path | None:
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None
