"""How a model predicts with a plan, beside exact attention, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..integrations.calls import Call
from ..integrations.replacing import replaced
from ..plans import ModelPlan
from .effects import frozen
from .planning import BLOCK, upper_limit
from .predictions import agreements, divergences, logits_of, run
from .progress import Progress
from .use import use

LINE, CUE = 64, 8  # tokens of a line that is copied, and of its beginning that is given
QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
DISTANCES = (1024, 2048, 4096, 8192, 16384, 30000)


@dataclass(frozen=True)
class CopyTest:
    """A line of random tokens is begun again after ``distance`` tokens: shares of its remaining
    tokens that are predicted."""

    distance: int
    exact: float
    planned: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """Predictions of a language model with a plan, paired with exact ones.

    ``kl`` is the mean over tokens, ``kl_upper`` its upper limit (95 % confidence), ``kl_tail`` the
    99.9th percentile; ``agreement`` the share of tokens with the same most likely continuation.
    """

    tokens: int
    loss_exact: float
    loss_planned: float
    kl: float
    kl_upper: float
    kl_tail: float
    agreement: float
    quantiles: tuple[tuple[float, float], ...] = ()  # of the KL of tokens: share, value
    copies: tuple[CopyTest, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens              exact   planned",
            f"loss (nats per token)   {self.loss_exact:8.4f}  {self.loss_planned:8.4f}",
            f"perplexity              {math.exp(self.loss_exact):8.4f}  "
            f"{math.exp(self.loss_planned):8.4f}",
            f"KL per token            {self.kl:.2e} (below {self.kl_upper:.2e} with confidence "
            f"0.95), 99.9 % of tokens below {self.kl_tail:.2e}",
            f"same top-1              {self.agreement:.2%}",
        ]
        lines += [
            f"copy from {copy.distance:6} ago      {copy.exact:8.2%}  {copy.planned:8.2%} of "
            f"{copy.count}"
            for copy in self.copies
        ]
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    model: Any,
    plan: ModelPlan,
    batches: Iterable[Tensor],
    *,
    copies: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Loss, divergence and agreement on batches of token ids [batch, tokens] of a causal language
    model, with a plan beside exact attention; and ``copies`` rounds of the copy test, with lines
    drawn by ``seed`` and hidden in the first batch. A bar shows the progress if tqdm is there."""
    given = [_ids(batch) for batch in batches]
    if not given:
        raise InputError("batches is empty; expected at least one tensor of token ids")
    found: list[tuple[Tensor, ...]] = []
    scores: dict[int, list[Tensor]] = {}
    with Progress(progress, len(given) + copies, "evaluating") as bar, frozen(model):
        for number, ids in enumerate(given):
            bar.step(f"batch {number + 1}")
            found.append(_compared(ids, *_both(model, plan, ids)))
        for number in range(copies):
            bar.step(f"copy test {number + 1}")
            ids, spans = hidden_lines(given[0][:1], seed + number)
            exact, planned = _both(model, plan, ids)
            for distance, first in spans.items():
                score = _copied(ids, first, exact, planned)
                scores.setdefault(distance, []).append(score)
    exact_loss, planned_loss, kl, same = (torch.cat(x) for x in zip(*found, strict=True))
    mean, upper = upper_limit(torch.stack([x.mean() for x in kl.split(BLOCK)]))
    ranked = kl.sort().values
    quantiles = tuple((share, float(ranked[math.ceil(share * len(kl)) - 1])) for share in QUANTILES)
    tests = []
    for distance, rounds in sorted(scores.items()):
        right = torch.stack(rounds).sum(0)
        count = len(rounds) * (LINE - CUE)
        tests.append(CopyTest(distance, float(right[0]) / count, float(right[1]) / count, count))
    return Evaluation(
        len(kl), float(exact_loss.mean()), float(planned_loss.mean()), mean, upper,
        quantiles[-1][1], float(same.double().mean()), quantiles, tuple(tests),
    )  # fmt: skip


def _ids(batch: Any) -> Tensor:
    if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point():
        raise InputError(
            "batches: each must be a tensor of token ids [batch, tokens], got "
            f"{type(batch).__name__}"
        )
    return batch


def _both(model: Any, plan: ModelPlan, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits exactly, and with the plan."""
    with replaced(model, Call.exact):  # whatever its attention is set to
        exact = _logits(model, ids)
    with use(model, plan):
        return exact, _logits(model, ids)


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits = logits_of(run(model, ids))
    if logits is None or logits.shape[:2] != ids.shape:
        raise InputError("model: expected a language model with logits of each token")
    return logits


def _compared(ids: Tensor, exact: Tensor, planned: Tensor) -> tuple[Tensor, ...]:
    """Losses, divergences and agreements of all tokens, on the host."""
    labels = ids[:, 1:].flatten()
    losses = (
        torch.cat([
            torch.nn.functional.cross_entropy(part.float(), mine, reduction="none")
            for part, mine in zip(
                x[:, :-1].flatten(0, 1).split(4096), labels.split(4096), strict=True
            )
        ])
        for x in (exact, planned)
    )  # fmt: skip
    kl, same = divergences(exact, planned), agreements(exact, planned)
    return (*(x.double().cpu() for x in losses), kl.double().cpu(), same.cpu())


def hidden_lines(ids: Tensor, seed: int) -> tuple[Tensor, dict[int, int]]:
    """A text [1, tokens] whose end begins lines of random tokens again, which were inserted some
    tokens before; and where each of them begins at the end, by its distance."""
    total = ids.shape[1]
    distances = [d for d in DISTANCES if d + LINE * (len(DISTANCES) + 1) <= total]
    if not distances:
        raise InputError(f"copies: a text of {total} tokens is too short; expected some 1500")
    generator = torch.Generator().manual_seed(seed)
    flat, spans = ids[0].cpu().clone(), {}
    start = total - LINE * len(distances)
    for number, distance in enumerate(sorted(distances)):
        drawn = torch.randint(start, (LINE,), generator=generator)
        line, first = flat[drawn].clone(), start + LINE * number
        flat[first - distance : first - distance + LINE] = line
        flat[first : first + LINE] = line
        spans[distance] = first
    return flat.unsqueeze(0).to(ids.device), spans


def _copied(ids: Tensor, first: int, exact: Tensor, planned: Tensor) -> Tensor:
    """How many tokens of a line were predicted, [2]: exactly, and with the plan."""
    at = slice(first + CUE - 1, first + LINE - 1)
    right = ids[0, first + CUE : first + LINE]
    counts: Sequence[Tensor] = [(x[0, at].argmax(-1) == right).sum() for x in (exact, planned)]
    return torch.stack(list(counts)).cpu()
