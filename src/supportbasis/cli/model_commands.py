"""``supportbasis plan``, ``profile`` and ``eval``: the attention of a whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import models
from ..errors import InputError
from ..models.evaluation import Evaluation
from ..models.ladder import LEAST
from ..models.profiling import HeadProfile, profile
from ..plans import ExactHead, ModelPlan
from ..plans.drawing import layer_panels, new_figure
from ..plans.model_plan import UNITS
from .loading import LoadedModel
from .report import Grid, Machine, Section, length_label, plain_axes, publish, times, write_csv

TOKENS, CPU_TOKENS = {"cuda": 32768}, 8192  # of a batch, where nothing is said
SMALLEST = 1e-9  # nats, of a picture
LENGTHS = (4096, 32768, 131072)  # at which a head's prospects are told


def batch_tokens(loaded: LoadedModel, path: Path, wanted: int | None, batches: int) -> Tensor:
    """Token ids [batches, tokens] of a text: as long as was asked for, or as it allows."""
    most = wanted or TOKENS.get(loaded.device.type, CPU_TOKENS)
    if loaded.context is not None and most > loaded.context:
        if wanted is not None:
            raise InputError(
                f"--tokens: got {wanted}, but {loaded.name} takes at most {loaded.context}"
            )
        most = loaded.context
    ids = loaded.tokens(path, most * batches)
    if len(ids) < most * batches:
        if wanted is not None or len(ids) < LEAST * batches:
            least = wanted or LEAST
            raise InputError(
                f"--text: {path} has {len(ids)} tokens of {loaded.name}, expected {batches} "
                f"batches of {least}; give a longer text, or fewer --tokens or --batches"
            )
        most = 1 << ((len(ids) // batches).bit_length() - 1)
    return ids[: most * batches].view(batches, most)


def run_plan(
    loaded: LoadedModel, ids: Tensor, wish: dict[str, Any], out: Path, console: Console
) -> None:
    """Plan a model on batches [batches, tokens] and write plan and report."""
    plan = models.plan(loaded.model, list(ids.split(1)), **wish)
    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    picture, machine = folder / "plan.png", Machine.here(loaded.device.type)
    plan.save(out)
    plan.draw(picture)
    write_csv(folder / "heads.csv", machine, head_rows(plan))
    console.print(str(plan))
    batches, tokens = ids.shape
    text = "Cost of each head relative to exact attention, and its share of the predicted effect."
    findings, figures = [_plan_finding(plan)], [(picture, text)]
    sections = [
        Section("The plan", findings=findings, figures=figures, verbatim=str(plan)),
        Section("Heads", grids=[_head_grid(plan)], printed=()),
    ]
    lead = (
        f"{loaded.name}, {batches} batches of {tokens} tokens; the last third of them was held "
        "back to measure the whole plan."
    )
    publish(folder, f"Attention plan of {loaded.name}", lead, sections, machine, console)
    console.print(f"Plan: {out}", style="bold")


def _plan_finding(plan: ModelPlan) -> str:
    exact = sum(isinstance(head, ExactHead) for head in plan.heads)
    return (
        f"{len(plan.heads) - exact} of {len(plan.heads)} heads are approximated, at a mean cost of "
        f"{plan.cost:.3g} of exact attention. On batches that were held back the prediction moved "
        f"by {plan.measured:.2g} {UNITS[plan.unit]} (below {plan.upper:.2g} with 95 % confidence; "
        f"allowed {plan.limit:.2g})."
    )


def head_rows(plan: ModelPlan) -> list[dict[str, Any]]:
    """A row for each head."""
    return [
        {
            "layer": layer.name,
            "head": number,
            "kind": head.kind,
            "cost": head.cost,
            "speedup": head.speedup,
            plan.unit: effect,
            "share": effect / plan.predicted if plan.predicted else 0.0,
        }
        for layer in plan.layers
        for number, (head, effect) in enumerate(zip(layer.heads, layer.effects, strict=True))
    ]


def _head_grid(plan: ModelPlan) -> Grid:
    lines = []
    for layer, head, kind, cost, speed, effect, share in (r.values() for r in head_rows(plan)):
        numbers = [f"{cost:.3g}", times(speed), f"{effect:.1e}", f"{share:.1%}"]
        lines.append([f"{layer}, head {head}", kind, *numbers])
    return Grid("", ("head", "kind", "cost", "predicted speed", plan.unit, "share"), lines)


def run_profile(
    loaded: LoadedModel, ids: Tensor, tolerance: float, out: Path, console: Console
) -> None:
    """Profile the heads of a model on token ids [1, tokens]."""
    found = profile(loaded.model, ids, LENGTHS, tolerance=tolerance)
    machine = Machine.here(loaded.device.type)
    write_csv(out / "heads.csv", machine, [_profile_row(head) for head in found])
    picture = out / "heads.png"
    draw_profile(found, picture)
    headings = ["head", "query σ, max", "key σ, max", "score σ, max", "entropy", "of uniform"]
    headings += [length_label(prospect.tokens) for prospect in found[0].prospects]
    grid = Grid("", headings, [_profile_line(head) for head in found])
    text = (
        f"Entries of queries and keys as they are multiplied (after rotation), scaled scores and "
        f"the entropy of the weights in nats, on {found[0].tokens} tokens, and what "
        f"Auto({tolerance:g}) gives each head: a kind and its predicted speed over SDPA. Lengths "
        "with a ~ are predicted from the plan at the longest length there is text for."
    )
    section = Section("Heads", text, grids=[grid], figures=[(picture, "Layer × head.")])
    publish(out, f"Attention of {loaded.name}", text, [section], machine, console)


def _profile_row(head: HeadProfile) -> dict[str, object]:
    content = asdict(head)
    names = {"kind": "kind", "speedup": "speedup", "is_planned": "planned"}
    for prospect in content.pop("prospects"):
        at = f"at_{prospect['tokens']}"
        content |= {f"{label}_{at}": prospect[name] for name, label in names.items()}
    return content


def _profile_line(head: HeadProfile) -> list[str]:
    cells = [
        f"{head.layer}, head {head.head}",
        f"{head.query_std:.2g}, {head.query_max:.2g}",
        f"{head.key_std:.2g}, {head.key_max:.2g}",
        f"{head.score_std:.2g}, {head.score_max:.3g}",
        f"{head.entropy:.2f}",
        f"{head.entropy / head.uniform if head.uniform else 1.0:.0%}",
    ]
    for prospect in head.prospects:
        about = "" if prospect.is_planned else "~"
        speed = "" if prospect.kind.startswith("exact") else f" {about}{times(prospect.speedup)}"
        cells.append(f"{prospect.kind}{speed}")
    return cells


def draw_profile(found: Sequence[HeadProfile], path: Path) -> None:
    """Three panels, layer × head: score deviation, entropy, speed at the longest planned length."""
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(head.layer for head in found))
    heads = 1 + max(head.head for head in found)
    panels = torch.full((3, len(layers), heads), math.nan)
    for head in found:
        best = max((x for x in head.prospects if x.is_planned), key=lambda x: x.tokens)
        share = head.entropy / head.uniform if head.uniform else 1.0
        values = (head.score_std, share, best.speedup)
        panels[:, layers.index(head.layer), head.head] = torch.tensor(values)
    figure = new_figure(5.0 + 0.9 * heads, 1.9 + 0.36 * len(layers))
    speeds = LogNorm(1.0, max(2.0, float(panels[2].nan_to_num().max())))
    names = ("σ of scores", "entropy over uniform", "predicted speed over SDPA")
    scales = (None, None, speeds)
    layer_panels(figure, list(zip(names, panels, scales, ["Blues"] * 3, strict=True)))
    figure.savefig(path, dpi=150)


def run_eval(
    loaded: LoadedModel,
    plan: ModelPlan,
    ids: Tensor,
    copies: int,
    seed: int,
    out: Path,
    console: Console,
) -> None:
    """Evaluate a plan on batches [batches, tokens], beside exact attention."""
    found = models.evaluate(loaded.model, plan, list(ids.split(1)), copies=copies, seed=seed)
    machine = Machine.here(loaded.device.type)
    row = {key: value for key, value in asdict(found).items() if key not in ("copies", "quantiles")}
    write_csv(out / "evaluation.csv", machine, [{"model": loaded.name, **row}])
    if found.copies:
        write_csv(out / "copies.csv", machine, [asdict(copy) for copy in found.copies])
    picture = out / "evaluation.png"
    draw_evaluation(found, picture)
    text = "Both attentions read the same tokens; differences are paired."
    figures = [(picture, "How far predictions of single tokens move, and copying.")]
    findings, verbatim = [_eval_finding(found)], str(found)
    section = Section("Exact and planned", text, findings, (), figures, verbatim=verbatim)
    console.print(verbatim)
    batches, tokens = ids.shape
    lead = (
        f"{loaded.name} on {batches} × {tokens} tokens; the plan allows {plan.unit} {plan.limit:g}."
    )
    publish(out, f"Evaluation of {loaded.name}", lead, [section], machine, console)


def _eval_finding(found: Evaluation) -> str:
    change = found.loss_planned / found.loss_exact - 1 if found.loss_exact else 0.0
    return (
        f"The loss changes by {change:+.2%}, the predicted distributions by {found.kl:.2g} nats "
        f"per token (below {found.kl_upper:.2g} with 95 % confidence); {found.agreement:.2%} of "
        "the most likely continuations are the same."
    )


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
