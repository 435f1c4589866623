"""stories260K, a real causal model: perplexity of a text, and how far its own story stays the same.

The story is what the model writes with exact attention, always the likeliest token. Read again
with another attention, the place of the first token that is no longer the likeliest is where the
two would part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from supportbasis import InputError

from ..distribution.texts import own_text
from ..models import attending
from ..study import models_from_environment
from .methods import replacement
from .rows import StoryRow

MODEL = "stories260K"
START = "Once upon a time"
TOKENS = 384  # of the story, and of a window of the text
WINDOWS = 4


def stories_folder(folder: Path | None) -> Path | None:
    """Where the model is, in the user's folder or that of the environment; None: nowhere."""
    named = folder or models_from_environment()
    if named is None:
        return None
    if not named.is_dir():
        raise InputError(f"--models: there is no folder {named}")
    found = named / MODEL
    if folder is not None and not found.is_dir():
        raise InputError(f"--models: there is no folder {MODEL} in {named}")
    return found if found.is_dir() else None


@dataclass(frozen=True, eq=False)
class Stories:
    """The model, a text in windows, and the story it writes."""

    model: Any
    text: Tensor  # [windows, tokens]
    story: Tensor  # [1, tokens]
    start: int  # tokens of the story that were given


@torch.no_grad()
def load(folder: Path, device: torch.device) -> Stories:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"--models: {folder} cannot be read as a model ({first})") from None
    model = model.eval().to(device)
    tokens = tokenizer(own_text(), return_tensors="pt", verbose=False).input_ids[0].to(device)
    windows = min(WINDOWS, len(tokens) // TOKENS)
    if not windows:
        raise InputError(
            f"--models: {folder} makes {len(tokens)} tokens of the text, fewer than a window of "
            f"{TOKENS}; expected {MODEL}"
        )
    start = tokenizer(START, return_tensors="pt").input_ids.to(device)
    length = TOKENS - start.shape[1]
    story = model.generate(
        start, do_sample=False, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
    )
    return Stories(model, tokens[: windows * TOKENS].view(windows, TOKENS), story, start.shape[1])


@torch.no_grad()
def measure_story(stories: Stories, unit: str, name: str) -> list[StoryRow]:
    with attending(stories.model, replacement(name).attend):
        logs = torch.cat(
            [
                stories.model(row.unsqueeze(0), use_cache=False).logits[:, :-1].log_softmax(-1)
                for row in stories.text
            ]
        )
        likeliest = stories.model(stories.story, use_cache=False).logits[0, :-1].argmax(-1)
    loss = -float(logs.gather(-1, stories.text[:, 1:, None]).mean())
    same = likeliest[stories.start - 1 :] == stories.story[0, stories.start :]
    parted = (~same).nonzero()
    first = int(parted[0]) if len(parted) else len(same)
    perplexity = math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf
    numbers = (stories.text.numel(), perplexity, float(same.double().mean()), first)
    return [StoryRow(unit, MODEL, name, *numbers)]
