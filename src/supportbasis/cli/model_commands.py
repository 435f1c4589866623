"""``supportbasis plan``, ``profile`` and ``eval``: the attention of a whole model, its options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from .. import models
from ..errors import InputError
from ..models.evaluation import Evaluation
from ..models.ladder import LEAST
from ..models.profiling import HeadProfile, profile
from ..plans import ExactHead, ModelPlan
from ..plans.drawing import layer_panels, new_figure
from ..plans.plan import UNITS
from .loading import Access, LoadedModel, chosen_device, chosen_dtype, load_model, one_line
from .report import Grid, Machine, Section, length_label, plain_axes, publish, times, write_csv
from .terminal import console, friendly, writable

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a model of transformers, or its name.")
]
Text = Annotated[Path, typer.Option(metavar="FILE", help="Text that the model reads.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a batch. \\[default: 32768 on a GPU, 8192 on a CPU]"),
]
Device = Annotated[str | None, typer.Option(help="\\[default: cuda if there is one]")]
Dtype = Annotated[
    str | None, typer.Option(help="\\[default: float32 on a CPU, elsewhere that of the file]")
]
Download = Annotated[bool, typer.Option("--download", help="Fetch the model if need be.")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Seed = Annotated[int, typer.Option(min=0)]
Folder = Annotated[Path, typer.Option(help="Folder of the report.")]


TOKENS, CPU_TOKENS = {"cuda": 32768}, 8192  # of a batch, where nothing is said
SMALLEST = 1e-9  # nats, of a picture
LENGTHS = (4096, 32768, 131072)  # at which a head's prospects are told


def batch_tokens(loaded: LoadedModel, path: Path, wanted: int | None, batches: int) -> Tensor:
    """Token ids [batches, tokens] of a text: as long as was asked for, or as it allows."""
    most = wanted or TOKENS.get(loaded.device.type, CPU_TOKENS)
    if loaded.context is not None and most > loaded.context:
        if wanted is not None:
            fault = f"got {wanted}, but {loaded.name} takes at most {loaded.context}"
            raise InputError(f"--tokens: {fault}")
        most = loaded.context
    ids = loaded.tokens(path, most * batches)
    if len(ids) < most * batches:
        if wanted is not None or len(ids) < LEAST * batches:
            raise InputError(
                f"--text: {path} has {len(ids)} tokens of {loaded.name}, expected {batches} batches"
                f" of {wanted or LEAST}; give a longer text, or fewer --tokens or --batches"
            )
        most = 1 << ((len(ids) // batches).bit_length() - 1)
    return ids[: most * batches].view(batches, most)


def _loaded(model: str, device: str | None, dtype: str | None, *allowed: bool) -> LoadedModel:
    return load_model(model, Access(*allowed), chosen_device(device), chosen_dtype(dtype))


@friendly("plan")
def plan_model(
    model: ModelName, text: Text,
    kl: Annotated[
        float | None, typer.Option(help="Nats per token that the prediction may move, on average.")
    ] = None,
    change: Annotated[
        float | None,
        typer.Option(help="Models without logits: allowed relative squared change of the output."),
    ] = None,
    tokens: Tokens = None,
    batches: Annotated[
        int, typer.Option(min=2, help="Every third, or the second of two, is held back.")
    ] = 3,
    minimise: Annotated[str, typer.Option(help="cost, or time on this device.")] = "cost",
    device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, seed: Seed = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.json", help="The plan; its report is in a folder beside it."),
    ] = Path("supportbasis-out/plan.json"),
) -> None:  # fmt: skip
    """Plan the attention of every head of a model within a change of its prediction."""
    if out.suffix != ".json":
        raise InputError(f"--out: got {out}, expected a file that ends in .json")
    writable(out.parent)
    loaded = _loaded(model, device, dtype, download, trust_remote_code)
    ids = batch_tokens(loaded, text, tokens, batches)
    read = list(ids.split(1))
    with one_line(loaded.name):
        plan = models.plan(loaded.model, read, kl=kl, change=change, minimise=minimise, seed=seed)
    plan.save(out)
    folder, to, machine = out.with_suffix(""), console(), Machine.here(str(loaded.device))
    folder.mkdir(parents=True, exist_ok=True)
    plan.draw(folder / "plan.png")
    rows, grid = _heads_of(plan)
    write_csv(folder / "heads.csv", machine, rows)
    exact = sum(isinstance(head, ExactHead) for head in plan.heads)
    finding = (
        f"{len(plan.heads) - exact} of {len(plan.heads)} heads are approximated, at a mean cost of "
        f"{plan.cost:.3g} of exact attention. On batches that were held back the prediction moved "
        f"by {plan.measured:.2g} {UNITS[plan.unit]} (below {plan.upper:.2g} with 95 % confidence; "
        f"allowed {plan.limit:.2g})."
    )
    drawn = "Cost of each head relative to exact attention, and its share of the predicted effect."
    figures = [(folder / "plan.png", drawn)]
    sections = [
        Section("The plan", findings=[finding], figures=figures, verbatim=str(plan)),
        Section("Heads", grids=[grid], printed=()),
    ]
    lead = (
        f"{loaded.name}, {len(ids)} batches of {ids.shape[1]} tokens; every third of them, or the "
        "second of two, was held back to measure the whole plan."
    )
    to.print(str(plan))
    publish(folder, f"Attention plan of {loaded.name}", lead, sections, machine, to)
    to.print(f"Plan: {out}", style="bold")


def _heads_of(plan: ModelPlan) -> tuple[list[dict[str, object]], Grid]:
    """What each head gets, as rows of a CSV file and as a table."""
    rows: list[dict[str, object]] = []
    lines: list[list[str]] = []
    columns = ("layer", "head", "kind", "cost", "speedup", plan.unit, "share")
    for layer in plan.layers:
        for number, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True)):
            share = effect / plan.predicted if plan.predicted else 0.0
            row = (layer.name, number, head.kind, head.cost, head.speedup, effect, share)
            rows.append(dict(zip(columns, row, strict=True)))
            cells = [f"{head.cost:.3g}", times(head.speedup), f"{effect:.1e}", f"{share:.1%}"]
            lines.append([f"{layer.name}, head {number}", head.kind, *cells])
    return rows, Grid("", ("head", "kind", "cost", "predicted speed", plan.unit, "share"), lines)


@friendly("profile")
def profile_model(
    model: ModelName, text: Text,
    tolerance: Annotated[float, typer.Option(help="Of the output of a head.")] = 0.05,
    tokens: Tokens = None, device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, out: Folder = Path("supportbasis-out/profile"),
) -> None:  # fmt: skip
    """Entries, scores and entropy of every head of a model, and what each would get."""
    writable(out)
    loaded = _loaded(model, device, dtype, download, trust_remote_code)
    ids = batch_tokens(loaded, text, tokens, 1)
    with one_line(loaded.name):
        found = profile(loaded.model, ids, LENGTHS, tolerance=tolerance)
    machine = Machine.here(str(loaded.device))
    write_csv(out / "heads.csv", machine, [_profile_row(head) for head in found])
    draw_profile(found, out / "heads.png")
    headings = ["head", "query σ, max", "key σ, max", "score σ, max", "entropy", "of uniform"]
    headings += [length_label(prospect.tokens) for prospect in found[0].prospects]
    grid = Grid("", headings, [_profile_line(head) for head in found])
    about = (
        f"Entries of queries and keys as they are multiplied (after rotation), scaled scores and "
        f"the entropy of the weights in nats, on {found[0].tokens} tokens, and what "
        f"Auto({tolerance:g}) gives each head: a kind and its predicted speed over SDPA. Lengths "
        "with a ~ are predicted from the plan at the longest length there is text for."
    )
    section = Section("Heads", about, grids=[grid], figures=[(out / "heads.png", "Layer × head.")])
    publish(out, f"Attention of {loaded.name}", about, [section], machine, console())


def _profile_row(head: HeadProfile) -> dict[str, object]:
    content = asdict(head)
    for each in content.pop("prospects"):
        for name, key in (("kind", "kind"), ("speedup", "speedup"), ("planned", "is_planned")):
            content[f"{name}_at_{each['tokens']}"] = each[key]
    return content


def _profile_line(head: HeadProfile) -> list[str]:
    cells = [
        f"{head.layer}, head {head.head}",
        f"{head.query_std:.2g}, {head.query_max:.2g}",
        f"{head.key_std:.2g}, {head.key_max:.2g}",
        f"{head.score_std:.2g}, {head.score_max:.3g}",
        f"{head.entropy:.2f}",
        f"{_evenness(head):.0%}",
    ]
    for prospect in head.prospects:
        about = "" if prospect.is_planned else "~"
        speed = "" if prospect.kind.startswith("exact") else f" {about}{times(prospect.speedup)}"
        cells.append(f"{prospect.kind}{speed}")
    return cells


def _evenness(head: HeadProfile) -> float:
    return head.entropy / head.uniform if head.uniform else 1.0


def draw_profile(found: Sequence[HeadProfile], path: Path) -> None:
    """Three panels, layer × head: score deviation, entropy, speed at the longest planned length."""
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(head.layer for head in found))
    heads = 1 + max(head.head for head in found)
    panels = torch.full((3, len(layers), heads), math.nan)
    for head in found:
        best = max((x for x in head.prospects if x.is_planned), key=lambda x: x.tokens)
        values = (head.score_std, _evenness(head), best.speedup)
        panels[:, layers.index(head.layer), head.head] = torch.tensor(values)
    figure = new_figure(5.0 + 0.9 * heads, 1.9 + 0.36 * len(layers))
    speeds = LogNorm(1.0, max(2.0, float(panels[2].nan_to_num().max())))
    names = ("σ of scores", "entropy over uniform", "predicted speed over SDPA")
    layer_panels(figure, panels, list(zip(names, (None, None, speeds), ["Blues"] * 3, strict=True)))
    figure.savefig(path, dpi=150)


@friendly("eval")
def evaluate_model(
    model: ModelName,
    plan: Annotated[Path, typer.Option(metavar="FILE.json", help="A plan of this model.")],
    text: Text, tokens: Tokens = None, batches: Annotated[int, typer.Option(min=1)] = 1,
    copies: Annotated[int, typer.Option(min=0, help="Rounds of the copy test.")] = 4,
    device: Device = None, dtype: Dtype = None, download: Download = False,
    trust_remote_code: RemoteCode = False, seed: Seed = 0,
    out: Folder = Path("supportbasis-out/eval"),
) -> None:  # fmt: skip
    """Loss and predictions of a language model with a plan, paired with exact attention."""
    writable(out)
    made = ModelPlan.load(plan)
    loaded = _loaded(model, device, dtype, download, trust_remote_code)
    ids = batch_tokens(loaded, text, tokens, batches)
    with one_line(loaded.name):
        found = models.evaluate(loaded.model, made, list(ids.split(1)), copies=copies, seed=seed)
    to, machine = console(), Machine.here(str(loaded.device))
    row = {key: value for key, value in asdict(found).items() if key not in ("copies", "quantiles")}
    write_csv(out / "evaluation.csv", machine, [{"model": loaded.name, **row}])
    if found.copies:
        write_csv(out / "copies.csv", machine, [asdict(copy) for copy in found.copies])
    picture = out / "evaluation.png"
    draw_evaluation(found, picture)
    change = found.loss_planned / found.loss_exact - 1 if found.loss_exact else 0.0
    finding = (
        f"The loss changes by {change:+.2%}, the predicted distributions by {found.kl:.2g} nats "
        f"per token (below {found.kl_upper:.2g} with 95 % confidence); {found.agreement:.2%} of "
        "the most likely continuations are the same."
    )
    about = "Both attentions read the same tokens; differences are paired."
    figures = [(picture, "How far predictions of single tokens move, and copying.")]
    section = Section("Exact and planned", about, [finding], figures=figures, verbatim=str(found))
    read = f"{loaded.name} on {ids.shape[0]} × {ids.shape[1]} tokens"
    lead = f"{read}; the plan allows {made.unit} {made.limit:g}."
    to.print(section.verbatim)
    publish(out, f"Evaluation of {loaded.name}", lead, [section], machine, to)


def draw_evaluation(found: Evaluation, path: Path) -> None:
    """Shares of tokens whose prediction moves further, and copy accuracy against distance."""
    figure = new_figure(10.0 if found.copies else 5.4, 3.6)
    panels = figure.subplots(1, 2 if found.copies else 1, squeeze=False)[0]
    for axes in panels:
        plain_axes(axes)
    shares, moves = zip(*((1 - share, kl) for share, kl in found.quantiles), strict=True)
    panels[0].plot([max(move, SMALLEST) for move in moves], shares, "o-")
    panels[0].set(xscale="log", yscale="log")
    panels[0].set(xlabel="KL of a token, nats", ylabel="share of tokens beyond")
    if found.copies:
        distance = [copy.distance for copy in found.copies]
        panels[1].plot(distance, [copy.exact for copy in found.copies], "o-", label="exact")
        panels[1].plot(distance, [copy.planned for copy in found.copies], "s--", label="planned")
        panels[1].set_xscale("log", base=2)
        panels[1].set(xlabel="distance in tokens", ylabel="share of tokens copied", ylim=(0, 1.05))
        panels[1].legend(frameon=False)
    figure.savefig(path, dpi=150)
