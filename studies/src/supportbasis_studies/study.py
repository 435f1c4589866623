"""What every study shares: units of rows in CSV files, checks of statements, tables, a report.

A study is cut into units. All rows of a unit are added at once and the file is replaced as a
whole, so that a run which is stopped, or runs out of disk, leaves the finished units behind; the
next run measures only what is missing.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from rich.console import Console

from supportbasis import InputError
from supportbasis.cli.loading import chosen_device
from supportbasis.cli.report import Grid, Machine, Section, publish, write_csv, write_page

from .progress import Steps, Tick

__all__ = ["Check", "Grid", "Machine", "Records", "Row", "Section", "Steps", "Tick", "Unit",
           "check_table", "chosen_device", "in_short", "measure", "models_from_environment",
           "publish", "table", "write_index", "write_rows"]  # fmt: skip

MODELS = "SUPPORTBASIS_MODELS"


# ---- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a study: strings and numbers, the first of which names its unit."""

    unit: str


R = TypeVar("R", bound=Row)
T = TypeVar("T")


class Records(Generic[R]):
    """The rows of one kind that a folder holds."""

    def __init__(self, path: Path, kind: type[R], machine: Machine):
        self.path, self.machine = path, machine
        self._columns = [*asdict(machine), *(field.name for field in fields(kind))]
        self._lines = self._read()
        hints = get_type_hints(kind)
        self.rows: list[R] = [
            kind(**{name: _parse(line[name], hint) for name, hint in hints.items()})
            for line in self._lines
        ]

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != self._columns:
                raise InputError(
                    f"--out: {self.path} has other columns; move it away to start anew"
                )
            return list(reader)

    def has(self, unit: str) -> bool:
        return any(row.unit == unit for row in self.rows)

    def of(self, units: Sequence[str]) -> list[R]:
        """The rows of some units, in the order of the units."""
        found: dict[str, list[R]] = {unit: [] for unit in units}
        for row in self.rows:
            if row.unit in found:
                found[row.unit].append(row)
        return [row for unit in units for row in found[unit]]

    def add(self, rows: Sequence[R]) -> None:
        """Add all rows of a unit and write the file."""
        new = [asdict(self.machine) | asdict(row) for row in rows]
        fresh = self.path.with_suffix(".csv.new")
        try:
            write_csv(fresh, None, [*self._lines, *new])
            os.replace(fresh, self.path)
        finally:
            fresh.unlink(missing_ok=True)
        self._lines += new
        self.rows += rows


def _parse(text: Any, hint: Any) -> Any:
    """A cell as its column's type; an empty one is None where the column allows it."""
    if hint is str:
        return text
    if text == "":
        return None
    if hint is bool:
        return text == "True"
    return int(text) if hint is int else float(text)


def write_rows(path: Path, machine: Machine, rows: Iterable[Any]) -> None:
    """Dataclasses as a CSV file; the fields of a dataclass within one are columns of their own. A
    row with other columns gives them by ``line()``."""
    lines = (row.line() if hasattr(row, "line") else asdict(row) for row in rows)
    write_csv(path, machine, map(_flat, lines))


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    parts = [value if isinstance(value, dict) else {key: value} for key, value in content.items()]
    return {key: value for part in parts for key, value in part.items()}


# ---- units -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unit(Generic[R]):
    """A part of a study that is measured and kept as a whole."""

    name: str
    records: Records[R]
    run: Callable[[Tick], Sequence[R]]

    @property
    def is_done(self) -> bool:
        return self.records.has(self.name)


def measure(
    units: Sequence[Unit[Any]], console: Console, *, redraw: bool = False, whole: bool = False
) -> None:
    """Measure the units that have no rows yet. With ``redraw`` none is measured: some units must
    be there, all of them where only the ``whole`` makes a report."""
    missing = [unit for unit in units if not unit.is_done]
    kept, path = len(units) - len(missing), units[0].records.path
    if redraw and (not kept or (whole and missing)):
        raise InputError(
            f"--redraw: {len(missing)} of {len(units)} parts are not in {path.parent}; run the "
            "same command without --redraw to measure them"
        )
    if kept:
        console.print(f"{kept} of {len(units)} parts are in {path.name} and kept.")
    if redraw:
        return
    with Steps(console, len(missing)) as steps:
        for unit in missing:
            with steps.step(unit.name) as tick:
                rows = _fitting(unit, tick)
                if rows:
                    unit.records.add(rows)


def _fitting(unit: Unit[R], tick: Tick) -> Sequence[R]:
    try:
        return unit.run(tick)
    except torch.OutOfMemoryError:
        raise InputError(
            f"--device: its memory does not suffice for “{unit.name}”; free some, or repeat the "
            "command with another device (finished parts are kept)"
        ) from None


# ---- checks, tables, reports -----------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A statement, what was measured, and whether it holds."""

    statement: str
    measured: str
    holds: bool


def check_table(title: str, checks: Sequence[Check]) -> Grid:
    columns: dict[str, Callable[[Check], str]] = {
        "statement": lambda check: check.statement,
        "measured": lambda check: check.measured,
        "holds": lambda check: "yes" if check.holds else "no",
    }
    return table(title, checks, columns, lost=lambda check: not check.holds)


def in_short(title: str, checks: Sequence[Check], *said: str) -> Section:
    """The first section of a report: which statements hold."""
    holds = sum(check.holds for check in checks)
    counted = f"{holds} of {len(checks)} statements hold."
    return Section("In short", findings=[*said, counted], grids=[check_table(title, checks)])


def table(
    title: str,
    rows: Iterable[T],
    columns: Mapping[str, Callable[[T], str]],
    lost: Callable[[T], bool] = lambda row: False,
) -> Grid:
    """A line for each row; ``columns`` gives each heading and what stands below it."""
    rows = list(rows)
    lines = [[cell(row) for cell in columns.values()] for row in rows]
    red = frozenset(index for index, row in enumerate(rows) if lost(row))
    return Grid(title, list(columns), lines, red)


def write_index(out: Path, title: str, parts: Mapping[str, str]) -> None:
    """A page that leads to the report of each part, by the part's folder and what it is about."""
    lead = "The parts of the paper's experiments, each with a report of its own."
    links = {f"{name}/report.html": f"{name}: {text}" for name, text in parts.items()}
    write_page(out / "report.html", title, lead, [Section("Reports", links=links)])


# ---- options ---------------------------------------------------------------------------------


def models_from_environment() -> Path | None:
    """The folder of trained models that some studies can use."""
    value = os.environ.get(MODELS)
    return Path(value) if value else None
