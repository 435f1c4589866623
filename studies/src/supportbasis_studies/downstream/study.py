"""``supportbasis reproduce downstream``: measure what the folder lacks, write, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from ..distribution import check_installed
from ..study import Machine, Records, Row, Section, Unit, chosen_device, measure, publish
from . import findings, pictures, stories
from .harness import BenchmarkRow, Harness, Wish
from .items import TASKS
from .measure import Subject, measure_layers, measure_recall, measure_task, measure_text
from .methods import LIBRARY, NAMES, SLOW
from .models import FOLDER
from .reading import FORMS
from .rows import LayerRow, RecallRow, StoryRow, TaskRow, TextRow

TITLE = "supportbasis reproduce downstream"
LEAD = (
    "The paper's table: accuracy on five tasks with approximate attention in every layer. The "
    "paper evaluates LLaDA-8B-Instruct on GSM8K, MMLU, HellaSwag and ARC; here two small "
    "transformers that come with the package, trained on a generated language, are scored on five "
    "generated tasks that stand for them. “Emulation” rows repeat the published evaluation: all "
    "scores are formed, the largest and smallest 10 % of each head are exponentiated, the others "
    "go through a Chebyshev series; AS23 puts all through it. They save no work. “Revised” rows "
    "follow the authors' second file, which subtracts every row's largest score first and keeps "
    "the series at 1e-8 or more. The other rows are methods of this library; “exact heads” says "
    "how many heads they left exact because nothing cheaper was good enough, and then they answer "
    "as exact does. Heads are planned on the first item of a task and the plan serves the others; "
    "MultiThreshold is planned for 50 items at a time. The mean of the values stands for a broken "
    "attention. The items are mostly harder than those that the models learned from, so that exact "
    "attention is not always right; they and the weights were fixed before methods were compared."
)
PART = 50  # items after which rows are written
BATCH = 4  # of emulations on a CPU: larger ones take no less time and more memory


@dataclass(frozen=True)
class Extent:
    """How much is asked of a model."""

    items: int  # of each task
    lengths: dict[str, int]  # of the prompts of a task
    windows: int  # of held-out text
    window: int
    recall: tuple[tuple[int, int], ...]  # length of the text, and how many of them
    prompts: int  # of each task, for the errors of hidden states

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First item and count of every part."""
        firsts = range(0, self.items, PART)
        return [(first, min(PART, self.items - first)) for first in firsts]


LENGTHS = dict.fromkeys(TASKS, 256)
SHORT = dict.fromkeys(TASKS, 192)
FULL = {
    "causal": Extent(400, LENGTHS, 6, 1024, ((1024, 2), (4096, 1)), 3),
    "diffusion": Extent(400, LENGTHS, 3, 1024, ((1024, 4),), 3),
}
QUICK = {
    "causal": Extent(6, SHORT, 1, 512, ((512, 1),), 1),
    "diffusion": Extent(3, SHORT, 1, 256, ((512, 1),), 1),
}


@dataclass(frozen=True, eq=False)
class Tables:
    """The rows that a folder holds."""

    tasks: Records[TaskRow]
    texts: Records[TextRow]
    recall: Records[RecallRow]
    layers: Records[LayerRow]
    stories: Records[StoryRow]

    @staticmethod
    def of(out: Path, machine: Machine) -> Tables:
        return Tables(
            Records(out / "tasks.csv", TaskRow, machine),
            Records(out / "perplexity.csv", TextRow, machine),
            Records(out / "recall.csv", RecallRow, machine),
            Records(out / "layers.csv", LayerRow, machine),
            Records(out / "stories.csv", StoryRow, machine),
        )


R = TypeVar("R", bound=Row)


