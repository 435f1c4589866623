"""The package of the studies: its entry points, and what its wheel holds."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from zipfile import ZipFile

import pytest
import typer

from supportbasis.cli.app import STUDIES

ROOT = Path(__file__).resolve().parents[1]


def declared() -> dict[str, EntryPoint]:
    """The entry points of pyproject.toml, whether the package is installed or not."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."supportbasis.commands"]')[1].split("[")[0]
    pairs = re.findall(r'^([\w-]+) = "(.+)"$', section, re.MULTILINE)
    return {name: EntryPoint(name, value, "supportbasis.commands") for name, value in pairs}


def test_every_command_is_registered() -> None:
    found = declared()
    assert set(found) == set(STUDIES)
    assert all(isinstance(point.load(), typer.Typer) for point in found.values())


def test_the_wheel_holds_weights_and_texts(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    names = ZipFile(built).namelist()
    for kind in ("causal", "diffusion"):
        assert f"supportbasis_studies/downstream/weights/{kind}/model.safetensors" in names
    assert "supportbasis_studies/distribution/natural.txt" in names
