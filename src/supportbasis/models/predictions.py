"""Run a model on batches, and compare what it predicts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..integrations.replacing import uncompiled

ENTRIES = 2**26  # of logits, as float32, at a time
OUTPUTS = ("last_hidden_state", "sample", "image_embeds", "text_embeds")

Batch = Mapping[str, Any] | Sequence[Any] | Tensor


def check_batches(batches: Iterable[Batch]) -> list[Batch]:
    """The batches as a list."""
    if isinstance(batches, Tensor | Mapping | str | bytes):
        raise InputError(
            f"batches must be a list of batches, got a {type(batches).__name__}; put it in a list"
        )
    found = list(batches)
    if not found:
        raise InputError("batches is empty; expected at least one batch of inputs of the model")
    for batch in found:
        if not isinstance(batch, Tensor | Mapping | Sequence) or isinstance(batch, str):
            raise InputError(
                "batches: each must be a tensor, a dictionary of arguments or a sequence of them, "
                f"got {type(batch).__name__}"
            )
        if isinstance(batch, Sequence) and all(isinstance(x, Number) for x in batch):
            raise InputError("batches: got a list of numbers; put it in a tensor [batch, tokens]")
        if isinstance(batch, Tensor) and (batch.dim() < 2 or batch.is_meta):
            raise InputError(
                f"batches: got a tensor of shape {tuple(batch.shape)} on {batch.device}; expected "
                "[batch, tokens, ...], with entries"
            )
    return found


def run(model: Any, batch: Batch) -> Any:
    """The model's output for a batch, without a cache of keys."""
    model = uncompiled(model)  # what watches its attention is not compiled either
    options = {"use_cache": False} if _takes_cache(model) else {}
    if isinstance(batch, Mapping):
        return model(**{**batch, **options})
    return model(batch, **options) if isinstance(batch, Tensor) else model(*batch, **options)


def _takes_cache(model: Any) -> bool:
    config = getattr(model, "config", None)
    if not hasattr(config, "use_cache"):
        return False
    return "use_cache" in inspect.signature(model.forward).parameters


def logits_of(output: Any) -> Tensor | None:
    """Logits [..., classes] of an output, if it has any."""
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return found if isinstance(found, Tensor) else None


def output_of(output: Any) -> Tensor:
    """The tensor that a model without logits computes."""
    if isinstance(output, Tensor):
        return output
    for name in OUTPUTS:
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        return output[0]
    raise InputError(
        f"model: its output, a {type(output).__name__}, holds no tensor named "
        f"{', '.join(OUTPUTS)}; wrap the model so that it returns a tensor"
    )


def visible(logits: Tensor, batch: Batch) -> Tensor:
    """Which predictions count, a flat boolean mask: not those at padding."""
    shape, given = logits.shape[:-1], batch if isinstance(batch, Mapping) else {}
    decodes = any(name.startswith("decoder_input") for name in given)  # the other mask: encoder's
    mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.to(logits.device, torch.bool).flatten()
    return torch.ones(shape, dtype=torch.bool, device=logits.device).flatten()


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    flat = logits.flatten(0, -2)
    return flat.split(max(1, ENTRIES // flat.shape[-1]))


def sample_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A label of each prediction, drawn from its distribution."""
    parts = (
        torch.multinomial(part.detach().float().softmax(-1), 1, generator=generator)
        for part in _chunks(logits)
    )
    return torch.cat(list(parts)).squeeze(1)


def log_likelihood(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """The sum of the log-probabilities of labels, where predictions count."""
    flat = logits.flatten(0, -2)
    losses = torch.nn.functional.cross_entropy(flat.float(), labels, reduction="none")
    return -(losses * counts).sum()


def divergences(exact: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each prediction from the exact one, flat, in nats."""
    parts = []
    for one, two in zip(_chunks(exact), _chunks(other), strict=True):
        log_p, log_q = one.float().log_softmax(-1), two.float().log_softmax(-1)
        terms = (log_p.exp() * (log_p - log_q)).masked_fill(log_p == -math.inf, 0.0)
        parts.append(terms.sum(-1).clamp(min=0.0))
    return torch.cat(parts)


def agreements(exact: Tensor, other: Tensor) -> Tensor:
    """Whether each prediction has the same most likely label, flat."""
    return exact.flatten(0, -2).argmax(-1) == other.flatten(0, -2).argmax(-1)
