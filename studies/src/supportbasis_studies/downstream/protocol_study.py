"""``supportbasis reproduce downstream --protocol paper``: estimate, measure, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from ..study import Grid, Machine, Records, Section, Tick, Unit, measure, publish
from .findings import Scored
from .methods import EXACT
from .protocol import BATCHES, METHODS, PLAN, PLANNED, WRITING, Chat, OwnChat, Prompted
from .rows import TaskRow, joined, task_answers

TITLE = "supportbasis reproduce downstream --protocol paper"
LEAD = (
    "The paper's table in the authors' protocol: a zero-shot chat prompt, an answer of 32 tokens "
    "written by a masked-diffusion model in 8 steps of one block of 32, the letter or the number "
    "read by a pattern. What they published: two files of LLaDA whose attention is exact on a "
    "share of the scores and a Chebyshev series on the others, scripts for MMLU, HellaSwag, ARC "
    "and GPQA, and neither weights nor answers. The first file fixes 20 % and degree 6; the "
    "scripts of its time set a share and a degree in the configuration, which it does not read. "
    "The revised file reads both from the environment, subtracts every row's largest score first "
    "and keeps the series at 1e-8 or more. Which of them made the paper's table is not said. There "
    "is no code for AS23 on a model and no script for GSM8K: AS23 rows here put all scores through "
    "the series, and the prompt and pattern of GSM8K are ours. “Unparsable” answers hold nothing "
    "that the pattern finds and count as wrong. Intervals are 95 % of a paired bootstrap over "
    "items."
)
STAND_IN = (
    "The diffusion model of the package was trained on a generated language: it knows neither "
    "English nor letters. Generated tasks stand for the benchmarks, answered items of the same "
    "task for the chat template, and the first of the choices among the written words for the "
    "letter."
)
PART = 50  # items after which rows are written
FIRST = 20  # questions of each task that the time of one is estimated from
LARGE = 8e9  # parameters, of the model in the paper's table
LAYERS_AND_HEADS = 32 * 32  # of that model
SPEEDS = {"one H100 in bfloat16": 3e14, "one H100 in float32": 4e13, "two CPU cores": 1e11}
ALL_ITEMS, MEAN_TOKENS = 28_951, 200  # of the five benchmarks: items, and tokens of a prompt


@dataclass(frozen=True)
class Extent:
    """Methods, items of each task and how many are answered at once."""

    methods: tuple[str, ...]
    limit: int
    batch: int


def run_protocol(
    chat: Chat, extent: Extent, out: Path, console: Console, *, redraw: bool = False
) -> None:
    """Fill in the rows that the folder lacks; then the report."""
    machine = Machine.here("cpu" if redraw else chat.model.device.type)
    rows = Records(out / "protocol.csv", TaskRow, machine)
    parts = _parts(chat, extent, rows)
    units = [part.unit for part in parts]
    if not redraw:
        _say_time(chat, extent, parts, console)
    measure(units, console, redraw=redraw)
    made = scored(rows.of([unit.name for unit in units]), extent.methods)
    own = [STAND_IN] * isinstance(chat, OwnChat)
    section = Section("In short", findings=[*own, *_sentences(made)], grids=tables(made))
    cost = Section("What an 8-billion-parameter run would cost", findings=[large_cost()])
    publish(out, f"{TITLE}: {chat.name}", LEAD, [section, cost], machine, console)


# ---- units -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Some items of a task, answered by one method."""

    method: str
    items: int
    unit: Unit[TaskRow]


def _parts(chat: Chat, extent: Extent, rows: Records[TaskRow]) -> list[Part]:
    made = []
    for task in chat.tasks:
        size = chat.size(task)
        items = extent.limit if size is None else min(extent.limit, size)
        for first, method in product(range(0, items, PART), extent.methods):
            count = min(PART, items - first)
            unit = _unit(chat, method, task, (first, count), extent.batch, rows)
            made.append(Part(method, count, unit))
    return made


def _unit(
    chat: Chat,
    method: str,
    task: str,
    part: tuple[int, int],
    batch: int,
    rows: Records[TaskRow],
) -> Unit[TaskRow]:
    first, count = part
    planned = chat.tasks if method == PLAN else ()  # the plan changes with them
    parts = (chat.name, chat.digest, method, task, first, count, "paper", *planned)
    name = ", ".join(map(str, parts))

    def run(tick: Tick) -> Sequence[TaskRow]:
        asked, start = chat.prompted(task, first, count), time.perf_counter()
        with chat.by(method) as used:
            found = chat.answers(asked, batch)
        seconds = time.perf_counter() - start
        length = max(len(question.tokens) for question in asked) + WRITING.length
        numbers = (*task_answers(found), seconds, used.exact_share, used.mean_cost)
        return [TaskRow(name, chat.name, method, task, first, count, length, *numbers)]

    return Unit(name, rows, run)


