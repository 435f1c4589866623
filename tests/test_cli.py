"""The command line: its options, what an import costs, and the studies' entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from zipfile import ZipFile

import pytest

import supportbasis as sb
from cli_cases import invoke
from supportbasis.cli import app as app_module


def test_version() -> None:
    assert invoke("--version") == (0, f"supportbasis {sb.__version__}")


# ---- commands of the studies -----------------------------------------------------------------

COMMANDS = {
    "demo": ("--n", "64"),
    "bench": ("frontier", "--quick"),
    "reproduce": ("efficiency", "--help"),
}
received: list[object] = []


def fake(*arguments: object, **options: object) -> None:
    received.append((arguments, options))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    """Stands for the metadata of what is installed; empty at first."""
    points: dict[str, EntryPoint] = {}

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        assert group == "supportbasis.commands"
        return [points[name]] if name in points else []

    monkeypatch.setattr(app_module, "entry_points", entry_points)
    return points


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_studies_a_line_says_what_to_install(command: str, tmp_path: Path) -> None:
    code, text = invoke(command, *COMMANDS[command], "--out", tmp_path / "out")
    assert code == 2
    assert "pip install supportbasis-studies" in text and "pip install ./studies" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_studies_get_what_the_user_wrote(
    command: str, registered: dict[str, EntryPoint], tmp_path: Path
) -> None:
    registered[command] = EntryPoint(command, f"{__name__}:fake", "supportbasis.commands")
    received.clear()
    assert invoke(command, *COMMANDS[command], "--out", tmp_path)[0] == 0
    words = [*COMMANDS[command], "--out", str(tmp_path)]
    assert received == [((), {"args": words, "prog_name": f"supportbasis {command}"})]


@pytest.mark.usefixtures("registered")
def test_help_lists_the_studies_whether_they_are_there_or_not() -> None:
    text = invoke("--help")[1]
    assert all(command in text for command in COMMANDS)


def test_help_shows_defaults_that_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are markup to the terminal's printer unless they are escaped."""
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke("plan", "--help")[1]
    assert "[default: cuda if there is one]" in text and "[default: 32768 on a GPU" in text


def test_the_wheel_is_small_and_holds_no_study(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    root = Path(sb.__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    (built,) = wheel.WheelBuilder(str(root)).build(directory=str(tmp_path))
    assert Path(built).stat().st_size < 1e6
    names = ZipFile(built).namelist()
    assert not [name for name in names if "studies" in name or "safetensors" in name]
    assert {"supportbasis/cli/app.py", "supportbasis/cli/report.html"} <= set(names)


# ---- what an import costs --------------------------------------------------------------------


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = Path(sb.__file__).resolve().parents[1]
    environment = dict(os.environ, PYTHONPATH=str(source))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def test_import_leaves_optional_packages_alone() -> None:
    names = ("triton", "transformers", "matplotlib", "typer", "rich", "safetensors", "jinja2")
    done = python(f"import sys, supportbasis; print([x for x in {names} if x in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["typer", "rich", "matplotlib", "jinja2"])
def test_without_the_extra_the_command_says_what_to_install(name: str) -> None:
    code = (
        "import sys; sys.modules[sys.argv.pop(1)] = None; from supportbasis.cli import main; main()"
    )
    done = python(code, name, "plan")
    assert done.returncode == 1
    assert 'pip install "supportbasis[cli]"' in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_module_is_the_command() -> None:
    done = python("import runpy; runpy.run_module('supportbasis', run_name='__main__')", "--help")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout and "bench" in done.stdout
