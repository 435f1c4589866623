"""The two models that come with the package: a causal one and a masked-diffusion one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .language import BOS, END, MASK, PAD, WORDS

FOLDER = Path(__file__).parent / "weights"
CONTEXT = {"causal": 4096, "diffusion": 1024}
VOCABULARY = 384  # the words, and space to a multiple of 64
assert len(WORDS) <= VOCABULARY


def new_model(kind: str, seed: int, *, layers: int = 6, width: int = 256) -> Any:
    """Random weights, in the format of Llama: heads of dim 64, rotary embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width // 2,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, max_position_embeddings=CONTEXT[kind],
        tie_word_embeddings=True, is_causal=kind == "causal", use_cache=False,
        bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, mask_token_id=MASK,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def load_model(folder: Path) -> Any:
    """A model that was saved with `save_model`, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig.from_pretrained(folder, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


def save_model(model: Any, folder: Path) -> None:
    """``config.json`` and bf16 weights in ``model.safetensors``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tied = "lm_head.weight"
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
