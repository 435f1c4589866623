"""``supportbasis reproduce downstream``: measure what the folder lacks, write, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from ...errors import InputError
from ..chapters import Chapter, publish
from ..devices import chosen_device
from ..distribution import check_installed
from ..machine import Machine
from ..measure import Tick
from ..progress import Steps
from ..records import Records, Row
from . import findings, pictures, stories, tables
from .contenders import LIBRARY, NAMES, SLOW
from .harness import BenchmarkRow, Harness, Wish
from .items import TASKS
from .measure import Subject, measure_layers, measure_recall, measure_task, measure_text
from .models import FOLDER
from .reading import FORMS
from .rows import LayerRow, RecallRow, StoryRow, TaskRow, TextRow

TITLE = "supportbasis reproduce downstream"
LEAD = (
    "The paper's table: accuracy on five tasks with approximate attention in every layer. The "
    "paper judges LLaDA-8B-Instruct on GSM8K, MMLU, HellaSwag and ARC; here two small transformers "
    "that come with the package, trained on a generated language, are judged on five generated "
    "tasks that stand for them. “Emulation” rows repeat the published evaluation: all scores are "
    "formed, the largest and smallest 10 % of each head are exponentiated and the others go "
    "through a Chebyshev series; AS23 puts all through the series. They save no work. The other "
    "rows are methods of this library; “exact heads” says how many heads they left exact because "
    "nothing cheaper was good enough, and then they answer as exact does. Heads are planned on the "
    "first item of a task and the plan serves the others; MultiThreshold is planned for 50 items "
    "at a time. The mean of the values stands for a broken attention. The items are mostly harder "
    "than those that the models learned from, so that exact attention is not always right; they "
    "and the weights were fixed before methods were compared."
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


def _fitting(run: Callable[[Tick], None], name: str, tick: Tick) -> None:
    try:
        run(tick)
    except torch.OutOfMemoryError:
        raise InputError(
            f"--device: its memory does not suffice for “{name}”; free some, or repeat the command "
            "with another device (finished parts are kept)"
        ) from None


class Plan:
    """The units of the study: their names, where their rows belong, and how they are measured."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Callable[[], bool], Callable[[Tick], None], int]] = []
        self.names: list[str] = []

    def add(
        self, records: Records[R], name: str, measure: Callable[[Tick], Sequence[R]], method: str
    ) -> None:
        def run(tick: Tick) -> None:
            records.add(measure(tick))

        turn = SLOW.index(method) + 1 if method in SLOW else 0
        self.steps.append((name, partial(records.has, name), run, turn))
        self.names.append(name)

    def run(self, console: Console) -> None:
        """Measure the units that have no rows yet, those of slow methods last."""
        with Steps(console, len(self.steps)) as steps:
            for name, has, run, _ in sorted(self.steps, key=lambda step: step[-1]):
                with steps.step(name) as tick:
                    if not has():
                        _fitting(run, name, tick)


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
    place = chosen_device(device)
    machine = Machine.here(device)
    made, plan = Tables.of(out, machine), Plan()
    subjects = [(Subject.of(kind, FOLDER / kind, place), extents[kind]) for kind in extents]
    for units in (_plan_tasks, _plan_reading):
        for subject, extent in subjects:
            units(plan, made, subject, extent)
    if story_folder is not None:
        _plan_stories(plan, made, story_folder, place)
    if not redraw:
        check_installed()
        plan.run(console)
    elif not made.tasks.of(plan.names):
        raise InputError(
            f"--redraw: {made.tasks.path} holds no rows of these weights and sizes; run the same "
            "command without --redraw"
        )
    publish(out, TITLE, LEAD, _chapters(made, plan.names, out), machine, console)


def run_benchmarks(
    wish: Wish, out: Path, console: Console, *, device: str = "cpu", redraw: bool = False
) -> None:
    """The paper's benchmarks on a user's model; rows that the folder has are kept."""
    place = chosen_device(device)
    machine = Machine.here(device)
    rows, plan = Records(out / "benchmarks.csv", BenchmarkRow, machine), Plan()
    harness = None if redraw else Harness(wish, place)
    for task, name in product(wish.tasks, NAMES):
        unit = f"{wish.name}, {name}, {task}, {wish.limit or 'all'}"
        plan.add(rows, unit, _whole(_benchmark, harness, unit, name, task), name)
    if not redraw:
        plan.run(console)
    found = rows.of(plan.names)
    if not found:
        raise InputError(f"--redraw: {rows.path} holds no such rows; run without --redraw")
    grid = tables.benchmark_table(found)
    text = "Accuracy in percent, as lm-eval counts it; “±” is its standard error."
    chapter = Chapter(f"{wish.label} on benchmarks", text, [], [grid], [grid])
    publish(out, f"{TITLE}: {wish.label}", LEAD, [chapter], machine, console)


def _benchmark(
    harness: Harness | None, unit: str, method: str, task: str
) -> Sequence[BenchmarkRow]:
    assert harness is not None
    return harness.run(unit, method, task)


