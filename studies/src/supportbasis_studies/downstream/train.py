"""Trains the models that come with the package: minutes on a GPU, a night on a CPU.

    python -m supportbasis_studies.downstream.train causal --steps 4000
    python -m supportbasis_studies.downstream.train diffusion --steps 4000

All data are made on the way from the seed. Leaves ``config.json``, ``model.safetensors`` (bf16)
and ``training.csv``: the loss and, by task, the share of answer tokens that come out right.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import KIND, KINDS, row
from .language import MASK
from .models import CONTEXT, FOLDER, load_model, new_model, save_model

WEIGHTS = {  # of a token in the loss; answers of one token among many weigh most
    "plain": 0.1,
    "arithmetic": 0.4,
    "knowledge": 1.0,
    "completion": 1.0,
    "easy": 2.0,
    "hard": 2.0,
    "recall": 2.0,
    "fact": 0.5,
    "copy": 0.5,
}
CHUNK = 4  # batches that a worker makes at once

Stages = tuple[tuple[int, float], ...]
STAGES: dict[str, Stages] = {  # lengths of rows, and when each ends: short ones teach to look up
    "causal": ((256, 0.5), (1024, 0.7), (4096, 1.0)),
    "diffusion": ((256, 0.7), (1024, 1.0)),
}


@dataclass(frozen=True)
class Settings:
    """How a model is trained."""

    kind: str
    steps: int
    tokens: int  # in a batch
    stages: Stages
    rate: float
    seed: int
    workers: int
    seconds: float  # the schedule ends here if the steps are not done by then

    def batch(self, length: int) -> int:
        """Rows of a batch."""
        return max(1, self.tokens // length)


def chunk(kind: str, rows: int, length: int, name: str) -> bytes:
    """Rows of coded tokens, as 16-bit numbers: what a worker makes.

    A causal model sees all tokens of a row but the last, and predicts all but the first.
    """
    random = Random(name)
    width = length + (kind == "causal")
    made = [row(random, width, padded=kind == "diffusion") for _ in range(rows)]
    return torch.tensor(made, dtype=torch.int16).numpy().tobytes()


def batches(settings: Settings, length: int) -> Iterator[Tensor]:
    """Coded tokens [batch, length], made ahead by other processes, in the order of the seed."""
    rows = settings.batch(length) * CHUNK
    waiting: deque[AsyncResult[bytes]] = deque()
    with get_context("spawn").Pool(settings.workers) as pool:
        for number in count():
            name = f"{settings.kind} {settings.seed} {length} {number}"
            waiting.append(pool.apply_async(chunk, (settings.kind, rows, length, name)))
            if len(waiting) > 2 * settings.workers:
                made = bytearray(waiting.popleft().get())
                coded = torch.frombuffer(made, dtype=torch.int16).view(rows, -1)
                yield from coded.split(settings.batch(length))


# ---- the two objectives ----------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """What a batch says: the loss, and which answer tokens were right, by kind."""

    loss: Tensor
    right: Tensor  # number of right tokens of each kind
    count: Tensor


def next_token(model: Any, coded: Tensor) -> Scored:
    """Every token from those before it; answers weigh more."""
    tokens, kinds = coded % KIND, coded // KIND
    logits = model(tokens[:, :-1], use_cache=False).logits
    target, kinds = tokens[:, 1:], kinds[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
    weight = _weights(kinds).flatten()
    loss = (losses * weight).sum() / weight.sum()
    return _scored(loss, logits, target, kinds, torch.ones_like(target, dtype=torch.bool))


def masked_tokens(model: Any, coded: Tensor, generator: torch.Generator) -> Scored:
    """Masked tokens from all others: a share t of a row is masked and its loss counts 1/t.

    In one row in four any token may be masked, in the others only those of answers.
    """
    tokens, kinds = coded % KIND, coded // KIND
    rows, length = tokens.shape
    share = torch.rand(rows, 1, generator=generator, device=tokens.device).clamp(min=0.02)
    free = torch.arange(rows, device=tokens.device).unsqueeze(1) % 4 == 0
    chance = torch.rand(rows, length, generator=generator, device=tokens.device)
    hidden = (chance < share) & (free | (kinds > 0))
    logits = model(torch.where(hidden, MASK, tokens), use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none")
    weight = _weights(kinds) * (free | (kinds > 0))
    loss = (losses.reshape(rows, length) * weight * hidden / share).sum() / weight.sum()
    return _scored(loss, logits, tokens, kinds, hidden)


def _weights(kinds: Tensor) -> Tensor:
    return torch.tensor([WEIGHTS[kind] for kind in KINDS], device=kinds.device)[kinds]


@torch.no_grad()
def _scored(loss: Tensor, logits: Tensor, target: Tensor, kinds: Tensor, seen: Tensor) -> Scored:
    right = (logits.argmax(-1) == target) & seen
    shown = F.one_hot(kinds.long(), len(KINDS)).flatten(0, 1)
    count = (shown * seen.flatten().unsqueeze(1)).sum(0)
    return Scored(loss, (shown * right.flatten().unsqueeze(1)).sum(0), count)


# ---- the loop --------------------------------------------------------------------------------


def rate_at(progress: float, peak: float) -> float:
    """A short rise, then half a cosine down to nothing."""
    rise = 0.03
    if progress < rise:
        return peak * (progress / rise + 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - rise) / (1 - rise))))


def train(settings: Settings, model: Any, out: Path) -> None:
    """Train, and save in ``out``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.98), fused=True)
    generator = torch.Generator(device).manual_seed(settings.seed)
    low = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    log, step = Log(out / "training.csv", settings), 0
    for length, end in settings.stages:
        for coded in batches(settings, length):
            progress = max(step / settings.steps, log.elapsed / settings.seconds)
            if progress >= end:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate_at(progress, settings.rate)
            coded = coded.to(device, torch.long, non_blocking=True)
            with low:
                if settings.kind == "causal":
                    scored = next_token(model, coded)
                else:
                    scored = masked_tokens(model, coded, generator)
            scored.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            log.add(step, length, scored)
    log.close()
    save_model(model, out)


