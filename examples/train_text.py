"""A transformer trained with exact and with approximate attention: `python examples/train_text.py`.

A small causal model of bytes reads English: by default the docstrings of Python's standard library,
which are on every machine. It is trained three times from the same weights on the same windows:
with exact attention, with a support basis of one threshold, and with `Auto`. Then the model that
was trained exactly is evaluated with each method; only its `method` changes, not its weights.

At this length exact attention is the fastest, and `Auto` knows it: with default settings it runs
exactly. The point is that the curves agree, not that they are reached sooner. It all takes about
six minutes on one core.

Needs the extra `cli` (rich and matplotlib). Writes a picture and two tables to --out.
"""

import argparse
import ast
import csv
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import Tensor, nn

import supportbasis as sb
from supportbasis.methods import Method
from supportbasis.nn import rotated
from supportbasis.plans import HeadPlan, PolynomialHead, ThresholdHead

BASIS = sb.SingleThreshold(2.0)  # rows with an entry beyond 2 exactly, the rest in degree 2
RUNS = {
    "exact": (sb.Exact(), "#1f2933"),
    "support basis": (BASIS, "#2f6fab"),
    "Auto(1e-2)": (sb.Auto(1e-2), "#c05621"),
}
METHODS = {
    "Exact()": sb.Exact(),
    "SingleThreshold(2)": BASIS,
    "SingleThreshold(3)": sb.SingleThreshold(3.0),
    "Polynomial(2)": sb.Polynomial(2),
    "Polynomial(4)": sb.Polynomial(4),
    "Auto(1e-2)": sb.Auto(1e-2),
}
LAYERS, DIM, HEADS, BATCH, RATE = 3, 64, 4, 4, 8e-3


class Text(NamedTuple):
    """Bytes to train on, and windows [windows, context + 1] that are held out."""

    train: Tensor
    held_out: Tensor


class Curve(NamedTuple):
    """One run: the loss of each step, the held-out loss after some, and seconds for a step."""

    losses: list[float]
    held_out: dict[int, float]
    step_seconds: float


class Row(NamedTuple):
    """The model that was trained exactly, with one method."""

    loss: float
    error: float  # relative error of the attention output, in the worst layer
    exact_heads: float  # share of the heads that ran exactly
    by_polynomial: float  # share of the pairs of queries and keys
    lost: float  # share of the query rows, whose weights cancelled
    seconds: float


