"""Synthetic video: textured shapes that move over a drifting background.

A clip is [3, frames, size, size] with entries in [-1, 1]. Its prompt is a vector that says what is
to be seen (kinds of shapes, textures, colours), not where: position, motion and scale are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FRAME = 64  # pixels of a whole frame; smaller clips are crops
SHAPES, KINDS = 2, 3  # of a clip; discs, squares and rings
PROMPT = 6 + SHAPES * (6 + KINDS + 1)  # background colours; colours, kind and texture of shapes
EDGE = 32.0  # sharpness of edges, per frame width


@dataclass(frozen=True, eq=False)
class Scenes:
    """What is to be seen in some clips; angles in turns, lengths in frame widths."""

    ground: Tensor  # [clips, 2, 3]: colours of the background
    colour: Tensor  # [clips, shapes, 2, 3]
    kind: Tensor  # [clips, shapes]
    checks: Tensor  # [clips, shapes]: 1 where the texture is a chessboard, 0: stripes
    motion: Tensor  # [clips, shapes, 8]: position 2, velocity 2, radius, angle, spin, frequency
    drift: Tensor  # [clips, 4]: frequency 2, phase and speed of the background

    @staticmethod
    def draw(clips: int, generator: torch.Generator) -> Scenes:
        """On the device of the generator."""
        device = generator.device

        def uniform(*shape: int) -> Tensor:
            return torch.rand(clips, *shape, generator=generator, device=device)

        low = torch.tensor([0.15, 0.15, -0.03, -0.03, 0.13, 0.0, -0.02, 5.0], device=device)
        high = torch.tensor([0.85, 0.85, 0.03, 0.03, 0.26, 1.0, 0.02, 9.0], device=device)
        drift = uniform(4) * torch.tensor([1.6, 1.6, 1.0, 0.06], device=device)
        drift[:, :2] -= 0.8
        return Scenes(
            1.4 * uniform(2, 3) - 0.7,
            2 * uniform(SHAPES, 2, 3) - 1,
            (uniform(SHAPES) * KINDS).long().clamp(max=KINDS - 1),
            (uniform(SHAPES) < 0.5).float(),
            low + (high - low) * uniform(SHAPES, 8),
            drift,
        )

    def prompts(self) -> Tensor:
        """[clips, PROMPT], entries of about unit size."""
        kind = torch.nn.functional.one_hot(self.kind, KINDS).float()
        shape = torch.cat([self.colour.flatten(2), kind, self.checks.unsqueeze(2)], 2)
        return torch.cat([self.ground.flatten(1), shape.flatten(1)], 1)

    def clips(self, frames: int, size: int, generator: torch.Generator) -> Tensor:
        """[clips, 3, frames, size, size]: crops of whole frames at random places and times."""
        count, device = len(self.kind), self.kind.device
        free = torch.tensor([16 - min(16, frames), FRAME - size, FRAME - size], device=device)
        first = (torch.rand(count, 3, generator=generator, device=device) * (free + 1)).floor()
        time = first[:, :1] + torch.arange(frames, device=device)  # [clips, frames]
        y, x = (
            (first[:, i : i + 1] + torch.arange(size, device=device) + 0.5) / FRAME for i in (1, 2)
        )
        time, y, x = time[:, :, None, None], y[:, None, :, None], x[:, None, None, :]
        video = self._ground(time, y, x)
        for number in range(SHAPES):
            inside, texture = self._shape(number, time, y, x)
            video = video + inside.unsqueeze(1) * (texture - video)
        return video

    def _ground(self, time: Tensor, y: Tensor, x: Tensor) -> Tensor:
        fy, fx, phase, speed = (part.view(-1, 1, 1, 1) for part in self.drift.unbind(1))
        wave = 0.5 + 0.5 * torch.sin(2 * math.pi * (fy * y + fx * x + phase + speed * time))
        return _mixed(self.ground, wave)

    def _shape(self, number: int, time: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Share of each pixel [clips, frames, size, size] that a shape covers, and its colours."""
        parts = (part.view(-1, 1, 1, 1) for part in self.motion[:, number].unbind(1))
        at_y, at_x, speed_y, speed_x, radius, angle, spin, frequency = parts
        dy = y - _reflected(at_y + speed_y * time)
        dx = x - _reflected(at_x + speed_x * time)
        turn = 2 * math.pi * (angle + spin * time)
        u, v = dx * turn.cos() + dy * turn.sin(), dy * turn.cos() - dx * turn.sin()
        length = (u.square() + v.square() + 1e-12).sqrt()
        outside = torch.stack(
            [length - radius, torch.maximum(u.abs(), v.abs()) - 0.8 * radius,
             (length - 0.75 * radius).abs() - 0.3 * radius]
        )  # fmt: skip
        kind = self.kind[:, number].view(1, -1, 1, 1, 1).expand_as(outside[:1])
        outside = outside.gather(0, kind)[0]
        wave, other = (torch.sin(2 * math.pi * frequency * z) for z in (u, v))
        checks = self.checks[:, number].view(-1, 1, 1, 1)
        wave = wave * torch.where(checks > 0, other, 1.0)
        texture = _mixed(self.colour[:, number], torch.sigmoid(8 * wave))
        return torch.sigmoid(-2 * EDGE * outside), texture


def _mixed(colours: Tensor, share: Tensor) -> Tensor:
    """Colours [clips, 2, 3] mixed by shares [clips, ...]: [clips, 3, ...]"""
    one, two = (colour.view(-1, 3, 1, 1, 1) for colour in colours.unbind(1))
    return one + share.unsqueeze(1) * (two - one)


def _reflected(place: Tensor) -> Tensor:
    """A place between 0 and 1 of something that is reflected there.

    >>> _reflected(torch.tensor([0.25, 1.25, -0.5]))
    tensor([0.2500, 0.7500, 0.5000])
    """
    return 1 - (1 - place.remainder(2)).abs()


def draw(clips: int, frames: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clips and their prompts, on the device of the generator."""
    scenes = Scenes.draw(clips, generator)
    return scenes.clips(frames, size, generator), scenes.prompts()
