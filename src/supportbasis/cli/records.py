"""Rows of a study in a CSV file, kept from run to run: what is there is not measured again.

A study is cut into units. All rows of a unit are added at once and the file is replaced as a
whole, so that a run which is stopped, or runs out of disk, leaves the finished units behind.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from ..errors import InputError
from .machine import Machine
from .report import write_table


@dataclass(frozen=True)
class Row:
    """A row of a study: strings and numbers, the first of which names its unit."""

    unit: str


R = TypeVar("R", bound=Row)


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
            write_table(fresh, None, [*self._lines, *new])
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
