"""What a comparison leaves behind: CSV rows, a table on the terminal, a page that stands alone."""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from .machine import Machine
from .measure import Measurement

HEADINGS = ("time", "speed-up", "rel. error", "max error", "bound", "cost")
GOOD, LOST = 1e-3, 0.1  # relative errors that count as accurate, and beyond which all is lost

EXPLAINED = """Time is the best of several whole calls, planning included, taking turns with the
baseline in one loop; “speed-up” is the baseline's time over it. Errors are against float64
attention of sampled query rows (up to 512) over all keys: the relative Frobenius error, and the
largest error over max|V|. “Bound” is the certified upper bound on the largest error over max|V|
for all rows. “Cost” counts multiply-adds relative to exact attention."""


# ---- numbers ---------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    if value is None:
        return "—"
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def small(value: float | None) -> str:
    return "—" if value is None else f"{value:.1e}"


def times(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


def percent(value: float) -> str:
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %" if value < 1e6 else f"{value:.1e} %"


def cells(row: Measurement) -> list[str]:
    """The numbers of a line, in the order of `HEADINGS`."""
    cost = "—" if row.cost is None else f"{row.cost:.3g}"
    errors = (small(row.relative_error), small(row.max_error), small(row.bound))
    return [seconds(row.seconds), times(row.ratio), *errors, cost]


def is_lost(row: Measurement) -> bool:
    """Whether the answer is useless: failed, not a number, or wrong by more than 10 %."""
    return row.relative_error is None or not row.relative_error <= LOST


def is_approximate(row: Measurement) -> bool:
    """Whether an approximation ran and gave numbers. Exact work has cost 1."""
    return row.ratio is not None and row.relative_error is not None and row.cost != 1.0


# ---- findings --------------------------------------------------------------------------------


def findings(rows: Sequence[Measurement]) -> str:
    """Two sentences that the numbers of one setting say: what won, and what did not work."""
    tried = [row for row in rows if row.bound is not None or row.seconds is None]
    return f"{_best_sentence(tried)} {_other_sentence(rows, tried)}"


def _best_sentence(tried: Sequence[Measurement]) -> str:
    accurate = [row for row in tried if is_approximate(row) and (row.relative_error or 0) <= GOOD]
    best = max(accurate, key=lambda row: row.ratio or 0.0, default=None)
    if best is None:
        return "No approximation came within 0.1 % of the exact answer."
    assert best.ratio is not None and best.relative_error is not None
    if best.ratio <= 1:
        return (
            f"No approximation within 0.1 % of the exact answer was faster than {best.baseline}; "
            f"the closest was {best.method} at {times(best.ratio)}."
        )
    return (
        f"The fastest approximation within 0.1 % of the exact answer was {best.method}: "
        f"{times(best.ratio)} as fast as {best.baseline}, with a relative error of "
        f"{small(best.relative_error)} and {_bound_words(best.bound)}."
    )


def _bound_words(bound: float | None) -> str:
    if bound is None or bound == math.inf:
        return "no certified bound"
    return f"a certified bound of {small(bound)} on its largest error"


def _other_sentence(rows: Sequence[Measurement], tried: Sequence[Measurement]) -> str:
    lost = [row.method for row in tried if is_lost(row)]
    mean = next((row for row in rows if row.method == "mean(V)"), None)
    parts = []
    if mean is not None and mean.relative_error is not None:
        parts.append(f"the mean of V alone is off by {percent(100 * mean.relative_error)}")
    if lost:
        parts.append(f"{', '.join(lost)} lost the answer (more than 10 % off, or no answer)")
    else:
        parts.append("every method stayed within 10 %")
    text = ", and ".join(parts)
    return text[0].upper() + text[1:] + "."


# ---- the terminal ----------------------------------------------------------------------------


def terminal_table(title: str, rows: Iterable[Measurement], *, named: bool = False) -> Table:
    """A line for each measurement; what ran stands below the method."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("method", ratio=1)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        method = Text(f"{row.name}  " if named else "", style="cyan")
        method.append(row.method, style="bold default")
        method.append(f"\n{row.ran}", style="dim default")
        if row.note:
            method.append(f"\n! {row.note}", style="yellow")
        table.add_row(method, *cells(row), style="red" if is_lost(row) else "")
    return table


@dataclass(frozen=True)
class Grid:
    """A table of any content: the first column names a line; lines in ``lost`` are red."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    lost: frozenset[int] = frozenset()

    def terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for index, heading in enumerate(self.headings):
            if index:
                table.add_column(heading, justify="right", no_wrap=True)
            else:
                table.add_column(heading, min_width=20)
        for index, line in enumerate(self.lines):
            table.add_row(*(Text(cell) for cell in line), style="red" if index in self.lost else "")
        return table

    def html(self) -> str:
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        parts = [f'<p class="caption">{escape(self.title)}</p>', '<div class="scroll"><table>']
        parts.append(f"<thead><tr>{head}</tr></thead><tbody>")
        for index, line in enumerate(self.lines):
            kind = ' class="lost"' if index in self.lost else ""
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in line)
            parts.append(f"<tr{kind}>{cells}</tr>")
        return "\n".join([*parts, "</tbody></table></div>"])


# ---- CSV -------------------------------------------------------------------------------------


def write_csv(
    path: Path,
    machine: Machine,
    rows: Iterable[Measurement],
    *,
    name: str = "name",
    append: bool = False,
) -> None:
    """Tidy rows, one for each measurement; ``name`` is the heading of the first of its columns."""
    table = [{name: row.name} | _without_name(row) for row in rows]
    write_table(path, machine, table, append=append)


def write_table(
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


def _without_name(row: Measurement) -> dict[str, object]:
    content = asdict(row)
    del content["name"]
    return content


# ---- HTML ------------------------------------------------------------------------------------

STYLE = """
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
figcaption, footer { color: #66788a; font-size: .85rem; }
"""


@dataclass(frozen=True)
class Section:
    """A heading, and paragraphs, tables and figures below it, as HTML."""

    title: str
    body: Sequence[str]


def write_html(path: Path, title: str, lead: str, sections: Iterable[Section]) -> None:
    """One file that needs no other."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']
    for section in sections:
        parts += [f"<h2>{escape(section.title)}</h2>", *section.body]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    path.write_text(page + "\n".join(parts) + "\n</body>\n</html>\n", encoding="utf-8")


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def link(target: str, text: str) -> str:
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def preformatted(text: str) -> str:
    """Lines as a terminal shows them."""
    return f'<div class="scroll"><pre>{escape(text)}</pre></div>'


def html_table(rows: Iterable[Measurement], *, named: bool = False) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ("method", *HEADINGS))
    lines = [f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>']
    for row in rows:
        label = f"{row.name}: {row.method}" if named else row.method
        first = f'<b>{escape(label)}</b><span class="ran">{escape(row.ran)}</span>'
        if row.note:
            first += f'<span class="note">{escape(row.note)}</span>'
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        kind = ' class="lost"' if is_lost(row) else ""
        lines.append(f"<tr{kind}><td>{first}</td>{numbers}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A small table of names and what they are."""
    lines = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in pairs)
    return f'<table class="facts">{lines}</table>'


def machine_section(machine: Machine) -> Section:
    labels = {"cores": "threads", "version": "supportbasis"}
    content = asdict(machine).items()
    pairs = [(labels.get(name, name), str(value)) for name, value in content if value != ""]
    return Section("Machine and versions", [facts(pairs)])


def figure(path: Path, caption: str) -> str:
    """A PNG, inlined."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f'<img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
    return f"<figure>{source}<figcaption>{escape(caption)}</figcaption></figure>"
