"""Train the study's denoiser: `python -m supportbasis_studies.video.train --seconds 210`.

First on small clips, which are crops, then on whole ones. The weights are written every 45 seconds,
so that a run that is cut leaves a model; the schedule follows the clock.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import clips
from .denoiser import SHIFT, WEIGHTS, Denoiser, Sizes, save

KEPT_SECONDS = 45.0  # between two writings of the weights
WARM_STEPS = 100
AVERAGED = 0.998  # decay of the mean of weights


@dataclass(frozen=True)
class Stage:
    """Clips of one size, up to a share of the time."""

    until: float
    frames: int
    size: int
    batch: int


STAGES = (Stage(0.35, 8, 32, 64), Stage(1.0, 16, 64, 8))
TINY = (Stage(0.5, 2, 8, 4), Stage(1.0, 4, 16, 2))


def velocity_loss(model: Denoiser, clip: Tensor, prompt: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity at timesteps t [batch]."""
    noise = torch.randn(clip.shape, device=clip.device)
    share = t.view(-1, 1, 1, 1, 1)
    predicted = model((1 - share) * clip + share * noise, t, prompt)
    return (predicted.float() - (noise - clip)).square().mean()


def drawn_timesteps(count: int, generator: torch.Generator) -> Tensor:
    """Logit-normal, shifted towards noise as the steps of sampling are."""
    u = torch.sigmoid(1.2 * torch.randn(count, generator=generator, device=generator.device))
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def rate_at(progress: float, step: int, rate: float) -> float:
    """A short warm-up, then a cosine to 1 % of the rate."""
    cosine = 0.505 + 0.495 * math.cos(math.pi * min(1.0, progress))
    return rate * min(1.0, (step + 1) / WARM_STEPS) * cosine


def stage_at(progress: float, stages: tuple[Stage, ...]) -> Stage:
    return next((stage for stage in stages if progress < stage.until), stages[-1])


@contextmanager
def table(path: Path) -> Iterator[csv.writer]:  # type: ignore[valid-type]
    """A file of losses, flushed line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", buffering=1) as file:
        lines = csv.writer(file)
        lines.writerow(["step", "seconds", "tokens", "loss"])
        yield lines


def train(
    model: Denoiser,
    stages: tuple[Stage, ...],
    seconds: float,
    out: Path,
    rate: float = 1.5e-3,
    seed: int = 0,
    most_steps: int = 10**9,
    every: int = 50,
) -> Denoiser:
    """Train for so many seconds; the mean of weights is written to ``out`` and returned."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    mean = Denoiser(model.sizes).to(device)
    mean.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    low = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    start = kept = time.perf_counter()
    losses: list[Tensor] = []
    step = 0
    with table(out.with_name("training.csv")) as lines:
        while step < most_steps:
            progress = max((time.perf_counter() - start) / seconds, step / most_steps)
            if progress >= 1:
                break
            stage = stage_at(progress, stages)
            clip, prompt = clips.draw(stage.batch, stage.frames, stage.size, generator)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(progress, step, rate)
            with low:
                loss = velocity_loss(model, clip, prompt, drawn_timesteps(len(clip), generator))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _average(mean, model, min(AVERAGED, (step + 1) / (step + 10)))
            losses.append(loss.detach())
            step += 1
            if step % every == 0 or step == 1:
                tokens = stage.batch * stage.frames * (stage.size // 2) ** 2
                seen, mean_loss = time.perf_counter() - start, float(torch.stack(losses).mean())
                lines.writerow([step, f"{seen:.1f}", tokens, f"{mean_loss:.4f}"])
                print(
                    f"step {step}, {seen:.0f} s, {tokens} tokens, loss {mean_loss:.4f}", flush=True
                )
                losses.clear()
            if time.perf_counter() - kept > KEPT_SECONDS:
                save(mean, out)
                kept = time.perf_counter()
    save(mean, out)
    return mean.eval()


@torch.no_grad()
def _average(mean: Denoiser, model: Denoiser, decay: float) -> None:
    old: list[Tensor] = list(mean.parameters())
    new: list[Tensor] = list(model.parameters())
    torch._foreach_lerp_(old, new, 1 - decay)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=210.0)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    given = parser.parse_args(arguments)
    sizes = Sizes(2, 2, 16, 64) if given.tiny else Sizes()
    model = Denoiser(sizes, given.seed).to(given.device)
    count = sum(x.numel() for x in model.parameters())
    print(f"{count} parameters, {2e-6 * count:.2f} MB", flush=True)
    most = 4 if given.tiny else 10**9
    stages = TINY if given.tiny else STAGES
    train(model, stages, given.seconds, given.out, given.rate, given.seed, most)
    print(given.out, flush=True)


if __name__ == "__main__":
    main()