class Model(nn.Module):
    """Bytes [batch, n] to the logits of the byte after each [batch, n, 256]."""

    def __init__(self, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(256, DIM)
            self.encoder = sb.nn.SupportBasisEncoder(LAYERS, DIM, HEADS, is_causal=True, rope=True)
            self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library's top modules, read and not imported."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, documented):
                yield ast.get_docstring(node) or ""


def read_text(path: Path | None, context: int, windows: int) -> Text:
    """The last tenth is held out: windows at even distances."""
    if path is None:
        different = dict.fromkeys(text for text in docstrings() if text)
        data = "\n\n".join(different).encode()
    else:
        data = path.read_bytes()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(tokens) * 9 // 10
    if len(tokens) - cut <= context:
        raise SystemExit(f"the text has {len(tokens)} bytes; expected {10 * (context + 1)} or more")
    starts = torch.linspace(cut, len(tokens) - context - 1, windows).long()
    return Text(tokens[:cut], tokens[starts[:, None] + torch.arange(context + 1)])


def loss_of(model: Model, windows: Tensor) -> Tensor:
    """Mean loss of the next byte, in nats."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Model, text: Text) -> float:
    batches = text.held_out.split(BATCH)
    return sum(float(loss_of(model, batch)) * len(batch) for batch in batches) / len(text.held_out)


def train(text: Text, name: str, steps: int, seed: int, progress: Progress) -> tuple[Model, Curve]:
    """Adam with a short warm-up and a cosine; model and windows depend on the seed alone."""
    model, spent = Model(seed), 0.0
    model.encoder.method = RUNS[name][0]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(text.held_out.shape[1])
    curve, task = (
        Curve([], {0: held_out_loss(model, text)}, 0.0),
        progress.add_task(name, total=steps),
    )
    for step in range(1, steps + 1):
        starts = torch.randint(len(text.train) - len(window), (BATCH, 1), generator=generator)
        begin = time.perf_counter()
        loss = loss_of(model, text.train[starts + window])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        spent += time.perf_counter() - begin
        curve.losses.append(float(loss.detach()))
        if step % max(1, steps // 20) == 0 or step == steps:
            curve.held_out[step] = held_out_loss(model, text)
        progress.update(task, advance=1, description=f"{name}, loss {curve.losses[-1]:.3f}")
    return model, curve._replace(step_seconds=spent / steps)


@torch.no_grad()
def evaluate(model: Model, text: Text, method: Method) -> Row:
    """The same weights with another method: the loss, and what became of attention itself."""
    model.encoder.method = method
    begin = time.perf_counter()
    loss = held_out_loss(model, text)
    seconds = time.perf_counter() - begin
    model.encoder.method = sb.Exact()
    wrong, size = torch.zeros(2, LAYERS)
    plans: list[HeadPlan] = []
    lost = 0
    for batch in text.held_out.split(BATCH):
        for at, (query, key, value) in enumerate(heads(model, batch[:, :-1])):
            result = sb.attention(
                query, key, value, is_causal=True, method=method, return_result=True
            )
            exact = sb.attention(query, key, value, is_causal=True, method=sb.Exact())
            wrong[at] += (result.output - exact).square().sum()
            size[at] += exact.square().sum()
            plans += result.plan.heads
            lost += int(result.certificate.invalid_rows.sum())
    return Row(
        loss,
        float((wrong / size).sqrt().max()),
        sum(plan.kind == "exact" for plan in plans) / len(plans),
        sum(by_polynomial(plan) for plan in plans) / len(plans),
        lost / sum(plan.n for plan in plans),
        seconds,
    )


def by_polynomial(plan: HeadPlan) -> float:
    """The share of a head's square that its polynomial covers."""
    if not isinstance(plan, PolynomialHead):
        return 0.0
    rows, keys = plan.large if isinstance(plan, ThresholdHead) else (0, 0)
    return (1 - rows / plan.n) * (1 - keys / plan.m)


def heads(model: Model, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every layer, as the layers compute them."""
    seen: list[Tensor] = []
    hooks = [
        layer.attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for layer in model.encoder.layers
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return [
        project(layer.attention, x) for layer, x in zip(model.encoder.layers, seen, strict=True)
    ]


def project(module: sb.nn.SupportBasisAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    projections = (module.query_projection, module.key_projection, module.value_projection)
    query, key, value = (
        linear(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for linear in projections
    )
    return rotated(query), rotated(key), value


def draw(curves: dict[str, Curve], rows: dict[str, Row], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    training, methods = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, curve in curves.items():
        wide = {"linewidth": 6, "alpha": 0.3} if name == "exact" else {"linewidth": 1.4}
        style = (0, (2, 4)) if name.startswith("Auto") else "-"
        label = f"{name}, {curve.step_seconds * 1e3:.0f} ms a step"
        steps, losses = zip(*curve.held_out.items(), strict=True)
        training.plot(steps, losses, ls=style, color=RUNS[name][1], label=label, **wide)
        training.plot(
            range(1, len(curve.losses) + 1), curve.losses, color=RUNS[name][1], lw=0.5, alpha=0.4
        )
    training.set(xlabel="step", ylabel="nats a byte", title="held out (thin: training windows)")
    training.set_ylim(top=min(max(losses), 1.6 * min(losses)))  # the first steps are cut off
    training.legend(frameon=False)
    training.grid(True, color="#e4e7eb", linewidth=0.8)
    losses = [row.loss for row in rows.values()]
    methods.barh(list(rows), losses, color="#9fb3c8")
    methods.axvline(losses[0], color="#1f2933", linewidth=1)
    for at, row in enumerate(rows.values()):
        methods.text(0.05, at, f"attention error {row.error:.2g}", va="center", fontsize=9)
    methods.invert_yaxis()
    methods.set(xlabel="held out, nats a byte", title="trained exactly, evaluated with")
    for axes in (training, methods):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def write(curves: dict[str, Curve], rows: dict[str, Row], out: Path) -> None:
    with open(out / "train-text.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", "step", "loss", "held_out_loss"])
        for name, curve in curves.items():
            for step, loss in enumerate([math.nan, *curve.losses]):
                held_out = curve.held_out.get(step, math.nan)
                table.writerow([name, step, f"{loss:.6g}", f"{held_out:.6g}"])
    with open(out / "train-text-methods.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["method", *Row._fields])
        for name, row in rows.items():
            table.writerow([name, *row])


def show(curves: dict[str, Curve], rows: dict[str, Row], console: Console) -> None:
    exact = list(curves["exact"].held_out.values())[-1]
    table = Table("trained with", "held out, nats", "against exact", "ms a step", box=SIMPLE)
    for name, curve in curves.items():
        loss = list(curve.held_out.values())[-1]
        table.add_row(
            name, f"{loss:.4f}", f"{loss / exact - 1:+.2%}", f"{curve.step_seconds * 1e3:.0f}"
        )
    console.print(table)
    table = Table(
        Column("evaluated with", no_wrap=True), "held out", "against\nexact", "error",
        "exact\nheads", "poly-\nnomial", "rows\nlost", box=SIMPLE,
        title="The model trained exactly (error: of attention, in the worst layer)",
    )  # fmt: skip
    for name, row in rows.items():
        change = f"{row.loss / rows['Exact()'].loss - 1:+.2%}"
        shares = (row.exact_heads, row.by_polynomial, row.lost)
        table.add_row(
            name, f"{row.loss:.4f}", change, f"{row.error:.2g}", *(f"{x:.0%}" for x in shares)
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> tuple[dict[str, Curve], dict[str, Row]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="a file (default: Python's docstrings)")
    parser.add_argument("--steps", type=int, help="300; with --quick 6")
    parser.add_argument("--context", type=int, help="512 bytes; with --quick 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("supportbasis-out/train-text"))
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see it run")
    given = parser.parse_args(arguments)
    usual = (6, 64) if given.quick else (300, 512)
    given.steps = usual[0] if given.steps is None else given.steps
    given.context = usual[1] if given.context is None else given.context
    if given.steps < 1 or given.context < 1:
        parser.error("--steps and --context must be at least 1")
    text, console = read_text(given.text, given.context, 2 if given.quick else 8), Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    sb.plan(*torch.zeros(2, 1, 1, 8, 8), method=sb.Polynomial(1))  # measures the machine, once
    warnings.filterwarnings("ignore", message="supportbasis: rows had")  # the table counts them
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        runs = {name: train(text, name, given.steps, given.seed, progress) for name in RUNS}
        model, curves = runs["exact"][0], {name: curve for name, (_, curve) in runs.items()}
        names = progress.track(METHODS, description="evaluating")
        rows = {name: evaluate(model, text, METHODS[name]) for name in names}
    show(curves, rows, console)
    given.out.mkdir(parents=True, exist_ok=True)
    title = (
        f"{LAYERS} layers, {HEADS} heads of dim {DIM // HEADS}, {given.context} bytes of context"
    )
    draw(curves, rows, title, given.out / "train-text.png")
    write(curves, rows, given.out)
    console.print(f"{given.out}/train-text.png")
    return curves, rows


if __name__ == "__main__":
    main()
