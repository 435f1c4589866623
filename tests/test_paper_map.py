"""docs/paper-map.md: every file, symbol and test that it names exists, and symbols load."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper-map.md"
SOURCES = {"supportbasis": ROOT / "src" / "supportbasis",
           "supportbasis_studies": ROOT / "studies" / "src" / "supportbasis_studies"}  # fmt: skip
TESTS = (ROOT / "tests", ROOT / "studies" / "tests")
ROW = re.compile(r"^\| .* \|$")


def rows() -> list[list[str]]:
    """Cells of every row: item, content, file and symbol, test."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if ROW.match(line)]
    found = [[cell.strip() for cell in re.split(r"(?<!\\) \| ", line[2:-2])] for line in lines]
    return [cells for cells in found if cells[0] != "item" and len(cells) == 4]


def named(cell: str) -> list[tuple[str, list[str]]]:
    """Files of a cell and the names that follow each of them."""
    found: list[tuple[str, list[str]]] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            found.append((name, []))
        elif found and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            found[-1][1].append(name)
    return found


@cache
def module_of(file: str) -> object | None:
    """The module of a file of the library or of the studies; None for a script."""
    for package, folder in SOURCES.items():
        if (folder / file).is_file():
            return importlib.import_module(f"{package}.{file[:-3].replace('/', '.')}")
    assert (ROOT / file).is_file(), f"{file} is in neither package"
    return None


@cache
def functions_of(file: str) -> set[str]:
    (path,) = [folder / file for folder in TESTS if (folder / file).is_file()]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


SYMBOLS = sorted({(file, name) for row in rows() for file, names in named(row[2])
                  for name in names or [""]})  # fmt: skip
CHECKS = sorted({(file, name) for row in rows() for file, names in named(row[3])
                 for name in names or [""]})  # fmt: skip


def test_there_are_rows() -> None:
    assert len(rows()) > 70 and len(SYMBOLS) > 80 and len(CHECKS) > 100


@pytest.mark.parametrize(("file", "name"), SYMBOLS)
def test_symbols_load(file: str, name: str) -> None:
    if file.split("/")[0] in ("distribution", "downstream", "efficiency", "polynomial_attention"):
        pytest.importorskip("matplotlib")
        pytest.importorskip("transformers")
    found = module_of(file)
    for part in name.split(".") if name and found is not None else ():
        fields = getattr(found, "__dataclass_fields__", {})
        assert hasattr(found, part) or part in fields, f"{file} has no {name}"
        found = getattr(found, part, None)


@pytest.mark.parametrize(("file", "name"), CHECKS)
def test_tests_exist(file: str, name: str) -> None:
    assert not name or name in functions_of(file), f"{file} has no {name}"


def test_every_item_is_checked_or_says_that_nothing_is_to_be_checked() -> None:
    bare = [row[0] for row in rows() if not named(row[3])]
    allowed = {"Theorems 1.3, 1.4", "Figure, polynomial method", "Theorem A.5", "Definition A.6",
               "Theorem A.7", "Fact J.3", "Fact J.4", "Facts J.7, J.8", "K"}  # fmt: skip
    assert set(bare) <= allowed


def test_no_row_promises_what_is_not_there() -> None:
    assert not re.search(r"\b(planned|to do|later)\b", PAGE.read_text(encoding="utf-8"))
