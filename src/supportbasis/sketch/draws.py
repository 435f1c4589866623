"""Random numbers of the sketches: private, seeded, the same on every dtype and device."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


class Source:
    """Random numbers, drawn on the CPU in float64 so that every dtype and device gets the same.

    Seeded by some fields, hashed so that sketches of different sizes are independent under one
    seed, and to 32 bits because torch's CPU generator ignores the others."""

    def __init__(self, fields: tuple[object, ...], dtype: torch.dtype, device: torch.device):
        key = int.from_bytes(blake2b(repr(fields).encode(), digest_size=4).digest(), "little")
        self.generator = torch.Generator().manual_seed(key)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int, scale: float) -> Tensor:
        draw = torch.empty(shape, dtype=torch.float64, device="cpu")
        return draw.normal_(std=scale, generator=self.generator).to(self.dtype).to(self.device)

    def signs(self, *shape: int, scale: float) -> Tensor:
        bits = torch.randint(2, shape, generator=self.generator, device="cpu")
        return (scale * (2.0 * bits.double() - 1.0)).to(self.dtype).to(self.device)

    def below(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.generator, device="cpu").to(self.device)
