"""What the heads of a model are like: entries, scores, entropy, and what `Auto` would give them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..integrations.calls import Call
from ..integrations.replacing import replaced
from ..methods import Auto
from ..methods.planning import make_plan
from ..plans import HeadPlan
from . import ladder
from .effects import frozen
from .planning import problem_of
from .predictions import run
from .progress import Progress

ROWS = 256  # of a head, on which scores and entropies are measured


@dataclass(frozen=True)
class Prospect:
    """What a head gets at a length: planned on the text, or predicted from a shorter one."""

    tokens: int
    kind: str
    speedup: float  # predicted, over SDPA
    measured: float | None  # error of the output
    is_planned: bool


@dataclass(frozen=True)
class HeadProfile:
    """Entries of query and key (standard deviation, largest magnitude), scaled scores, and the
    entropy of the weights in nats, beside that of equal weights; means over sampled rows."""

    layer: str
    head: int
    tokens: int
    query_std: float
    query_max: float
    key_std: float
    key_max: float
    score_std: float
    score_max: float
    entropy: float
    uniform: float
    prospects: tuple[Prospect, ...] = ()


@torch.no_grad()
def profile(
    model: Any,
    ids: Tensor,
    lengths: Sequence[int],
    *,
    tolerance: float = 0.05,
    progress: bool = True,
) -> list[HeadProfile]:
    """Profiles of all heads on token ids [1, tokens]. Statistics are of the longest of ``lengths``
    that there are tokens for; each head is planned at those, and predicted at the others."""
    planned = sorted({n for n in lengths if n <= ids.shape[1]}) or [ids.shape[1]]
    found: dict[tuple[int, int], HeadProfile] = {}
    prospects: dict[tuple[int, int], list[Prospect]] = {}
    with Progress(progress, len(planned), "profiling") as bar, frozen(model):
        for n in planned:

            def watch(call: Call, n: int = n) -> Tensor:
                bar.say(f"{call.name}, {n} tokens")
                beyond = [other for other in lengths if other > n] if n == planned[-1] else []
                for head, plans in enumerate(_prospects(call, tolerance, beyond)):
                    prospects.setdefault((call.site, head), []).extend(plans)
                    if n == planned[-1]:
                        found[call.site, head] = _statistics(call, head)
                return call.exact()

            with replaced(model, watch):
                run(model, ids[:, :n])
            bar.step(f"{n} tokens")
    if not found:
        raise InputError("model: it has no attention")
    return [
        HeadProfile(**{**vars(found[key]), "prospects": tuple(prospects[key])})
        for key in sorted(found)
    ]


def _prospects(call: Call, tolerance: float, beyond: Sequence[int]) -> list[list[Prospect]]:
    """The plan of each head, and what it would be at lengths for which there is no text."""
    heads = call.query.shape[1]
    if call.reason:
        return [[Prospect(call.n, f"exact ({call.reason})", 1.0, None, True)]] * heads
    problem = problem_of(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of methods that turn out not to suit a head
        plan = make_plan(problem, Auto(tolerance))
    found: list[list[Prospect]] = []
    for head in plan.heads:
        mine = [Prospect(call.n, head.kind, head.speedup, head.measured, True)]
        for n in beyond:
            speed = _predicted(problem, head, n)
            mine.append(Prospect(n, head.kind, speed, None, False))
        found.append(mine)
    return found


def _predicted(problem: Any, head: HeadPlan, n: int) -> float:
    return 1.0 if head.kind == "exact" else ladder.speedup_at(problem, [head], n)


def _statistics(call: Call, head: int) -> HeadProfile:
    query = call.query[:, head].float()
    key = call.key[:, head // call.group].float()
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    rows = torch.linspace(0, call.n - 1, min(ROWS, call.n), device=query.device).long()
    score = scale * (query[0, rows] @ key[0].mT)
    hidden = torch.zeros_like(score, dtype=torch.bool)
    if call.is_causal:
        hidden = (rows + call.offset).unsqueeze(1) < torch.arange(call.m, device=query.device)
    if call.key_mask is not None:
        hidden = hidden | ~call.key_mask[0]
    if call.row_mask is not None:
        shape = (len(query), call.query.shape[1], call.n, call.m)
        mask = call.row_mask.expand(shape)[0, head, rows]
        if mask.dtype == torch.bool:
            hidden = hidden | ~mask
        else:
            hidden = hidden | (mask < torch.finfo(mask.dtype).min / 2)
            score = score + mask.masked_fill(hidden, 0.0)
    weight = score.masked_fill(hidden, -math.inf).softmax(-1)
    entropy = torch.special.entr(weight).sum(-1)
    seen = score[~hidden]
    return HeadProfile(
        call.name, head, call.n, float(query.std()), float(query.abs().max()), float(key.std()),
        float(key.abs().max()), float(seen.std()), float(seen.abs().max()),
        float(entropy.mean()), float((~hidden).sum(-1).log().mean()),
    )  # fmt: skip
