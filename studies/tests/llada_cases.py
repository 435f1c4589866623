"""A tiny model with code of its own, saved as LLaDA comes: weights, code, tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
AUTO_MAP = {
    "AutoConfig": "configuration_tiny_llada.TinyLladaConfig",
    "AutoModel": "modeling_tiny_llada.TinyLladaModelLM",
    "AutoModelForCausalLM": "modeling_tiny_llada.TinyLladaModelLM",
}
WORDS = {"<pad>": 0, "<end>": 1, "<mask>": 2, "[UNK]": 3}
CHAT = (
    "{% for message in messages %}user : {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def save_llada(folder: Path, **sizes: Any) -> Path:
    """Random weights, drawn with entries large enough for attention to matter."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file in (DATA / "tiny_llada").glob("*.py"):
        shutil.copy(file, folder)
    modeling = _modeling()
    config = modeling.TinyLladaConfig(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = modeling.TinyTransformer(config)
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.data.mul_(6.0)
    weights: dict[str, Tensor] = {f"model.{k}": v for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = config.to_dict() | {"auto_map": AUTO_MAP, "architectures": ["TinyLladaModelLM"]}
    content.pop("use_cache", None)
    (folder / "config.json").write_text(json.dumps(content))
    save_tokenizer(folder, config.vocab_size)
    return folder


def save_tokenizer(folder: Path, size: int) -> None:
    """Bytes, and a chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = WORDS | {letter: number + len(WORDS) for number, letter in enumerate(alphabet)}
    assert len(known) <= size
    tokenizer = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
         pre_tokenizers.Split("", "isolated")]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", mask_token="<mask>"
    )
    made.chat_template = CHAT
    made.save_pretrained(folder)


def _modeling() -> Any:
    """The code of the model as a package, so that its relative imports hold."""
    if str(DATA) not in sys.path:
        sys.path.append(str(DATA))
    return import_module("tiny_llada.modeling_tiny_llada")
