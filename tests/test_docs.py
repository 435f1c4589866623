"""The README runs, and the API page is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import supportbasis as sb

ROOT = Path(__file__).parent.parent


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer tokens, so that it takes a second: then every head is exact."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "16384" in code
    names: dict[str, object] = {}
    exec(code.replace("16384", "512"), names)
    result = names["result"]
    assert isinstance(result, sb.Result) and result.certificate.holds(0.05)
    printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```\n(Plan: .*?)```", text, re.DOTALL)
    assert printed[0].partition(",")[0] == shown.partition(",")[0]
    assert re.match(r"Certificate: bound .*, measured ", printed[-1])


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert all(len(line) <= 100 for line in lines if not line.startswith("|"))


def test_every_public_name_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    directive = r"(auto\w+:: |currentmodule:: supportbasis\.)"
    missing = [name for name in sb.__all__ if not re.search(rf"{directive}{name}\n", page)]
    assert not missing


def test_names_on_the_architecture_page_are_in_their_files() -> None:
    """`file.py` `name`, `Class.name`."""
    page, package = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "supportbasis"
    found = re.findall(r"`([\w/]+\.py)`((?:,?\s`[\w.]+`)+)", page)
    assert len(found) > 20
    for path, names in found:
        code = "".join(file.read_text() for file in package.rglob(path))
        for name in re.findall(r"[\w.]+", names):
            for part in name.split("."):
                assert re.search(rf"\b(def|class) {part}\b", code), (path, name)
