"""What a command leaves behind: CSV rows, tables on the terminal, a page that stands alone."""

from __future__ import annotations

import base64
import csv
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jinja2 import Environment, PackageLoader
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import supportbasis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT = (".csv", ".png", ".svg")


def times(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


@dataclass(frozen=True)
class Grid:
    """A table: the first column names a line; lines in ``lost`` are red.

    Further lines of a name are small print; those that start with "!" are warnings."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    lost: frozenset[int] = frozenset()

    def terminal(self) -> Table:
        title = self.title or None
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column(self.headings[0], min_width=20)
        for heading in self.headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for index, line in enumerate(self.lines):
            cells = (_styled(line[0]), *(Text(cell) for cell in line[1:]))
            table.add_row(*cells, style="red" if index in self.lost else "")
        return table


def _styled(name: str) -> Text:
    first, *rest = name.split("\n")
    text = Text(first, style="bold" if rest else "")
    for line in rest:
        text.append(f"\n{line}", style="yellow" if line.startswith("!") else "dim default")
    return text


@dataclass(frozen=True)
class Machine:
    """Where and when a measurement was made: the first columns of every result."""

    date: str
    device: str
    cpu: str
    cores: int
    torch: str
    version: str
    commit: str

    @staticmethod
    def here(device: str = "cpu") -> Machine:
        """The machine of this process; a device of CUDA gets its own name."""
        known = torch.device(device).type == "cuda" and torch.cuda.is_available()
        named = torch.cuda.get_device_name(device) if known else device
        date, threads = datetime.now(timezone.utc), torch.get_num_threads()
        which = (date.isoformat(timespec="seconds"), named, _cpu(), threads)
        return Machine(*which, torch.__version__, supportbasis.__version__, _commit())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", info.read_text() if info.is_file() else "", re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout this package is imported from; empty for an installed package. A copy
    without its history may say it in SUPPORTBASIS_COMMIT."""
    top = Path(supportbasis.__file__).resolve().parents[2]
    command = ["git", "-C", str(top), "describe", "--always", "--dirty", "--exclude", "*"]
    if (top / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10)
            return done.stdout.strip()
    return os.environ.get("SUPPORTBASIS_COMMIT", "")


def write_csv(path: Path, machine: Machine | None, lines: Iterable[Mapping[str, object]]) -> None:
    """Lines with the same columns, the machine's before them unless they are there already."""
    table = [(asdict(machine) if machine else {}) | dict(line) for line in lines]
    if table:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


def plain_axes(axes: Axes) -> None:
    """A light grid and no box around the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def length_label(n: float, _: object = None) -> str:
    """16k for 16384, on an axis of lengths."""
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


@dataclass(frozen=True, eq=False)
class Section:
    """A heading, and what stands below it: sentences, tables, pictures with captions, links."""

    title: str
    text: str = ""
    findings: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    figures: Sequence[tuple[Path, str]] = ()
    printed: Sequence[Grid] | None = None  # on the terminal; None: all tables
    verbatim: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    def print(self, console: Console) -> None:
        printed = self.grids if self.printed is None else self.printed
        if printed or self.findings:
            console.print()
            console.print(self.title, style="bold underline")
        for item in (*(grid.terminal() for grid in printed), *self.findings):
            console.print(item)


def write_page(
    path: Path, title: str, lead: str, sections: Sequence[Section], machine: Machine | None = None
) -> None:
    """One file that needs no other: pictures are inlined."""
    loader = PackageLoader("supportbasis.cli", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode("ascii")
    page = environment.get_template("report.html")
    facts = asdict(machine) if machine else {}
    text = page.render(title=title, lead=lead, sections=sections, facts=facts)
    path.write_text(text, encoding="utf-8")


def publish(
    out: Path, title: str, lead: str, sections: Sequence[Section], machine: Machine, to: Console
) -> None:
    """Write ``report.html``, print the sections, and say where everything is."""
    write_page(out / "report.html", title, lead, sections, machine)
    for section in sections:
        section.print(to)
    files = sorted(path.name for path in out.iterdir() if path.suffix in KEPT)
    to.print(f"\nReport: {out / 'report.html'}", style="bold")
    to.print(f"Beside it: {', '.join(files)}")
