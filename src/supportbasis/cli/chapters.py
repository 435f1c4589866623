"""What a study says: chapters of sentences, tables and pictures, printed and written as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .machine import Machine
from .report import Grid, Section, figure, link, machine_section, paragraph, write_html

KEPT = (".csv", ".png", ".svg")


@dataclass(frozen=True, eq=False)
class Chapter:
    """A section of the report: sentences, tables and pictures with their captions."""

    title: str
    text: str
    said: Sequence[str]
    grids: Sequence[Grid]
    shown: Sequence[Grid]  # on the terminal
    figures: Sequence[tuple[Path, str]] = ()

    def section(self) -> Section:
        body = [paragraph(self.text)] if self.text else []
        body += [paragraph(sentence, "finding") for sentence in self.said]
        body += [grid.html() for grid in self.grids]
        return Section(self.title, body + [figure(*picture) for picture in self.figures])

    def show(self, console: Console) -> None:
        console.print()
        console.print(self.title, style="bold underline")
        for grid in self.shown:
            console.print(grid.terminal())
        for sentence in self.said:
            console.print(sentence)


def publish(
    out: Path,
    title: str,
    lead: str,
    chapters: Sequence[Chapter],
    machine: Machine,
    console: Console,
    further: Sequence[Section] = (),
) -> None:
    """Write ``report.html``, print the chapters, and say where everything is.

    ``further`` sections stand in the report alone, before the machine's.
    """
    sections = [chapter.section() for chapter in chapters]
    write_html(out / "report.html", title, lead, [*sections, *further, machine_section(machine)])
    for chapter in chapters:
        chapter.show(console)
    files = sorted(path.name for path in out.iterdir() if path.suffix in KEPT)
    console.print(f"\nReport: {out / 'report.html'}", style="bold")
    console.print(f"Beside it: {', '.join(files)}")


def write_index(out: Path, title: str, parts: Mapping[str, str]) -> None:
    """A page that leads to the report of each part, by the part's folder and what it is about."""
    lines = [f"<p>{link(f'{name}/report.html', name)}: {text}</p>" for name, text in parts.items()]
    lead = "The parts of the paper's experiments, each with a report of its own."
    write_html(out / "report.html", title, lead, [Section("Reports", lines)])
