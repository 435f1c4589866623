"""Tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from supportbasis.cli.report import Grid, small

from ..study import table
from .findings import Scored
from .harness import BENCHMARKS as LABELLED
from .harness import BenchmarkRow
from .methods import EXACT
from .paper import BENCHMARKS, PAPER, paper_average
from .rows import LayerRow, RecallRow, StoryRow, TextRow, recalled

LABELS = dict(zip(LABELLED, BENCHMARKS, strict=True))  # lm-eval's names, and our tasks


def _share(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.0f} %"


def accuracy_table(made: Mapping[str, Scored]) -> Grid:
    """Every method on every task."""
    lines = [[name, str(mine.items), *_accuracies(mine)] for name, mine in made.items()]
    title = f"{made[EXACT].model}: accuracy in percent"
    return Grid(title, ["method", "items", *BENCHMARKS, "average"], lines)


def _accuracies(mine: Scored) -> list[str]:
    tasks = [f"{100 * mine.rows[task].accuracy:.1f}" for task in BENCHMARKS]
    return [*tasks, f"{mine.average().value:.1f}"]


def loss_table(made: Mapping[str, Scored]) -> Grid:
    """What every method loses against exact, and how it answers."""
    exact, lines = made[EXACT], []
    for name, mine in made.items():
        less = "—" if name == EXACT else str(mine.against(exact))
        heads = _mean([row.exact_heads for row in mine.rows.values()])
        cost = _mean([row.cost for row in mine.rows.values()])
        last = [f"{mine.unparsable():.1f} %", f"{mine.written():.1f}", _share(heads), _share(cost)]
        lines.append([name, less, *last])
    headings = ["method", "less exact", "unparsable", "written", "exact heads", "cost"]
    return Grid(f"{exact.model}: points against exact on the same items", headings, lines)


def difference_table(made: Mapping[str, Scored]) -> Grid:
    """Points against exact, task by task, with paired intervals."""
    exact = made[EXACT]
    lines = [
        [name, *(str(mine.against_on(exact, task)) for task in BENCHMARKS)]
        for name, mine in made.items()
        if name != EXACT
    ]
    title = f"{exact.model}: points against exact, 95 % intervals of a paired bootstrap"
    return Grid(title, ["method", *BENCHMARKS], lines)


def paper_table(models: Mapping[str, Mapping[str, Scored]]) -> Grid:
    """The paper's rows beside ours."""
    lines = []
    for name, numbers in PAPER.items():
        paper = [f"{numbers[task]:.2f}" for task in BENCHMARKS]
        lines.append([f"{name}, LLaDA-8B (paper)", *paper, f"{paper_average(name):.2f}"])
        for model, made in models.items():
            if name in made:
                lines.append([f"{name}, {model} (here)", *_accuracies(made[name])])
    title = f"The paper's table beside ours ({', '.join(BENCHMARKS)} in place of its benchmarks)"
    return Grid(title, ["row", *BENCHMARKS.values(), "average"], lines)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def text_table(rows: Sequence[TextRow]) -> Grid:
    models = list(dict.fromkeys(row.model for row in rows))
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        mine = {row.model: row for row in rows if row.method == name}
        numbers = [f"{mine[model].perplexity:.4g}" if model in mine else "—" for model in models]
        heads = [_share(mine[model].exact_heads) if model in mine else "—" for model in models]
        lines.append([name, *numbers, *heads])
    headings = ["method", *models, *(f"{model}: exact heads" for model in models)]
    return Grid("Perplexity of held-out text", headings, lines)


def recall_table(rows: Sequence[RecallRow], model: str, form: str) -> Grid:
    """Share of codes that come out right, by distance; all lengths of text together."""
    mine = [row for row in rows if row.model == model and row.form == form]
    reaches = sorted({row.distance for row in mine})
    lines = []
    for name in dict.fromkeys(row.method for row in mine):
        those = [row for row in mine if row.method == name]
        found = recalled(those)
        cells = [f"{found[reach]:.0f}" if reach in found else "—" for reach in reaches]
        lines.append([name, *cells, _share(_mean([row.exact_heads for row in those]))])
    headings = ["method", *(f"≤ {reach}" for reach in reaches), "exact heads"]
    return Grid(f"{model}, {form}: percent recalled by distance in tokens", headings, lines)


def layer_table(rows: Sequence[LayerRow], model: str) -> Grid:
    mine = [row for row in rows if row.model == model]
    layers = sorted({row.layer for row in mine})
    lines = []
    for name in dict.fromkeys(row.method for row in mine):
        errors = {row.layer: row.error for row in mine if row.method == name}
        lines.append([name, *(small(errors.get(layer)) for layer in layers)])
    headings = ["method", *(f"layer {layer}" for layer in layers)]
    return Grid(f"{model}: relative error of hidden states", headings, lines)


def story_table(rows: Sequence[StoryRow]) -> Grid:
    columns: dict[str, Callable[[StoryRow], str]] = {
        "method": lambda row: row.method,
        "perplexity": lambda row: f"{row.perplexity:.4g}",
        "same likeliest token": lambda row: f"{100 * row.agreement:.1f} %",
        "tokens until the stories part": lambda row: f"{row.same}",
    }
    return table("stories260K", rows, columns)


def benchmark_table(rows: Sequence[BenchmarkRow]) -> Grid:
    """A user's model: accuracy in percent, with the share of answers that could not be parsed."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        mine = {row.task: row for row in rows if row.method == name}
        lines.append([name, *(_benchmark(mine.get(task)) for task in tasks)])
        paper = {label: PAPER.get(name, {}).get(ours) for label, ours in LABELS.items()}
        if any(paper.get(task) is not None for task in tasks):
            numbers = (paper.get(task) for task in tasks)
            cells = ["—" if number is None else f"{number:.2f}" for number in numbers]
            lines.append([f"{name}, LLaDA-8B (paper)", *cells])
    return Grid("Accuracy in percent", ["method", *tasks], lines)


def _benchmark(row: BenchmarkRow | None) -> str:
    if row is None:
        return "—"
    error = "" if row.error is None else f" ± {100 * row.error:.1f}"
    lost = f" ({100 * row.unparsable:.0f} % unparsable)" if row.unparsable else ""
    return f"{100 * row.accuracy:.2f}{error}{lost}"