class Units:
    """The units of the study, those of slow methods last."""

    def __init__(self) -> None:
        self._found: list[tuple[int, Unit[Any]]] = []

    def add(
        self, records: Records[R], name: str, method: str, run: Callable[..., Sequence[R]],
        *given: Any,
    ) -> None:  # fmt: skip
        """A unit whose rows are ``run(*given)``."""
        turn = SLOW.index(method) + 1 if method in SLOW else 0
        self._found.append((turn, Unit(name, records, lambda tick: run(*given))))

    @property
    def names(self) -> list[str]:
        return [unit.name for _, unit in self._found]

    def sorted(self) -> list[Unit[Any]]:
        return [unit for _, unit in sorted(self._found, key=lambda item: item[0])]


def run_downstream(
    extents: dict[str, Extent],
    out: Path,
    story_folder: Path | None,
    console: Console,
    *,
    device: str = "cpu",
    redraw: bool = False,
) -> None:
    """Fill in the rows that the folder lacks; then the report."""
    chosen = chosen_device(device)
    machine = Machine.here(device)
    made, units = Tables.of(out, machine), Units()
    subjects = [(Subject.of(kind, FOLDER / kind, chosen), extents[kind]) for kind in extents]
    for add in (_add_tasks, _add_reading):
        for subject, extent in subjects:
            add(units, made, subject, extent)
    if story_folder is not None:
        _add_stories(units, made, story_folder, chosen)
    if not redraw:
        check_installed()
    measure(units.sorted(), console, redraw=redraw)
    publish(out, TITLE, LEAD, _sections(made, units.names, out), machine, console)


def own_subject(kind: str, device: str) -> Subject:
    """A model of the package."""
    return Subject.of(kind, FOLDER / kind, chosen_device(device))


def run_benchmarks(
    wish: Wish, out: Path, console: Console, *, device: str = "cpu", redraw: bool = False
) -> None:
    """The paper's benchmarks on a user's model; rows that the folder has are kept."""
    chosen = chosen_device(device)
    machine = Machine.here(device)
    rows, units = Records(out / "benchmarks.csv", BenchmarkRow, machine), Units()
    harness = None if redraw else Harness(wish, chosen)
    for task, name in product(wish.tasks, NAMES):
        unit = wish.unit(name, task)
        units.add(rows, unit, name, _benchmark, harness, unit, name, task)
    measure(units.sorted(), console, redraw=redraw)
    grid = findings.benchmark_table(rows.of(units.names))
    text = "Accuracy in percent, as lm-eval counts it; “±” is its standard error."
    section = Section(f"{wish.label} on benchmarks", text, grids=[grid])
    publish(out, f"{TITLE}: {wish.label}", LEAD, [section], machine, console)


def _benchmark(
    harness: Harness | None, unit: str, method: str, task: str
) -> Sequence[BenchmarkRow]:
    assert harness is not None
    return harness.run(unit, method, task)


def _add_tasks(units: Units, made: Tables, subject: Subject, extent: Extent) -> None:
    tasks = extent.lengths.items()
    for (first, count), name, (task, length) in product(extent.parts, NAMES, tasks):
        unit = subject.unit(name, task, first, count, length)
        small = subject.device.type == "cpu" and name not in LIBRARY
        asked = (task, first, count, length, BATCH if small else PART)
        units.add(made.tasks, unit, name, measure_task, subject, unit, name, *asked)


def _add_reading(units: Units, made: Tables, subject: Subject, extent: Extent) -> None:
    length = extent.lengths["easy"]
    for name in NAMES:
        asked: tuple[int, int] = (length, extent.prompts)
        unit = subject.unit(name, "layers", extent.prompts, length)
        units.add(made.layers, unit, name, measure_layers, subject, unit, name, *asked)
        asked = (extent.window, extent.windows)
        unit = subject.unit(name, "text", extent.windows, extent.window)
        units.add(made.texts, unit, name, measure_text, subject, unit, name, *asked)
        for form, asked in product(FORMS, extent.recall):
            unit = subject.unit(name, form, *asked)
            units.add(made.recall, unit, name, measure_recall, subject, unit, name, form, *asked)