def _say_time(chat: Chat, extent: Extent, parts: Sequence[Part], console: Console) -> None:
    """Time a batch of each method that is missing, and say what the rest will take."""
    missing: Counter[str] = Counter()
    for part in parts:
        missing[part.method] += 0 if part.unit.is_done else part.items
    if not missing.total():
        return
    asked, total = _typical(chat, extent), 0.0
    for method in filter(missing.__getitem__, extent.methods):
        if method == PLAN:
            console.print(f"{PLAN}: made once, on {BATCHES} batches of up to {PLANNED} tokens.")
        with chat.by(method):
            chat.answers(asked, extent.batch)  # plans, where there are any
            start = time.perf_counter()
            chat.answers(asked, extent.batch)
        each = (time.perf_counter() - start) / len(asked)
        total += missing[method] * each
        console.print(f"{method}: {each:.2g} s an item, {missing[method]} items.")
    console.print(f"In all about {duration(total)}; finished parts are kept.")


def _typical(chat: Chat, extent: Extent) -> list[Prompted]:
    """Of the first questions of all tasks, those of the length nearest to their mean: a batch."""
    count = min(extent.limit, FIRST)
    asked = [question for task in chat.tasks for question in chat.prompted(task, 0, count)]
    lengths = [len(question.tokens) for question in asked]
    mean = sum(lengths) / len(lengths)
    length = min(lengths, key=lambda length: abs(length - mean))
    return [question for question in asked if len(question.tokens) == length][: extent.batch]


def duration(seconds: float) -> str:
    """In words that a person plans by.

    >>> duration(45), duration(600), duration(10_000), duration(1e6)
    ('45 s', '10 min', '2.8 h', '12 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"


def large_cost() -> str:
    """2 FLOP for a parameter and a token, 8 passes for an item."""
    flops = 2 * LARGE * WRITING.steps * (MEAN_TOKENS + WRITING.length) * ALL_ITEMS
    scores = LAYERS_AND_HEADS * (MEAN_TOKENS + WRITING.length) ** 2
    times = ", ".join(f"{duration(flops / speed)} on {name}" for name, speed in SPEEDS.items())
    return (
        f"The five benchmarks have {ALL_ITEMS} items; at about {MEAN_TOKENS} tokens a prompt and "
        f"{WRITING.steps} passes an item, one method on a model of 8 billion parameters takes "
        f"{flops:.1e} FLOP: {times} (at 3e14, 4e13 and 1e11 FLOP/s), with 16 GB of weights in "
        "bfloat16 and 32 GB in float32. Emulations also form and sort all scores, "
        f"{scores:.1e} in every pass, and methods of the library plan for every item or batch; "
        "neither is counted."
    )


# ---- tables ----------------------------------------------------------------------------------


def scored(rows: Sequence[TaskRow], methods: Sequence[str]) -> dict[str, Scored]:
    """The methods that have rows; of each, the parts of a task joined."""
    parts: dict[tuple[str, str], list[TaskRow]] = {}
    for row in rows:
        parts.setdefault((row.method, row.task), []).append(row)
    made = {}
    for method in methods:
        mine = {task: joined(found) for (name, task), found in parts.items() if name == method}
        if mine:
            made[method] = Scored(next(iter(mine.values())).model, method, mine)
    return made


def tables(made: dict[str, Scored]) -> list[Grid]:
    exact = made[EXACT]
    names = list(exact.rows)
    lines, losses = [], []
    for name, mine in made.items():
        cells = [f"{100 * mine.rows[t].accuracy:.1f}" if t in mine.rows else "—" for t in names]
        lost = [f"{100 * mine.rows[t].unparsable:.1f}" if t in mine.rows else "—" for t in names]
        lines.append([name, str(mine.items), *cells, str(mine.average())])
        less = "—" if name == EXACT else str(mine.against(exact))
        losses.append([name, less, *lost, f"{sum(r.seconds for r in mine.rows.values()):.0f}"])
    title = f"{exact.model}: accuracy in percent"
    other = f"{exact.model}: points against exact on the same items, and percent unparsable"
    return [
        Grid(title, ["method", "items", *names, "average"], lines),
        Grid(other, ["method", "less exact", *names, "seconds"], losses),
    ]


def _sentences(made: dict[str, Scored]) -> list[str]:
    exact = made[EXACT]
    said = [f"Exact attention answers {exact.average()} % of {exact.items} items right."]
    for name, mine in made.items():
        if name != EXACT:
            said.append(
                f"{name}: {mine.against(exact)} points against exact, "
                f"{mine.unparsable():.1f} % unparsable."
            )
    missing = [name for name in METHODS.values() if name not in made]
    return said + ([f"Not run: {', '.join(missing)}."] if missing else [])
