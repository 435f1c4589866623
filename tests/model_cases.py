"""Small models that plans of models are tested on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
TOKENS, WORDS = 1536, 64


class Toy(torch.nn.Module):
    """One attention layer between linear maps; logits or the output itself."""

    def __init__(self, is_distribution: bool = True, heads: int = 2, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = heads * dim
        self.heads, self.is_distribution = heads, is_distribution
        self.maps = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, WORDS if is_distribution else width)

    def forward(self, x: torch.Tensor) -> object:
        q, k, v = self.maps(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(2 * q, k, v, is_causal=True)
        y = self.head(mixed.transpose(1, 2).flatten(2))
        return {"logits": y} if self.is_distribution else y


def tiny_llama(seed: int = 0, heads: int = 2, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=1, vocab_size=WORDS, max_position_embeddings=4 * TOKENS,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name or "head" in name:
                weight *= 6  # attention and predictions far from uniform
    return model


def texts(count: int, tokens: int = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (1, tokens), generator=generator) for _ in range(count)]
