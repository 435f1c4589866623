"""What a model makes of text it only reads: perplexity, recall at a distance, hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..models import Attend, attending, is_causal
from .documents import KIND, Hidden, needles, pairs, prose
from .language import MASK

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of tokens that are masked, for a masked-diffusion model
HIDDEN = 24  # codes in a text


# ---- perplexity ------------------------------------------------------------------------------


def held_out(length: int, windows: int, seed: int) -> Tensor:
    """Sentences about the world, [windows, length]."""
    made = [prose(Random(f"held out {seed} {number}"), length) for number in range(windows)]
    return torch.tensor([[token % KIND for token in tokens[:length]] for tokens in made])


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, seed: int = 0) -> float:
    """Of a causal model; of a masked-diffusion model, the bound that its loss gives."""
    if is_causal(model):
        losses = [_next_loss(model, row.unsqueeze(0)) for row in tokens]
    else:
        generator = torch.Generator().manual_seed(seed)
        losses = [_masked_loss(model, row.unsqueeze(0), generator) for row in tokens]
    mean = sum(losses) / len(losses)
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.inf


def _next_loss(model: Any, tokens: Tensor) -> float:
    logs = model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return -float(logs.gather(-1, tokens[:, 1:, None]).mean())


def _masked_loss(model: Any, tokens: Tensor, generator: torch.Generator) -> float:
    """The mean of (loss of masked tokens)/t over shares t that stand evenly in [0, 1]."""
    total, count = 0.0, tokens.shape[1]
    for share in SHARES:
        hidden = torch.randperm(count, generator=generator)[: max(1, round(share * count))]
        hidden = hidden.to(tokens.device)
        masked = tokens.clone()
        masked[:, hidden] = MASK
        logs = model(masked, use_cache=False).logits[:, hidden].float().log_softmax(-1)
        total -= float(logs.gather(-1, tokens[:, hidden, None]).mean())
    return total / len(SHARES)


# ---- recall ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recalled:
    """A code that was asked for: how far behind it stood, and whether it came out right."""

    distance: int
    right: bool


FORMS = {"needle": needles, "associative": pairs}


@torch.no_grad()
def recall(model: Any, form: str, length: int, texts: int, seed: int) -> list[Recalled]:
    """Codes hidden in sentences, or listed before them, asked for at the end."""
    made: list[Recalled] = []
    for number in range(texts):
        hidden = FORMS[form](Random(f"{form} {seed} {length} {number}"), length, HIDDEN)
        made += _recalled(model, hidden)
    return made


def _recalled(model: Any, hidden: Hidden) -> list[Recalled]:
    tokens = torch.tensor([[token % KIND for token in hidden.tokens]], device=model.device)
    places = torch.tensor([place for place, _ in hidden.asked], device=model.device)
    truth = tokens[0, places]
    if is_causal(model):
        found = model(tokens, use_cache=False, logits_to_keep=places - 1).logits[0].argmax(-1)
    else:
        tokens[0, places] = MASK
        found = model(tokens, use_cache=False, logits_to_keep=places).logits[0].argmax(-1)
    distances = [distance for _, distance in hidden.asked]
    return [
        Recalled(distance, right)
        for distance, right in zip(distances, (found == truth).tolist(), strict=True)
    ]


# ---- hidden states ---------------------------------------------------------------------------


@torch.no_grad()
def hidden_states(model: Any, tokens: Tensor, attend: Attend) -> list[Tensor]:
    """After each layer; the last one after the final norm too."""
    with attending(model, attend):
        return list(model(tokens, use_cache=False, output_hidden_states=True).hidden_states[1:])


def hidden_errors(truth: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    """Relative to the exact ones, in norm, layer by layer."""
    return [
        float((mine - true).norm() / true.norm()) for true, mine in zip(truth, found, strict=True)
    ]