def _plan_tasks(plan: Plan, made: Tables, subject: Subject, extent: Extent) -> None:
    tasks = extent.lengths.items()
    for (first, count), name, (task, length) in product(extent.parts, NAMES, tasks):
        unit = subject.unit(name, task, first, count, length)
        small = subject.device.type == "cpu" and name not in LIBRARY
        asked = (task, first, count, length, BATCH if small else PART)
        plan.add(made.tasks, unit, partial(measure_task, subject, unit, name, *asked), name)


def _plan_reading(plan: Plan, made: Tables, subject: Subject, extent: Extent) -> None:
    length = extent.lengths["easy"]
    for name in NAMES:
        unit = subject.unit(name, "layers", extent.prompts, length)
        measure = _whole(measure_layers, subject, unit, name, length, extent.prompts)
        plan.add(made.layers, unit, measure, name)
        unit = subject.unit(name, "text", extent.windows, extent.window)
        reading = _whole(measure_text, subject, unit, name, extent.window, extent.windows)
        plan.add(made.texts, unit, reading, name)
        for form, (long, texts) in product(FORMS, extent.recall):
            unit = subject.unit(name, form, long, texts)
            recalling = _whole(measure_recall, subject, unit, name, form, long, texts)
            plan.add(made.recall, unit, recalling, name)


def _plan_stories(plan: Plan, made: Tables, folder: Path, device: torch.device) -> None:
    loaded = cache(stories.load)

    def measure(unit: str, name: str) -> list[StoryRow]:
        return stories.measure_story(loaded(folder, device), unit, name)

    for name in NAMES:
        unit = f"{stories.MODEL}, {name}"
        plan.add(made.stories, unit, _whole(measure, unit, name), name)


def _whole(measure: Callable[..., Sequence[R]], *given: Any) -> Callable[[Tick], Sequence[R]]:
    """A measurement that takes one step of the bar."""
    return lambda tick: measure(*given)


# ---- the report ------------------------------------------------------------------------------


def _chapters(made: Tables, units: Sequence[str], out: Path) -> list[Chapter]:
    models = findings.judged(made.tasks.of(units))
    chapters = [_short(models, out)]
    chapters += [_model_chapter(judged) for judged in models.values()]
    chapters.append(_layer_chapter(made.layers.of(units), out))
    chapters.append(_reading_chapter(made.texts.of(units), made.recall.of(units), out))
    told = made.stories.of(units)
    if told:
        chapters.append(_story_chapter(told))
    return chapters


def _short(models: dict[str, dict[str, findings.Judged]], out: Path) -> Chapter:
    said = [sentence for made in models.values() for sentence in findings.sentences(made)]
    grids = [
        findings.statement_table(f"{model}: what the paper leads to expect", found)
        for model, found in ((model, findings.statements(made)) for model, made in models.items())
    ]
    paper = tables.paper_table(models)
    picture = out / "accuracy.png"
    pictures.draw_accuracy(models, picture)
    figures = [(picture, "Average over the five tasks with 95 % intervals.")]
    return Chapter("In short", "", said, [*grids, paper], [*grids, paper], figures)


def _model_chapter(made: dict[str, findings.Judged]) -> Chapter:
    model = next(iter(made.values())).model
    text = (
        "Choices are judged by likelihood; sums are written and parsed. “Unparsable”: a written "
        "sum without the form that was shown, a token that is none of the choices where one token "
        "is asked for, or no number at all. “Written”: right where every answer of one token has "
        "to be the likeliest of all words, not only of the choices. “Cost”: multiply-adds of the "
        "plans over those of exact attention. Intervals are 95 % of a paired bootstrap over items."
    )
    shown = [tables.accuracy_table(made), tables.loss_table(made)]
    grids = [*shown, tables.difference_table(made)]
    return Chapter(f"The {model} model", text, [], grids, shown)


def _layer_chapter(rows: Sequence[LayerRow], out: Path) -> Chapter:
    picture = out / "layers.png"
    pictures.draw_layers(rows, picture)
    grids = [tables.layer_table(rows, model) for model in dict.fromkeys(row.model for row in rows)]
    text = "Relative error, in norm, of the hidden states of prompts of all tasks, layer by layer."
    figures = [(picture, "Error of hidden states after each layer.")]
    return Chapter("Errors through the layers", text, [], grids, grids, figures)


def _reading_chapter(texts: Sequence[TextRow], recall: Sequence[RecallRow], out: Path) -> Chapter:
    picture = out / "recall.png"
    pictures.draw_recall(recall, picture)
    shown = dict.fromkeys((row.model, row.form) for row in recall)
    grids = [tables.text_table(texts)]
    grids += [tables.recall_table(recall, *pair) for pair in shown]
    text = (
        "Perplexity of sentences about the world that were not trained on; of the diffusion model, "
        "the bound that its loss gives. Recall: codes hidden in such sentences (needle) or listed "
        "before them (associative), asked for at the end."
    )
    figures = [(picture, "Codes recalled against distance.")]
    return Chapter("Perplexity and recall at a distance", text, [], grids, grids, figures)


def _story_chapter(rows: Sequence[StoryRow]) -> Chapter:
    grid = tables.story_table(rows)
    text = (
        "A real model, head dim 8. Perplexity of a plain English story; and of the story that the "
        "model writes with exact attention, how many tokens stay the likeliest, and how many come "
        "before the first that does not."
    )
    return Chapter("stories260K", text, [], [grid], [grid])