class Log:
    """Means over some steps, printed and kept as a table."""

    def __init__(self, path: Path, settings: Settings, every: int = 100):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.settings, self.every, self.start = settings, every, time.perf_counter()
        self.file = path.open("w", newline="")
        self.table = csv.writer(self.file)
        self.table.writerow(["step", "length", "tokens", "seconds", "loss", *KINDS])
        self.kept: list[Scored] = []
        self.tokens = 0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def add(self, step: int, length: int, scored: Scored) -> None:
        self.tokens += self.settings.batch(length) * length
        self.kept.append(Scored(scored.loss.detach(), scored.right, scored.count))
        if step % self.every == 0 or step == 1:
            self.write(step, length)

    def write(self, step: int, length: int) -> None:
        loss = torch.stack([item.loss for item in self.kept]).mean()
        right = torch.stack([item.right for item in self.kept]).sum(0)
        count = torch.stack([item.count for item in self.kept]).sum(0)
        shares = [f"{share:.4f}" for share in (right / count).tolist()]
        line = [step, length, self.tokens, f"{self.elapsed:.1f}", f"{float(loss):.4f}", *shares]
        self.table.writerow(line)
        self.file.flush()
        print(self.settings.kind, *line, flush=True)
        self.kept = []

    def close(self) -> None:
        self.file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kind", choices=sorted(CONTEXT))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=131072, help="in a batch")
    parser.add_argument("--length", type=int, help="of all rows; by default it grows on the way")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule earlier")
    parser.add_argument("--start", type=Path, help="folder of a model to go on with")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--out", type=Path, help="by default the package's weights")
    given = parser.parse_args()
    stages = ((given.length, 1.0),) if given.length else STAGES[given.kind]
    settings = Settings(
        given.kind, given.steps, given.tokens, stages, given.rate, given.seed, given.workers,
        given.seconds,
    )  # fmt: skip
    if given.start:
        model = load_model(given.start)
    else:
        model = new_model(given.kind, given.seed, layers=given.layers, width=given.width)
    train(settings, model, given.out or FOLDER / given.kind)


if __name__ == "__main__":
    main()