def _add_stories(units: Units, made: Tables, folder: Path, device: torch.device) -> None:
    loaded = cache(stories.load)

    def run(unit: str, name: str) -> list[StoryRow]:
        return stories.measure_story(loaded(folder, device), unit, name)

    for name in NAMES:
        unit = f"{stories.MODEL}, {name}"
        units.add(made.stories, unit, name, run, unit, name)


# ---- the report ------------------------------------------------------------------------------


def _sections(made: Tables, units: Sequence[str], out: Path) -> list[Section]:
    models = findings.scored(made.tasks.of(units))
    sections = [_short(models, out)]
    sections += [_model_section(scored) for scored in models.values()]
    sections.append(_layer_section(made.layers.of(units), out))
    sections.append(_reading_section(made.texts.of(units), made.recall.of(units), out))
    told = made.stories.of(units)
    if told:
        sections.append(_story_section(told))
    return sections


def _short(models: dict[str, dict[str, findings.Scored]], out: Path) -> Section:
    said = [sentence for made in models.values() for sentence in findings.sentences(made)]
    grids = [
        findings.statement_table(f"{model}: what the paper leads to expect", found)
        for model, found in ((model, findings.statements(made)) for model, made in models.items())
    ]
    paper = findings.paper_table(models)
    picture = out / "accuracy.png"
    pictures.draw_accuracy(models, picture)
    figures = [(picture, "Average over the five tasks with 95 % intervals.")]
    return Section("In short", "", said, [*grids, paper], figures)


def _model_section(made: dict[str, findings.Scored]) -> Section:
    model = next(iter(made.values())).model
    text = (
        "Choices are scored by likelihood; sums are written and parsed. “Unparsable”: a written "
        "sum without the form that was shown, a token that is none of the choices where one token "
        "is asked for, or no number at all. “Written”: right where every answer of one token has "
        "to be the likeliest of all words, not only of the choices. “Cost”: multiply-adds of the "
        "plans over those of exact attention. Intervals are 95 % of a paired bootstrap over items."
    )
    shown = [findings.accuracy_table(made), findings.loss_table(made)]
    grids = [*shown, findings.difference_table(made)]
    return Section(f"The {model} model", text, grids=grids, printed=shown)


def _layer_section(rows: Sequence[LayerRow], out: Path) -> Section:
    picture = out / "layers.png"
    pictures.draw_layers(rows, picture)
    grids = [
        findings.layer_table(rows, model) for model in dict.fromkeys(row.model for row in rows)
    ]
    text = "Relative error, in norm, of the hidden states of prompts of all tasks, layer by layer."
    figures = [(picture, "Error of hidden states after each layer.")]
    return Section("Errors through the layers", text, grids=grids, figures=figures)


def _reading_section(texts: Sequence[TextRow], recall: Sequence[RecallRow], out: Path) -> Section:
    picture = out / "recall.png"
    pictures.draw_recall(recall, picture)
    shown = dict.fromkeys((row.model, row.form) for row in recall)
    grids = [findings.text_table(texts)]
    grids += [findings.recall_table(recall, *pair) for pair in shown]
    text = (
        "Perplexity of sentences about the world that were not trained on; of the diffusion model, "
        "the bound that its loss gives. Recall: codes hidden in such sentences (needle) or listed "
        "before them (associative), asked for at the end."
    )
    figures = [(picture, "Codes recalled against distance.")]
    return Section("Perplexity and recall at a distance", text, grids=grids, figures=figures)


def _story_section(rows: Sequence[StoryRow]) -> Section:
    text = (
        "A real model, head dim 8. Perplexity of a plain English story; and of the story that the "
        "model writes with exact attention, how many tokens stay the likeliest, and how many come "
        "before the first that does not."
    )
    return Section("stories260K", text, grids=[findings.story_table(rows)])
