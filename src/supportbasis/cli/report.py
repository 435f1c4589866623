"""What a command leaves behind: CSV rows, tables on the terminal, a page that stands alone."""

from __future__ import annotations

import base64
import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jinja2 import Environment
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import supportbasis

from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT = (".csv", ".png", ".svg")

# ---- numbers ---------------------------------------------------------------------------------


def times(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


# ---- tables ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A table: the first column names a line; lines in ``lost`` are red.

    Further lines of a name are small print; those that start with "!" are warnings.
    """

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    lost: frozenset[int] = frozenset()

    def terminal(self) -> Table:
        title = self.title or None
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for index, heading in enumerate(self.headings):
            if index:
                table.add_column(heading, justify="right", no_wrap=True)
            else:
                table.add_column(heading, min_width=20)
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


# ---- CSV -------------------------------------------------------------------------------------


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
        return Machine(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=torch.cuda.get_device_name(device) if known else device,
            cpu=_cpu(),
            cores=torch.get_num_threads(),
            torch=torch.__version__,
            version=supportbasis.__version__,
            commit=_commit(),
        )

    def facts(self) -> list[tuple[str, str]]:
        labels = {"cores": "threads", "version": "supportbasis"}
        content = asdict(self).items()
        return [(labels.get(name, name), str(value)) for name, value in content if value != ""]


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout this package is imported from; empty for an installed package. A copy
    without its history may say it in SUPPORTBASIS_COMMIT."""
    package = Path(supportbasis.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or package != Path(top).resolve() / "src" / "supportbasis":
        return os.environ.get("SUPPORTBASIS_COMMIT", "")
    return _git(package, "describe", "--always", "--dirty", "--exclude", "*")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_csv(
    path: Path,
    machine: Machine | None,
    lines: Iterable[Mapping[str, object]],
    *,
    append: bool = False,
) -> None:
    """Lines with the same columns, the machine's before them unless they are there already."""
    table = [({} if machine is None else asdict(machine)) | dict(line) for line in lines]
    if not table:
        return
    columns = list(table[0])
    append = append and path.exists()
    if append:
        with path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), None) != columns:
                raise InputError(f"--out: {path} has other columns; move it away to start anew")
    with path.open("a" if append else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if not append:
            writer.writeheader()
        writer.writerows(table)


# ---- pictures --------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, with space for its labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_axes(axes: Axes) -> None:
    """A light grid and no box around the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def length_label(n: float, _: object = None) -> str:
    """16k for 16384, on an axis of lengths."""
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


# ---- pages -----------------------------------------------------------------------------------

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  color: #1f2933; background: #fff; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; }
p.lead { color: #52606d; margin-top: 0; } p.finding { border-left: 4px solid #2f6fab;
  background: #f2f7fc; padding: .6rem .9rem; margin: .8rem 0; }
p.caption { font-weight: 600; margin: 1.4rem 0 .2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th { text-align: right; white-space: nowrap; border-bottom: 2px solid #9aa5b1;
  padding: .35rem .6rem; }
td { text-align: right; border-bottom: 1px solid #e4e7eb; padding: .35rem .6rem;
  vertical-align: top; font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 17rem; }
td .ran { display: block; color: #66788a; font-size: .8rem; }
td .note { display: block; color: #9c4221; font-size: .8rem; }
tr.lost td { color: #a61b1b; } tr.lost .ran { color: #b9605f; }
table.facts { width: auto; } table.facts td { text-align: left; white-space: normal; border: 0;
  padding: .1rem 1rem .1rem 0; min-width: 0; } table.facts td:first-child { color: #66788a; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; }
figcaption { color: #66788a; font-size: .85rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% for finding in section.findings %}<p class="finding">{{ finding }}</p>{% endfor %}
{% if section.verbatim %}<div class="scroll"><pre>{{ section.verbatim }}</pre></div>{% endif %}
{% for grid in section.grids %}
{% if grid.title %}<p class="caption">{{ grid.title }}</p>{% endif %}
<div class="scroll"><table>
<thead><tr>{% for heading in grid.headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for line in grid.lines %}
<tr{% if loop.index0 in grid.lost %} class="lost"{% endif %}>
{%- for cell in line %}{% set parts = cell.split("\\n") %}<td>
{%- if parts | length > 1 %}<b>{{ parts[0] }}</b>
{%- for part in parts[1:] %}
<span class="{{ 'note' if part.startswith('!') else 'ran' }}">{{ part }}</span>
{%- endfor %}{% else %}{{ cell }}{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endfor %}
{% for path, caption in section.figures %}
<figure><img src="{{ path | inline }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption>
</figure>
{% endfor %}
{% for target, text in section.links.items() %}
<p><a href="{{ target }}">{{ text }}</a></p>
{% endfor %}
{% endfor %}
{% if facts %}
<h2>Machine and versions</h2>
<table class="facts">
{% for name, value in facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% endif %}
</body>
</html>
"""


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
        if not printed and not self.findings:
            return
        console.print()
        console.print(self.title, style="bold underline")
        for grid in printed:
            console.print(grid.terminal())
        for finding in self.findings:
            console.print(finding)


def write_page(
    path: Path, title: str, lead: str, sections: Sequence[Section], machine: Machine | None = None
) -> None:
    """One file that needs no other: pictures are inlined."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inline"] = _inline
    facts = machine.facts() if machine else []
    page = environment.from_string(PAGE).render(
        title=title, lead=lead, sections=sections, facts=facts
    )
    path.write_text(page, encoding="utf-8")


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def publish(
    out: Path,
    title: str,
    lead: str,
    sections: Sequence[Section],
    machine: Machine,
    console: Console,
) -> None:
    """Write ``report.html``, print the sections, and say where everything is."""
    write_page(out / "report.html", title, lead, sections, machine)
    for section in sections:
        section.print(console)
    files = sorted(path.name for path in out.iterdir() if path.suffix in KEPT)
    console.print(f"\nReport: {out / 'report.html'}", style="bold")
    console.print(f"Beside it: {', '.join(files)}")
