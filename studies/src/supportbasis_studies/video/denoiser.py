"""A small diffusion transformer over video: every token attends to all tokens of the clip.

Rectified flow: with noise e and a clip x, z_t = (1 - t) x + t e, and the model predicts e - x from
z_t, t and a prompt. Patches of 1 x 2 x 2 pixels are tokens; positions enter by rotations of queries
and keys in time, height and width; queries and keys are normalised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from supportbasis import InputError

from .clips import PROMPT

WEIGHTS = Path(__file__).parent / "weights" / "model.safetensors"
PATCH, COLOURS = 2, 3
SLOWEST = 100.0  # base of the frequencies of rotations
CONDITION = 128  # width of what is known of a clip: its timestep and its prompt
SHIFT = 3.0  # moves steps towards noise, where a clip of many tokens is decided


@dataclass(frozen=True)
class Sizes:
    """Of a model; the dim of a head is a multiple of 8."""

    layers: int = 4
    heads: int = 4
    dim: int = 64
    hidden: int = 768

    @property
    def width(self) -> int:
        return self.heads * self.dim


class Attend(nn.Module):
    """PyTorch's attention as a module, whose calls hooks can time."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Block(nn.Module):
    """Attention and a layer of neurons, scaled and shifted by the condition."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query_scale, self.key_scale = (nn.Parameter(torch.ones(sizes.dim)) for _ in range(2))
        self.up, self.down = nn.Linear(width, sizes.hidden), nn.Linear(sizes.hidden, width)
        self.table = nn.Parameter(torch.zeros(6 * width))
        self.attend = Attend()

    def forward(self, x: Tensor, modulation: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (
            (modulation + self.table).unsqueeze(1).chunk(6, -1)
        )
        y = self.qkv(_normed(x) * (1 + scale) + shift)
        query, key, value = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (
            rotated(F.rms_norm(z, z.shape[-1:]) * size.to(z.dtype), turn).to(value.dtype)
            for z, size in ((query, self.query_scale), (key, self.key_scale))
        )
        x = x + gate * self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        y = _normed(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class Denoiser(nn.Module):
    """Clips [batch, 3, frames, height, width], timesteps [batch] in [0, 1] and prompts [batch, p]
    to velocities of the shape of clips."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.patches = nn.Linear(COLOURS * PATCH**2, width)
            self.time = nn.Sequential(
                nn.Linear(64, CONDITION), nn.SiLU(), nn.Linear(CONDITION, CONDITION)
            )
            self.prompt = nn.Linear(PROMPT, CONDITION)
            self.modulation = nn.Linear(CONDITION, 6 * width)
            self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
            self.last = nn.Linear(CONDITION, 2 * width)
            self.pixels = nn.Linear(width, COLOURS * PATCH**2)
        for module in (self.modulation, self.last, self.pixels):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, clip: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
        frames, height, width = clip.shape[2], clip.shape[3] // PATCH, clip.shape[4] // PATCH
        x = clip.unflatten(3, (height, PATCH)).unflatten(5, (width, PATCH))
        x = x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)  # [batch, tokens, 12]
        wave = waves(timestep.to(clip.device)).to(clip.dtype)
        known = F.silu(self.time(wave) + self.prompt(prompt.to(clip.dtype)))
        turn = turns(frames, height, width, self.sizes.dim, clip.device)
        x, modulation = self.patches(x), self.modulation(known)
        for block in self.blocks:
            x = block(x, modulation, turn)
        shift, scale = self.last(known).unsqueeze(1).chunk(2, -1)
        y = self.pixels(_normed(x) * (1 + scale) + shift)
        y = y.unflatten(1, (frames, height, width)).unflatten(-1, (COLOURS, PATCH, PATCH))
        return y.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def waves(timestep: Tensor) -> Tensor:
    """Sines and cosines of timesteps, [batch, 64] float32."""
    rates = torch.exp(torch.linspace(0, math.log(1000.0), 32, device=timestep.device))
    angle = timestep.float().unsqueeze(1) * rates
    return torch.cat([angle.sin(), angle.cos()], 1)


@lru_cache(maxsize=8)
def turns(
    frames: int, height: int, width: int, dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, dim / 2] of rotations: a quarter of the pairs turn in time, the
    others in height and width."""
    pairs = (dim // 8, (dim // 2 - dim // 8) // 2, dim // 2 - dim // 8 - (dim // 2 - dim // 8) // 2)
    place = torch.meshgrid(
        *(torch.arange(size, device=device).float() for size in (frames, height, width)),
        indexing="ij",
    )
    angle = torch.cat([
        at.flatten().unsqueeze(1) * SLOWEST ** (-torch.arange(count, device=device) / max(1, count))
        for at, count in zip(place, pairs, strict=True)
    ], 1)  # fmt: skip
    return angle.cos(), angle.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Tokens [..., tokens, dim] with their pairs of coordinates turned."""
    cos, sin = (part.to(x.dtype) for part in turn)
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


# ---- steps -----------------------------------------------------------------------------------


def timesteps(steps: int) -> list[float]:
    """From noise, 1, to a clip, 0.

    >>> [round(t, 3) for t in timesteps(4)]
    [1.0, 0.9, 0.75, 0.5, 0.0]
    """
    even = [1 - i / steps for i in range(steps + 1)]
    return [SHIFT * u / (1 + (SHIFT - 1) * u) for u in even]


@torch.no_grad()
def sample(
    model: Denoiser,
    noise: Tensor,
    prompt: Tensor,
    steps: int,
    before: Callable[[float], None] = lambda t: None,
) -> Tensor:
    """Euler steps from noise to clips, float32; ``before`` is called with the timestep of each."""
    dtype, x = next(model.parameters()).dtype, noise.float()
    times = timesteps(steps)
    for now, then in pairwise(times):
        before(now)
        at = torch.full((len(x),), now)  # on the CPU, where plans by timestep read it
        x = x + (then - now) * model(x.to(dtype), at, prompt.to(dtype)).float()
    return x


# ---- weights ---------------------------------------------------------------------------------


def save(model: Denoiser, path: Path) -> None:
    """bfloat16, with the sizes in the file's metadata; a file that is there is replaced at once."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    fresh = path.with_suffix(".new")
    save_file(weights, fresh, metadata={"sizes": json.dumps(asdict(model.sizes))})
    fresh.replace(path)


def load(path: Path = WEIGHTS) -> Denoiser:
    """A model that `save` wrote, in float32."""
    from safetensors import safe_open

    if not path.is_file():
        raise InputError(
            f"--weights: {path} is missing; train the model on a GPU, which takes 3.5 minutes: "
            f"python -m supportbasis_studies.video.train --out {path}"
        )
    with safe_open(path, "pt") as file:
        sizes = Sizes(**json.loads((file.metadata() or {})["sizes"]))
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    model = Denoiser(sizes)
    model.load_state_dict(weights)
    return model.eval()
