"""Tiny models of transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import supportbasis as sb

transformers = pytest.importorskip("transformers")
WORDS, TOKENS = 96, 70
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
WIDE = {"hidden_size": 32, "intermediate_size": 48, **SIZES}
GROUPED = {**WIDE, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": WORDS,
    "decoder_start_token_id": 1, **SPECIAL,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Bidirectional": ("LlamaForCausalLM", {**GROUPED, "is_causal": False}),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": None}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "OPT": ("OPTForCausalLM", {
        **SIZES, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32,
        "max_position_embeddings": 256}),
    "Phi": ("PhiForCausalLM", WIDE),
    "GPT2": ("GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": WORDS,
        **SPECIAL}),
    "Bert": ("BertForMaskedLM", WIDE),
    "ModernBert": ("ModernBertForMaskedLM", {
        **WIDE, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2, **SPECIAL}),
    "ViT": ("ViTForImageClassification", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 4}),
    "Whisper": ("WhisperForConditionalGeneration", {
        **BOTH, "num_mel_bins": 8, "max_source_positions": 60, "max_target_positions": 80}),
    "Bart": ("BartForConditionalGeneration", BOTH),
}  # fmt: skip


def tiny(name: str, **more: Any) -> Any:
    """A model with random weights, large enough that attention is far from uniform."""
    cls, given = MODELS.get(name, (name, GROUPED))
    kind = getattr(transformers, cls)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**given, **more})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 5
    return model


def ids(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(0))


def inputs(name: str, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if name == "Whisper":
        mel = torch.randn(2, 8, 120, generator=generator)
        return {"input_features": mel, "decoder_input_ids": ids(tokens=40)}
    if name == "Bart":
        return {"input_ids": ids(), "decoder_input_ids": ids(tokens=40)}
    return {"input_ids": ids(tokens=tokens)}


def padded(side: str, tokens: int = TOKENS) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.int64)
    hidden = tokens // 3
    mask[1, slice(0, hidden) if side == "left" else slice(tokens - hidden, tokens)] = 0
    return mask


@torch.no_grad()
def both(
    model: Any, run: Callable[[], torch.Tensor], method: Any = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What a model computes by itself, and with a method."""
    exact = run()
    with sb.models.use(model, method or sb.Exact()) as answers:
        return exact, run(), answers


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    """To rounding of float32 in two layers, beside logits of size one to ten."""
    assert float(one.abs().max()) > 0.1
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def model_plan(plans: list[sb.Plan], names: list[str] | None = None) -> sb.ModelPlan:
    from supportbasis.plans import LayerPlan

    layers = tuple(
        LayerPlan(names[i] if names else f"layer {i}", plan, (0.0,) * plan.num_heads, 0)
        for i, plan in enumerate(plans)
    )
    return sb.ModelPlan(layers, "kl", 1.0, 64, 0.0)
