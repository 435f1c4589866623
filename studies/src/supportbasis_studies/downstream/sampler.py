"""Writing with a masked-diffusion model, as LLaDA does: block by block, the surest tokens first.

The answer starts as masks. In every step the model fills all masks of the block; of what it
wrote, the tokens it is surest of are kept and the others are masked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""Logits [batch, n, vocabulary] of tokens [batch, n]."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is written. Temperature 0 takes the likeliest token everywhere."""

    length: int
    steps: int  # in all; shared evenly by the blocks
    block: int  # tokens that are written together, block after block
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length % self.block:
            raise ValueError(f"block {self.block} does not divide the length {self.length}")
        if self.steps % (self.length // self.block):
            raise ValueError(f"steps {self.steps} are not shared evenly by the blocks")


def sample(logits: Logits, prompt: Tensor, how: Sampling, mask: int) -> Tensor:
    """The written tokens, [batch, length], after prompts [batch, n]."""
    batch, start = prompt.shape
    tokens = torch.cat((prompt, prompt.new_full((batch, how.length), mask)), 1)
    generator = torch.Generator(prompt.device).manual_seed(how.seed)
    blocks = how.length // how.block
    for number in range(blocks):
        end = start + (number + 1) * how.block
        for kept in shares(how.block, how.steps // blocks):
            _step(logits, tokens, end, kept, how.temperature, mask, generator)
    return tokens[:, start:]


def shares(count: int, steps: int) -> list[int]:
    """How many tokens each step keeps: as even as it goes, the larger first.

    >>> shares(8, 3)
    [3, 3, 2]
    """
    return [count // steps + (step < count % steps) for step in range(steps)]


def _step(
    logits: Logits,
    tokens: Tensor,
    end: int,
    kept: int,
    temperature: float,
    mask: int,
    generator: torch.Generator,
) -> None:
    """Fill the ``kept`` masks before ``end`` of which the model is surest."""
    found = logits(tokens)
    written = noisy(found, temperature, generator).argmax(-1)
    sureness = found.softmax(-1).gather(-1, written.unsqueeze(-1)).squeeze(-1)
    masked = tokens == mask
    masked[:, end:] = False
    sureness = sureness.nan_to_num(0.0).masked_fill(~masked, -1.0)
    chosen = sureness.topk(kept, -1).indices
    fresh = torch.zeros_like(masked).scatter_(-1, chosen, True) & masked
    tokens[fresh] = written[fresh]


def noisy(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Logits whose largest is a draw at this temperature: Gumbel noise, in float64 as LLaDA's."""
    if temperature == 0:
        return logits
    uniform = torch.rand(
        logits.shape, generator=generator, dtype=torch.float64, device=logits.device
    )
    return logits.double() / temperature - (-uniform.clamp(min=1e-300).log()).log()
