"""Gradient descent on the attention loss: `python examples/attention_regression.py`.

A teacher attends with weights W* and Y*. A student that sees only the tokens X and the teacher's
output E minimises |D^-1 exp(scale X W Xᵀ) X Y - E|²_F over W and Y. Every run starts from the same
weights and takes the same number of Adam steps; the runs differ in who computes the gradient: exact
attention, the paper's support basis, the support basis with its exact part cut to rank 16, and a
polynomial alone (AS23). One token in a hundred is four times as large as the others.

Needs the extra `cli` (rich and matplotlib). Writes a picture and a table to --out.
"""

import argparse
import csv
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import supportbasis as sb

RUNS = {
    "exact": (sb.Exact(), None, "#1f2933"),
    "support basis, degree 2": (sb.SingleThreshold(threshold=2.2, degree=2), None, "#2f6fab"),
    "the same, exact part of rank 16": (sb.SingleThreshold(threshold=2.2, degree=2), 16, "#2f855a"),
    "polynomial alone, degree 2": (sb.Polynomial(degree=2), None, "#c05621"),
}


class Data(NamedTuple):
    """Tokens and the teacher's output."""

    x: Tensor
    target: Tensor
    scale: float


class Curve(NamedTuple):
    """One run: true relative loss and seconds spent on gradients after each step."""

    losses: list[float]
    seconds: list[float]
    lost: list[int]  # rows for which the polynomial had no usable weights


def make_data(n: int, dim: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = 0.5 * torch.randn(n, dim, generator=generator)
    x[torch.randperm(n, generator=generator)[: max(1, n // 100)]] *= 4
    weight, weight_v = torch.randn(2, dim, dim, generator=generator) / dim**0.5
    scale = dim**-0.5
    return Data(x, attention(x, 1.5 * weight, weight_v, scale), scale)


def attention(x: Tensor, weight: Tensor, weight_v: Tensor, scale: float) -> Tensor:
    query = (x @ weight)[None, None]
    key, value = x[None, None], (x @ weight_v)[None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)[0, 0]


def train(data: Data, name: str, steps: int, rate: float, progress: Progress) -> Curve:
    method, low_rank, _ = RUNS[name]
    dim = data.x.shape[1]
    weight = torch.zeros(dim, dim, requires_grad=True)
    weight_v = torch.eye(dim).mul_(0.5).requires_grad_()
    optimizer = torch.optim.Adam([weight, weight_v], lr=rate)
    curve, spent = Curve([], [], []), 0.0
    task = progress.add_task(name, total=steps)
    for _ in range(steps):
        curve.losses.append(true_loss(data, weight, weight_v))
        curve.seconds.append(spent)
        start = time.perf_counter()
        result = sb.gradient.attention_loss_gradient(
            data.x,
            weight,
            weight_v,
            data.target,
            scale=data.scale,
            method=method,
            low_rank=low_rank,
            input_gradient=False,
        )
        spent += time.perf_counter() - start
        curve.lost.append(result.invalid_rows)
        weight.grad, weight_v.grad = result.weight_qk, result.weight_v
        optimizer.step()
        progress.advance(task)
    curve.losses.append(true_loss(data, weight, weight_v))
    curve.seconds.append(spent)
    return curve


@torch.no_grad()
def true_loss(data: Data, weight: Tensor, weight_v: Tensor) -> float:
    """The loss with exact attention, whoever computed the gradient, over |E|²."""
    error = attention(data.x, weight, weight_v, data.scale) - data.target
    return float(error.square().sum() / data.target.square().sum())


def draw(curves: dict[str, Curve], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        colour = RUNS[name][2]
        wide = {"linewidth": 5, "alpha": 0.35} if name == "exact" else {"linewidth": 1.6}
        by_step.plot(curve.losses, color=colour, label=name, **wide)
        by_time.plot(curve.seconds, curve.losses, color=colour, **wide)
    for axes in (by_step, by_time):
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    by_step.set(xlabel="step", ylabel="loss with exact attention / |E|²")
    by_time.set(xlabel="seconds spent on gradients")
    by_step.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def write(curves: dict[str, Curve], path: Path) -> None:
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "step", "seconds", "relative_loss"])
        for name, curve in curves.items():
            for step, (loss, seconds) in enumerate(zip(*curve[:2], strict=True)):
                rows.writerow([name, step, f"{seconds:.4f}", f"{loss:.6g}"])


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path("supportbasis-out/attention-regression"))
    given = parser.parse_args(arguments)
    data, console = make_data(given.tokens, given.dim), Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    sb.plan(data.x[None], data.x[None], method=sb.Polynomial(1))  # measures the machine, once
    warnings.filterwarnings("ignore", message="supportbasis: some rows")  # the table counts them
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        curves = {name: train(data, name, given.steps, given.rate, progress) for name in RUNS}
    table = Table("gradient by", "first loss", "last loss", "seconds", "rows lost at a step")
    for name, curve in curves.items():
        losses = (f"{curve.losses[at]:.4g}" for at in (0, -1))
        table.add_row(name, *losses, f"{curve.seconds[-1]:.2f}", f"{max(curve.lost)}")
    console.print(table)
    given.out.mkdir(parents=True, exist_ok=True)
    title = f"Attention regression: {given.tokens} tokens, d = {given.dim}, 1 % of them large"
    draw(curves, title, given.out / "attention-regression.png")
    write(curves, given.out / "attention-regression.csv")
    console.print(f"{given.out}/attention-regression.png")
    return curves


if __name__ == "__main__":
    main()
